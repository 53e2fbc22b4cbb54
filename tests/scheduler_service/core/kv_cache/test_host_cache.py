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
from tests.support.symbolic_worker import Sampling

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


def test_many_prompts_are_remembered_beyond_the_devices_memory() -> None:
    driver = make_driver()
    assert [ask(driver, prompt).cached_tokens for prompt in PROMPTS] == [0] * 6
    assert [ask(driver, prompt).cached_tokens for prompt in PROMPTS] == [20] * 6
    driver.check_empty()


def test_where_the_host_has_little_room_a_prompts_first_blocks_stay_longest() -> None:
    driver = make_driver(num_gpu_blocks=7, num_cpu_blocks=4)
    for prompt in PROMPTS[:2]:
        ask(driver, prompt)
    # The device has the second prompt, the host the first four blocks of the first one.
    assert ask(driver, PROMPTS[0]).cached_tokens == 16


def test_without_host_blocks_or_without_prefix_caching_nothing_is_moved() -> None:
    for driver in (make_driver(num_cpu_blocks=0), make_driver(enable_prefix_caching=False)):
        for prompt in PROMPTS + PROMPTS:
            assert ask(driver, prompt).cached_tokens == 0
        assert driver.core.snapshot().num_swapped_out_blocks == 0


def test_the_last_token_is_computed_even_if_all_blocks_are_found() -> None:
    driver = make_driver(num_gpu_blocks=7)
    ask(driver, PROMPTS[0])
    ask(driver, PROMPTS[1])
    assert ask(driver, PROMPTS[0][:24]).cached_tokens == 20
    assert ask(driver, PROMPTS[1][:21]).cached_tokens == 20


def test_prompt_log_probabilities_that_are_owed_are_computed() -> None:
    driver = make_driver()
    for prompt in PROMPTS:
        ask(driver, prompt)
    sampling = Sampling(seed=1, prompt_logprobs=True)
    assert ask(driver, PROMPTS[0], sampling=sampling).cached_tokens == 0


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


def test_without_chunked_prefill_what_arrives_is_computed_in_one_piece_too() -> None:
    driver = make_driver(num_gpu_blocks=48, num_cpu_blocks=200, enable_chunked_prefill=False)
    for prompt in PROMPTS:
        ask(driver, prompt)
    for token in (1, 2, 3):
        driver.submit(prompt=[token] * 62, max_tokens=2)
    driver.run_until_idle()
    plans: list[StepPlan] = []
    driver.on_plan = lambda _, plan: plans.append(plan)
    for prompt in PROMPTS[:2]:
        driver.submit(prompt=[*prompt, *range(31, -1, -1), *range(6)], max_tokens=1)
    driver.run_until_idle()
    assert len(plans[0].swap_in) == 2 * 2 * 6
    assert [plan.num_tokens for plan in plans] == [None, [38], [38]]
    driver.check_empty()


def test_a_worker_that_is_lost_takes_what_its_host_had_with_it() -> None:
    driver = make_driver()
    for prompt in PROMPTS:
        ask(driver, prompt)
    driver.lose_worker_group("g0")
    driver.add_worker_group(make_capacity("g1", num_gpu_blocks=8, num_cpu_blocks=64))
    assert ask(driver, PROMPTS[0]).cached_tokens == 0


@pytest.mark.parametrize("num_cpu_blocks", [1, 3, 8, 100])
@pytest.mark.parametrize("mode", list(PreemptionMode))
@pytest.mark.parametrize("depth", [1, 3])
def test_requests_that_begin_alike_end_right_in_any_crowd(
    num_cpu_blocks: int, mode: PreemptionMode, depth: int
) -> None:
    driver = make_driver(
        num_gpu_blocks=12,
        num_cpu_blocks=num_cpu_blocks,
        preemption_mode=mode,
        pipeline_depth=depth,
        max_num_batched_tokens=16,
    )
    for i in range(30):
        prompt = [*PROMPTS[i % 4][: 4 + 5 * i % 19], *range(i % 5)]
        driver.submit(prompt=prompt, max_tokens=1 + 5 * i % 14, n=1 + i % 2)
    driver.run_until_idle()
    driver.check_empty()
    assert all(record.finished is not None for record in driver.records.values())
    assert driver.core.snapshot().num_swapped_out_blocks > 0


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
