"""A failure that lasts does not fill the log."""

from service_common.logging_config import LogThrottle


def test_the_first_and_each_other_failure_is_told_and_one_that_lasts_now_and_then() -> None:
    now = 0.0
    failures = LogThrottle(lambda: now)
    decisions = [
        failures.should_log(failure) for failure in ("away", "away", "refused", "refused", "away")
    ]
    assert decisions == [True, False, True, False, True]
    logged = []
    for now in (4, 5, 9, 34, 35, 64, 65):
        if failures.should_log("away"):
            logged.append(now)
    assert logged == [5, 35, 65]


def test_after_a_success_any_failure_is_news() -> None:
    failures = LogThrottle(lambda: 0.0)
    failures.should_log("away")
    failures.end()
    assert failures.should_log("away")
