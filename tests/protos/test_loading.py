"""How far a worker is, in words."""

import pytest

from pagewire.loading import describe_load
from pagewire.v1.status_pb2 import WorkerLoading


@pytest.mark.parametrize(
    ("done_bytes", "total_bytes", "remaining_s", "text"),
    [
        (0, 0, None, "downloading"),
        (999, 1000, None, "downloading 99 %"),
        (1000, 1000, 0.0, "downloading 100 %, about 0 s left"),
        (5, 0, 61.6, "downloading, about 62 s left"),
    ],
)
def test_a_load_is_its_phase_with_the_share_and_the_time_left_that_are_known(
    done_bytes: int, total_bytes: int, remaining_s: float | None, text: str
) -> None:
    load = WorkerLoading(
        phase="downloading",
        done_bytes=done_bytes,
        total_bytes=total_bytes,
        remaining_s=remaining_s,
    )
    assert describe_load(load) == text
