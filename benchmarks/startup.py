"""Time from a server's launch to its first token, and its peak memory.

    python -m benchmarks.startup --shape llama-160m --vllm-python ENVIRONMENT/bin/python

`pagewire serve` with its three services against vLLM's API server: the same checkpoint, the same
memory for KV, the same limits of a batch. They run in turns, and nothing else runs. The first turn
of each does not count: it fills the caches of compiled code that both keep on disk, and that of the
file system. Memory is the total of all processes of a server, with shared pages counted once
(proportional set size), at its peak from the launch to the end of the *mixed* workload.
"""

import argparse
import asyncio
import statistics
import threading
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Self

import numpy as np

from benchmarks.engines.engine import Settings
from benchmarks.engines.servers import ServedPagewire, ServedVllm, Server
from benchmarks.engines.workloads import WORKLOADS
from benchmarks.measuring.machine import ForeignLoad
from benchmarks.measuring.processes import exit_on_sigterm, resident_bytes
from benchmarks.measuring.tables import publish
from benchmarks.offline import add_common, settings_of
from pagewire_cli.load.workload import Arrival

SAMPLE_S = 0.1
OURS = "pagewire"
COLUMNS = {
    "shape": "model",
    "dtype": "dtype",
    "engine": "server",
    "first_token_s": "launch to first token, s",
    "first_token_s_worst": "at worst",
    "times_pagewire_first_token": "÷ ours",
    "peak_mib": "peak memory, MiB",
    "times_pagewire_peak": "÷ ours",
}
"""Titles by the names in a row."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Start:
    """One server's launch and load."""

    first_token_s: float
    peak_mib: float
    foreign_cores: float


class PeakMemory:
    """The most that a process and its descendants hold while this is entered."""

    def __init__(self, pid: int) -> None:
        self.peak_bytes = 0
        self._pid = pid
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def _watch(self) -> None:
        while not self._ended.wait(SAMPLE_S):
            self.peak_bytes = max(self.peak_bytes, resident_bytes(self._pid))

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()


async def start(server: Server, settings: Settings) -> Start:
    """Launch, request a token, run a workload, end."""
    scale = settings.shape.scale if settings.device == "cpu" else 1.0
    draw = np.random.default_rng(0)
    jobs = WORKLOADS["mixed"].make_jobs(draw, settings.shape.vocab_size, scale)
    load = ForeignLoad()
    async with server.launched():
        with PeakMemory(server.pid) as memory:
            await server.wait_ready()
            foreign = load.cores
            await server.run([Arrival(0.0, job.prompt, job.num_output_tokens) for job in jobs])
        return Start(
            first_token_s=round(server.first_token_s, 2),
            peak_mib=round(memory.peak_bytes / 2**20),
            foreign_cores=foreign,
        )


def measure(servers: Sequence[Server], settings: Settings, repeats: int) -> dict[str, list[Start]]:
    """All servers in turns, after a turn that does not count."""
    starts: dict[str, list[Start]] = {server.name: [] for server in servers}
    for turn in range(repeats + 1):
        for server in servers:
            seen = asyncio.run(start(server, settings))
            print(f"{server.name}: {seen}" + ("" if turn else " (does not count)"), flush=True)
            if turn:
                starts[server.name].append(seen)
    return starts


def compare(starts: Mapping[str, Sequence[Start]]) -> list[dict[str, Any]]:
    """A line for each server: medians, and how many times ours they are."""

    def median(name: str, field: str) -> float:
        return round(statistics.median(getattr(one, field) for one in starts[name]), 2)

    return [
        {
            "engine": name,
            "first_token_s": median(name, "first_token_s"),
            "first_token_s_worst": max(one.first_token_s for one in its),
            "peak_mib": median(name, "peak_mib"),
            "times_pagewire_first_token": round(
                median(name, "first_token_s") / median(OURS, "first_token_s"), 2
            ),
            "times_pagewire_peak": round(median(name, "peak_mib") / median(OURS, "peak_mib"), 2),
        }
        for name, its in starts.items()
    ]


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure each shape in each dtype; print, and write the results."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add_common(parser)
    parser.add_argument("--repeats", type=int, default=3)
    args = parser.parse_args(arguments)
    exit_on_sigterm()
    rows: list[dict[str, Any]] = []
    runs: list[dict[str, Any]] = []
    for shape in args.shape:
        for dtype in args.dtype:
            settings = settings_of(args, shape, dtype)
            ours = ServedPagewire(settings, "gRPC")
            ours.name = OURS  # It has no second interface here.
            servers: list[Server] = [ours]
            if args.vllm_python is not None:
                servers.append(ServedVllm(args.vllm_python.absolute(), settings))
            starts = measure(servers, settings, args.repeats)
            what = {"shape": shape, "dtype": dtype}
            rows += [what | row for row in compare(starts)]
            runs += [
                what | {"engine": n, "starts": [asdict(s) for s in its]}
                for n, its in starts.items()
            ]
    facts = f"{args.kv_cache_gib} GiB for KV. Medians of {args.repeats}."
    foreign_cores = max(start["foreign_cores"] for run in runs for start in run["starts"])
    publish("startup", facts, COLUMNS, rows, foreign_cores, args.results, runs=runs)


if __name__ == "__main__":
    main()
