"""The most that this machine reads from memory and multiplies in a second.

    python -m benchmarks.ceilings --dtype bfloat16

Measured in a process of its own, in the same run as what is compared with it: the best of several
ways to read, and of matrix products of several sizes as the worker makes them. Prints JSON.

The best way is what a short trial of each finds; its rate is the mean of a second. A host that
others share gives its memory's best moments to nobody for as long as a run lasts: 30 to 57 GB/s
were seen within six seconds.
"""

import argparse
import json
import math
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from statistics import harmonic_mean

import torch
from torch import Tensor

from benchmarks.shapes import BYTES_PER_VALUE
from worker_service.models.onednn_weight import OneDNNWeight
from worker_service.models.packed_weight import can_pack, pack

READ_BYTES = 2**30
"""Far more than caches hold."""
TRIALS = 3
"""Of each way."""
TRIAL_S, SUSTAINED_S = 0.05, 1.0
"""At least, of a trial and of what is measured."""

Way = tuple[float, Callable[[], object]]
"""Bytes or floating-point operations, and how they are read or done."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Ceilings:
    """Of one machine in one dtype."""

    read_bytes_per_s: float
    flops_per_s: float

    def mean(self, other: "Ceilings") -> "Ceilings":
        """Of both times together."""
        return Ceilings(
            read_bytes_per_s=harmonic_mean((self.read_bytes_per_s, other.read_bytes_per_s)),
            flops_per_s=harmonic_mean((self.flops_per_s, other.flops_per_s)),
        )


def measure_apart(dtype: str, device: str, threads: int) -> Ceilings:
    """Measured in another process, whose threads and memory are gone afterwards."""
    flags = ["--dtype", dtype, "--device", device, "--threads", str(threads)]
    command = [sys.executable, "-m", "benchmarks.ceilings", *flags]
    environment = os.environ | {"PYTHONPATH": ":".join(sys.path)}
    done = subprocess.run(command, check=True, capture_output=True, text=True, env=environment)
    return Ceilings(**json.loads(done.stdout))


@torch.inference_mode()
def measure(dtype: torch.dtype, device: torch.device) -> Ceilings:
    """The best of all ways."""
    return Ceilings(
        read_bytes_per_s=_best_rate(list(_reads(device)), device),
        flops_per_s=_best_rate(list(_products(dtype, device)), device),
    )


def _best_rate(ways: list[Way], device: torch.device) -> float:
    """What the best way does in a second."""
    trials = [
        max(amount / _mean_seconds(work, TRIAL_S, device) for _ in range(TRIALS))
        for amount, work in ways
    ]
    amount, work = ways[trials.index(max(trials))]
    return amount / seconds(work, device)


def _reads(device: torch.device) -> Iterator[Way]:
    """Ways to look at `READ_BYTES`."""
    floats = torch.ones(READ_BYTES // 4, device=device)
    rows, vector = floats.view(-1, 4096), torch.ones(4096, device=device)
    yield READ_BYTES, floats.sum
    yield READ_BYTES, floats.amax
    yield READ_BYTES, lambda: rows @ vector
    if can_pack(torch.float32, device):
        packed = pack(rows)
        yield READ_BYTES, lambda: packed.apply(vector.unsqueeze(0))


def _products(dtype: torch.dtype, device: torch.device) -> Iterator[Way]:
    """Products of several sizes, each in the ways there are."""
    if device.type == "cuda":
        sizes = [(8192, 8192, 8192), (16_384, 4096, 4096)]
    else:
        sizes = [(rows, 1024, 4096) for rows in (64, 256, 1024, 2048)]
    for rows, inputs, outputs in sizes:
        x = torch.randn(rows, inputs, dtype=dtype, device=device)
        weight = torch.randn(outputs, inputs, dtype=dtype, device=device)
        for multiply in _products_of(x, weight):
            yield 2.0 * rows * inputs * outputs, multiply


def _products_of(x: Tensor, weight: Tensor) -> Iterator[Callable[[], Tensor]]:
    """One product, in the ways there are."""
    yield lambda: torch.nn.functional.linear(x, weight)
    if can_pack(x.dtype, x.device):
        packed = pack(weight)
        yield lambda: packed.apply(x)
    if x.device.type == "cpu" and OneDNNWeight.can_pack(x.dtype):
        reordered = OneDNNWeight(weight)
        yield lambda: reordered.apply(x)


def seconds(work: Callable[[], object], device: torch.device) -> float:
    """What `work` takes, the mean of a second."""
    return _mean_seconds(work, SUSTAINED_S, device)


def _mean_seconds(work: Callable[[], object], at_least_s: float, device: torch.device) -> float:
    count = max(1, math.ceil(at_least_s / _timed(work, 1, device)))  # and warm
    return _timed(work, count, device) / count


def _timed(work: Callable[[], object], count: int, device: torch.device) -> float:
    began = time.perf_counter()
    for _ in range(count):
        work()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - began


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--dtype", default="bfloat16", choices=list(BYTES_PER_VALUE))
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    args = parser.parse_args(arguments)
    torch.set_num_threads(args.threads)
    print(json.dumps(asdict(measure(getattr(torch, args.dtype), torch.device(args.device)))))


if __name__ == "__main__":
    main()
