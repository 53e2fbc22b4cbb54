"""When a step is overdue, by what steps have taken before."""

import pytest

from scheduler_service.core import SchedulerConfig
from scheduler_service.core.throughput import StepWork
from scheduler_service.core_service.workers.step_watchdog import (
    NUM_FIRST_STEPS,
    StepTimeout,
    StepTimes,
    StepWatch,
)
from tests.support.core_driver import CoreDriver, make_capacity
from tests.support.steps import make_work

TIMEOUT = StepTimeout(floor_s=0.5, first_floor_s=60, factor=10)


def decode(num_rows: int, context: int = 100) -> StepWork:
    return make_work(num_tokens=num_rows, num_attended_pairs=num_rows * context)


def prefill(num_tokens: int, context: int) -> StepWork:
    return make_work(
        num_tokens=num_tokens,
        num_prefill_tokens=num_tokens,
        num_attended_pairs=num_tokens * context,
    )


def seen(*steps: tuple[StepWork, float]) -> StepTimes:
    """Times after each step was taken often enough to count once."""
    times = StepTimes(TIMEOUT)
    for work, seconds in steps:
        for _ in range(NUM_FIRST_STEPS):
            times.observe(work, 50.0)
        times.observe(work, seconds)
    return times


def test_the_first_steps_of_a_size_may_take_long_and_say_nothing_of_later_ones() -> None:
    times = StepTimes(TIMEOUT)
    for _ in range(NUM_FIRST_STEPS):
        assert times.limit_s(decode(4)) == 60
        times.observe(decode(4), 50.0)
    times.observe(decode(4), 0.2)
    assert times.limit_s(decode(4)) == pytest.approx(10 * 0.2)
    assert times.limit_s(decode(8)) == 60
    assert times.limit_s(prefill(4, 4)) == 60


def test_no_limit_is_below_the_floor() -> None:
    assert seen((decode(4), 0.001)).limit_s(decode(4)) == 0.5


def test_a_limit_grows_with_tokens_or_with_what_they_attend_to_whichever_is_more() -> None:
    times = seen((prefill(1030, 1000), 2.0))
    assert times.limit_s(prefill(2040, 1000)) == pytest.approx(20 * 2040 / 1030)
    assert times.limit_s(prefill(1030, 5000)) == pytest.approx(20 * 5)
    assert times.limit_s(prefill(1030, 10)) == pytest.approx(20)


def test_moved_blocks_count_as_tokens() -> None:
    work = make_work(num_tokens=4, num_attended_pairs=400, num_moves=3)
    assert seen((decode(4), 1.0)).limit_s(work) == pytest.approx(10 * 7 / 4)


def test_the_lesser_bound_of_decodes_and_prefills_holds() -> None:
    """A decode takes almost as long as many do, so by decodes a prefill might take for ever."""
    times = seen((decode(1), 1.0), (prefill(1030, 100), 2.0))
    assert times.limit_s(prefill(1024, 100)) == pytest.approx(20)
    assert times.limit_s(decode(1)) == pytest.approx(10)


@pytest.mark.parametrize("seed", range(20))
def test_a_step_as_long_as_its_work_explains_is_never_overdue(seed: int) -> None:
    """Whatever a worker's costs are, even with a factor of one."""
    a, b, c = [(0.0, 0.1, 3.0)[(seed // 3**i) % 3] for i in range(3)]
    if a + b + c == 0:
        return
    times = StepTimes(StepTimeout(floor_s=1e-9, first_floor_s=1e9, factor=1))
    for i in range(200):
        num_tokens, context = (7 * i + seed) % 61 + 1, (13 * i + seed) % 997 + 1
        work = (prefill if i % 3 else decode)(num_tokens, context)
        seconds = a + b * work.num_tokens + c * work.num_attended_pairs
        assert seconds <= times.limit_s(work) * (1 + 1e-9)
        times.observe(work, seconds)


def test_without_a_floor_no_step_is_ever_overdue() -> None:
    times = StepTimes(StepTimeout(floor_s=0))
    assert times.limit_s(decode(1)) == float("inf")


def test_a_step_is_worked_on_once_the_one_before_it_is_done() -> None:
    watch = StepWatch(seen((decode(1), 0.2)), num_ranks=1)
    assert watch.overdue_at is None
    watch.sent(decode(1), 100.0)
    watch.sent(decode(1), 101.0)
    assert watch.overdue_at == pytest.approx(102.0)
    watch.answered(0, 101.5)
    assert watch.num_done == 1
    limit_s = 10 * (0.2 + 0.1 * (1.5 - 0.2))
    assert watch.overdue_at == pytest.approx(101.5 + limit_s)
    watch.answered(0, 102.0)
    assert watch.overdue_at is None


def test_a_result_that_may_come_with_others_may_take_as_long_as_they() -> None:
    watch = StepWatch(seen((decode(1), 0.2)), num_ranks=1)
    watch.sent(decode(1), 100.0, max_results=3)
    watch.sent(decode(1), 100.0)
    assert watch.overdue_at == pytest.approx(106.0)
    watch.answered(0, 100.2)
    assert watch.overdue_at == pytest.approx(102.2)


def test_no_step_takes_less_than_no_time() -> None:
    """Both results came together; the core was late to read the one before them."""
    watch = StepWatch(seen((decode(1), 0.2)), num_ranks=1)
    for _ in range(3):
        watch.sent(decode(1), 100.0)
    taken = [watch.answered(0, now) for now in (101.0, 100.8, 101.2)]
    assert taken == [[1.0], [0.0], [pytest.approx(0.2)]]


def test_a_step_is_done_when_every_rank_has_answered_it() -> None:
    watch = StepWatch(StepTimes(TIMEOUT), num_ranks=2)
    watch.sent(decode(1), 0.0)
    watch.sent(decode(1), 0.0)
    watch.answered(1, 1.0)
    watch.answered(1, 2.0)
    assert (watch.num_done, watch.overdue_at) == (0, 60.0)
    watch.answered(0, 3.0)
    assert (watch.num_done, watch.overdue_at) == (1, 63.0)


def test_the_core_tells_what_its_plans_take() -> None:
    driver = CoreDriver(SchedulerConfig(max_num_seqs=4, max_num_batched_tokens=8))
    driver.add_worker_group(make_capacity("g"))
    driver.submit(prompt=list(range(10)), max_tokens=5)
    works = []
    for _ in range(3):
        driver.schedule("g")
        works.append(driver.core.newest_work("g"))
        driver.deliver("g")
    assert works == [
        make_work(num_tokens=8, num_prefill_tokens=8, num_attended_pairs=64, num_prefill_pairs=36),
        make_work(num_tokens=2, num_prefill_tokens=2, num_attended_pairs=20, num_prefill_pairs=19),
        make_work(num_tokens=1, num_attended_pairs=12),
    ]


@pytest.mark.parametrize(
    "fields",
    [{"floor_s": -1}, {"first_floor_s": 1}, {"factor": 0.5}, {"factor": float("inf")}],
)
def test_impossible_limits_are_refused(fields: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="step_timeout"):
        StepTimeout(**fields)
