"""What the scenarios do not show of the core: errors in full, resumed requests, timings, bounds."""

import dataclasses
import gc
import tracemalloc

import pytest

from scheduler_service.core import (
    GeneratedTokens,
    Request,
    ResultMismatch,
    RowError,
    RowPromptLogprobs,
    SchedulerConfig,
    SchedulerCore,
    StepResult,
)
from scheduler_service.core.delivery import deliver_prompt_logprobs
from scheduler_service.core.registry import Registry
from scheduler_service.errors import (
    DuplicateRequest,
    InvalidArgument,
    PromptTooLong,
    QueueFull,
    RequestAborted,
    UnknownModel,
    UnknownRequest,
)
from tests.support.core_driver import CoreDriver, make_capacity
from tests.support.symbolic_worker import Sampling, undisturbed

CONFIG = SchedulerConfig(max_num_seqs=4, max_num_batched_tokens=16)


def make_request(**changes: object) -> Request:
    values: dict[str, object] = {
        "frontend_id": "f0",
        "handle": 1,
        "request_id": "r1",
        "model": "m",
        "prompt_token_ids": [1, 2, 3, 4, 5],
        "max_tokens": 4,
        "sampling": Sampling(seed=1),
    }
    return Request(**(values | changes))  # type: ignore[arg-type]


def make_driver(**changes: object) -> CoreDriver:
    driver = CoreDriver(dataclasses.replace(CONFIG, **changes))  # type: ignore[arg-type]
    driver.add_group(make_capacity())
    return driver


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"prompt_token_ids": []}, "prompt"),
        ({"prompt_token_ids": [1, 32]}, "prompt"),
        ({"prompt_token_ids": [-1]}, "prompt"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"num_choices": 0}, "num_choices"),
        ({"num_choices": 5}, "num_choices"),
        ({"generated": {1: GeneratedTokens(token_ids=[1])}}, "resume"),
        ({"generated": {0: GeneratedTokens(token_ids=[1] * 5)}}, "resume"),
    ],
)
def test_a_wrong_field_is_refused_by_name(changes: dict[str, object], field: str) -> None:
    core = make_driver().core
    with pytest.raises(InvalidArgument) as caught:
        core.submit(make_request(**changes), 0.0)
    assert caught.value.field == field
    assert core.snapshot().num_waiting == 0


def test_a_prompt_that_leaves_no_room_for_a_token_is_refused_with_the_numbers() -> None:
    core = make_driver().core
    with pytest.raises(PromptTooLong) as caught:
        core.submit(make_request(prompt_token_ids=[1] * 64), 0.0)
    assert caught.value.reason == "PROMPT_TOO_LONG"
    assert caught.value.details == {"num_prompt_tokens": "64", "max_model_len": "64"}


def test_a_prompt_larger_than_the_cache_is_refused_with_the_numbers() -> None:
    driver = CoreDriver(CONFIG)
    driver.add_group(make_capacity(num_gpu_blocks=3))
    driver.core.submit(make_request(prompt_token_ids=[1] * 12), 0.0)
    with pytest.raises(PromptTooLong) as caught:
        driver.core.submit(make_request(request_id="r2", handle=2, prompt_token_ids=[1] * 13), 0.0)
    assert caught.value.reason == "PROMPT_LARGER_THAN_CACHE"
    assert caught.value.details["num_cache_tokens"] == "12"


def test_a_prompt_that_fits_one_group_of_several_is_taken_there() -> None:
    driver = CoreDriver(CONFIG)
    driver.add_group(make_capacity("small", num_gpu_blocks=2))
    driver.add_group(make_capacity("large", num_gpu_blocks=16))
    driver.submit(prompt=[1] * 20, max_tokens=1)
    assert driver.schedule("small") is None
    assert driver.schedule("large") is not None


def test_hopeless_requests_fail_when_the_first_group_joins_and_others_start() -> None:
    driver = CoreDriver(CONFIG)
    long = driver.submit(prompt=[1] * 70, max_tokens=1)
    foreign = driver.submit(prompt=[99], max_tokens=1)
    good = driver.submit(prompt=[1], max_tokens=1)
    driver.add_group(make_capacity())
    driver.run_until_idle()
    assert isinstance(long.error, PromptTooLong)
    assert isinstance(foreign.error, InvalidArgument)
    assert good.finished is not None
    driver.check_empty()


def test_any_model_is_waited_for_until_a_group_is_known() -> None:
    driver = CoreDriver(CONFIG)
    driver.submit(prompt=[1], max_tokens=1, model="later")
    driver.add_group(make_capacity(model="m"))
    with pytest.raises(UnknownModel) as caught:
        driver.submit(prompt=[1], max_tokens=1, model="never")
    assert caught.value.details == {"model": "never", "served": "m"}


def test_a_model_whose_groups_are_all_lost_is_waited_for() -> None:
    driver = CoreDriver(CONFIG)
    driver.add_group(make_capacity("a", model="m"))
    driver.add_group(make_capacity("b", model="other"))
    driver.lose_group("a")
    record = driver.submit(prompt=[1], max_tokens=1, model="m")
    driver.add_group(make_capacity("a", model="m"))
    driver.run_until_idle()
    assert record.finished is not None


def test_a_live_request_id_or_handle_is_not_taken_twice() -> None:
    core = SchedulerCore(CONFIG)
    core.submit(make_request(num_choices=3), 0.0)
    with pytest.raises(DuplicateRequest):
        core.submit(make_request(handle=9), 0.0)
    with pytest.raises(DuplicateRequest):
        core.submit(make_request(request_id="r2", handle=3), 0.0)
    core.submit(make_request(request_id="r2", handle=3, frontend_id="f1"), 0.0)
    core.cancel("f0", 1, 0.0)
    core.submit(make_request(handle=9), 0.0)


def test_a_full_queue_says_when_to_come_again_but_takes_what_was_accepted_before() -> None:
    core = SchedulerCore(dataclasses.replace(CONFIG, max_queue_requests=1, queue_retry_delay_s=2.5))
    core.submit(make_request(), 0.0)
    with pytest.raises(QueueFull) as caught:
        core.submit(make_request(request_id="r2", handle=2), 0.0)
    assert caught.value.retry_delay_s == 2.5
    generated = {0: GeneratedTokens(token_ids=[1])}
    core.submit(make_request(request_id="r2", handle=2, generated=generated), 0.0)
    assert core.take_outboxes()["f0"].accepted == [1, 2]


def test_aborting_an_unknown_request_is_an_error_and_cancelling_one_is_not() -> None:
    core = SchedulerCore(CONFIG)
    with pytest.raises(UnknownRequest):
        core.abort("", "r1", 0.0)
    core.cancel("f0", 1, 0.0)
    core.stop_choice("f0", 1, 3, 0.0)
    core.remove_frontend("f0", 0.0)
    core.remove_group("g0", 0.0)
    assert core.take_outboxes() == {}


# Resumed requests.


def resume(generated: dict[int, GeneratedTokens], **changes: object) -> CoreDriver:
    driver = make_driver()
    driver.core.submit(make_request(generated=generated, **changes), driver.now)
    return driver


def test_resumed_choices_go_on_from_their_tokens_and_ended_ones_stay_ended() -> None:
    prompt, sampling = [1, 2, 3, 4, 5], Sampling(seed=1)
    expected = [undisturbed(prompt, choice, sampling, frozenset(), 4) for choice in range(4)]
    generated = {
        0: GeneratedTokens(token_ids=expected[0][:2]),
        1: GeneratedTokens(token_ids=expected[1][:1], finished=True),
    }
    driver = resume(generated, num_choices=4)
    plan = driver.schedule("g0")
    assert plan is not None
    # Choices 2 and 3 have nothing yet and share a prefill; choice 0 waits for the block that it
    # will find then, and computes the rest on its own.
    origins = [(new.choice_index, new.parent_seq_id) for new in plan.new_sequences]
    assert origins == [(2, None), (3, 3)]
    tokens: dict[int, list[int]] = {}
    late = []
    while driver.deliver("g0"):
        for plan in (driver.schedule("g0"), driver.schedule("g0")):
            late += plan.new_sequences if plan else []
        outbox = driver.core.take_outboxes()["f0"]
        for handle, token in zip(outbox.token_handles, outbox.token_ids, strict=True):
            tokens.setdefault(handle, []).append(token)
    assert [new.token_ids for new in late] == [prompt + expected[0][:2]]
    assert (late[0].num_prompt_tokens, late[0].num_computed_tokens) == (5, 4)
    assert tokens == {1: expected[0][2:], 3: expected[2], 4: expected[3]}
    assert outbox.requests_finished[0].timings.queue_us == 0


@pytest.mark.parametrize(
    ("generated", "stop_token_ids", "finish"),
    [
        (GeneratedTokens(token_ids=[7] * 4), frozenset(), ("length", None)),
        (GeneratedTokens(token_ids=[7, 9]), frozenset({9}), ("stop", 9)),
        (GeneratedTokens(token_ids=[7, 7], finished=True), frozenset(), None),
    ],
)
def test_a_resumed_request_with_all_its_tokens_ends_at_once(
    generated: GeneratedTokens,
    stop_token_ids: frozenset[int],
    finish: tuple[str, int | None] | None,
) -> None:
    driver = resume({0: generated}, stop_token_ids=stop_token_ids)
    outbox = driver.core.take_outboxes()["f0"]
    finished = [(end.reason, end.stop_token_id) for end in outbox.choices_finished]
    assert finished == ([finish] if finish else [])
    assert [end.handle for end in outbox.requests_finished] == [1]
    assert driver.schedule("g0") is None


def test_a_resumed_choice_at_the_models_length_ends_when_a_group_is_known() -> None:
    core = SchedulerCore(CONFIG)
    generated = {0: GeneratedTokens(token_ids=[7] * 59)}
    core.submit(make_request(generated=generated, max_tokens=100), 0.0)
    core.add_group(make_capacity(), 0.0)
    assert core.schedule("g0", 0.0) is None
    outbox = core.take_outboxes()["f0"]
    assert [end.reason for end in outbox.choices_finished] == ["length"]
    assert [end.handle for end in outbox.requests_finished] == [1]


# Log probabilities and errors of rows.


def test_prompt_logprobs_are_told_once_although_the_prompt_is_computed_twice() -> None:
    driver = CoreDriver(dataclasses.replace(CONFIG, watermark=0.0))
    driver.add_group(make_capacity(num_gpu_blocks=5))
    sampling = Sampling(seed=1, logprobs=True, prompt_logprobs=True)
    introduced = []
    driver.on_plan = lambda group_id, plan: introduced.extend(plan.new_sequences)
    driver.submit(prompt=[1] * 7, max_tokens=9, sampling=sampling)
    second = driver.submit(prompt=[2] * 8, max_tokens=4, sampling=sampling)
    driver.run_until_idle()
    assert [(new.seq_id, new.prompt_logprobs_start) for new in introduced] == [
        (1, 0),
        (2, 0),
        (2, 8),
    ]
    assert second.num_prompt_logprobs == 7
    assert second.choices[0].num_logprobs == 4
    driver.check_empty()


def test_prompt_logprobs_that_overlap_are_cut_to_what_is_new() -> None:
    core = SchedulerCore(CONFIG)
    core.submit(make_request(), 0.0)
    group = core._registry.groups()[0]

    def update(start: int, count: int) -> RowPromptLogprobs:
        positions = range(start, start + count)
        matrix = b"".join(bytes([p, 0, 0, 0, 100 + p, 0, 0, 0]) for p in positions)
        ranks = b"".join(bytes([p, 0, 0, 0]) for p in positions)
        return RowPromptLogprobs(
            start=start, width=2, token_ids=matrix, logprobs=matrix, ranks=ranks
        )

    for part in (update(1, 2), update(1, 1), update(2, 3), update(1, 4)):
        deliver_prompt_logprobs(group, part)
    told = core.take_outboxes()["f0"].prompt_logprobs
    assert told == [(1, update(1, 2)), (1, update(3, 2))]


def test_a_row_that_fails_ends_its_request_and_no_other() -> None:
    driver = make_driver()
    sampling = Sampling(seed=1, fails_at=1)
    broken = driver.submit(prompt=[1, 2], max_tokens=4, n=2, sampling=sampling)
    sound = driver.submit(prompt=[1, 2], max_tokens=4)
    driver.run_until_idle()
    assert broken.error is not None
    assert broken.error.reason == "NON_FINITE_LOGITS"
    assert sound.finished is not None
    driver.check_empty()


@pytest.mark.parametrize(
    ("result", "message"),
    [
        (StepResult(step_id=2, token_ids=[1]), "expected step_id=1"),
        (StepResult(step_id=1, token_ids=[]), "expected 1 tokens"),
        (StepResult(step_id=1, token_ids=[32]), "not below 32"),
        (StepResult(step_id=1, token_ids=[-1]), "neither a token nor an error"),
        (
            StepResult(
                step_id=1, token_ids=[1], errors={1: RowError(reason="NO_CANDIDATES", message="")}
            ),
            "beyond the 1 of the batch",
        ),
    ],
)
def test_a_result_that_does_not_answer_the_open_plan_changes_nothing(
    result: StepResult, message: str
) -> None:
    driver = make_driver()
    record = driver.submit(prompt=[1, 2], max_tokens=2)
    driver.schedule("g0")
    with pytest.raises(ResultMismatch, match=message):
        driver.core.update("g0", result, driver.now)
    driver.run_until_idle()
    assert record.finished is not None


def test_a_result_without_an_open_plan_is_a_mismatch() -> None:
    with pytest.raises(ResultMismatch, match="no step is open"):
        make_driver().core.update("g0", StepResult(step_id=1, token_ids=[]), 0.0)


# Worker groups.


def test_a_group_id_is_not_taken_twice() -> None:
    core = make_driver().core
    with pytest.raises(ValueError, match="g0 is there already"):
        core.add_group(make_capacity(), 0.0)


def test_what_has_not_begun_moves_to_a_group_that_joins() -> None:
    driver = make_driver()
    for _ in range(4):
        driver.submit(prompt=[1] * 16, max_tokens=1)
    driver.schedule("g0")  # the token budget takes one of them; the others are placed and wait
    driver.add_group(make_capacity("g1"))
    plan = driver.schedule("g1")
    assert plan is not None
    assert len(plan.new_sequences) == 1


def test_a_group_is_drained_when_what_it_has_begun_is_done() -> None:
    driver = make_driver()
    driver.submit(prompt=[1], max_tokens=1)
    driver.schedule("g0")
    assert not driver.core.is_drained("g0")
    driver.core.drain_group("g0", driver.now)
    assert not driver.core.is_drained("g0")
    driver.deliver("g0")
    assert driver.core.is_drained("g0")
    driver.lose_group("g0")
    assert driver.core.is_drained("g0")


def test_a_request_with_rows_in_flight_was_on_the_worker_though_it_is_preempted() -> None:
    config = dataclasses.replace(CONFIG, watermark=0.0, pipeline_depth=3, max_worker_losses=1)
    driver = CoreDriver(config)
    driver.add_group(make_capacity(num_gpu_blocks=5))
    records = [driver.submit(prompt=[1] * count, max_tokens=9) for count in (7, 8, 1)]
    for _ in range(3):
        driver.schedule("g0")
    assert driver.core.snapshot().num_preemptions == 1
    driver.lose_group("g0")
    driver.collect()
    errors = [record.error.reason if record.error else None for record in records]
    assert errors == ["WORKERS_LOST", "WORKERS_LOST", None]


# Deadlines, timings, bounds.


def test_the_next_deadline_is_that_of_the_live_request_that_is_due_first() -> None:
    driver = make_driver()
    driver.submit(prompt=[1], max_tokens=1, timeout=5.0)
    first = driver.submit(prompt=[1], max_tokens=1, timeout=1.0)
    assert driver.core.next_deadline() == driver.now + 1.0
    driver.cancel(first)
    assert driver.core.next_deadline() == driver.now + 5.0
    driver.run_until_idle()
    assert driver.core.next_deadline() is None


def test_timings_name_where_the_time_went_and_add_up() -> None:
    driver = make_driver(pipeline_depth=1)
    record = driver.submit(prompt=[1, 2, 3], max_tokens=2)
    driver.now += 0.5
    driver.schedule("g0")
    driver.core.add_plan_time("g0", 0.00001)
    driver.deliver("g0")  # 1000 us on the worker: 900 forward, 60 sample
    driver.now += 0.25
    driver.schedule("g0")
    driver.deliver("g0")
    driver.collect()
    timings = record.finished
    assert timings is not None
    assert timings.queue_us == 500_000
    assert timings.forward_us == 1800
    assert timings.sample_us == 120
    assert timings.plan_us == 10
    assert timings.wire_us == 250_000 + 2 * 40 - 10
    assert timings.total_us == 502_000 + 250_000


def test_a_request_that_enters_amid_a_step_is_charged_from_there() -> None:
    driver = make_driver(pipeline_depth=2)
    driver.submit(prompt=[1, 2, 3], max_tokens=9)
    driver.schedule("g0")
    driver.now += 0.0005
    late = driver.submit(prompt=[1, 2, 3], max_tokens=1)
    driver.schedule("g0")
    driver.deliver("g0")
    driver.deliver("g0")
    driver.collect()
    timings = late.finished
    assert timings is not None
    assert timings.queue_us == 0
    assert timings.total_us == 2000
    assert 1740 <= timings.forward_us <= 1800


def test_sequence_numbers_wrap_around_and_skip_live_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = make_driver()
    registry: Registry = driver.core._registry
    driver.submit(prompt=[1], max_tokens=9)  # sequence 1 lives
    monkeypatch.setattr(registry, "_last_seq_id", 2**31 - 2)
    driver.submit(prompt=[1], max_tokens=9, n=2)
    plan = driver.schedule("g0")
    assert plan is not None
    assert plan.seq_ids == [1, 2**31 - 1, 2]
    driver.run_until_idle()
    driver.check_empty()


def test_memory_does_not_grow_with_requests_that_have_ended() -> None:
    driver = make_driver(max_queue_requests=10_000)

    def serve(count: int) -> None:
        for i in range(count):
            record = driver.submit(prompt=[1, 2, 3], max_tokens=2, timeout=1e6)
            if i % 2:
                driver.cancel(record)
            if i % 4 == 0:
                driver.run_until_idle()
            driver.records = {key: r for key, r in driver.records.items() if r.is_live}
        driver.run_until_idle()
        driver.records = {}

    tracemalloc.start()  # before the last ended requests, which are remembered, are made
    try:
        serve(400)
        before = tracemalloc.get_traced_memory()[0]
        serve(1200)
        gc.collect()  # empties the interpreter's free lists, too
        grown = tracemalloc.get_traced_memory()[0] - before
    finally:
        tracemalloc.stop()
    assert grown < 20 * 1200


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"max_num_seqs": 0}, "max_num_seqs must be at least 1"),
        ({"max_num_batched_tokens": 3}, "max_num_batched_tokens must be at least 4"),
        ({"watermark": 1.0}, "watermark must be in"),
        ({"pipeline_depth": 0}, "pipeline_depth must be at least 1"),
        ({"queue_retry_delay_s": 0.0}, "queue_retry_delay_s must be above 0"),
    ],
)
def test_contradictory_configuration_is_refused(changes: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(CONFIG, **changes)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "changes",
    [
        {"num_gpu_blocks": 0},
        {"block_size": 0},
        {"vocab_size": 0},
        {"num_cpu_blocks": -1},
        {"max_model_len": 1},
    ],
)
def test_impossible_capacities_are_refused(changes: dict[str, object]) -> None:
    [name] = changes
    with pytest.raises(ValueError, match=name):
        make_capacity(**changes)


# Tenants.


def test_request_ids_are_a_tenants_own() -> None:
    core = SchedulerCore(CONFIG)
    core.submit(make_request(request_id="r", handle=1, tenant="one"), 0.0)
    core.submit(make_request(request_id="r", handle=2, tenant="two"), 0.0)
    with pytest.raises(DuplicateRequest):
        core.submit(make_request(request_id="r", handle=3, tenant="two"), 0.0)
    with pytest.raises(UnknownRequest):
        core.abort("three", "r", 0.0)
    core.abort("two", "r", 0.0)
    failed = core.take_outboxes()["f0"].requests_failed
    assert [(handle, type(error)) for handle, error in failed] == [(2, RequestAborted)]
    assert core.snapshot().num_waiting == 1
