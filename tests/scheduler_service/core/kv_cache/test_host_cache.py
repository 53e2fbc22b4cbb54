"""What the device has no room to remember; the scenarios host_cache*.txt show the plans."""

import pytest

from scheduler_service.core import SchedulerConfig, StepPlan
from scheduler_service.core.config import PreemptionMode
from scheduler_service.core.scheduling.preemption import is_fetch_cheaper
from scheduler_service.core.step_plan import StepResult
from scheduler_service.core.throughput import StepRates
from tests.support.core_driver import CoreDriver, make_capacity
from tests.support.records import RequestRecord
from tests.support.steps import make_work

PROMPTS = [[(3 * i * i + k * i + k) % 31 for i in range(24)] for k in range(6)]


def measured(*, us_per_prefill_token: int, us_per_move: int) -> StepRates:
    rates = StepRates()
    work = make_work(num_prefill_tokens=10, num_moves=10, swaps_in=False)
    ops_us = 10 * us_per_move
    busy_us = ops_us + 10 * us_per_prefill_token
    result = StepResult(step_id=1, token_ids=[1], busy_us=busy_us, cache_ops_us=ops_us)
    rates.observe(work, result)
    return rates


def make_driver(num_gpu_blocks: int = 8, num_cpu_blocks: int = 64, **changes: object) -> CoreDriver:
    values: dict[str, object] = {
        "max_num_seqs": 4,
        "max_num_batched_tokens": 67,
        "watermark": 0.0,
        "preemption_mode": PreemptionMode.RECOMPUTE,
    }
    driver = CoreDriver(SchedulerConfig(**(values | changes)))  # type: ignore[arg-type]
    capacity = make_capacity(num_gpu_blocks=num_gpu_blocks, num_cpu_blocks=num_cpu_blocks)
    driver.add_worker_group(capacity)
    return driver


def ask(driver: CoreDriver, prompt: list[int], **changes: object) -> RequestRecord:
    """One request from beginning to end."""
    record = driver.submit(prompt=prompt, max_tokens=2, **changes)  # type: ignore[arg-type]
    driver.run_until_idle()
    driver.core.check()
    assert record.finished is not None
    return record


def test_without_host_blocks_or_without_prefix_caching_nothing_is_moved() -> None:
    for driver in (make_driver(num_cpu_blocks=0), make_driver(enable_prefix_caching=False)):
        for prompt in PROMPTS + PROMPTS:
            assert ask(driver, prompt).cached_tokens == 0
        assert driver.core.snapshot().num_swapped_out_blocks == 0


@pytest.mark.parametrize(("us_per_move", "fetches"), [(30, True), (50, False)])
def test_blocks_are_brought_back_where_that_costs_less_than_computing_them(
    us_per_move: int, fetches: bool
) -> None:
    rates = measured(us_per_prefill_token=10, us_per_move=us_per_move)
    assert is_fetch_cheaper(rates, num_moves=1, num_tokens=4) is fetches
    assert is_fetch_cheaper(StepRates(), num_moves=1, num_tokens=4), (
        "as long as nothing was measured"
    )
    driver = make_driver()
    for prompt in PROMPTS:
        ask(driver, prompt)
    driver.core._fleet.schedulers["g0"].rates.__dict__.update(rates.__dict__)
    assert ask(driver, PROMPTS[0]).cached_tokens == (20 if fetches else 0)


def test_a_preempted_request_finds_itself_on_the_host() -> None:
    driver = make_driver(num_gpu_blocks=9, pipeline_depth=1)
    plans: list[StepPlan] = []
    driver.on_plan = lambda _, plan: plans.append(plan)
    for i in range(2):
        driver.submit(prompt=PROMPTS[i][:12], max_tokens=20)
    driver.run_until_idle()
    assert driver.core.snapshot().num_preemptions > 0
    assert driver.core.snapshot().num_swapped_in_blocks > 0
    again = [new for plan in plans for new in plan.new_sequences if new.seq_id == 2][1]
    assert again.num_computed_tokens >= 12
    driver.check_empty()


def test_steps_evict_only_blocks_that_earlier_ones_have_copied() -> None:
    driver = make_driver(num_gpu_blocks=120, num_cpu_blocks=400)
    plans: list[StepPlan] = []
    driver.on_plan = lambda _, plan: plans.append(plan)
    for i in range(40):
        driver.submit(prompt=[i % 31, i % 29, *PROMPTS[i % 6]], max_tokens=5 + i % 9)
    driver.run_until_idle()
    driver.check_empty()
    assert sum(len(plan.swap_out) // 2 for plan in plans) > 120
    for plan in plans:
        assert plan.seq_ids, "a plan for copies alone"
        assigned = {block for new in plan.new_sequences for block in new.tables[0].block_ids}
        assigned.update(plan.block_updates[3::4])
        assert assigned.isdisjoint(plan.swap_out[::2])
