"""Time accounts: the parts add up exactly, whatever the order of events."""

from dataclasses import replace

import hypothesis.strategies as st
from hypothesis import given

from scheduler_service.core import RequestTimings, StepResult
from scheduler_service.core.request_timing import RequestClock, RequestPhase, StepClock


def result(forward_us: int, sample_us: int, cache_ops_us: int = 0) -> StepResult:
    return StepResult(
        step_id=1,
        token_ids=[],
        forward_us=forward_us,
        sample_us=sample_us,
        cache_ops_us=cache_ops_us,
    )


def sum_of_parts(timings: RequestTimings) -> int:
    return (
        timings.queue_us
        + timings.plan_us
        + timings.wire_us
        + timings.forward_us
        + timings.sample_us
        + timings.preempted_us
        + timings.recovery_us
    )


def test_the_time_between_results_is_forward_then_sampling_then_planning_then_wire() -> None:
    steps = StepClock(0)
    steps.unassigned_plan_us = 20
    steps.advance(1000, result(forward_us=800, sample_us=100, cache_ops_us=50))
    assert (steps.forward_us, steps.sample_us, steps.plan_us, steps.wire_us) == (850, 100, 20, 30)
    # A full pipeline: the worker was busy all the time, so planning delayed nothing.
    steps.unassigned_plan_us = 20
    steps.advance(1900, result(forward_us=800, sample_us=200))
    assert (steps.forward_us, steps.sample_us, steps.plan_us, steps.wire_us) == (1650, 200, 20, 30)


def test_results_that_come_together_count_as_if_each_had_come_at_once() -> None:
    steps = StepClock(0)
    for held_us in (1800, 900, 0):
        held = replace(result(forward_us=800, sample_us=70), held_us=held_us)
        assert steps.advance(2700, held) == 900
    assert (steps.forward_us, steps.sample_us, steps.wire_us) == (2400, 210, 90)
    assert steps.mark_us == 2700


def test_a_request_that_enters_late_in_a_step_is_charged_for_the_rest_of_it() -> None:
    steps = StepClock(0)
    clock = RequestClock.start(100, RequestPhase.QUEUE)
    clock.enter_batch(steps, 900)
    steps.advance(1000, result(forward_us=950, sample_us=50))
    timings = clock.finish(1000)
    assert timings.queue_us == 800
    assert (timings.wire_us, timings.forward_us, timings.sample_us) == (0, 50, 50)
    assert timings.total_us == 900


@given(
    events=st.lists(
        st.tuples(
            st.sampled_from(["enter", "leave", "result"]),
            st.integers(-50, 2000),
            st.integers(0, 1500),
            st.integers(0, 500),
        )
    ),
    phase=st.sampled_from([RequestPhase.QUEUE, RequestPhase.RECOVERY]),
)
def test_parts_add_up_to_the_total(
    events: list[tuple[str, int, int, int]], phase: RequestPhase
) -> None:
    """Also where a clock stands still or goes back a little."""
    now = 1_000_000
    steps = StepClock(now)
    clock = RequestClock.start(now, phase)
    latest = now
    for event, passed, forward_us, sample_us in events:
        now += passed
        latest = max(latest, now)
        if event == "result":
            steps.unassigned_plan_us = sample_us
            steps.advance(now, result(forward_us, sample_us))
        elif event == "enter" and clock.phase is not RequestPhase.RUNNING:
            clock.enter_batch(steps, now)
        elif event == "leave" and clock.phase is RequestPhase.RUNNING:
            clock.leave_batch(now, RequestPhase.PREEMPTED)
    timings = clock.finish(now)
    assert sum_of_parts(timings) == timings.total_us
    assert 0 <= timings.total_us <= latest - 1_000_000
    assert min(timings.wire_us, timings.forward_us, timings.sample_us, timings.plan_us) >= 0
