"""Throughput of many worker groups through one scheduler core, and where the core saturates.

    python -m benchmarks.many_groups --groups 1 2 4 8 16

One core process, and simulated workers as processes of their own, whose steps sleep as long as a
device would compute. A bare frontend keeps the batch of every group full: a quarter more requests
are open than the batches hold. Prompts share no prefix. Linear is the throughput of one group times
the number of groups.

    python -m benchmarks.many_groups --workers answering --groups 4 8 16 32 64 --step-us 20000 0

With `--workers answering`, workers check nothing, and many groups share a process, so that the core
process saturates first, as if workers were on other machines. Steps of length 0 show its maximum
throughput; there is no linear throughput to compare them with.

Rounds go from few groups to many, each with the processor time of all processes. The bottleneck of
a round is reported only if it is clear: a process that uses nearly a whole core, or all processes
together if they use nearly all cores. Otherwise "core µs per step" gives the maximum number of
steps per second of the core process, since it does nothing else.
"""

import asyncio
import os
import time
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass

import grpc

from benchmarks.core_and_workers import MODEL, BareFrontend, CoreAndWorkers
from benchmarks.machine import ForeignLoad, save
from benchmarks.tables import print_table, script_parser
from pagewire.v1 import scheduler_service_pb2 as pb
from pagewire.v1.scheduler_service_pb2_grpc import SchedulerServiceStub

OPEN_PER_PLACE = 1.25
"""Open requests per sequence of a batch; some always wait."""

_WARM_UP_ANSWERS = 2
"""Completed requests per open request before a round counts."""

BUSY = 0.9
"""Share of a core, or of all cores, from which it counts as the bottleneck."""

Row = dict[str, float | int | str]


@dataclass(frozen=True, kw_only=True, slots=True)
class Shape:
    """The properties of all groups and requests."""

    step_us: int
    rows: int
    """Sequences in the batch of each group."""
    prompt_tokens: int
    output_tokens: int
    checks_plans: bool
    """Whether workers are simulated ones, which check plans, or `null_workers`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Sample:
    """Counters and processor times at one moment."""

    time: float
    num_tokens: int
    num_finished: int
    num_steps: int
    core_s: float
    workers_s: list[float]
    frontend_s: float


class Bench:
    """A deployment that grows, and its load."""

    def __init__(self, shape: Shape, services: CoreAndWorkers, frontend: BareFrontend) -> None:
        self._shape = shape
        self._services = services
        self._frontend = frontend

    async def measure(self, num_groups: int, seconds: float) -> Row:
        """A line of the table."""
        await self._services.grow(num_groups)
        num_open = int(num_groups * self._shape.rows * OPEN_PER_PLACE)
        self._frontend.keep_open(num_open)
        for _ in range(_WARM_UP_ANSWERS):  # until ends are spread over steps
            await self._frontend.run_until_finished(num_open)
        before = await self._sample()
        await self._frontend.run(seconds)
        after = await self._sample()
        return self._row(num_groups, before, after)

    async def _sample(self) -> Sample:
        async with grpc.aio.insecure_channel(self._services.core_address) as channel:
            request = pb.SchedulerServiceGetStatusRequest()
            status = (await SchedulerServiceStub(channel).GetStatus(request)).status
        return Sample(
            time=time.monotonic(),
            num_tokens=self._frontend.num_tokens,
            num_finished=self._frontend.num_finished,
            num_steps=sum(group.num_steps for group in status.groups),
            core_s=self._services.core_seconds(),
            workers_s=self._services.worker_seconds(),
            frontend_s=time.process_time(),
        )

    def _row(self, num_groups: int, before: Sample, after: Sample) -> Row:
        seconds = after.time - before.time
        num_steps = after.num_steps - before.num_steps
        core_s = after.core_s - before.core_s
        workers = [b - a for a, b in zip(before.workers_s, after.workers_s, strict=True)]
        frontend_s = after.frontend_s - before.frontend_s
        return {
            "step_ms": self._shape.step_us / 1000,
            "rows": self._shape.rows,
            "groups": num_groups,
            "tokens_per_s": round((after.num_tokens - before.num_tokens) / seconds),
            "requests_per_s": round((after.num_finished - before.num_finished) / seconds, 1),
            "steps_per_s": round(num_steps / seconds, 1),
            "rows_per_step": round((after.num_tokens - before.num_tokens) / num_steps, 1),
            "core_cores": round(core_s / seconds, 3),
            "core_us_per_step": round(1e6 * core_s / num_steps),
            "worker_cores": round(max(workers) / seconds, 3),
            "all_worker_cores": round(sum(workers) / seconds, 3),
            "frontend_cores": round(frontend_s / seconds, 3),
        }


def compare(rows: Sequence[Row], num_cores: int) -> None:
    """Add to each line its ratio to linear throughput, and its bottleneck."""
    base = float(rows[0]["tokens_per_s"]) / float(rows[0]["groups"])
    for row in rows:
        if row["step_ms"]:  # else a group alone does as much as the core can
            row["of_linear"] = round(float(row["tokens_per_s"]) / (base * float(row["groups"])), 4)
        row["limited_by"] = _limit(row, num_cores)


def _limit(row: Row, num_cores: int) -> str:
    shares = {name: float(row[f"{name}_cores"]) for name in ("core", "worker", "frontend")}
    for name, share in shares.items():
        if share >= BUSY:
            return name
    total = shares["core"] + float(row["all_worker_cores"]) + shares["frontend"]
    return "machine" if total >= BUSY * num_cores else ""


async def run(shape: Shape, groups: Sequence[int], seconds: float) -> list[Row]:
    """All rounds, on one deployment."""
    async with AsyncExitStack() as stack:
        services = await stack.enter_async_context(
            CoreAndWorkers(
                step_us=shape.step_us,
                max_num_seqs=shape.rows,
                checks_plans=shape.checks_plans,
            )
        )
        frontend = await stack.enter_async_context(
            BareFrontend(
                services.core_address,
                MODEL,
                prompt_tokens=shape.prompt_tokens,
                output_tokens=shape.output_tokens,
            )
        )
        bench = Bench(shape, services, frontend)
        rows = [await bench.measure(num_groups, seconds) for num_groups in sorted(groups)]
    compare(rows, os.cpu_count() or 1)
    return rows


COLUMNS = {
    "step_ms": "step, ms",
    "groups": "groups",
    "tokens_per_s": "tokens/s",
    "of_linear": "of linear",
    "requests_per_s": "requests/s",
    "steps_per_s": "steps/s",
    "rows_per_step": "rows a step",
    "core_cores": "core process, cores",
    "core_us_per_step": "core, µs a step",
    "worker_cores": "a worker, cores",
    "all_worker_cores": "all workers",
    "frontend_cores": "load, cores",
    "limited_by": "limited by",
}
"""Titles by the names in a row."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, print, and write the results."""
    parser = script_parser(__doc__)
    parser.add_argument("--groups", type=int, nargs="+", default=[1, 2, 4, 8, 16])
    parser.add_argument("--step-us", type=int, nargs="+", default=[20_000, 5_000])
    parser.add_argument("--workers", choices=("simulated", "answering"), default="simulated")
    parser.add_argument("--rows", type=int, default=32, help="sequences in each group's batch")
    parser.add_argument("--prompt-tokens", type=int, default=64)
    parser.add_argument("--output-tokens", type=int, default=128)
    parser.add_argument("--seconds", type=float, default=10.0, help="of each round that count")
    args = parser.parse_args(arguments)
    load = ForeignLoad()
    rows: list[Row] = []
    for step_us in args.step_us:
        shape = Shape(
            step_us=step_us,
            rows=args.rows,
            prompt_tokens=args.prompt_tokens,
            output_tokens=args.output_tokens,
            checks_plans=args.workers == "simulated",
        )
        rows += asyncio.run(run(shape, args.groups, args.seconds))
    print_table(rows, "worker groups on one scheduler core", COLUMNS)
    name = "many_groups" if args.workers == "simulated" else "core_saturation"
    figures = {
        "workers": args.workers,
        "prompt_tokens": args.prompt_tokens,
        "output_tokens": args.output_tokens,
        "seconds": args.seconds,
        "rows": rows,
    }
    save(name, figures, load.cores, args.results)


if __name__ == "__main__":
    main()
