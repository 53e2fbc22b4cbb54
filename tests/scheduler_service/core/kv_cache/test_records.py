"""A core finds what the plans of the one before it have left in the workers' caches."""

from dataclasses import replace

import pytest

from scheduler_service.core.config import CacheGroup, CacheLifetime, KeptBlocks
from tests.support.core_driver import CoreDriver, make_capacity, make_driver

PROMPT = list(range(20))
STATE = CacheGroup(lifetime=CacheLifetime.STATE, num_blocks=2)
WINDOW = CacheGroup(block_tokens=4, lifetime=CacheLifetime.WINDOW, span=8)
GROUPS = {
    "all": (CacheGroup(block_tokens=4),),
    "windows": (CacheGroup(block_tokens=4), WINDOW),
    "states": (CacheGroup(block_tokens=4), STATE),
}


def recording_driver(cache: str = "all", **changes: object) -> CoreDriver:
    capacity = make_capacity(cache_groups=GROUPS[cache], num_gpu_blocks=32, kept=KeptBlocks())
    return make_driver(replace(capacity, **changes))  # type: ignore[arg-type]


def prefilled_after_restart(driver: CoreDriver) -> int:
    """Tokens that prefills compute after the core has died."""
    totals: list[int] = []

    def count(_: str, plan: object) -> None:
        if (numbers := getattr(plan, "num_tokens")) is not None:  # noqa: B009
            totals.append(sum(number for number in numbers if number > 1))

    driver.on_plan = count
    driver.lose_core()
    driver.run_until_idle()
    return sum(totals)


@pytest.mark.parametrize("num_steps", [2, 3, 9, 20])
@pytest.mark.parametrize("cache", GROUPS)
def test_a_sequence_in_progress_finds_all_that_was_computed(cache: str, num_steps: int) -> None:
    driver = recording_driver(cache)
    record = driver.submit(prompt=PROMPT, max_tokens=30)
    driver.step("g0", times=num_steps)
    assert prefilled_after_restart(driver) == 0
    assert record.error is None
    assert len(record.choices[0].tokens) == 30


@pytest.mark.parametrize("cache", GROUPS)
def test_a_sequence_finds_its_blocks_before_those_with_steps_in_flight(cache: str) -> None:
    driver = recording_driver(cache)
    record = driver.submit(prompt=PROMPT, max_tokens=30)
    driver.step("g0", times=9)
    driver.schedule("g0")
    driver.schedule("g0")
    before = len(record.choices[0].tokens)
    prefilled = prefilled_after_restart(driver)
    if cache == "states":  # the state is beyond what the requests have
        assert prefilled <= before + len(PROMPT) - 16
    else:
        assert prefilled <= 4
    assert len(record.choices[0].tokens) == 30


def test_a_prefix_on_the_host_is_found() -> None:
    driver = recording_driver(num_gpu_blocks=10, num_cpu_blocks=32)
    for first in range(4):
        driver.submit(prompt=[first, *PROMPT], max_tokens=4)
        driver.run_until_idle()
    records = driver.links["g0"].records
    assert records is not None
    assert any(entry.blocks[0] < 0 for entry in records.records.entries())
    driver.lose_core()
    driver.links["g0"].worker.num_results_taken = 0
    hits = []
    driver.on_plan = lambda _, plan: hits.extend(plan.swap_in)
    driver.submit(prompt=[0, *PROMPT], max_tokens=4)
    driver.run_until_idle()
    assert hits


def test_a_core_without_the_records_seed_begins_cold_and_says_so(
    caplog: pytest.LogCaptureFixture,
) -> None:
    driver = recording_driver()
    driver.add_worker_group(make_capacity("g1", num_gpu_blocks=32, kept=KeptBlocks()))
    driver.submit(prompt=PROMPT, max_tokens=4)
    driver.run_until_idle()
    link = driver.links["g0"]
    assert link.records is not None
    foreign = replace(link.records.kept(), key_seed=77)
    cold = make_driver(make_capacity(kept=KeptBlocks()))
    cold.add_worker_group(make_capacity("g1", num_gpu_blocks=32, kept=foreign))
    assert "not used reason=other key seed" in caplog.text
    plans = []
    cold.on_plan = lambda group_id, plan: plans.append((group_id, plan.key_seed))
    for seed in range(2):
        cold.submit(prompt=[seed, *PROMPT], max_tokens=4)
    cold.run_until_idle()
    first_of_g1 = next(seed for group_id, seed in plans if group_id == "g1")
    assert first_of_g1 == cold.config.key_seed


@pytest.mark.parametrize(
    "kept",
    [
        KeptBlocks(key_seed=5, blocks=[99, 0, 1, 1, 0], keys=bytes(16)),
        KeptBlocks(key_seed=5, blocks=[-1, 0, 1, 1, 0], keys=bytes(16)),
        KeptBlocks(key_seed=5, blocks=[1, 3, 1, 1, 0], keys=bytes(16)),
        KeptBlocks(key_seed=5, blocks=[1, 0, 9, 1, 0], keys=bytes(144)),
        KeptBlocks(key_seed=5, blocks=[1, 0, 1, 1, 0], keys=bytes(32)),
        KeptBlocks(key_seed=5, blocks=[1, 0, 1, 1, 0, 2, 0, 0, 0, 0], keys=bytes(16)),
        KeptBlocks(key_seed=5, blocks=[1, 0, 1, 1, 0, 1, 0, 1, 1, 0], keys=bytes(range(32))),
        KeptBlocks(key_seed=5, blocks=[1, 0, 0, 1, 0], keys=b""),
    ],
)
def test_records_that_cannot_be_of_these_caches_are_not_used(
    kept: KeptBlocks, caplog: pytest.LogCaptureFixture
) -> None:
    driver = make_driver(make_capacity(kept=kept))
    assert "cached blocks of an earlier core are not used" in caplog.text
    seeds = []
    driver.on_plan = lambda _, plan: seeds.append(plan.key_seed)
    driver.submit(prompt=PROMPT, max_tokens=2)
    driver.run_until_idle()
    assert seeds[0] == 5, "the seed is adopted, and the records end"
    assert set(seeds[1:]) <= {None}


def test_stale_entries_end_with_the_first_plan() -> None:
    kept = KeptBlocks(key_seed=5, blocks=[1, 0, 1, 1, 0], keys=bytes(16), stale=[3, 4])
    driver = make_driver(make_capacity(kept=kept))
    plans = []
    driver.on_plan = lambda _, plan: plans.append(plan)
    driver.submit(prompt=PROMPT, max_tokens=2)
    driver.run_until_idle()
    assert plans[0].key_seed is None
    assert {3, 4} <= set(plans[0].uncached_blocks)
