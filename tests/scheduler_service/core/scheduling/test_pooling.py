"""Requests for vectors: a prefill whose last row brings one."""

import dataclasses
from dataclasses import replace

import pytest

from scheduler_service.core import StepPlan, StepResult
from scheduler_service.core.request import PoolingType
from scheduler_service.core.scheduling.pipeline import ResultMismatch
from tests.support.core_driver import make_capacity, make_driver
from tests.support.symbolic_worker import VECTOR_SIZE

PROMPT = list(range(1, 21))


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
