"""What the scenarios do not show of draining: ends on the way, losses, timings, limits."""

import dataclasses

import pytest

from scheduler_service.core import SchedulerConfig, TenantConfig
from tests.support.core_driver import CoreDriver, make_capacity
from tests.support.records import RequestRecord
from tests.support.symbolic_worker import Sampling, undisturbed

CONFIG = SchedulerConfig(max_num_seqs=4, max_num_batched_tokens=16)
PROMPT = [1, 2, 3, 4, 5]


def make_driver(*group_ids: str, **changes: object) -> CoreDriver:
    driver = CoreDriver(dataclasses.replace(CONFIG, **changes))  # type: ignore[arg-type]
    for group_id in group_ids:
        driver.add_worker_group(make_capacity(group_id))
    return driver


def drain(driver: CoreDriver, group_id: str) -> None:
    driver.core.drain_worker_group(group_id, driver.now)


def under_way(driver: CoreDriver, **request: object) -> RequestRecord:
    """A request of which g0 has planned two steps; then g1 joins."""
    record = driver.submit(prompt=PROMPT, **({"max_tokens": 6} | request))  # type: ignore[arg-type]
    driver.schedule("g0")
    driver.schedule("g0")
    driver.add_worker_group(make_capacity("g1"))
    return record


def test_moving_is_no_loss_however_often_it_happens() -> None:
    driver = make_driver("g0", max_worker_losses=1)
    record = driver.submit(prompt=PROMPT, max_tokens=12)
    for number in range(5):
        driver.schedule(f"g{number}")
        driver.add_worker_group(make_capacity(f"g{number + 1}"))
        drain(driver, f"g{number}")
        driver.deliver(f"g{number}")
        assert driver.core.is_drained(f"g{number}")
        driver.lose_worker_group(f"g{number}")
    driver.run_until_idle()
    assert record.finished is not None
    driver.check_empty()


def test_a_worker_that_drains_and_ends_before_it_is_empty_is_no_loss() -> None:
    driver = make_driver("g0", max_worker_losses=1)
    record = driver.submit(prompt=PROMPT, max_tokens=6)
    driver.schedule("g0")
    drain(driver, "g0")
    driver.lose_worker_group("g0")
    driver.add_worker_group(make_capacity("g1"))
    driver.run_until_idle()
    assert record.finished is not None


def test_the_time_between_two_groups_is_recovery() -> None:
    driver = make_driver("g0")
    record = under_way(driver)
    drain(driver, "g0")
    driver.deliver("g0")
    driver.now += 0.5
    driver.deliver("g0")
    driver.run_until_idle()
    assert record.finished is not None
    assert record.finished.recovery_us == 502_000
    assert record.finished.preempted_us == 0


def test_a_preempted_request_that_moves_was_preempted_and_then_recovers() -> None:
    driver = CoreDriver(dataclasses.replace(CONFIG, watermark=0.0, pipeline_depth=1))
    driver.add_worker_group(make_capacity("g0", num_gpu_blocks=5))
    driver.submit(prompt=[1] * 7, max_tokens=9)
    last = driver.submit(prompt=[2] * 8, max_tokens=4)
    while driver.core.snapshot().num_preemptions == 0:
        driver.schedule("g0")
        driver.deliver("g0")
    driver.now += 0.25
    driver.add_worker_group(make_capacity("g1"))
    drain(driver, "g0")
    driver.now += 0.5
    driver.run_until_idle()
    assert last.finished is not None
    assert 250_000 <= last.finished.preempted_us < 260_000
    assert last.finished.recovery_us == 500_000


def test_a_request_that_ends_by_a_step_under_way_never_moves() -> None:
    driver = make_driver("g0")
    record = under_way(driver, max_tokens=2)
    drain(driver, "g0")
    driver.deliver("g0")
    driver.deliver("g0")
    driver.collect()
    assert record.finished is not None
    assert driver.schedule("g1") is None
    assert driver.core.is_drained("g0")


def test_a_choice_that_ends_on_the_way_leaves_the_others_on_theirs() -> None:
    sampling = Sampling(seed=1)
    stop = undisturbed(PROMPT, 0, sampling, frozenset(), 2)[-1]
    driver = make_driver("g0")
    record = under_way(driver, n=3, sampling=sampling, stop_token_ids=frozenset({stop}))
    drain(driver, "g0")
    driver.deliver("g0")
    driver.core.check()
    driver.deliver("g0")
    driver.core.check()
    driver.collect()
    assert record.choices[0].finish_reason == "stop"
    assert driver.core.is_drained("g0")
    driver.run_until_idle()
    assert record.finished is not None
    driver.check_empty()


@pytest.mark.parametrize("how", ["cancel", "abort", "stop"])
def test_a_request_may_end_on_the_way(how: str) -> None:
    driver = make_driver("g0")
    record = under_way(driver)
    drain(driver, "g0")
    if how == "stop":
        driver.stop_choice(record, 0, 0)
    else:
        getattr(driver, how)(record)
    assert driver.core.is_drained("g0")
    driver.run_until_idle()
    driver.check_empty()


def test_a_row_that_fails_in_a_step_under_way_ends_its_request() -> None:
    driver = make_driver("g0")
    record = under_way(driver, sampling=Sampling(seed=1, fails_at=1))
    drain(driver, "g0")
    driver.run_until_idle()
    assert record.error is not None
    assert record.error.reason == "NON_FINITE_LOGITS"
    driver.check_empty()


def test_a_prompt_that_is_computed_in_pieces_begins_again() -> None:
    driver = make_driver("g0")
    record = driver.submit(prompt=[1] * 40, max_tokens=2)
    driver.schedule("g0")
    driver.schedule("g0")
    driver.add_worker_group(make_capacity("g1"))
    drain(driver, "g0")
    assert driver.schedule("g1") is None, "results of its rows are to come"
    driver.run_until_idle()
    assert record.finished is not None
    driver.check_empty()


def test_a_tenants_blocks_go_along() -> None:
    tenants = {"small": TenantConfig(max_kv_blocks=4)}
    driver = make_driver("g0", tenants=tenants)
    record = under_way(driver, tenant="small")
    drain(driver, "g0")
    driver.deliver("g0")
    driver.deliver("g0")
    assert driver.schedule("g1") is not None, "the tenant may hold the blocks there"
    driver.run_until_idle()
    assert record.finished is not None


def test_no_group_is_drained_while_what_is_on_its_way_needs_one() -> None:
    driver = make_driver("g0")
    record = under_way(driver)
    drain(driver, "g0")
    drain(driver, "g1")
    driver.deliver("g0")
    driver.deliver("g0")
    assert not driver.core.is_drained("g0")
    assert not driver.core.is_drained("g1")
    driver.run_until_idle()
    assert record.finished is not None
    assert driver.core.is_drained("g0")
    assert driver.core.is_drained("g1")


def test_a_group_is_drained_although_what_has_not_begun_waits() -> None:
    driver = make_driver("g0")
    drain(driver, "g0")
    driver.submit(prompt=PROMPT, max_tokens=6)
    driver.run_until_idle()
    assert driver.core.is_drained("g0")


def test_what_is_accepted_again_goes_on_though_all_groups_drain() -> None:
    driver = make_driver("g0")
    record = driver.submit(prompt=PROMPT, max_tokens=6)
    driver.schedule("g0")
    driver.deliver("g0")
    driver.lose_core()
    drain(driver, "g0")
    new = driver.submit(prompt=PROMPT, max_tokens=6)
    driver.run_until_idle()
    assert record.finished is not None
    assert new.is_live, "it has not begun"
