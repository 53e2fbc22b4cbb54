"""Memory that leases hold: no sequence ends when it becomes free, and none can be preempted for it.

A request that has ended leaves ten blocks in the prefix cache, which are leased; six others are
free.
"""

from typing import Any

from scheduler_service.core.config import PreemptionMode
from scheduler_service.core.kv_cache.exchange import CachedEntry
from tests.support.core_driver import CoreDriver, make_capacity, make_driver
from tests.support.records import RequestRecord

NUM_LEASED = 10


def make_leased(*, num_cpu_blocks: int = 0, **changes: Any) -> CoreDriver:
    """Its worker group has begun lease 1."""
    driver = make_driver(make_capacity(num_cpu_blocks=num_cpu_blocks), watermark=0.0, **changes)
    driver.submit(prompt=[9] * 4 * NUM_LEASED, max_tokens=1)
    driver.run_until_idle()
    scheduler = driver.core._fleet.schedulers["g0"]
    cached = scheduler.cache.tables.pool.cached
    entries = [
        CachedEntry((block,), contents)
        for block, contents in enumerate(cached.contents)
        if contents is not None
    ]
    assert len(entries) == NUM_LEASED
    scheduler.port.lease(entries, b"token", 1000)
    driver.step("g0")
    return driver


def end_lease(driver: CoreDriver) -> None:
    driver.core._fleet.schedulers["g0"].port.end_lease(1)
    driver.work["g0"] = None


def rest(driver: CoreDriver) -> None:
    """Step until the group has no plan."""
    while not driver.is_at_rest:
        driver.step("g0")


def suspect(driver: CoreDriver, record: RequestRecord) -> None:
    """Count two deaths of workers against a request, as if in company."""
    (group,) = (g for g in driver.core.requests.seq_groups() if g.request is record.request)
    group.losses.num_repeated = 2
    for seq in group.unfinished():
        seq.suspect(seq.num_known + 40)


def test_what_is_preempted_in_the_last_turn_leaves_its_memory_to_a_suspect() -> None:
    driver = make_leased()
    tried = driver.submit(prompt=[1] * 11, max_tokens=9)
    suspect(driver, tried)
    other = driver.submit(prompt=[2] * 8, max_tokens=20)
    rest(driver)
    assert driver.core.snapshot().num_preemptions == 2, "of each, while the other had its turn"
    assert tried.finished is not None
    assert other.is_live, "it needs seven blocks"
    end_lease(driver)
    driver.run_until_idle()
    driver.check_empty()


def test_what_is_preempted_without_a_row_leaves_its_memory_to_what_was_swapped_out() -> None:
    driver = make_leased(num_cpu_blocks=4, pipeline_depth=1, preemption_mode=PreemptionMode.SWAP)
    first = driver.submit(prompt=[1] * 8, max_tokens=20)
    swapped = driver.submit(prompt=[2] * 8, max_tokens=9)
    rest(driver)
    assert driver.core.snapshot().num_preemptions == 2
    assert swapped.finished is not None
    assert first.is_live, "it needs seven blocks"
    end_lease(driver)
    driver.run_until_idle()
    driver.check_empty()
