"""Throughput of whole workloads, Pagewire through its services against `transformers`.

    python -m benchmarks.offline --dtype float32 --repeats 3

The engines take turns, workload by workload, and medians are compared, so that a machine whose
speed drifts harms both alike. Weights are random. Results are written to `benchmarks/results/`.
"""

import argparse
import json
import platform
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from rich.console import Console
from rich.table import Table

from benchmarks.engines import LLAMA_160M, Engine, Pagewire, Transformers
from benchmarks.workloads import WORKLOADS, Workload

RESULTS = Path(__file__).parent / "results"

Rates = dict[str, dict[str, float]]
"""Tokens per second by workload and engine."""


def measure(engines: Sequence[Engine], repeats: int) -> Rates:
    """Medians over `repeats` turns, after one that is not counted."""
    draw = np.random.default_rng(0)
    return {w.name: measure_workload(w, engines, repeats, draw) for w in WORKLOADS}


def measure_workload(
    workload: Workload, engines: Sequence[Engine], repeats: int, draw: np.random.Generator
) -> dict[str, float]:
    rates: dict[str, list[float]] = {engine.name: [] for engine in engines}
    for turn in range(repeats + 1):
        for engine in engines:
            jobs = workload.make_jobs(draw, LLAMA_160M["vocab_size"])
            began = time.perf_counter()
            engine.run(jobs)
            if turn:
                taken = time.perf_counter() - began
                rates[engine.name].append(workload.num_tokens(jobs) / taken)
    return {name: statistics.median(values) for name, values in rates.items()}


def show(rates: Rates, title: str) -> None:
    table = Table("workload", "pagewire", "transformers", "ratio", title=title)
    for workload, row in rates.items():
        ours, theirs = row["pagewire"], row["transformers"]
        table.add_row(workload, f"{ours:.0f}", f"{theirs:.0f}", f"{ours / theirs:.2f}")
    Console().print(table)


def save(rates: Rates, dtype: str, repeats: int) -> Path:
    machine = {
        "processor": platform.processor() or platform.machine(),
        "threads": torch.get_num_threads(),
        "python": platform.python_version(),
        "torch": torch.__version__,
    }
    path = RESULTS / f"offline-160m-{dtype}.json"
    content = {"machine": machine, "dtype": dtype, "repeats": repeats, "tokens_per_second": rates}
    path.write_text(json.dumps(content, indent=2) + "\n")
    return path


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    parser.add_argument("--repeats", type=int, default=3)
    arguments = parser.parse_args()
    with (
        tempfile.TemporaryDirectory() as folder,
        Pagewire(Path(folder), LLAMA_160M, arguments.dtype) as pagewire,
        Transformers(LLAMA_160M, arguments.dtype) as transformers,
    ):
        rates = measure([pagewire, transformers], arguments.repeats)
    show(rates, f"Llama 160M, {arguments.dtype}, tokens/s")
    print(f"written to {save(rates, arguments.dtype, arguments.repeats)}")


if __name__ == "__main__":
    main()
