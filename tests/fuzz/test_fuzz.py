"""A short run of each kind; `make fuzz` makes long ones."""

import pytest

from tests.fuzz.run import TARGETS, run

NUM_CALLS = {"grpc": 1500, "http": 1000, "core": 500, "worker": 500}


@pytest.mark.parametrize("target", TARGETS)
def test_no_request_crashes_hangs_or_stays_open(target: str) -> None:
    outcome, _ = run(target, num_calls=NUM_CALLS[target], seed=7)
    assert outcome.harm == []
    assert outcome.num_requests >= NUM_CALLS[target] * 0.9
    assert len(outcome.answers) >= 3  # it was more than one way of being refused
