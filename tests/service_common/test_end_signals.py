"""Signals of one request to end, and of a second one."""

import pytest

from service_common.end_signals import SAME_REQUEST_S, EndSignals


def test_signals_that_follow_at_once_are_of_the_same_request(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now_s = 100.0
    monkeypatch.setattr("time.monotonic", lambda: now_s)
    signals = EndSignals()
    assert not signals.is_second_request()
    now_s += SAME_REQUEST_S
    assert not signals.is_second_request()
    now_s += SAME_REQUEST_S
    assert signals.is_second_request()
