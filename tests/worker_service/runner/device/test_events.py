"""How a thread waits for a GPU."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from worker_service.runner.device import in_flight_step
from worker_service.runner.device.in_flight_step import CudaEvent


@pytest.fixture(autouse=True)
def _forget_cores() -> Iterator[None]:
    in_flight_step._sleeps.cache_clear()
    yield
    in_flight_step._sleeps.cache_clear()


@pytest.mark.parametrize(
    ("num_cores", "sleeps"), [(1, True), (2, True), (4, True), (5, False), (64, False)]
)
def test_it_sleeps_where_cores_are_few(
    monkeypatch: pytest.MonkeyPatch, num_cores: int, sleeps: bool
) -> None:
    made: list[dict[str, Any]] = []

    class Event:
        def __init__(self, **options: Any) -> None:
            made.append(options)

        def record(self) -> None:
            pass

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(in_flight_step, "num_usable_cores", lambda: num_cores)
    CudaEvent()
    assert made == [{"enable_timing": True, "blocking": sleeps}]
