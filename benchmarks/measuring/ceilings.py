"""This machine's highest memory bandwidth and arithmetic throughput.

    python -m benchmarks.measuring.ceilings --dtype bfloat16

Measured in a process of its own, in the same run as the figures that are compared with it: the best
of several ways to read memory, and of matrix products of several sizes in all implementations that
the worker uses. Prints JSON.

A short trial of each way selects the best one, whose rate is the mean over a few tenths of a
second. On a shared host, bandwidth varies within a run: 30 to 57 GB/s were measured within six
seconds. Therefore the process stays alive (`CeilingsProcess`), to measure just before and after
each timing.
"""

import argparse
import json
import math
import signal
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import chain
from statistics import harmonic_mean

import torch
from torch import Tensor

from benchmarks.measuring.json_lines import LineProcess, take_stdout
from benchmarks.measuring.processes import send_signal
from benchmarks.models.model_shapes import BYTES_PER_VALUE
from worker_service.models.linear.packing import can_pack, pack

READ_BYTES = 2**30
"""Much larger than the caches."""
TRIALS = 3
"""Number of short trials of each way, of which the fastest counts."""
TRIAL_S, SUSTAINED_S = 0.05, 0.3
"""Minimum durations of a trial, and of each of the three parts of a measurement."""

Way = tuple[float, Callable[[], object]]
"""Number of bytes or floating-point operations, and the function that reads or computes them."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Ceilings:
    """Ceilings of one machine in one dtype."""

    read_bytes_per_s: float
    flops_per_s: float

    def mean(self, other: "Ceilings") -> "Ceilings":
        """The mean of two measurements."""
        return Ceilings(
            read_bytes_per_s=harmonic_mean((self.read_bytes_per_s, other.read_bytes_per_s)),
            flops_per_s=harmonic_mean((self.flops_per_s, other.flops_per_s)),
        )


class CeilingsProcess(LineProcess):
    """A process that measures on request, and is stopped in between, because its threads would
    spin."""

    def __init__(self, dtype: str, device: str, threads: int) -> None:
        flags = ["--dtype", dtype, "--device", device, "--threads", str(threads), "--when-asked"]
        command = [sys.executable, "-m", "benchmarks.measuring.ceilings", *flags]
        super().__init__(command, {"PYTHONPATH": ":".join(sys.path)})
        send_signal(self.pid, signal.SIGSTOP)

    def measure(self) -> Ceilings:
        """Measure for about a second."""
        send_signal(self.pid, signal.SIGCONT)
        measured = Ceilings(**self.ask({}))
        send_signal(self.pid, signal.SIGSTOP)
        return measured

    def close(self, timeout_s: float = 30.0) -> None:
        """Stop the process."""
        send_signal(self.pid, signal.SIGCONT)
        super().close(timeout_s)


class Fastest:
    """The fastest of several ways, chosen by short trials of each; measures its current speed."""

    def __init__(self, ways: Iterable[Way], device: torch.device) -> None:
        def rate(way: Way) -> float:
            amount, work = way
            return max(amount / _mean_seconds(work, TRIAL_S, device) for _ in range(TRIALS))

        self._amount, self._work = max(ways, key=rate)
        self._device = device

    def rate(self) -> float:
        """Bytes or operations per second, over some tenths of a second."""
        return self._amount / seconds(self._work, self._device)


def reads(device: torch.device) -> Fastest:
    """The fastest way to read memory."""
    return Fastest(_reads(device), device)


def products(dtype: torch.dtype, device: torch.device) -> Fastest:
    """The fastest matrix product."""
    return Fastest(_products(dtype, device), device)


def _reads(device: torch.device) -> Iterator[Way]:
    """Ways to read `READ_BYTES`."""
    floats = torch.ones(READ_BYTES // 4, device=device)
    rows, vector = floats.view(-1, 4096), torch.ones(4096, device=device)
    yield READ_BYTES, floats.sum
    yield READ_BYTES, floats.amax
    yield READ_BYTES, lambda: rows @ vector
    if can_pack(torch.float32, device):
        packed = pack(rows)
        yield READ_BYTES, lambda: packed.apply(vector.unsqueeze(0))


def _products(dtype: torch.dtype, device: torch.device) -> Iterator[Way]:
    """Products of several sizes, each in all available ways."""
    if device.type == "cuda":
        sizes = [(8192, 8192, 8192), (16_384, 4096, 4096)]
    else:
        sizes = [(rows, 2080, 1024) for rows in (64, 256, 1024, 2048)]
    for rows, inputs, outputs in sizes:
        x = torch.randn(rows, inputs, dtype=dtype, device=device)
        weight = torch.randn(outputs, inputs, dtype=dtype, device=device)
        for multiply in _products_of(x, weight):
            yield 2.0 * rows * inputs * outputs, multiply


def _products_of(x: Tensor, weight: Tensor) -> Iterator[Callable[[], Tensor]]:
    """One product, in all available ways."""
    yield lambda: torch.nn.functional.linear(x, weight)
    if can_pack(x.dtype, x.device):
        packed = pack(weight)
        yield lambda: packed.apply(x)


def seconds(work: Callable[[], object], device: torch.device) -> float:
    """Duration of `work`, as the mean of some tenths of a second."""
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


@torch.inference_mode()
def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--dtype", default="bfloat16", choices=list(BYTES_PER_VALUE))
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument(
        "--when-asked", action="store_true", help="again for each line of the standard input"
    )
    args = parser.parse_args(arguments)
    torch.set_num_threads(args.threads)
    answers = take_stdout() if args.when_asked else sys.stdout
    device = torch.device(args.device)
    read, product = reads(device), products(getattr(torch, args.dtype), device)
    for _ in chain([""], sys.stdin if args.when_asked else []):
        # Reads come first and last, closest to the timings before and after: bandwidth drifts most.
        first, flops_per_s = read.rate(), product.rate()
        read_bytes_per_s = harmonic_mean((first, read.rate()))
        measured = Ceilings(read_bytes_per_s=read_bytes_per_s, flops_per_s=flops_per_s)
        print(json.dumps(asdict(measured)), file=answers, flush=True)


if __name__ == "__main__":
    main()
