"""Which failures are worth another attempt, when, and for how long."""

from typing import Any

import pytest

from pagewire_client import errors
from pagewire_client.retry import NO_RETRIES, Attempts, Deadline, RetryPolicy
from tests.support.clocks import Clock

POLICY = RetryPolicy(
    max_retries=3, initial_backoff_s=1.0, max_backoff_s=4.0, recovery_timeout_s=60.0
)
UNAVAILABLE = errors.Unavailable("gone")


@pytest.fixture
def clock() -> Clock:
    return Clock()


def make_attempts(
    clock: Clock, policy: RetryPolicy = POLICY, timeout_s: float | None = None, draw: float = 1.0
) -> Attempts:
    deadline = Deadline(timeout_s, clock=clock)
    return Attempts(policy, deadline, clock=clock, draw=lambda: draw)


@pytest.fixture
def never_connected() -> errors.Unavailable:
    error = errors.Unavailable("cannot connect to 127.0.0.1:1: connection refused")
    error.was_connected = False
    return error


def test_waits_double_up_to_the_longest_and_end_with_the_error(
    clock: Clock, never_connected: errors.Unavailable
) -> None:
    attempts = make_attempts(clock)
    assert [attempts.delay_after(never_connected) for _ in range(3)] == [1.0, 2.0, 4.0]
    with pytest.raises(errors.Unavailable, match="refused"):
        attempts.delay_after(never_connected)


def test_a_server_that_cannot_serve_the_request_is_tried_by_count(clock: Clock) -> None:
    attempts = make_attempts(clock)
    no_model = errors.Unavailable("the model is not served", reason="NO_MODEL_SERVED")
    assert [attempts.delay_after(no_model) for _ in range(3)] == [1.0, 2.0, 4.0]
    with pytest.raises(errors.Unavailable, match="not served"):
        attempts.delay_after(no_model)


@pytest.mark.parametrize(
    "error",
    [
        UNAVAILABLE,
        errors.Unavailable("the frontend is shutting down", reason="SHUTTING_DOWN"),
        errors.Overloaded("full", retry_delay_s=1.0),
    ],
)
def test_a_request_is_tried_by_time_while_the_server_restarts_or_is_full(
    clock: Clock, error: errors.PagewireError
) -> None:
    attempts = make_attempts(clock)
    for _ in range(20):
        attempts.delay_after(error)
    clock.now += 60.0
    with pytest.raises(type(error)):
        attempts.delay_after(error)


def test_a_full_server_that_answers_other_requests_is_tried_on(clock: Clock) -> None:
    attempts = make_attempts(clock)
    for _ in range(3):
        full = errors.Overloaded("full", retry_delay_s=1.0)
        full.progressed_at = clock.now - 30.0
        attempts.delay_after(full)
        clock.now += 60.0
    gone = errors.Unavailable("gone")
    gone.progressed_at = clock.now
    with pytest.raises(errors.Unavailable):
        attempts.delay_after(gone)


def test_clients_spread_over_half_the_wait(clock: Clock) -> None:
    assert make_attempts(clock, draw=0.0).delay_after(UNAVAILABLE) == 0.5


@pytest.mark.parametrize(
    "error",
    [
        errors.InvalidArgument("x"),
        errors.NotFound("x"),
        errors.ServerError("x"),
        errors.RequestAborted("x"),
        errors.DeadlineExceeded("x"),
        errors.Overloaded("without a delay"),
        errors.AlreadyExists("somebody else's"),
    ],
)
def test_what_will_not_pass_is_raised_at_once(clock: Clock, error: errors.PagewireError) -> None:
    with pytest.raises(type(error)):
        make_attempts(clock).delay_after(error)


def test_a_full_server_is_left_alone_as_long_as_it_asks(clock: Clock) -> None:
    full = errors.Overloaded("full", retry_delay_s=9.0)
    assert make_attempts(clock).delay_after(full) == 9.0


def test_a_stream_that_has_begun_is_tried_by_time_and_not_by_count(clock: Clock) -> None:
    attempts = make_attempts(clock)
    attempts.progressed()
    for _ in range(20):
        attempts.delay_after(UNAVAILABLE)
    clock.now += 60.0
    with pytest.raises(errors.Unavailable):
        attempts.delay_after(UNAVAILABLE)


def test_progress_starts_the_count_and_the_time_anew(clock: Clock) -> None:
    attempts = make_attempts(clock)
    attempts.progressed()
    attempts.delay_after(UNAVAILABLE)
    attempts.delay_after(UNAVAILABLE)
    clock.now += 59.0
    attempts.progressed()
    clock.now += 59.0
    assert attempts.delay_after(UNAVAILABLE) == 1.0


def test_no_attempt_is_made_after_the_deadline(clock: Clock) -> None:
    attempts = make_attempts(clock, timeout_s=2.5)
    assert attempts.delay_after(UNAVAILABLE) == 1.0
    clock.now += 1.0
    with pytest.raises(errors.DeadlineExceeded, match="gone"):
        attempts.delay_after(UNAVAILABLE)


def test_no_retries_means_none(clock: Clock) -> None:
    attempts = make_attempts(clock, NO_RETRIES)
    with pytest.raises(errors.Unavailable):
        attempts.delay_after(UNAVAILABLE)
    begun = make_attempts(clock, NO_RETRIES)
    begun.progressed()
    with pytest.raises(errors.Unavailable):
        begun.delay_after(UNAVAILABLE)


@pytest.mark.parametrize("timeout_s", [1e9, 9e9, 1e18, 10**400, float("inf")])
def test_a_timeout_of_decades_is_no_deadline(timeout_s: float) -> None:
    assert Deadline(timeout_s).remaining_s() is None
    assert Deadline(1e8, clock=lambda: 5.0).remaining_s() == 1e8


@pytest.mark.parametrize("timeout_s", [0.0, -1.0, float("nan"), "1", [1]])
def test_a_timeout_must_be_positive(timeout_s: Any) -> None:
    with pytest.raises(ValueError, match="timeout"):
        Deadline(timeout_s)
