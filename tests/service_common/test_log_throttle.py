"""A failure that lasts does not fill the log."""

from service_common.logging_config import INTERVAL_S, LogThrottle


def test_the_first_and_each_other_failure_is_told_and_one_that_lasts_now_and_then() -> None:
    now = 0.0
    failures = LogThrottle(lambda: now)
    told = [failures.is_news(failure) for failure in ("away", "away", "refused", "refused", "away")]
    assert told == [True, False, True, False, True]
    now = INTERVAL_S - 1
    assert not failures.is_news("away")
    now = INTERVAL_S
    assert failures.is_news("away")
    assert not failures.is_news("away")


def test_after_a_success_any_failure_is_news() -> None:
    failures = LogThrottle(lambda: 0.0)
    failures.is_news("away")
    failures.end()
    assert failures.is_news("away")
