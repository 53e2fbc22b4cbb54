"""How many drafts rows may have, and what becomes of those that were not kept.

A symbolic worker drafts as many tokens as it may, and keeps from none to all of them.
"""

from typing import Any

import pytest

from scheduler_service.core import StepPlan, StepResult
from scheduler_service.core.beam_search import BeamParams, EarlyStopping
from scheduler_service.core.config import PolicyName, PoolingType, PreemptionMode
from scheduler_service.core.scheduling.pipeline import ResultMismatch
from tests.support.core_driver import CoreDriver, make_capacity, make_driver
from tests.support.symbolic_worker import Sampling, logprobs_of

NUM_DRAFTS = 5


def make(
    *,
    num_gpu_blocks: int = 64,
    num_cpu_blocks: int = 0,
    max_model_len: int = 64,
    **changes: object,
) -> tuple[CoreDriver, list[StepPlan]]:
    """A driver whose worker drafts, and all plans that it will have executed."""
    capacity = make_capacity(
        num_gpu_blocks=num_gpu_blocks,
        num_cpu_blocks=num_cpu_blocks,
        max_model_len=max_model_len,
        num_speculative_tokens=NUM_DRAFTS,
    )
    defaults: dict[str, object] = {"max_num_batched_tokens": 64, "max_speculative_seqs": 8}
    driver = make_driver(capacity, **(defaults | changes))
    plans: list[StepPlan] = []
    driver.on_plan = lambda group_id, plan: plans.append(plan)
    return driver, plans


def grants(plans: list[StepPlan]) -> list[int]:
    return [max(plan.lookahead or [0]) for plan in plans]


def test_a_decode_may_have_as_many_drafts_as_the_worker_makes() -> None:
    driver, plans = make()
    record = driver.submit(prompt=[1, 2, 3], max_tokens=40)
    driver.run_until_idle()
    assert len(record.choices[0].tokens) == 40
    assert max(grants(plans)) == NUM_DRAFTS
    assert len(plans) < 30, "some drafts were kept"
    driver.check_empty()


def test_texts_whose_vectors_are_in_flight_leave_a_row_without_drafts() -> None:
    driver, plans = make(max_num_batched_tokens=4, pipeline_depth=3)
    record = driver.submit(prompt=[1], max_tokens=5)
    for _ in range(9):
        driver.submit_pooled([7], PoolingType.LAST)
    for _ in range(3):
        driver.schedule("g0")
    assert [len(plan.seq_ids) for plan in plans] == [4, 4, 4]
    assert grants(plans) == [0, 0, 0]
    driver.run_until_idle()
    assert len(record.choices[0].tokens) == 5
    driver.check_empty()


def test_drafts_and_those_that_became_output_are_counted() -> None:
    for first in range(8):
        driver, plans = make()
        stops = frozenset({first + 8, first + 16})
        record = driver.submit(prompt=[1, first], max_tokens=60, stop_token_ids=stops)
        driver.run_until_idle()
        assert record.finished is not None
        timings = record.finished
        (model,) = driver.core.snapshot().models
        totals = model.totals
        assert timings.num_drafts == totals.num_drafts
        assert timings.num_accepted_drafts == totals.num_accepted_drafts
        assert sum(totals.num_accepted_by_position()) == totals.num_accepted_drafts
        assert 0 < totals.num_draft_rows == sum(totals.num_rows_by_accepted.values())
        assert timings.num_drafts == sum(sum(plan.lookahead or ()) for plan in plans)
        # Each of the plans brought one token more, and what followed a stop token is not output.
        assert timings.num_accepted_drafts == len(record.choices[0].tokens) - len(plans)


@pytest.mark.parametrize("most", [0, 2, 9])
def test_a_request_may_limit_its_drafts(most: int) -> None:
    driver, plans = make()
    driver.submit(prompt=[1, 2, 3], max_tokens=20, num_speculative_tokens=most)
    driver.run_until_idle()
    assert max(grants(plans)) == min(most, NUM_DRAFTS)
    driver.submit(prompt=[4, 2, 3], max_tokens=30)
    driver.submit(prompt=[1, 2, 3], max_tokens=30, num_speculative_tokens=most)
    driver.run_until_idle()
    assert max(grants(plans)) == NUM_DRAFTS, "of the other request"


@pytest.mark.parametrize("max_model_len", [64, 9])
def test_no_block_is_reserved_beyond_the_end(max_model_len: int) -> None:
    for max_tokens in range(1, 16):
        num_tokens = min(3 + max_tokens, max_model_len) - 1  # of the last one, nothing is computed
        num_blocks = -(-num_tokens // 4)
        driver, plans = make(max_model_len=max_model_len, watermark=0.0)
        record = driver.submit(prompt=[1, 2, 3], max_tokens=max_tokens)
        driver.run_until_idle()
        assert len(record.choices[0].tokens) == num_tokens + 1 - 3
        tables = [
            len(plan.new_sequences[0].tables[0].block_ids) for plan in plans if plan.new_sequences
        ]
        added = [index for plan in plans for index in plan.block_updates[2::4]]
        assert max([*(count - 1 for count in tables), *added]) == num_blocks - 1
        driver.check_empty()


def test_a_row_that_fails_beyond_a_choice_s_end_fails_no_other_choice() -> None:
    """A row was planned ahead for a choice that a stop token ended: what it computes is void."""
    num_stopped = 0
    for seed in range(200):
        driver, _ = make(pipeline_depth=3)
        sampling = Sampling(seed=seed, fails_at=5)
        stops = frozenset(range(4))
        record = driver.submit(
            prompt=[1, 2, 3], n=3, max_tokens=20, sampling=sampling, stop_token_ids=stops
        )
        while driver.schedule("g0") or driver.schedule("g0") or driver.deliver("g0"):
            pass  # every step is planned before the result of the one before arrives
        driver.run_until_idle()
        stopped = [choice.finish_reason == "stop" for choice in record.choices]
        num_stopped += any(stopped)
        if not all(stopped):
            assert max(len(choice.tokens) for choice in record.choices) == 5
        driver.check_empty()
    assert num_stopped > 50


def test_a_large_batch_has_no_drafts() -> None:
    driver, plans = make(max_speculative_seqs=2)
    for max_tokens in (30, 30, 10):
        driver.submit(prompt=[1, 2, 3], max_tokens=max_tokens)
    driver.run_until_idle()
    full = [plan for plan in plans if len(plan.seq_ids) == 3]
    assert full
    assert grants(full) == [0] * len(full)
    assert max(grants(plans)) > 0, "once one has ended"


@pytest.mark.parametrize(
    "changes", [{"max_speculative_seqs": 0}, {"max_num_batched_tokens": 4, "max_num_seqs": 4}]
)
def test_speculation_may_be_off_and_needs_room_in_the_step(changes: dict[str, int]) -> None:
    driver, plans = make(**changes)
    driver.submit(prompt=[1, 2, 3], max_tokens=20)
    driver.submit(prompt=[4, 2, 3], max_tokens=20)
    driver.run_until_idle()
    most = 0 if "max_speculative_seqs" in changes else 3
    assert max(grants(plans)) <= most
    assert all(
        len(plan.seq_ids) + sum(plan.lookahead or ()) <= driver.config.max_num_batched_tokens
        for plan in plans
        if plan.num_tokens is None
    )


@pytest.mark.parametrize(
    ("changes", "num_steps"),
    [
        ({"max_num_batched_tokens": 18}, 6),
        ({"max_num_batched_tokens": 68, "enable_chunked_prefill": False}, 1),
    ],
)
def test_drafts_leave_tokens_of_the_step_to_prompts(
    changes: dict[str, object], num_steps: int
) -> None:
    driver, plans = make(**changes)
    others = [driver.submit(prompt=[1, 2, number], max_tokens=50) for number in range(3)]
    driver.step("g0", times=2)
    assert grants(plans)[-1] == NUM_DRAFTS
    late = driver.submit(prompt=[9] * 52, max_tokens=4)
    driver.step("g0", times=num_steps)
    assert len(late.choices[0].tokens) == 1
    assert all(record.is_live for record in others)
    if driver.config.enable_chunked_prefill:
        assert grants(plans)[-num_steps:] == [2] * num_steps
    driver.run_until_idle()
    driver.check_empty()


def test_drafts_leave_nothing_to_prompts_that_have_no_place() -> None:
    driver, plans = make(max_num_batched_tokens=18, max_num_seqs=3)
    for number in range(4):
        driver.submit(prompt=[1, 2, number], max_tokens=9)
    driver.step("g0", times=2)
    assert grants(plans)[-1] == NUM_DRAFTS
    driver.run_until_idle()
    driver.check_empty()


def test_prompt_log_probabilities_and_beam_searches_have_no_drafts() -> None:
    driver, plans = make()
    driver.submit(prompt=[1, 2, 3], max_tokens=9, sampling=Sampling(seed=1, prompt_logprobs=True))
    driver.run_until_idle()
    beams = BeamParams(width=2, length_penalty=1.0, early_stopping=EarlyStopping.NEVER)
    driver.submit(prompt=[1, 2, 3], max_tokens=9, beam_search=beams)
    driver.run_until_idle()
    assert max(grants(plans)) == 0
    driver.check_empty()


def test_drafts_take_no_block_that_a_running_sequence_may_need_next() -> None:
    driver, _ = make(num_gpu_blocks=6)
    driver.submit(prompt=[1, 2, 3], max_tokens=9)
    driver.submit(prompt=[4, 2, 3], max_tokens=9)
    driver.run_until_idle()
    assert driver.core.snapshot().num_preemptions == 0
    driver.check_empty()


@pytest.mark.parametrize("is_in_flight", [True, False])
def test_a_sequence_with_drafts_in_flight_is_recomputed_instead_of_swapped(
    is_in_flight: bool,
) -> None:
    driver, plans = make(
        num_gpu_blocks=10,
        num_cpu_blocks=40,
        preemption_mode=PreemptionMode.SWAP,
        policy=PolicyName.PRIORITY,
        enable_prefix_caching=False,
        watermark=0.0,
    )
    low = driver.submit(prompt=[1, 2, 3], max_tokens=34, priority=1)
    while len(low.choices[0].tokens) < 14:
        driver.step("g0")
    if is_in_flight:
        driver.schedule("g0")
    high = driver.submit(prompt=list(range(26)), max_tokens=2, priority=0)
    driver.run_until_idle()
    assert low.finished is not None
    assert high.finished is not None
    assert driver.core.snapshot().num_preemptions == 1
    assert any(plan.swap_in for plan in plans) != is_in_flight
    driver.check_empty()


@pytest.mark.parametrize(
    ("result", "message"),
    [
        (StepResult(step_id=2, token_ids=[1, 2], num_sampled=[1, 1]), "numbers of tokens"),
        (StepResult(step_id=2, token_ids=[], num_sampled=[0]), "has 0 tokens, expected 1 to 6"),
        (StepResult(step_id=2, token_ids=[1] * 7, num_sampled=[7]), "has 7 tokens, expected 1 to"),
        (StepResult(step_id=2, token_ids=[1, 2], num_sampled=[3]), "expected 3 tokens, result"),
        (StepResult(step_id=2, token_ids=[1, 2]), "expected 1 tokens, result has 2"),
        (StepResult(step_id=2, token_ids=[1, 32], num_sampled=[2]), "not below 32"),
        (StepResult(step_id=2, token_ids=[1, -1], num_sampled=[2]), "neither a token nor"),
        (StepResult(step_id=2, token_ids=[1], num_drafts=[1, 1]), "numbers of drafts"),
        (StepResult(step_id=2, token_ids=[1], num_drafts=[6]), "has 6 drafts, expected 0 to 5"),
        (
            StepResult(step_id=2, token_ids=[1, 2, 3], num_sampled=[3], num_drafts=[1]),
            "has 1 drafts, expected 2 to 5",
        ),
    ],
)
def test_a_result_with_more_or_fewer_tokens_than_rows_may_bring_changes_nothing(
    result: StepResult, message: str
) -> None:
    driver, _ = make()
    record = driver.submit(prompt=[1, 2], max_tokens=20)
    driver.step("g0")
    driver.schedule("g0")
    with pytest.raises(ResultMismatch, match=message):
        driver.core.update("g0", result, driver.now)
    driver.run_until_idle()
    assert record.finished is not None


@pytest.mark.parametrize(
    "entries",
    [
        {"logprobs": {0: logprobs_of(1)}},
        {"kept_logprobs": {0: [logprobs_of(1), logprobs_of(2)]}, "logprobs": {0: logprobs_of(1)}},
        {"kept_logprobs": {0: [logprobs_of(1)]}},
    ],
)
def test_a_result_without_log_probabilities_of_each_token_changes_nothing(
    entries: dict[str, Any],
) -> None:
    driver, _ = make()
    sampling = Sampling(seed=1, logprobs=True)
    record = driver.submit(prompt=[1, 2], max_tokens=20, sampling=sampling)
    driver.step("g0")
    driver.schedule("g0")
    result = StepResult(step_id=2, token_ids=[1, 2], num_sampled=[2], **entries)
    with pytest.raises(ResultMismatch, match="log probabilities, expected one for each of its 2"):
        driver.core.update("g0", result, driver.now)
    driver.run_until_idle()
    assert record.finished is not None


def test_drafts_of_a_request_that_was_cancelled_meanwhile_are_no_latencies() -> None:
    driver, _ = make()
    record = driver.submit(prompt=[1, 2, 3], max_tokens=40)
    driver.step("g0", 3)
    plan = driver.schedule("g0")
    assert plan is not None
    assert plan.lookahead == [NUM_DRAFTS]
    before = driver.core.snapshot()
    driver.cancel(record)
    driver.now += 0.5
    driver.core.update("g0", answer(plan, NUM_DRAFTS + 1), driver.now)
    after = driver.core.snapshot()
    assert after.inter_token_counts == before.inter_token_counts
    assert after.num_generated_tokens == before.num_generated_tokens


def answer(plan: StepPlan, num_tokens: int) -> StepResult:
    """The result of a plan with one row, which brings this many tokens."""
    return StepResult(
        step_id=plan.step_id,
        token_ids=[1] * num_tokens,
        num_sampled=[num_tokens],
        num_drafts=[num_tokens - 1],
    )
