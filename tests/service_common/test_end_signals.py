"""Signals of one request to end, and of a second one."""

import signal

from service_common.end_signals import SAME_REQUEST_S, EndSignals
from tests.support.clocks import Clock


def test_signals_that_follow_at_once_are_of_the_same_request() -> None:
    clock = Clock(100.0)
    signals = EndSignals(clock)
    assert not signals.is_second_request(signal.SIGTERM)
    clock.now += SAME_REQUEST_S
    assert not signals.is_second_request(signal.SIGTERM)
    clock.now += SAME_REQUEST_S
    assert signals.is_second_request(signal.SIGTERM)
    assert not signals.is_second_request(signal.SIGHUP)
