"""A short run of each kind; `make fuzz` makes long ones."""

import pytest

from tests.fuzz.run import run


@pytest.mark.parametrize(
    ("target", "num_calls"),
    [
        ("grpc", 160),
        pytest.param("grpc", 1600, marks=pytest.mark.long),
        ("http", 240),
        pytest.param("core", 1600, marks=pytest.mark.long),
        pytest.param("worker", 1600, marks=pytest.mark.long),
    ],
)
def test_no_request_crashes_hangs_or_stays_open(target: str, num_calls: int) -> None:
    outcome, _ = run(target, num_calls=num_calls, seed=1)
    assert outcome.harm == []
    assert outcome.num_requests >= num_calls * 0.8
    assert len(outcome.answers) >= 3  # it was more than one way of being refused
