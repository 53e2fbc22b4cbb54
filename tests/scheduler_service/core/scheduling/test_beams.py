"""Beam groups in the core: what is refused, delivered, and survives losses."""

import dataclasses
from typing import Any

import pytest

from scheduler_service.core import (
    BeamParams,
    EarlyStopping,
    GeneratedTokens,
    PolicyName,
    ResultMismatch,
    SchedulerConfig,
)
from scheduler_service.core.admission.deadlines import _work_us
from scheduler_service.core.config import CacheGroup, CacheLifetime, PoolingType, PreemptionMode
from scheduler_service.core.step_plan import RowCandidates, StepResult
from scheduler_service.errors import InvalidArgument, NoCandidates
from tests.support.core_driver import CoreDriver, make_capacity

CONFIG = SchedulerConfig(max_num_seqs=6, max_num_batched_tokens=32)
THREE = BeamParams(width=3, length_penalty=1.0, early_stopping=EarlyStopping.NEVER)
PROMPT = [3, 1, 4, 1, 5]


def make_driver(**changes: Any) -> CoreDriver:
    driver = CoreDriver(CONFIG)
    driver.add_worker_group(make_capacity(**changes))
    return driver


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"beam_search": dataclasses.replace(THREE, width=7)}, "beam_search.width"),
        ({"beam_search": dataclasses.replace(THREE, width=0)}, "beam_search.width"),
        ({"n": 4}, "beam_search.width"),
        ({"beam_search": dataclasses.replace(THREE, length_penalty=6.0)}, "length_penalty"),
    ],
)
def test_what_no_search_can_be_is_refused_by_name(changes: dict[str, Any], field: str) -> None:
    driver = make_driver()
    with pytest.raises(InvalidArgument) as caught:
        driver.submit(**({"prompt": PROMPT, "max_tokens": 5, "beam_search": THREE} | changes))
    assert field in caught.value.field
    driver.check_empty()


def test_a_search_does_not_go_on_from_tokens() -> None:
    driver = make_driver()
    request = driver.submit(prompt=PROMPT, max_tokens=5, beam_search=THREE).request
    work = dataclasses.replace(request.work, generated={0: GeneratedTokens(token_ids=[1])})
    other = dataclasses.replace(request, handle=50, request_id="again", work=work)
    with pytest.raises(InvalidArgument) as caught:
        driver.core.submit(other, driver.now)
    assert caught.value.field == "resume"


def test_a_search_tells_all_at_its_end_and_the_alternatives_where_asked() -> None:
    driver = make_driver()
    outboxes = []
    driver.submit(
        prompt=PROMPT,
        max_tokens=4,
        n=2,
        beam_search=dataclasses.replace(THREE, num_logprobs=2),
    )
    while driver.schedule("g0") is not None:
        driver.deliver("g0")
        outboxes += driver.core.pop_outboxes().values()
    told = [box for box in outboxes if box.token_ids]
    assert len(told) == 1
    assert [finished.handle for finished in told[0].choices_finished] == [1, 2]
    assert len(told[0].requests_finished) == 1
    assert len(told[0].logprobs) == 8
    for (handle, logprobs), token in zip(told[0].logprobs, told[0].token_ids, strict=True):
        assert handle in (1, 2)
        assert logprobs.token_ids[:4] == token.to_bytes(4, "little")
        assert len(logprobs.token_ids) == len(logprobs.logprobs) == 4 * 3


def test_a_search_that_moves_to_a_shorter_model_ends_with_what_it_has() -> None:
    driver = make_driver(max_model_len=20)
    record = driver.submit(prompt=PROMPT, max_tokens=15, n=3, beam_search=THREE)
    for _ in range(8):
        driver.schedule("g0")
        driver.deliver("g0")
    core = driver.core
    core.remove_worker_group("g0", driver.now)
    core.add_worker_group(make_capacity("g1", max_model_len=12), driver.now)
    assert core.schedule("g1", driver.now) is None
    [outbox] = core.pop_outboxes().values()
    assert [finished.reason for finished in outbox.choices_finished] == ["length"] * 3
    assert len(outbox.token_ids) == 3 * 8
    assert len(outbox.requests_finished) == 1
    assert record.request.work.num_choices == 3


def test_a_frontend_cannot_stop_a_beam() -> None:
    driver = make_driver()
    record = driver.submit(prompt=PROMPT, max_tokens=4, n=2, beam_search=THREE)
    driver.schedule("g0")
    driver.core.stop_choice("f0", record.request.handle, 0, driver.now)
    driver.run_until_idle()
    assert record.finished is not None


def test_a_search_has_come_as_far_as_the_beams_that_it_has() -> None:
    driver = make_driver()
    driver.submit(prompt=PROMPT, max_tokens=9, min_tokens=4, beam_search=THREE)
    three = RowCandidates(token_ids=[7, 8, 9], logprobs=[-1.0, -2.0, -3.0])
    one = RowCandidates(token_ids=[7], logprobs=[-1.0])
    none = RowCandidates(token_ids=[], logprobs=[])
    for number, rows in enumerate(({0: three}, {0: one, 1: none, 2: none}), 1):
        driver.core.schedule("g0", driver.now)
        result = StepResult(
            step_id=number, token_ids=[-1] * len(rows), candidates=rows, busy_us=1000
        )
        driver.core.update("g0", result, driver.now)
    [group] = driver.core.requests.seq_groups()
    group.losses.num_repeated = 2
    for seq in group.unfinished():
        seq.suspect(len(PROMPT) + 2)
    assert not group.is_suspect
    assert _work_us(group, driver.core._fleet.models["m"]) == 1000, "two tokens more"


def test_a_search_waits_for_memory_of_texts_whose_vectors_are_in_flight() -> None:
    """They have left the batch, so that the beams are alone there, and hold memory all the same."""
    driver = CoreDriver(dataclasses.replace(CONFIG, policy=PolicyName.PRIORITY))
    driver.add_worker_group(make_capacity(num_gpu_blocks=7))
    search = driver.submit(prompt=PROMPT, max_tokens=9, beam_search=THREE)
    driver.schedule("g0")
    text = driver.submit_pooled(list(range(16)), PoolingType.LAST, priority=-1)
    driver.schedule("g0")
    [group] = driver.core.snapshot().worker_groups
    assert group.num_free_gpu_blocks == 1
    driver.run_until_idle()
    assert text.finished is not None
    assert search.finished is not None
    driver.check_empty()


def test_beams_with_windows_need_no_more_memory_when_they_are_computed_again() -> None:
    """Those that go on from another beam share the window there, not all of the prompt."""
    window = CacheGroup(lifetime=CacheLifetime.WINDOW, block_tokens=4, span=9)
    config = dataclasses.replace(
        CONFIG,
        max_num_batched_tokens=8,
        policy=PolicyName.PRIORITY,
        enable_prefix_caching=False,
        preemption_mode=PreemptionMode.RECOMPUTE,
    )
    driver = CoreDriver(config)
    driver.add_worker_group(make_capacity(num_gpu_blocks=9, cache_groups=(window,)))
    beams = dataclasses.replace(THREE, width=2)
    search = driver.submit(prompt=[n % 32 for n in range(40)], max_tokens=12, beam_search=beams)
    driver.step("g0", times=6)
    other = driver.submit(prompt=list(range(20)), max_tokens=8, priority=-1)
    driver.run_until_idle()
    [model] = driver.core.snapshot().models
    assert model.totals.num_preemptions > 0
    assert other.finished is not None
    assert search.finished is not None
    driver.check_empty()


def test_a_search_whose_constraints_leave_nothing_fails_by_name() -> None:
    driver = make_driver()
    record = driver.submit(prompt=PROMPT, max_tokens=4, beam_search=THREE)
    driver.schedule("g0")
    nothing = RowCandidates(token_ids=[], logprobs=[])
    driver.core.update(
        "g0", StepResult(step_id=1, token_ids=[-1], candidates={0: nothing}), driver.now
    )
    driver.collect()
    assert isinstance(record.error, NoCandidates)
    assert driver.core.snapshot().num_running == 0


@pytest.mark.parametrize(
    "result",
    [
        {"token_ids": [5]},
        {"token_ids": [-1]},
        {"token_ids": [-1], "candidates": {0: RowCandidates(token_ids=[32], logprobs=[-1.0])}},
        {"token_ids": [-1], "candidates": {0: RowCandidates(token_ids=[-2], logprobs=[-1.0])}},
        {"token_ids": [-1], "candidates": {1: RowCandidates(token_ids=[2], logprobs=[-1.0])}},
    ],
    ids=["token", "nothing", "large", "negative", "row"],
)
def test_a_result_that_does_not_answer_a_search_is_a_mismatch(result: dict[str, Any]) -> None:
    driver = make_driver()
    driver.submit(prompt=PROMPT, max_tokens=4, beam_search=THREE)
    driver.schedule("g0")
    with pytest.raises(ResultMismatch):
        driver.core.update("g0", StepResult(step_id=1, **result), driver.now)


def test_candidates_for_a_row_that_chooses_are_a_mismatch() -> None:
    driver = make_driver()
    driver.submit(prompt=PROMPT, max_tokens=4)
    driver.schedule("g0")
    candidates = {0: RowCandidates(token_ids=[2], logprobs=[-1.0])}
    with pytest.raises(ResultMismatch):
        driver.core.update(
            "g0", StepResult(step_id=1, token_ids=[5], candidates=candidates), driver.now
        )


def test_a_result_from_before_a_swap_is_ignored_when_the_beams_are_back() -> None:
    driver = CoreDriver(
        dataclasses.replace(
            CONFIG, max_num_seqs=8, pipeline_depth=3, preemption_mode=PreemptionMode.SWAP
        )
    )
    driver.add_worker_group(make_capacity(num_gpu_blocks=3, num_cpu_blocks=16))
    other = driver.submit(prompt=[1, 2, 3], max_tokens=16)
    search = driver.submit(
        prompt=[1, 2, 3, 4, 5], max_tokens=7, beam_search=dataclasses.replace(THREE, width=1)
    )
    plan = driver.schedule("g0")
    while plan is None or not plan.swap_out:
        if len(driver.links["g0"].results) >= 2:
            driver.deliver("g0")
        plan = driver.schedule("g0")
    assert driver.links["g0"].results
    driver.cancel(other)  # so that there is room again before any result is in
    plan = driver.schedule("g0")
    assert plan is not None
    assert plan.swap_in
    driver.run_until_idle()
    assert search.finished is not None
    driver.check_empty()
