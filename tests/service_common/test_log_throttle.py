"""A failure that lasts does not fill the log."""

import logging

import pytest

from service_common.logging_config import INTERVAL_S, LogThrottle, WarningThrottle


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


def test_warnings_that_anybody_can_cause_are_counted_instead_of_written(
    caplog: pytest.LogCaptureFixture,
) -> None:
    now = 0.0
    logger = logging.getLogger("test_warnings_that_anybody_can_cause")
    logger.addFilter(WarningThrottle(lambda: now))
    for _ in range(1000):
        logger.warning("Invalid HTTP request received.")
    logger.error("failed")
    now = INTERVAL_S
    logger.warning("Invalid HTTP request received.")
    assert [record.getMessage() for record in caplog.records] == [
        "Invalid HTTP request received.",
        "failed",
        "Invalid HTTP request received. num_left_out=999",
    ]
