"""Requests for vectors: a prefill whose last row brings one."""

import dataclasses
from dataclasses import replace

import pytest

from scheduler_service.core import StepPlan, StepResult
from scheduler_service.core.config import WorkKind
from scheduler_service.core.request import PoolingType
from scheduler_service.core.scheduling.pipeline import ResultMismatch
from scheduler_service.errors import InvalidArgument, PromptTooLong, UnsupportedByModel
from tests.support.core_driver import make_capacity, make_driver
from tests.support.symbolic_worker import VECTOR_SIZE

PROMPT = list(range(1, 21))
POOLS_ONLY = {"work_kinds": frozenset({WorkKind.POOLING})}


@pytest.mark.parametrize("type", PoolingType)
def test_a_request_gets_one_vector_and_no_token(type: PoolingType) -> None:
    driver = make_driver()
    record = driver.submit_pooled(PROMPT, type)
    driver.run_until_idle()
    assert record.finished is not None  # with the vector of an undisturbed run
    assert driver.core.snapshot().num_generated_tokens == 0


def test_the_chunks_of_its_prompt_bring_nothing_and_the_last_one_a_vector() -> None:
    driver = make_driver(max_num_batched_tokens=8)
    plans: list[StepPlan] = []
    driver.on_plan = lambda _, plan: plans.append(plan)
    driver.submit_pooled(PROMPT, PoolingType.MEAN)
    driver.run_until_idle()
    rows = [plan for plan in plans if plan.seq_ids]
    assert [(plan.num_tokens, plan.output) for plan in rows] == [
        ([8], [0]),
        ([8], [0]),
        ([4], [3]),
    ]


@pytest.mark.parametrize(
    ("type", "is_reused"),
    [(PoolingType.LAST, True), (PoolingType.MEAN, False), (PoolingType.CLS, False)],
)
def test_only_the_last_tokens_vector_reuses_a_cached_prefix(
    type: PoolingType, is_reused: bool
) -> None:
    driver = make_driver(max_num_batched_tokens=64)
    driver.submit(prompt=PROMPT, max_tokens=1)
    driver.run_until_idle()
    record = driver.submit_pooled(PROMPT, type)
    driver.run_until_idle()
    assert record.finished is not None
    assert (record.cached_tokens > 0) == is_reused


def test_what_a_pooled_request_computes_serves_others() -> None:
    driver = make_driver(max_num_batched_tokens=64)
    driver.submit_pooled(PROMPT, PoolingType.MEAN)
    driver.run_until_idle()
    record = driver.submit(prompt=PROMPT, max_tokens=2)
    driver.run_until_idle()
    assert record.cached_tokens == 16


def test_a_prompt_may_be_as_long_as_the_model() -> None:
    driver = make_driver(make_capacity(max_model_len=20))
    record = driver.submit_pooled(PROMPT, PoolingType.LAST)
    driver.run_until_idle()
    assert record.finished is not None
    with pytest.raises(PromptTooLong, match=r"has 21 tokens; the model takes 20"):
        driver.submit_pooled([*PROMPT, 1], PoolingType.LAST)
    with pytest.raises(PromptTooLong, match="with one to generate, the model takes 20"):
        driver.submit(prompt=PROMPT, max_tokens=1)


def test_a_model_of_whole_prompts_computes_each_in_one_row_and_reuses_none() -> None:
    capacity = make_capacity(whole_prompt=True, **POOLS_ONLY)
    driver = make_driver(capacity, max_num_batched_tokens=24)
    plans: list[StepPlan] = []
    driver.on_plan = lambda _, plan: plans.append(plan)
    records = [driver.submit_pooled(PROMPT, PoolingType.LAST) for _ in range(3)]
    driver.run_until_idle()
    assert all(record.finished and record.cached_tokens == 0 for record in records)
    assert [plan.num_tokens for plan in plans if plan.seq_ids] == [[20]] * 3


def test_a_whole_prompt_beyond_the_token_budget_is_refused_by_its_name() -> None:
    capacity = make_capacity(whole_prompt=True, **POOLS_ONLY)
    driver = make_driver(capacity, max_num_batched_tokens=19)
    with pytest.raises(PromptTooLong) as caught:
        driver.submit_pooled(PROMPT, PoolingType.LAST)
    assert caught.value.reason == "PROMPT_LARGER_THAN_STEP"
    assert "max_num_batched_tokens=19" in str(caught.value)


def test_work_of_another_kind_than_the_models_is_refused_by_its_name() -> None:
    generates = make_driver(make_capacity(work_kinds={WorkKind.GENERATION}, vector_size=0))
    with pytest.raises(UnsupportedByModel, match="do generation, not pooling"):
        generates.submit_pooled(PROMPT, PoolingType.LAST)
    pools = make_driver(make_capacity(**POOLS_ONLY))
    with pytest.raises(UnsupportedByModel, match="do pooling, not generation"):
        pools.submit(prompt=PROMPT, max_tokens=1)


def test_more_dimensions_than_the_model_has_are_refused_by_field() -> None:
    driver = make_driver()
    with pytest.raises(InvalidArgument, match=f"0 to the model's {VECTOR_SIZE}") as caught:
        driver.submit_pooled(PROMPT, PoolingType.LAST, dimensions=VECTOR_SIZE + 1)
    assert caught.value.field == "pooling.dimensions"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"vectors": {}}, "row 0 has neither vector nor an error"),
        ({"vectors": {0: bytes(8)}}, "the vector of row 0 has 8 bytes, expected 4 numbers"),
        ({"vectors": {0: bytes(16), 1: bytes(16)}}, "row 1 has vector, which its plan does not"),
        ({"token_ids": [5]}, "expected 0 tokens, result has 1"),
    ],
)
def test_a_result_with_other_vectors_than_planned_is_a_mismatch(
    change: dict[str, object], message: str
) -> None:
    driver = make_driver(max_num_batched_tokens=64)
    driver.submit_pooled(PROMPT, PoolingType.LAST)
    driver.schedule("g0")
    result = driver.links["g0"].results[0]
    with pytest.raises(ResultMismatch, match=message):
        driver.core.update("g0", replace(result, **change), driver.now)  # type: ignore[arg-type]


def test_a_vector_where_none_was_planned_is_a_mismatch() -> None:
    driver = make_driver()
    driver.submit(prompt=[1, 2], max_tokens=4)
    driver.schedule("g0")
    result: StepResult = driver.links["g0"].results[0]
    with pytest.raises(ResultMismatch, match="row 0 has vector"):
        driver.core.update("g0", dataclasses.replace(result, vectors={0: bytes(16)}), driver.now)


def test_the_vectors_of_a_step_fit_its_result() -> None:
    """2,048 vectors of 8,192 numbers are 64 MiB; a result holds 16 MiB."""
    capacity = make_capacity(vector_size=2_000_000, num_gpu_blocks=64)
    driver = make_driver(capacity, max_num_batched_tokens=64)
    for _ in range(4):
        driver.submit_pooled([1, 2, 3], PoolingType.MEAN, dimensions=VECTOR_SIZE)
    plans: list[StepPlan] = []
    driver.on_plan = lambda _, plan: plans.append(plan)
    driver.run_until_idle()
    assert [len(plan.seq_ids) for plan in plans if plan.seq_ids] == [2, 2]
