"""Requests that preempt others by priority; the scenarios priority*.txt show the plans."""

import gc

from scheduler_service.core import PolicyName
from scheduler_service.core.sequence import SequenceGroup
from tests.support.core_driver import CoreDriver, make_capacity, make_driver


def make_full(*, small: int, large: int) -> CoreDriver:
    """A small worker group and a large one, each with a request of the given priority."""
    driver = make_driver(
        make_capacity("small", num_gpu_blocks=6),
        policy=PolicyName.PRIORITY,
        max_num_seqs=1,
        watermark=0.0,
    )
    driver.submit(prompt=[1] * 4, max_tokens=16, priority=small)
    driver.schedule("small")
    driver.add_worker_group(make_capacity("large", num_gpu_blocks=12))
    driver.submit(prompt=[2] * 30, max_tokens=16, priority=large)
    driver.schedule("large")
    assert [group.num_running_sequences for group in driver.core.snapshot().worker_groups] == [1, 1]
    return driver


def test_one_that_can_go_ahead_nowhere_holds_up_nobody_elsewhere() -> None:
    driver = make_full(small=5, large=0)
    waits = driver.submit(prompt=[3] * 30, max_tokens=2)
    urgent = driver.submit(prompt=[4] * 4, max_tokens=2, priority=1)
    plan = driver.schedule("small")
    assert plan is not None
    assert [new.token_ids for new in plan.new_sequences] == [[4] * 4]
    driver.run_until_idle()
    assert urgent.finished is not None
    assert urgent.finished.queue_us == 0
    assert waits.finished is not None
    driver.check_empty()


def test_one_that_can_go_ahead_nowhere_is_first_where_it_waits() -> None:
    driver = make_full(small=0, large=0)
    first = driver.submit(prompt=[3] * 30, max_tokens=2)
    later = driver.submit(prompt=[4] * 30, max_tokens=2, priority=1)
    driver.run_until_idle()
    assert first.finished is not None
    assert later.finished is not None
    assert first.finished.queue_us < later.finished.queue_us


def num_groups() -> int:
    """Requests that the core, or anything of it, still knows."""
    gc.collect()
    return sum(type(thing) is SequenceGroup for thing in gc.get_objects())


def test_what_goes_ahead_of_one_that_waits_leaves_nothing_behind() -> None:
    driver = make_driver(policy=PolicyName.PRIORITY, max_num_seqs=1)
    driver.submit(prompt=[1] * 5, max_tokens=9, priority=9)
    driver.schedule("g0")
    driver.deliver("g0")
    before = num_groups()
    for number in range(20):
        ahead = driver.submit(prompt=[2, number], max_tokens=1)
        driver.schedule("g0")
        driver.deliver("g0")
        driver.collect()
        assert ahead.finished is not None
    assert num_groups() < before + 3
    driver.run_until_idle()
    driver.check_empty()


def new_prompts(driver: CoreDriver) -> list[list[int]]:
    """Plan and execute a step; the prompts of the sequences that start in it."""
    plan = driver.schedule("g0")
    assert plan is not None
    driver.deliver("g0")
    return [new.token_ids for new in plan.new_sequences]


def test_one_that_may_preempt_does_not_take_the_place_of_an_equal_one_that_waits_there() -> None:
    driver = make_driver(policy=PolicyName.PRIORITY, max_num_seqs=3, max_num_batched_tokens=4)
    driver.submit(prompt=[1] * 4, max_tokens=9, priority=5)
    assert new_prompts(driver)
    driver.submit(prompt=[2] * 6, max_tokens=9, priority=5)
    assert new_prompts(driver)
    driver.submit(prompt=[3] * 3, max_tokens=9, priority=1)
    assert not new_prompts(driver), "it has the last place, but no token of this step is left"
    driver.submit(prompt=[4] * 2, max_tokens=9, priority=1)
    assert new_prompts(driver) == [[3] * 3]
    assert driver.core.snapshot().num_preemptions == 0
    driver.run_until_idle()
    driver.check_empty()


def test_a_more_urgent_one_preempts_although_others_wait_there() -> None:
    driver = make_driver(policy=PolicyName.PRIORITY, max_num_seqs=3, max_num_batched_tokens=4)
    driver.submit(prompt=[1] * 4, max_tokens=9, priority=5)
    assert new_prompts(driver)
    driver.submit(prompt=[2] * 6, max_tokens=9, priority=5)
    assert new_prompts(driver)
    driver.submit(prompt=[3] * 3, max_tokens=9, priority=1)
    assert not new_prompts(driver)
    driver.submit(prompt=[4] * 2, max_tokens=9, priority=0)
    assert new_prompts(driver)[0] == [4] * 2
    driver.run_until_idle()
    driver.check_empty()
