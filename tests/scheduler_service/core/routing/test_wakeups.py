"""Worker groups plan only when they are woken; no request is left waiting because of it."""

from random import Random

import pytest

from scheduler_service.core import SchedulerConfig
from scheduler_service.core.config import PolicyName, TenantConfig
from tests.support.core_driver import CoreDriver, make_capacity

TENANTS = {"few": TenantConfig(max_kv_blocks=6), "many": TenantConfig()}
NUM_REQUESTS = 40


def make_driver(policy: PolicyName) -> CoreDriver:
    """Two groups of one model, and one of another."""
    driver = CoreDriver(
        SchedulerConfig(
            max_num_seqs=3,
            max_num_batched_tokens=12,
            watermark=0.0,
            policy=policy,
            tenants=TENANTS,
        )
    )
    for group_id, model, num_blocks in (("a", "m", 8), ("b", "m", 12), ("c", "n", 8)):
        driver.add_worker_group(make_capacity(group_id, model=model, num_gpu_blocks=num_blocks))
    return driver


def submit(driver: CoreDriver, random: Random) -> None:
    tenant = random.choice(list(TENANTS))
    driver.submit(
        prompt=[random.randrange(3)] * random.randint(1, 16),
        max_tokens=random.randint(1, 8),
        n=1 if tenant == "few" else random.randint(1, 2),
        tenant=tenant,
        priority=random.randint(0, 1),
        model=random.choice("mn"),
        max_hold_us=random.choice((0, 100_000)),
    )


def interrupt(driver: CoreDriver, random: Random) -> None:
    """A client goes away, or a stop string appears in its answer."""
    driver.collect()
    live = [record for record in driver.records.values() if record.is_live]
    if not live:
        return
    record = random.choice(live)
    if random.random() < 0.5:
        driver.cancel(record)
    else:
        driver.stop_choice(record, 0, len(record.choices[0].tokens))


def plan(driver: CoreDriver) -> None:
    """All there is for the groups that have work, and for those that are given requests by it."""
    while driver.work:
        driver.schedule(min(driver.work))


@pytest.mark.parametrize("policy", PolicyName)
@pytest.mark.parametrize("seed", range(8))
def test_all_requests_end_though_only_those_groups_plan_that_are_named(
    seed: int, policy: PolicyName
) -> None:
    random, driver = Random(seed), make_driver(policy)
    num_submitted = 0
    while True:
        answering = [group_id for group_id, link in driver.links.items() if link.results]
        if num_submitted < NUM_REQUESTS and (not answering or random.random() < 0.3):
            submit(driver, random)
            num_submitted += 1
        elif random.random() < 0.1:
            interrupt(driver, random)
        elif answering:
            driver.deliver(random.choice(answering))
        else:
            break
        plan(driver)
        driver.collect()
    driver.check_empty()


def test_a_draining_group_is_woken_when_its_last_request_waits_for_a_larger_one() -> None:
    driver = CoreDriver(SchedulerConfig())
    driver.add_worker_group(make_capacity("small", num_gpu_blocks=4))
    driver.add_worker_group(make_capacity("large", num_gpu_blocks=12))
    record = driver.submit(prompt=[1, 2, 3, 4, 5], max_tokens=30)
    driver.step("large", times=3)
    driver.lose_worker_group("large")
    driver.core.drain_worker_group("small", driver.now)
    driver.schedule("small")
    while driver.deliver("small"):
        assert not driver.core.is_drained("small")
        while driver.schedule("small") is not None:
            pass
    assert driver.core.is_drained("small")
    assert "small" in driver.work
    driver.add_worker_group(make_capacity("large again", num_gpu_blocks=12))
    driver.run_until_idle()
    assert record.finished is not None


def test_a_request_that_waits_for_a_lost_group_leaves_its_tenants_memory_to_other_models() -> None:
    tenants = {"t": TenantConfig(max_kv_blocks=16)}
    driver = CoreDriver(SchedulerConfig(max_num_seqs=4, tenants=tenants))
    driver.add_worker_group(make_capacity("small", num_gpu_blocks=4))
    driver.add_worker_group(make_capacity("large", num_gpu_blocks=24))
    driver.add_worker_group(make_capacity("other", num_gpu_blocks=24, model="b"))
    driver.lose_worker_group("large")
    outgrown = driver.submit(prompt=[1, 2, 3, 4, 5], max_tokens=40, tenant="t")
    driver.schedule("small")
    limited = driver.submit(prompt=[1, 2, 3, 4, 5], max_tokens=28, tenant="t", model="b")
    driver.run_until_idle()
    assert outgrown.is_live
    assert limited.finished is not None
