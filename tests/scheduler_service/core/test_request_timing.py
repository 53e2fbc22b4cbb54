"""Time accounts: the parts add up exactly, whatever the order of events."""

from dataclasses import replace

from scheduler_service.core import StepResult
from scheduler_service.core.request_timing import RequestClock, RequestPhase, StepClock


def result(forward_us: int, sample_us: int, cache_ops_us: int = 0) -> StepResult:
    return StepResult(
        step_id=1,
        token_ids=[],
        forward_us=forward_us,
        sample_us=sample_us,
        cache_ops_us=cache_ops_us,
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
