"""How long a device stands idle between steps, by pipeline depth.

    python -m benchmarks.pipelining

A worker process of its own is driven by the core service's step stream over gRPC on a unix socket:
a simulated one whose steps cost 2, 5 and 10 ms, and the real one on CPU with the embedded model.
The worker's own clock gives the start and end of each step; idle is the time from one step's end
to the next one's start. All sequences decode throughout. At depth 1 that is the round trip, with
results, scheduling and plan in it; from depth 2 on the next plan should be there already.

The depths take turns, so that a machine whose speed drifts harms them alike.
"""

import argparse
import asyncio
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import median, quantiles

from benchmarks.machine import ForeignLoad, save
from benchmarks.observed_worker import Load, ObservedCall, ObservedWorker
from benchmarks.tables import print_table, script_parser

PROMPT_TOKENS = 16
SETTLING_STEPS = 10
"""Steps at a run's start, with the prefills, and at its end that do not count."""

Row = dict[str, object]


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """A kind of worker."""

    name: str
    flags: Sequence[str]


@dataclass(frozen=True, kw_only=True, slots=True)
class Steps:
    """What the worker's clock said of a run's steps, in microseconds."""

    idle_us: list[int]
    """Between each step and the next."""
    step_us: list[int]
    ahead: list[bool]
    """Whether the next plan had left the core when a step's result came in."""

    @classmethod
    def of(cls, call: ObservedCall) -> "Steps":
        """Those of steady decoding."""
        timings = call.timings[SETTLING_STEPS:-SETTLING_STEPS]
        written = call.num_written_at_result[SETTLING_STEPS:-SETTLING_STEPS]
        return cls(
            idle_us=[after.started_us - before.finished_us for before, after in pairwise(timings)],
            step_us=[timing.finished_us - timing.started_us for timing in timings],
            ahead=[
                num_written > number
                for number, num_written in enumerate(written, SETTLING_STEPS + 1)
            ],
        )

    def __add__(self, other: "Steps") -> "Steps":
        return Steps(
            idle_us=self.idle_us + other.idle_us,
            step_us=self.step_us + other.step_us,
            ahead=self.ahead + other.ahead,
        )


def simulated(step_us: int) -> Case:
    """A worker whose steps take so long, whatever is in them."""
    flags = ["--simulate", "--simulate-step-us", str(step_us)]
    return Case(name=f"simulated, {step_us / 1000:g} ms", flags=flags)


EMBEDDED = Case(
    name="embedded model on CPU",
    flags=["--model", "embedded", "--device", "cpu", "--dtype", "float32"],
)


async def measure(case: Case, depths: Sequence[int], load: Load, turns: int) -> list[Row]:
    """A line for each depth."""
    steps: dict[int, Steps] = {}
    with tempfile.TemporaryDirectory() as folder:
        async with ObservedWorker(Path(folder), case.flags) as worker:
            for _ in range(turns):
                for depth in depths:
                    seen = Steps.of(await worker.run(load, pipeline_depth=depth))
                    steps[depth] = steps[depth] + seen if depth in steps else seen
    return [_row(case, depth, load.num_seqs, seen) for depth, seen in steps.items()]


def _row(case: Case, depth: int, num_seqs: int, steps: Steps) -> Row:
    centiles = quantiles(steps.idle_us, n=100)
    idle, busy = sum(steps.idle_us), sum(steps.step_us)
    return {
        "worker": case.name,
        "running": num_seqs,
        "pipeline_depth": depth,
        "steps": len(steps.step_us),
        "step_us_p50": round(median(steps.step_us)),
        "idle_us_p50": round(centiles[49]),
        "idle_us_p99": round(centiles[98]),
        "idle_share": round(idle / (idle + busy), 4),
        "plans_sent_ahead": round(sum(steps.ahead) / len(steps.ahead), 4),
    }


COLUMNS = {
    "worker": "worker",
    "running": "running",
    "pipeline_depth": "depth",
    "step_us_p50": "step p50, µs",
    "idle_us_p50": "idle p50, µs",
    "idle_us_p99": "idle p99, µs",
    "idle_share": "idle, share of time",
    "plans_sent_ahead": "plans sent ahead",
}
"""Titles by the names in a row."""


async def run(arguments: argparse.Namespace) -> list[Row]:
    """All cases, one after the other."""
    cases = [simulated(step_us) for step_us in arguments.step_us]
    if not arguments.no_model:
        cases.append(EMBEDDED)
    load = Load(
        num_seqs=arguments.running,
        prompt_tokens=PROMPT_TOKENS,
        output_tokens=arguments.steps + 2 * SETTLING_STEPS,
    )
    rows: list[Row] = []
    for case in cases:
        rows += await measure(case, arguments.depth, load, arguments.turns)
    return rows


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, print, and write the results."""
    parser = script_parser(__doc__)
    parser.add_argument("--step-us", type=int, nargs="*", default=[2000, 5000, 10_000])
    parser.add_argument("--depth", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--running", type=int, default=64)
    parser.add_argument("--steps", type=int, default=200, help="steps of each turn that count")
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--no-model", action="store_true", help="simulated workers only")
    args = parser.parse_args(arguments)
    load = ForeignLoad()
    rows = asyncio.run(run(args))
    print_table(rows, "the device between steps of steady decoding", COLUMNS, width=140)
    print(f"written to {save('pipelining', {'rows': rows}, load.cores, args.results)}")


if __name__ == "__main__":
    main()
