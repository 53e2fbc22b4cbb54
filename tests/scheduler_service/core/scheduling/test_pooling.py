"""Requests for vectors: a prefill whose last row brings one, or whose rows bring one per token."""

import dataclasses
from dataclasses import replace
from typing import Any

import pytest

from scheduler_service.core import StepPlan, StepResult, WorkerGroupCapacity
from scheduler_service.core.config import PolicyName, PoolingHead, PoolingType, WorkKind
from scheduler_service.core.policies.policy import POOLED_TOKEN_US
from scheduler_service.core.scheduling.pipeline import ResultMismatch
from scheduler_service.core.scheduling.pooling import MAX_PART_BYTES, MAX_ROW_BYTES
from scheduler_service.errors import InvalidArgument, PromptTooLong, UnsupportedByModel
from tests.support.core_driver import CoreDriver, make_capacity, make_driver
from tests.support.symbolic_worker import VECTOR_SIZE

LAST, MEAN, CLS, ALL = PoolingType
CLASSIFIER = PoolingHead.CLASSIFIER
PROMPT = list(range(1, 21))


def encoder(**changes: Any) -> WorkerGroupCapacity:
    """A worker group that keeps nothing of a text."""
    kinds = frozenset({WorkKind.POOLING})
    fields = {"cache_groups": (), "num_gpu_blocks": 0, "whole_prompt": True, "work_kinds": kinds}
    return make_capacity(**(fields | changes))


def plans_of(driver: CoreDriver) -> list[StepPlan]:
    """The plans with rows that it takes to end all requests."""
    plans: list[StepPlan] = []
    driver.on_plan = lambda _, plan: plans.append(plan) if plan.seq_ids else None
    driver.run_until_idle()
    return plans


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"vectors": {}}, "row 0 has neither vector nor an error"),
        ({"vectors": {0: bytes(8)}}, "the vector of row 0: 8 bytes, expected 16"),
        ({"vectors": {0: bytes(16), 1: bytes(16)}}, "row 1 has vector, which its plan does not"),
        ({"token_ids": [5]}, "expected 0 tokens, result has 1"),
    ],
)
def test_a_result_with_other_vectors_than_planned_is_a_mismatch(
    change: dict[str, object], message: str
) -> None:
    driver = make_driver(max_num_batched_tokens=64)
    driver.submit_pooled(PROMPT, LAST)
    driver.schedule("g0")
    result = driver.links["g0"].results[0]
    with pytest.raises(ResultMismatch, match=message):
        driver.core.update("g0", replace(result, **change), driver.now)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("type", "fields", "message"),
    [
        (LAST, {"head": CLASSIFIER}, "the vector of row 0: 4 bytes, expected 12"),
        (ALL, {"head": CLASSIFIER}, "the 16 vectors of row 0: 4 bytes, expected 192"),
        (ALL, {"dimensions": 2}, "the 16 vectors of row 0: 4 bytes, expected 128"),
    ],
)
def test_a_row_brings_numbers_of_its_head_for_its_tokens(
    type: PoolingType, fields: dict[str, Any], message: str
) -> None:
    driver = make_driver(make_capacity(classifier_type=type))
    driver.submit_pooled(PROMPT[:16], type, **fields)
    driver.schedule("g0")
    result = driver.links["g0"].results[0]
    with pytest.raises(ResultMismatch, match=message):
        driver.core.update("g0", replace(result, vectors={0: bytes(4)}), driver.now)


def test_a_vector_where_none_was_planned_is_a_mismatch() -> None:
    driver = make_driver()
    driver.submit(prompt=[1, 2], max_tokens=4)
    driver.schedule("g0")
    result: StepResult = driver.links["g0"].results[0]
    with pytest.raises(ResultMismatch, match="row 0 has vector"):
        driver.core.update("g0", dataclasses.replace(result, vectors={0: bytes(16)}), driver.now)


def test_the_vectors_of_a_step_fit_its_result() -> None:
    """2,048 vectors of 8,192 numbers are 64 MiB; a result holds 16 MiB."""
    driver = make_driver(make_capacity(vector_size=2_000_000), max_num_batched_tokens=64)
    for _ in range(4):
        driver.submit_pooled([1, 2, 3], MEAN, dimensions=2_000_000)
    assert [len(plan.seq_ids) for plan in plans_of(driver)] == [2, 2]


@pytest.mark.parametrize(
    ("capacity", "columns"),
    [
        (make_capacity(vector_size=2_000_000), [[2], [2], [1, 1], [2], [2]]),
        (encoder(vector_size=2_000_000), [[5], [5]]),
    ],
)
def test_the_vectors_of_all_tokens_fit_results_where_a_prompt_may_be_computed_in_chunks(
    capacity: WorkerGroupCapacity, columns: list[list[int]]
) -> None:
    driver = make_driver(capacity, max_num_batched_tokens=64)
    records = [driver.submit_pooled(PROMPT[:5], ALL, dimensions=2_000_000) for _ in range(2)]
    plans = plans_of(driver)
    assert [plan.num_tokens for plan in plans] == columns
    assert all(output == 3 for plan in plans for output in plan.output or ())
    assert {len(record.vector or b"") for record in records} == {5 * 2_000_000 * 4}


def test_the_vectors_of_a_row_are_delivered_in_parts_of_a_mebibyte() -> None:
    size = MAX_PART_BYTES // 8
    driver = make_driver(encoder(vector_size=size))
    driver.submit_pooled(PROMPT[:5], ALL, dimensions=size)
    driver.schedule("g0")
    result = driver.links["g0"].results[0]
    driver.core.update("g0", result, driver.now)
    outbox = driver.core.pop_outboxes()["f0"]
    assert [first for _, first, _ in outbox.vectors] == [0, 2, 4]
    assert b"".join(part for *_, part in outbox.vectors) == result.vectors[0]


def test_the_vectors_of_all_tokens_come_again_after_the_loss_of_a_worker() -> None:
    driver = make_driver(max_num_batched_tokens=8)
    record = driver.submit_pooled(PROMPT, ALL)
    driver.schedule("g0")
    driver.deliver("g0")
    driver.collect()
    assert len(record.vector or b"") == 8 * VECTOR_SIZE * 4
    driver.lose_worker_group("g0")
    driver.add_worker_group(make_capacity("g1"))
    driver.run_until_idle()
    assert record.finished is not None
    assert len(record.vector or b"") == 20 * VECTOR_SIZE * 4


@pytest.mark.parametrize(
    ("capacity", "type", "fields", "field", "problem"),
    [
        (
            {},
            LAST,
            {"dimensions": 5},
            "dimensions",
            "for the head vector, is 5",
        ),
        (
            {"pooling_types": frozenset({MEAN, CLS})},
            ALL,
            {},
            "type",
            "must be cls or mean, is all",
        ),
        ({}, LAST, {"head": CLASSIFIER}, "type", "must be all, is last"),
        (
            {},
            ALL,
            {"head": CLASSIFIER, "dimensions": 1},
            "dimensions",
            "must be 0 to the model's 0 for the head classifier, is 1",
        ),
        (
            {"num_labels": 0},
            ALL,
            {"head": CLASSIFIER},
            "head",
            "must be vector, is classifier: the model has no labels",
        ),
        (
            {"vector_size": 0, "pooling_types": frozenset()},
            ALL,
            {},
            "head",
            "must be classifier, is vector: the model has no vectors",
        ),
    ],
)
def test_what_a_model_does_not_pool_is_refused_by_field_with_what_is_allowed(
    capacity: dict[str, Any], type: PoolingType, fields: dict[str, Any], field: str, problem: str
) -> None:
    driver = make_driver(make_capacity(**capacity))
    with pytest.raises(InvalidArgument) as error:
        driver.submit_pooled(PROMPT, type, **fields)
    assert error.value.field == f"pooling.{field}"
    assert error.value.message.endswith(problem)


# Models without cache groups.


def test_a_model_without_cache_groups_has_no_blocks_and_reuses_nothing() -> None:
    driver = make_driver(encoder(), max_num_batched_tokens=64)
    records = [driver.submit_pooled(PROMPT, type) for type in PoolingType]
    (plan,) = plans_of(driver)[:1]
    assert all(not new.tables and not new.num_computed_tokens for new in plan.new_sequences)
    assert {record.cached_tokens for record in records} == {0}


def test_texts_are_packed_up_to_the_tokens_of_a_step() -> None:
    driver = make_driver(encoder(), max_num_seqs=64, max_num_batched_tokens=64)
    for length in (16, 16, 16, 16, 20, 20, 20):
        driver.submit_pooled(PROMPT[:length], MEAN)
    assert [plan.num_tokens for plan in plans_of(driver)] == [[16] * 4, [20] * 3]


@pytest.mark.parametrize(
    ("fields", "length", "limit"),
    [
        ({}, 17, "17 tokens, which the model computes in one step; a step computes"
         " max_num_batched_tokens=16"),
        ({"vector_size": 9 * 2**20}, 4, f"a step computes max_row_bytes={MAX_ROW_BYTES}"),
    ],
)  # fmt: skip
def test_a_text_that_exceeds_a_step_is_refused_by_name(
    fields: dict[str, Any], length: int, limit: str
) -> None:
    driver = make_driver(encoder(**fields))
    with pytest.raises(PromptTooLong, match=limit) as error:
        driver.submit_pooled(PROMPT[:length], ALL)
    assert error.value.reason == "PROMPT_LARGER_THAN_STEP"


def test_a_text_that_a_former_core_accepted_is_refused_if_it_exceeds_a_step() -> None:
    driver = make_driver(encoder())
    with pytest.raises(PromptTooLong, match="max_num_batched_tokens=16"):
        driver.submit_pooled(PROMPT, ALL, was_accepted=True)


def test_generation_of_a_model_that_only_pools_is_refused_with_what_it_does() -> None:
    driver = make_driver(encoder())
    with pytest.raises(UnsupportedByModel, match="do pooling, not generation"):
        driver.submit(prompt=[1], max_tokens=1)


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"num_gpu_blocks": 1}, "without cache_groups there must be no blocks"),
        ({"num_cpu_blocks": 1}, "without cache_groups there must be no blocks"),
        ({"whole_prompt": False}, "must not be empty unless whole_prompt is true"),
    ],
)
def test_a_model_without_cache_groups_has_no_blocks(changes: dict[str, Any], problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        encoder(**changes)


# Batches and order.


def test_a_text_in_flight_occupies_no_place_and_is_forgotten_by_the_next_plan() -> None:
    driver = make_driver(encoder(), max_num_seqs=4, pipeline_depth=2)
    for _ in range(8):
        driver.submit_pooled([1], CLS)
    first, second = driver.schedule("g0"), driver.schedule("g0")
    assert first is not None
    assert second is not None
    assert [len(plan.seq_ids) for plan in (first, second)] == [4, 4]
    assert second.forget_seq_ids == first.seq_ids
    driver.run_until_idle()


def test_the_memory_of_a_text_in_flight_is_free_once_its_result_is_in() -> None:
    driver = make_driver(max_num_seqs=2)
    records = [driver.submit_pooled(PROMPT[:8], LAST) for _ in range(2)]
    driver.schedule("g0")
    assert driver.core.snapshot().worker_groups[0].num_free_gpu_blocks == 12
    driver.deliver("g0")
    driver.collect()
    assert driver.core.snapshot().worker_groups[0].num_free_gpu_blocks == 16
    again = driver.submit_pooled(PROMPT[:8], LAST)
    driver.run_until_idle()
    assert all(record.finished is not None for record in records)
    assert again.cached_tokens == 4


@pytest.mark.parametrize(
    ("arrivals_us", "lengths", "order"),
    [
        ([0, 0, 0], [9, 3, 6], [1, 2, 0]),
        ([0, 6 * POOLED_TOKEN_US - 1], [9, 3], [1, 0]),
        ([0, 6 * POOLED_TOKEN_US + 1], [9, 3], [0, 1]),
        ([0, 9 * POOLED_TOKEN_US], [9, 1], [0, 1]),
    ],
)
@pytest.mark.parametrize("policy", PolicyName)
def test_a_text_yields_to_a_shorter_one_that_arrives_soon_after_it(
    arrivals_us: list[int], lengths: list[int], order: list[int], policy: PolicyName
) -> None:
    driver = make_driver(encoder(), max_num_seqs=1, policy=policy)
    now_us = max(arrivals_us)
    for at_us, length in zip(arrivals_us, lengths, strict=True):
        driver.submit_pooled(PROMPT[:length], MEAN, waited_us=now_us - at_us)
    served = [plan.num_tokens for plan in plans_of(driver)]
    assert served == [[lengths[number]] for number in order]


def test_thousands_of_texts_of_one_tenant_do_not_delay_another_under_the_fair_policy() -> None:
    driver = make_driver(
        encoder(), policy=PolicyName.FAIR, max_num_batched_tokens=64, max_queue_requests=3000
    )
    for _ in range(2000):
        driver.submit_pooled(PROMPT[:16], MEAN, tenant="heavy")
    driver.schedule("g0")
    record = driver.submit_pooled(PROMPT, MEAN, tenant="light")
    for _ in range(3):
        driver.deliver("g0")
        driver.schedule("g0")
    driver.collect()
    assert record.finished is not None
    assert len(driver.core.requests) > 1980
