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


def test_a_request_alone_gives_up_its_last_choice_and_continues_with_the_others() -> None:
    driver = make_driver(PreemptionMode.RECOMPUTE, num_gpu_blocks=6)
    driver.submit(prompt=[1] * 6, max_tokens=14, n=3)
    for _ in run(driver):
        if driver.core.snapshot().num_preemptions:
            break
    [group] = driver.core.snapshot().worker_groups
    assert group.num_running_sequences == 2


def test_a_request_of_one_choice_is_swapped_though_it_needs_the_memory_itself() -> None:
    driver = make_driver(PreemptionMode.SWAP, num_gpu_blocks=6)
    driver.submit(prompt=[1] * 9, max_tokens=14)
    driver.submit(prompt=[2] * 11, max_tokens=4)
    for _ in run(driver):
        pass
    status = driver.core.snapshot()
    assert status.num_preemptions == 1
    assert status.num_swapped_out_blocks > 0
