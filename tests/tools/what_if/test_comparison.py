"""A recorded trace under other configurations, with outcomes that can be calculated by hand."""

import math
from dataclasses import replace

import pytest

from scheduler_service.core import GeneratedTokens, SchedulerConfig, SchedulerCore, StepResult
from scheduler_service.core.config import MoveKV, PoolingType, Role, WorkKind
from scheduler_service.replay.recorder import RecordingCore
from tests.support.core_driver import CoreDriver, make_capacity
from tests.support.recorded import Recorder, Recording
from tests.support.virtual import (
    COSTS,
    entry,
    join,
    make_trace,
    read_trace,
    record,
    script,
)
from tools.what_if.comparison import PREDICTED, RECORDED, compare
from tools.what_if.cost_model import CostModel
from tools.what_if.simulation import simulate
from tools.what_if.trace import RequestHistory, Trace

CONFIG = SchedulerConfig(max_num_seqs=4, max_num_batched_tokens=64, pipeline_depth=1)
STEP = CostModel(base=0.01, per_row=0.0, per_token=0.0, per_block=0.0)
"""Every step takes 10 ms."""


def run(
    trace: Trace, config: SchedulerConfig = CONFIG, costs: CostModel = STEP
) -> list[RequestHistory]:
    return simulate(trace, SchedulerCore(config), {"g0": costs})


def test_with_one_place_the_second_request_waits_for_the_first() -> None:
    trace = make_trace(script(0, num_tokens=5), script(1, num_tokens=2))
    together = run(trace)
    assert [history.first_token for history in together] == pytest.approx([0.01, 0.01])
    alone = run(trace, replace(CONFIG, max_num_seqs=1))
    assert [history.first_token for history in alone] == pytest.approx([0.01, 0.06])
    assert [history.ended for history in alone] == pytest.approx([0.05, 0.07])


def test_plans_that_leave_ahead_are_executed_one_after_the_other() -> None:
    histories = run(make_trace(script(0, num_tokens=4)), replace(CONFIG, pipeline_depth=3))
    assert histories[0].choices[0].times == pytest.approx([0.01, 0.02, 0.03, 0.04])


def test_a_choice_gets_its_recorded_tokens_but_for_the_last_by_which_it_ends() -> None:
    (history,) = run(make_trace(script(0, tokens=[7, 9, 3], max_tokens=50)))
    assert history.choices[0].tokens == [7, 9, 0]
    assert history.is_finished


def test_tokens_that_a_request_brings_along_are_not_given_again() -> None:
    generated = {0: GeneratedTokens(token_ids=[8, 8])}
    resumed = script(0, tokens=[5, 6], max_tokens=4, generated=generated)
    (history,) = run(make_trace(resumed))
    assert history.is_finished
    assert history.choices[0].tokens == [5, 0]


def test_a_request_that_outgrows_a_group_goes_on_in_one_that_had_nothing_to_plan() -> None:
    small = make_capacity("small", num_gpu_blocks=4)
    short, long = script(0, num_tokens=2), script(1, num_tokens=20)
    histories = run(make_trace(short, long, interventions=[join(small)]))
    assert [history.is_finished for history in histories] == [True, True]
    assert [history.num_tokens for history in histories] == [2, 20]


def test_a_request_goes_on_in_a_group_that_reads_its_kv_from_another_one() -> None:
    groups = [
        make_capacity(
            group_id, role=role, kv_layout=(("dtype", "float32"),), addresses=(group_id, "rank 1")
        )
        for group_id, role in (("prefills", Role.PREFILL), ("decodes", Role.DECODE))
    ]
    trace = make_trace(script(0, prompt=20, num_tokens=8))
    trace = replace(trace, interventions=list(map(join, groups)))
    core = SchedulerCore(replace(CONFIG, move_kv=MoveKV.ALWAYS))
    (history,) = simulate(trace, core, {"prefills": STEP})
    assert history.num_tokens == 8
    assert core.snapshot().num_fetched_blocks > 0


@pytest.mark.parametrize("type", [PoolingType.MEAN, PoolingType.ALL])
@pytest.mark.parametrize(
    "memory", [{"num_gpu_blocks": 0, "cache_groups": (), "whole_prompt": True}, {}]
)
def test_texts_that_are_pooled_are_load_without_tokens(
    type: PoolingType, memory: dict[str, object]
) -> None:
    recorder = Recorder()
    driver = CoreDriver(CONFIG, recorder.make_core)
    work = frozenset({WorkKind.POOLING, *([WorkKind.GENERATION] if not memory else [])})
    driver.add_worker_group(make_capacity(work_kinds=work, **memory))
    for number in range(20):
        driver.submit_pooled([number, *range(30)], type)
    driver.run_until_idle()
    comparison = compare(read_trace(recorder.recordings[0]), CONFIG, {})
    assert comparison.num_assumed == 0
    recorded, predicted = (run.latencies() for run in comparison.runs)
    assert recorded.num_requests == predicted.num_requests == 20
    assert recorded.tokens_per_s == 0
    assert sum(predicted.end_to_end) == pytest.approx(sum(recorded.end_to_end), rel=0.01)


def test_steps_whose_results_came_together_took_each_its_own_time() -> None:
    recording = Recording(lambda sampling: sampling)
    core = RecordingCore(replace(CONFIG, pipeline_depth=3), recording)
    core.add_worker_group(make_capacity(), 0.0)
    core.submit(script(0).request, 0.0)
    for _ in range(3):
        core.schedule("g0", 0.0)
    for step_id, held_us in enumerate((20_000, 10_000, 0), start=1):
        core.update("g0", StepResult(step_id=step_id, token_ids=[5], held_us=held_us), 0.03)
    core.pop_outboxes()
    seconds = [step.seconds for step in read_trace(recording).steps["g0"]]
    assert seconds == pytest.approx([0.01, 0.01, 0.01])


def test_clients_and_workers_go_when_they_went() -> None:
    trace = make_trace(
        script(0, num_tokens=40),
        script(1, num_tokens=5),
        interventions=[
            entry("cancel", frontend_id="f0", handle=1, now=0.035),
            entry("remove_worker_group", worker_group_id="g0", now=0.045),
            join(now=1.0),
        ],
    )
    cancelled, interrupted = run(trace)
    assert not cancelled.is_finished
    assert cancelled.ended == pytest.approx(0.035)
    assert len(cancelled.choices[0].tokens) == 3
    assert interrupted.is_finished
    assert interrupted.choices[0].times == pytest.approx([0.01, 0.02, 0.03, 0.04, 1.01])


def test_a_deadline_ends_a_request_in_virtual_time() -> None:
    (history,) = run(make_trace(script(0, num_tokens=40, deadline=0.055)))
    assert not history.is_finished
    assert history.ended == pytest.approx(0.055)
    assert len(history.choices[0].tokens) == 5


def test_a_recording_of_exact_workers_is_predicted_exactly() -> None:
    trace = make_trace(
        *(
            script(i, at=0.02 * i, prompt=3 + 7 * i % 29, num_tokens=2 + 5 * i % 11)
            for i in range(60)
        )
    )
    recording = record(trace, CONFIG)
    again = read_trace(recording)
    comparison = compare(again, CONFIG, {"alone": replace(CONFIG, max_num_seqs=1)})
    fitted = comparison.fits["g0"].model
    assert fitted.base == pytest.approx(COSTS.base, rel=1e-6)
    assert fitted.per_row == pytest.approx(COSTS.per_row, rel=1e-6)
    assert fitted.per_token == pytest.approx(COSTS.per_token, rel=1e-6)
    assert comparison.fits["g0"].mean_error < 1e-9

    assert [run.name for run in comparison.runs] == [RECORDED, PREDICTED, "alone"]
    recorded, predicted, alone = (run.latencies() for run in comparison.runs)
    assert recorded.num_requests == 60
    assert comparison.num_assumed == 0
    for name in ("first_token", "between_tokens", "end_to_end", "tokens_per_s"):
        expected = getattr(recorded, name)
        assert getattr(predicted, name) == pytest.approx(expected, rel=1e-6)
    assert max(alone.first_token) > 2 * max(recorded.first_token)


def test_a_trace_says_again_what_was_put_into_it() -> None:
    scripts = [script(0, num_tokens=4), script(1, num_tokens=4, max_tokens=50)]
    gone = entry("cancel", frontend_id="f0", handle=2, now=0.025)
    recording = record(make_trace(*scripts, interventions=[gone]), CONFIG, STEP)
    trace = read_trace(recording)
    first, cancelled = trace.histories
    assert (first.choices[0].tokens, first.is_assumed) == ([5, 5, 5, 0], False)
    # It goes on for as long as is usual, if it is not cancelled before.
    assert (cancelled.choices[0].tokens, cancelled.is_assumed) == ([5, 5, 0, 0], True)
    assert [entry.do for entry in trace.interventions] == ["add_worker_group", "cancel"]
    assert [history.is_finished for history in trace.histories] == [True, False]
    assert sum(step.size.num_rows for step in trace.steps["g0"]) >= 6


def test_a_choice_that_its_frontend_ended_has_the_tokens_up_to_there() -> None:
    core = RecordingCore(CONFIG, recording := Recording(lambda sampling: sampling))
    core.add_worker_group(make_capacity(), 0.0)
    core.submit(script(0, max_tokens=9).request, 0.0)
    for step_id in range(1, 4):
        core.schedule("g0", 0.0)
        core.update("g0", StepResult(step_id=step_id, token_ids=[step_id]), 0.01 * step_id)
        core.pop_outboxes()
    core.stop_choice("f0", 1, 2, 0.04)
    core.pop_outboxes()
    (history,) = read_trace(recording).histories
    assert history.choices[0].tokens == [1, 2]
    assert history.is_finished


def test_a_refused_request_is_put_to_other_configurations_once() -> None:
    config = replace(CONFIG, max_queue_requests=1)
    scripts = [script(i, num_tokens=3) for i in range(3)]
    scripts[2] = replace(scripts[2], request=replace(scripts[2].request, request_id="r1"))
    late = script(3, at=0.5, num_tokens=3)
    late = replace(late, request=replace(late.request, request_id="r1"))
    trace = make_trace(*scripts, late)
    trace = replace(trace, interventions=[join(now=0.005)])
    recorded = read_trace(record(trace, config, STEP))
    # All three come before the worker does; r1 is retried without success, and finally accepted.
    assert [math.isfinite(history.ended) for history in recorded.histories].count(True) == 2
    assert len(recorded.histories) == 4
    histories = run(recorded, CONFIG)
    assert [history.number for history in histories] == [0, 1, 3]


def test_what_ends_a_deployment_is_no_part_of_the_load() -> None:
    shutdown = [
        entry("remove_frontend", frontend_id="f0", now=0.5),
        entry("remove_worker_group", worker_group_id="g0", now=0.5),
    ]
    trace = read_trace(record(make_trace(script(0), interventions=shutdown), CONFIG, STEP))
    assert [entry.do for entry in trace.interventions] == ["add_worker_group"]
