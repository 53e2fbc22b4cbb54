"""Requests that move take their KV along, and their timings say how long they waited for it."""

from dataclasses import replace

import pytest

from scheduler_service.core.config import MoveKV, Role
from scheduler_service.core.step_plan import StepPlan
from tests.support.core_driver import CoreDriver, make_capacity, make_driver

PROMPT = list(range(20))


def two_groups(*roles: Role, **config: object) -> CoreDriver:
    """Two worker groups that can read each other's KV."""
    groups = [
        replace(
            make_capacity(group_id, block_size=32, max_model_len=256),
            role=role,
            kv_layout="one",
            addresses=(f"at {group_id}",),
            epoch=7,
        )
        for group_id, role in zip(("g0", "g1"), roles or (Role.BOTH, Role.BOTH), strict=True)
    ]
    driver = make_driver(groups[0], **{"move_kv": MoveKV.ALWAYS, **config})
    driver.add_worker_group(groups[1])
    return driver


def test_a_group_that_has_computed_no_prompt_copies_a_long_one() -> None:
    """Its steps are short, so a token of its largest possible step would seem to cost nothing."""
    driver = two_groups(Role.PREFILL, Role.DECODE, move_kv=MoveKV.AUTO, max_num_batched_tokens=512)
    plans: list[tuple[str, StepPlan]] = []
    driver.on_plan = lambda group_id, plan: plans.append((group_id, plan))
    driver.submit(prompt=[4, *(n % 32 for n in range(70))], max_tokens=9)
    driver.run_until_idle()
    assert any(plan.fetches for _, plan in plans)
    plans.clear()
    driver.submit(prompt=[5, *(n % 32 for n in range(200))], max_tokens=9)
    driver.run_until_idle()
    assert any(plan.fetches for _, plan in plans)
    assert all(sum(plan.num_tokens or ()) < 9 for group_id, plan in plans if group_id == "g1")
    plans.clear()
    driver.submit(prompt=[6, *range(30)], max_tokens=9)
    driver.run_until_idle()
    assert not any(plan.fetches for _, plan in plans), "31 tokens are too few"


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
