"""Requests that move take their KV along, and their timings say how long they waited for it."""

from dataclasses import replace

import pytest

from scheduler_service.core.config import MoveKV
from tests.support.core_driver import CoreDriver, make_capacity, make_driver

PROMPT = list(range(20))


def two_groups(**config: object) -> CoreDriver:
    """Two worker groups that can read each other's KV."""
    groups = [
        replace(
            make_capacity(group_id, num_gpu_blocks=32),
            kv_layout="one",
            addresses=(f"at {group_id}",),
            epoch=7,
        )
        for group_id in ("g0", "g1")
    ]
    driver = make_driver(groups[0], move_kv=MoveKV.ALWAYS, **config)
    driver.add_worker_group(groups[1])
    return driver


@pytest.mark.parametrize("is_lost", [False, True])
def test_a_request_that_waits_for_kv_has_that_time_in_its_timings(is_lost: bool) -> None:
    driver = two_groups()
    record = driver.submit(prompt=PROMPT, max_tokens=30)
    driver.step("g0", times=6)
    assert len(record.choices[0].tokens) > 0
    driver.core.drain_worker_group("g0", driver.now)
    driver.step("g0")  # which begins the lease
    plan = driver.schedule("g1")
    assert plan is not None
    assert plan.fetches
    driver.now += 2.0
    if is_lost:
        driver.lose_worker_group("g0")
    driver.run_until_idle()
    assert record.finished is not None
    assert 2_000_000 <= record.finished.transfer_us < 2_100_000
    assert record.finished.recovery_us < 100_000
