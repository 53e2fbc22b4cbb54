"""Which sequences are preempted when memory runs out, and how; swap*.txt show the plans."""

import logging
from collections.abc import Iterator

import pytest

from scheduler_service.core import SchedulerConfig
from scheduler_service.core.config import PreemptionMode
from scheduler_service.core.scheduling.preemption import is_swap_cheaper
from scheduler_service.core.step_plan import StepResult
from scheduler_service.core.throughput import StepRates
from tests.support.core_driver import CoreDriver, make_capacity
from tests.support.records import RequestRecord
from tests.support.steps import make_work
from tests.support.symbolic_worker import Sampling


def measured(*, us_per_prefill_token: int, us_per_move: int) -> StepRates:
    rates = StepRates()
    work = make_work(num_prefill_tokens=10, num_moves=0, swaps_in=False)
    busy_us = 10 * us_per_prefill_token
    rates.observe(work, StepResult(step_id=1, token_ids=[1], busy_us=busy_us))
    work = make_work(num_prefill_tokens=0, num_moves=10, swaps_in=False)
    ops_us = 10 * us_per_move
    rates.observe(work, StepResult(step_id=1, token_ids=[], busy_us=ops_us, cache_ops_us=ops_us))
    return rates


@pytest.mark.parametrize(("us_per_move", "swaps"), [(70, True), (90, False)])
def test_blocks_are_moved_there_and_back_where_that_costs_less_than_their_tokens(
    us_per_move: int, swaps: bool
) -> None:
    rates = measured(us_per_prefill_token=10, us_per_move=us_per_move)
    for num_sequences in (1, 2):
        decision = is_swap_cheaper(rates, num_sequences=num_sequences, num_moves=8, num_tokens=64)
        assert decision is swaps


def test_as_long_as_nothing_is_measured_only_several_sequences_are_swapped() -> None:
    assert not is_swap_cheaper(StepRates(), num_sequences=1, num_moves=2, num_tokens=1000)
    assert is_swap_cheaper(StepRates(), num_sequences=2, num_moves=2000, num_tokens=1)


def make_driver(
    mode: PreemptionMode,
    *,
    num_gpu_blocks: int = 8,
    num_cpu_blocks: int = 32,
    **changes: object,
) -> CoreDriver:
    values: dict[str, object] = {
        "max_num_seqs": 6,
        "max_num_batched_tokens": 32,
        "watermark": 0.0,
        "preemption_mode": mode,
        "enable_prefix_caching": False,
    }
    driver = CoreDriver(SchedulerConfig(**(values | changes)))  # type: ignore[arg-type]
    driver.add_worker_group(
        make_capacity(num_gpu_blocks=num_gpu_blocks, num_cpu_blocks=num_cpu_blocks)
    )
    return driver


def run(driver: CoreDriver) -> Iterator[None]:
    """Step by step, to the end."""
    while True:
        planned = driver.schedule("g0")
        delivered = driver.deliver("g0")
        driver.collect()
        driver.core.check()
        if planned is None and not delivered:
            return
        yield


def crowd(driver: CoreDriver) -> list[RequestRecord]:
    """Three requests of two choices each that do not fit together."""
    return [driver.submit(prompt=[i + 1] * 6, max_tokens=14, n=2) for i in range(3)]


def test_a_whole_group_leaves_and_comes_back_as_a_whole() -> None:
    driver = make_driver(PreemptionMode.SWAP, num_gpu_blocks=12)
    crowd(driver)
    seen = set()
    for _ in run(driver):
        for group in driver.core._registry.seq_groups():
            statuses = {seq.status.name for seq in group.unfinished()}
            seen |= statuses
            assert not {"RUNNING", "SWAPPED"} <= statuses
    assert seen == {"WAITING", "RUNNING", "SWAPPED"}
    driver.check_empty()


def test_where_the_last_group_needs_a_block_itself_its_last_choice_makes_room() -> None:
    driver = make_driver(PreemptionMode.SWAP, num_gpu_blocks=6)
    record = driver.submit(prompt=[1] * 6, max_tokens=14, n=3)
    mixed = False
    for _ in run(driver):
        [*groups] = driver.core._registry.seq_groups()
        mixed |= any(group.running() and group.waiting() for group in groups)
    assert mixed
    assert record.finished is not None
    assert driver.core.snapshot().num_swapped_out_blocks == 0


def test_nothing_computed_is_computed_again_where_the_host_has_room() -> None:
    driver = make_driver(PreemptionMode.SWAP, num_gpu_blocks=6)
    for i in range(2):
        driver.submit(prompt=[i + 1] * 9, max_tokens=14)
    for _ in run(driver):
        pass
    status = driver.core.snapshot()
    assert status.num_preemptions > 0
    assert status.num_swapped_in_blocks == status.num_swapped_out_blocks > 0
    assert status.num_prefill_tokens == 18
    driver.check_empty()


def test_in_mode_recompute_the_host_stays_empty() -> None:
    driver = make_driver(PreemptionMode.RECOMPUTE)
    crowd(driver)
    for _ in run(driver):
        [group] = driver.core.snapshot().worker_groups
        assert group.num_free_cpu_blocks == group.num_cpu_blocks
    assert driver.core.snapshot().num_preemptions > 0


def test_many_preemptions_within_seconds_are_one_line_of_the_log(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Logging is synchronous, on the event loop of all requests."""
    caplog.set_level(logging.INFO, logger="scheduler_service")
    driver = make_driver(PreemptionMode.RECOMPUTE)
    crowd(driver)
    for _ in run(driver):
        pass
    assert driver.core.snapshot().num_preemptions > 1
    [line] = [record for record in caplog.records if "preempted" in record.getMessage()]
    assert line.levelno == logging.WARNING


def test_a_prompt_that_is_partly_computed_begins_again() -> None:
    driver = make_driver(
        PreemptionMode.SWAP, num_gpu_blocks=8, max_num_batched_tokens=6, pipeline_depth=1
    )
    driver.submit(prompt=[1] * 6, max_tokens=20)
    driver.submit(prompt=list(range(1, 25)), max_tokens=2)
    new_sequences = []
    driver.on_plan = lambda _, plan: new_sequences.extend(plan.new_sequences)
    for _ in run(driver):
        pass
    assert driver.core.snapshot().num_swapped_out_blocks == 0
    assert [new.seq_id for new in new_sequences] == [1, 2, 2]
    driver.check_empty()


def test_measured_costs_decide() -> None:
    for us_per_move, swaps in ((1, True), (10_000, False)):
        driver = make_driver(PreemptionMode.AUTO, num_gpu_blocks=6)
        rates = measured(us_per_prefill_token=100, us_per_move=us_per_move)
        driver.core._fleet.schedulers["g0"].rates.__dict__.update(rates.__dict__)
        for i in range(2):
            driver.submit(prompt=[i + 1] * 9, max_tokens=14)
        for _ in run(driver):
            driver.core._fleet.schedulers["g0"].rates.__dict__.update(rates.__dict__)
        assert (driver.core.snapshot().num_swapped_out_blocks > 0) is swaps
        assert driver.core.snapshot().num_preemptions > 0


def test_time_swapped_out_counts_as_preempted() -> None:
    driver = make_driver(PreemptionMode.SWAP, num_gpu_blocks=6)
    records = [driver.submit(prompt=[i + 1] * 9, max_tokens=14) for i in range(2)]
    swapped = 0
    for _ in run(driver):
        swapped += driver.core.snapshot().num_swapped
    first, second = (record.finished for record in records)
    assert first is not None
    assert second is not None
    assert first.preempted_us == 0
    assert 0 < second.preempted_us <= swapped * 1000


@pytest.mark.parametrize("caching", [True, False])
@pytest.mark.parametrize("depth", [1, 2, 4])
@pytest.mark.parametrize("num_cpu_blocks", [0, 5, 9, 200])
@pytest.mark.parametrize("mode", list(PreemptionMode))
def test_everything_ends_whatever_the_host_holds(
    mode: PreemptionMode, num_cpu_blocks: int, depth: int, caching: bool
) -> None:
    driver = make_driver(
        mode,
        num_gpu_blocks=10,
        num_cpu_blocks=num_cpu_blocks,
        pipeline_depth=depth,
        enable_prefix_caching=caching,
    )
    for i in range(14):
        driver.submit(
            prompt=[1 + (i * k * k) % 7 for k in range(1 + 5 * i % 17)],
            max_tokens=3 + 7 * i % 19,
            n=1 + i % 3,
            sampling=Sampling(seed=i),
        )
    for _ in run(driver):
        pass
    driver.check_empty()
    assert all(record.finished is not None for record in driver.records.values())
    status = driver.core.snapshot()
    assert status.num_preemptions > 0
    if mode is PreemptionMode.SWAP and num_cpu_blocks > 0:
        assert status.num_swapped_in_blocks > 0
        assert caching or status.num_swapped_in_blocks == status.num_swapped_out_blocks
