"""How fast queues drain, and what that makes of a retry delay."""

import pytest

from scheduler_service.core.throughput import QueueThroughput, retry_delay_s


def drained(
    *, us_per_request: int, tokens_per_request: int = 10, times: int = 8
) -> QueueThroughput:
    rate = QueueThroughput()
    rate.observe(0, num_requests=0, num_tokens=0, is_empty=False)
    for i in range(1, times + 1):
        rate.observe(
            i * us_per_request, num_requests=1, num_tokens=tokens_per_request, is_empty=False
        )
    return rate


def delay(rates: list[QueueThroughput], *, num_requests: int = 0, num_tokens: int = 0) -> float:
    return retry_delay_s(rates, num_requests=num_requests, num_tokens=num_tokens, unmeasured_s=1.25)


def test_nothing_is_known_before_some_have_left() -> None:
    rate = drained(us_per_request=1000, times=7)
    assert rate.us_per_request is rate.us_per_token is None
    assert delay([rate], num_requests=1) == 1.25


def test_a_rate_is_time_by_what_left_in_it() -> None:
    rate = drained(us_per_request=300_000, tokens_per_request=100)
    assert rate.us_per_request == pytest.approx(300_000)
    assert rate.us_per_token == pytest.approx(3000)


def test_time_in_which_nothing_waits_does_not_count() -> None:
    rate = drained(us_per_request=1000)
    rate.observe(9000, num_requests=1, num_tokens=10, is_empty=True)
    rate.observe(9_000_000, num_requests=1, num_tokens=10, is_empty=False)
    rate.observe(9_001_000, num_requests=1, num_tokens=10, is_empty=True)
    assert rate.us_per_request == pytest.approx(1000)


def test_time_that_was_interrupted_does_not_count() -> None:
    rate = drained(us_per_request=1000)
    rate.interrupt()
    rate.observe(9_000_000, num_requests=1, num_tokens=10, is_empty=True)
    assert rate.us_per_request == pytest.approx(1000)


def test_waiting_goes_on_counting_while_nothing_leaves() -> None:
    rate = drained(us_per_request=1000)
    for now_us in range(8000, 18_000, 500):
        rate.observe(now_us, num_requests=0, num_tokens=0, is_empty=False)
    rate.observe(18_000, num_requests=10, num_tokens=100, is_empty=True)
    assert rate.us_per_request == pytest.approx(1000)


def test_a_delay_is_the_time_until_enough_has_left_queues_that_drain_side_by_side() -> None:
    slow, fast = drained(us_per_request=3_000_000), drained(us_per_request=1_000_000)
    assert delay([fast], num_requests=6) == pytest.approx(6.0)
    assert delay([slow, fast], num_requests=6) == pytest.approx(4.5)
    assert delay([slow, fast, QueueThroughput()], num_tokens=60) == pytest.approx(4.5)
    assert delay([fast], num_requests=2, num_tokens=60) == pytest.approx(6.0)


def test_a_delay_is_neither_useless_nor_endless() -> None:
    rate = drained(us_per_request=1_000_000)
    assert delay([rate], num_requests=1_000_000) == 60.0
    assert delay([drained(us_per_request=10)], num_requests=1) == 0.1
