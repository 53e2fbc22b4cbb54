"""Durations of single kernels, without the time to launch them."""

import statistics
import time
from collections.abc import Callable

import torch

Operation = Callable[[], object]

_CALLS_PER_GRAPH = 10


def median_seconds(
    operation: Operation, device: torch.device, *, repeats: int, capture: bool = True
) -> float:
    """Return the seconds of one call: the median of `repeats` measurements.

    On a GPU, a measurement is the replay of a CUDA graph of ten calls between two events; without
    `capture`, for operations that cannot be captured, it is one call between two events.
    """
    for _ in range(2):
        operation()
    if device.type != "cuda":
        return statistics.median(_wall_seconds(operation) for _ in range(repeats))
    torch.cuda.synchronize(device)
    if not capture:
        return statistics.median(_event_seconds(operation) for _ in range(repeats))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(_CALLS_PER_GRAPH):
            operation()
    graph.replay()
    seconds = statistics.median(_event_seconds(graph.replay) for _ in range(repeats))
    return seconds / _CALLS_PER_GRAPH


def _wall_seconds(operation: Operation) -> float:
    started = time.perf_counter()
    operation()
    return time.perf_counter() - started


def _event_seconds(operation: Operation) -> float:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    operation()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / 1000
