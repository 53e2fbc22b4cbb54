"""A core finds what the plans of the one before it have left in the workers' caches."""

from dataclasses import replace

import pytest

from scheduler_service.core import NewSequence
from scheduler_service.core.config import CacheGroup, CacheLifetime, KeptBlocks
from tests.support.core_driver import CoreDriver, make_capacity, make_driver
from tests.support.symbolic_worker import Sampling

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


@pytest.mark.parametrize("num_more", range(3))
def test_what_a_failed_sequence_computed_is_not_found(num_more: int) -> None:
    """Whether or not the core has withdrawn it when it dies."""
    driver = recording_driver()
    driver.submit(prompt=[9, *PROMPT], max_tokens=2)
    driver.run_until_idle()
    record = driver.submit(prompt=PROMPT, max_tokens=30, sampling=Sampling(seed=1, fails_at=9))
    other = driver.submit(prompt=[8, *PROMPT], max_tokens=30)
    while not driver.links["g0"].results or not driver.links["g0"].results[-1].errors:
        driver.deliver("g0")
        driver.schedule("g0")
    for _ in range(num_more):
        driver.deliver("g0")
        driver.schedule("g0")
    driver.lose_core()
    found: list[NewSequence] = []
    driver.on_plan = lambda _, plan: found.extend(plan.new_sequences)
    driver.submit(prompt=[9, *PROMPT], max_tokens=2)
    driver.run_until_idle()
    computed = {tuple(new.token_ids[:2]): new.num_computed_tokens for new in found}
    assert computed.get((0, 1), 0) == 0
    assert (computed[9, 0] > 0) == (computed[8, 0] > 0) == (num_more > 0)
    assert record.error is not None
    assert len(other.choices[0].tokens) == 30


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
    known = replace(foreign, key_seed=78)
    cold = make_driver(make_capacity(num_gpu_blocks=32, kept=known))
    cold.add_worker_group(make_capacity("g1", num_gpu_blocks=32, kept=foreign))
    assert "not used reason=other key seed" in caplog.text
    plans = []
    cold.on_plan = lambda group_id, plan: plans.append((group_id, plan.key_seed))
    for seed in range(2):
        cold.submit(prompt=[seed, *PROMPT], max_tokens=4)
    cold.run_until_idle()
    first_of_g1 = next(seed for group_id, seed in plans if group_id == "g1")
    assert first_of_g1 == 78


@pytest.mark.parametrize("num_running", [0, 1])
def test_a_group_with_more_records_makes_fresh_ones_cold(num_running: int) -> None:
    former = recording_driver()
    for number in range(3):
        former.submit(prompt=[number, *PROMPT], max_tokens=20)
    former.run_until_idle()
    records = former.links["g0"].records
    assert records is not None
    kept = replace(records.kept(), key_seed=77)
    driver = make_driver(make_capacity("fresh", num_gpu_blocks=32, kept=KeptBlocks()))
    driver.submit(prompt=[1, 2, 3, 4, 5], max_tokens=2)
    driver.run_until_idle()
    begun = [driver.submit(prompt=[9, *PROMPT], max_tokens=12) for _ in range(num_running)]
    driver.step("fresh", times=3)
    seeds: list[tuple[str, int | None]] = []
    driver.on_plan = lambda group_id, plan: seeds.append((group_id, plan.key_seed))
    driver.core.add_worker_group(make_capacity("warm", num_gpu_blocks=32, kept=kept), driver.now)
    driver.core.check()
    (found,) = [g for g in driver.core.snapshot().worker_groups if g.worker_group_id == "warm"]
    assert found.num_free_gpu_blocks == found.num_gpu_blocks
    for number in range(3):
        driver.submit(prompt=[number, *PROMPT], max_tokens=12)
        driver.step("fresh", times=9)
        driver.core.check()
    assert ("fresh", 77) in seeds, "its records begin again"
    assert [seed for group_id, seed in seeds if group_id == "fresh"].count(77) == 1
    fresh = driver.links["fresh"].records
    assert fresh is not None
    assert fresh.kept().key_seed == 77
    assert all(record.error is None for record in begun)


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
