"""A worker group whose memory runs short gives requests to another one that has much more."""

from collections import Counter
from dataclasses import replace

import pytest

from scheduler_service.core.config import MoveKV, PreemptionMode
from scheduler_service.core.inspection import InspectionDetail
from scheduler_service.core.request_timing import RequestEvent
from scheduler_service.core.scheduler_stats import MoveReason, WorkerGroupSnapshot
from scheduler_service.core.step_plan import StepPlan
from tests.support.core_driver import CoreDriver, make_capacity, make_driver

CAPACITY = replace(
    make_capacity(block_size=16, num_gpu_blocks=16, max_model_len=256),
    kv_layout=(("layout", "one"),),
    addresses=("at g0",),
    epoch=7,
)
"""256 tokens."""


def hot_group(num_requests: int = 3, max_tokens: int = 100, **config: object) -> CoreDriver:
    """A worker group that will have no memory for the answers of all its requests."""
    driver = make_driver(CAPACITY, **{"move_kv": MoveKV.ALWAYS, "watermark": 0.0, **config})
    for number in range(num_requests):
        driver.submit(prompt=[number, *range(20)], max_tokens=max_tokens)
    driver.step("g0", times=20)
    return driver


def join(driver: CoreDriver, **changes: object) -> None:
    joined = replace(CAPACITY, worker_group_id="g1", addresses=("at g1",), **changes)
    driver.add_worker_group(joined)


def moved(driver: CoreDriver) -> Counter[MoveReason]:
    (model,) = driver.core.snapshot().models
    return model.totals.num_moved


def num_preemptions(driver: CoreDriver) -> int:
    return driver.core.snapshot().num_preemptions


def group(driver: CoreDriver, group_id: str) -> WorkerGroupSnapshot:
    groups = driver.core.snapshot().worker_groups
    return next(found for found in groups if found.worker_group_id == group_id)


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_a_request_leaves_with_its_kv_before_it_would_be_preempted(depth: int) -> None:
    driver = hot_group(pipeline_depth=depth)
    join(driver)
    plans: list[tuple[str, StepPlan]] = []
    driver.on_plan = lambda group_id, plan: plans.append((group_id, plan))
    driver.run_until_idle()
    assert moved(driver) == {MoveReason.REBALANCE: 1}
    assert num_preemptions(driver) == 0
    assert sum(bool(plan.fetches) for group_id, plan in plans if group_id == "g1") == 1
    num_again = max(sum(plan.num_tokens or ()) for group_id, plan in plans if group_id == "g1")
    assert num_again < 16 + depth, "the rest was copied"
    driver.check_empty()


def test_without_another_group_requests_are_preempted() -> None:
    driver = hot_group()
    driver.run_until_idle()
    assert moved(driver) == {}
    assert num_preemptions(driver) > 0


@pytest.mark.parametrize("mode", [PreemptionMode.RECOMPUTE, PreemptionMode.SWAP])
def test_a_preempted_request_continues_in_the_group_that_joins(mode: PreemptionMode) -> None:
    capacity = replace(CAPACITY, num_cpu_blocks=40)
    driver = make_driver(capacity, move_kv=MoveKV.ALWAYS, watermark=0.0, preemption_mode=mode)
    records = [driver.submit(prompt=[n, *range(20)], max_tokens=100) for n in range(3)]
    while not num_preemptions(driver):
        driver.step("g0")
    join(driver, num_cpu_blocks=40)
    for _ in range(5):
        driver.step("g0")
        driver.step("g1")
    assert moved(driver) == {MoveReason.REBALANCE: 1}
    assert group(driver, "g1").num_running_sequences == 1
    driver.run_until_idle()
    assert records[-1].choices[0].finish_reason is not None
    assert num_preemptions(driver) == 1
    driver.check_empty()


@pytest.mark.parametrize(
    ("config", "changes"),
    [
        ({"move_kv": MoveKV.NEVER}, {}),
        ({"enable_prefix_caching": False}, {}),
        ({}, {"kv_layout": (("layout", "another"),)}),
        ({}, {"num_gpu_blocks": 7}),
    ],
    ids=["never", "no prefix cache", "another layout", "a small cache"],
)
def test_requests_stay_where_they_cannot_move(
    config: dict[str, object], changes: dict[str, object]
) -> None:
    driver = hot_group(**config)
    join(driver, **changes)
    driver.run_until_idle()
    assert moved(driver) == {}
    driver.check_empty()


def test_requests_stay_where_a_copy_takes_longer_than_to_compute() -> None:
    driver = hot_group(move_kv=MoveKV.AUTO)
    scheduler = driver.core._fleet.schedulers["g0"]
    while scheduler.rates.us_per_prompt_token() is None:
        scheduler.rates._prompts.add(64.0, 64)  # a microsecond for a token
    join(driver)
    driver.step("g0", times=40)
    assert moved(driver) == {}
    assert not num_preemptions(driver)
    driver.run_until_idle()
    assert num_preemptions(driver) >= 1


def test_nothing_moves_back_and_forth() -> None:
    """There are more requests than both groups have memory for."""
    driver = hot_group(num_requests=4, max_num_seqs=8)
    join(driver)
    for number in range(4, 12):
        driver.submit(prompt=[number, *range(20)], max_tokens=150)
    driver.run_until_idle()
    assert moved(driver)[MoveReason.REBALANCE] > 0
    ended = driver.core.inspect(InspectionDetail(include_requests=True)).ended_requests
    moves = [sum(event is RequestEvent.MOVED for event, *_ in r.events) for r in ended]
    assert len(moves) == 12
    assert max(moves) == 1
    driver.check_empty()
