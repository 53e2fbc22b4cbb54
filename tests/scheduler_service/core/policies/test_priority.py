"""Requests that preempt others by priority; the scenarios priority*.txt show the plans."""

import gc

from scheduler_service.core import PolicyName
from scheduler_service.core.sequence import SequenceGroup
from tests.support.core_driver import make_driver


def num_groups() -> int:
    """Requests that the core, or anything of it, still knows."""
    gc.collect()
    return sum(type(thing) is SequenceGroup for thing in gc.get_objects())


def test_what_goes_ahead_of_one_that_waits_leaves_nothing_behind() -> None:
    driver = make_driver(policy=PolicyName.PRIORITY, max_num_seqs=1)
    driver.submit(prompt=[1] * 5, max_tokens=9, priority=9)
    driver.step("g0")
    before = num_groups()
    for number in range(20):
        ahead = driver.submit(prompt=[2, number], max_tokens=1)
        driver.step("g0")
        assert ahead.finished is not None
    assert num_groups() < before + 3
    driver.run_until_idle()
    driver.check_empty()
