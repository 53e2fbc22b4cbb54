"""The most that this machine reads from memory and multiplies in a second.

    python -m benchmarks.ceilings --dtype bfloat16

Measured in a process of its own, in the same run as what is compared with it: the best of several
ways to read, and of matrix products of several sizes as the worker makes them. Prints JSON.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass

import torch
from torch import Tensor

from benchmarks.shapes import BYTES_PER_VALUE
from worker_service.models.onednn_weight import OneDNNWeight
from worker_service.models.packed_weight import can_pack, pack

READ_BYTES = 2**30
"""Far more than caches hold."""
REPEATS = 5
_MIN_SECONDS = 0.05
"""What is quicker is repeated within one measurement."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Ceilings:
    """Of one machine in one dtype."""

    read_bytes_per_s: float
    flops_per_s: float

    def best(self, other: "Ceilings") -> "Ceilings":
        """The higher of each."""
        return Ceilings(
            read_bytes_per_s=max(self.read_bytes_per_s, other.read_bytes_per_s),
            flops_per_s=max(self.flops_per_s, other.flops_per_s),
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
        read_bytes_per_s=max(READ_BYTES / seconds(read, device) for read in _reads(device)),
        flops_per_s=max(
            flops / seconds(multiply, device) for flops, multiply in _products(dtype, device)
        ),
    )


def _reads(device: torch.device) -> Iterator[Callable[[], object]]:
    """Ways to look at `READ_BYTES`."""
    floats = torch.ones(READ_BYTES // 4, device=device)
    yield floats.sum
    yield floats.amax
    rows = floats.view(-1, 4096)
    vector = torch.ones(4096, device=device)
    yield lambda: rows @ vector
    if can_pack(torch.float32, device):
        packed = pack(rows)
        del floats, rows
        yield lambda: packed.apply(vector.unsqueeze(0))


def _products(
    dtype: torch.dtype, device: torch.device
) -> Iterator[tuple[float, Callable[[], object]]]:
    """Their floating-point operations, and how they are done."""
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
    """What `work` takes at best."""
    once = _timed(work, 1, device)  # and warm
    count = max(1, round(_MIN_SECONDS / once))
    return min(_timed(work, count, device) for _ in range(REPEATS)) / count


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
