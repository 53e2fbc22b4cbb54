"""Throughput of 1, 2, 4 ... simulated worker groups through one scheduler core.

    python -m benchmarks.many_groups --groups 1 2 4 8 16 --step-us 20000 5000

The core is a process of its own, and so is each worker, whose steps sleep as long as a device would
compute. A bare frontend keeps the batch of every group full: a quarter more requests are open than
the batches hold. Prompts share no prefix. Linear is the throughput of one group times the number of
groups.

Rounds go from few groups to many, each with the processor time of all processes. The bottleneck of
a round is reported only if it is clear: a process that uses nearly a whole core, or all processes
together if they use nearly all cores. Otherwise "core µs per step" gives the maximum number of
steps per second of the core process, since it does nothing else.
"""

import asyncio
import os
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import grpc

from benchmarks.machine import ForeignLoad
from benchmarks.processes import processor_seconds
from benchmarks.tables import publish, script_parser
from pagewire.v1 import scheduler_service_pb2 as pb
from pagewire.v1.scheduler_service_pb2_grpc import SchedulerServiceStub
from tests.support.attached_frontend import AttachedFrontend, submission
from tests.support.cluster import Cluster

MODEL = "simulated"

OPEN_PER_PLACE = 1.25
"""Open requests per sequence of a batch; some always wait."""

BUSY = 0.9
"""Share of a core, or of all cores, from which it counts as the bottleneck."""

_WARM_UP_ANSWERS = 2
"""Completed requests per open request before a round counts."""

_START_TIMEOUT_S = 120.0
_INT32_BYTES = 4
_LOOK_S = 0.05

Row = dict[str, float | int | str]


@dataclass(frozen=True, kw_only=True, slots=True)
class Shape:
    """The properties of all groups and requests."""

    step_us: int
    rows: int
    """Sequences in the batch of each group."""
    prompt_tokens: int
    output_tokens: int


class BareFrontend(AttachedFrontend):
    """A frontend without clients, text or streams; an asynchronous context manager.

    It keeps a number of greedy requests of one shape open and counts their tokens, column by
    column, so that it uses much less processor time than the core.
    """

    def __init__(self, core_address: str, shape: Shape) -> None:
        super().__init__(core_address)
        self.num_tokens = 0
        """Number of output tokens received."""
        self.num_finished = 0
        self._shape = shape
        self._num_submitted = 0
        self._has_room = asyncio.Event()

    async def run(self, num_open: int, is_over: Callable[[], bool]) -> None:
        """Keep `num_open` requests open until `is_over`; surplus requests run to completion.

        Raises RuntimeError if one fails, or the core ends the stream.
        """
        while not is_over():
            self._has_room.clear()
            num_missing = num_open - (self._num_submitted - self.num_finished)
            if num_missing > 0:
                submits = [self._next() for _ in range(num_missing)]
                await self.send(pb.FrontendMessage(submits=submits))
            with suppress(TimeoutError):
                await asyncio.wait_for(self._has_room.wait(), _LOOK_S)
            if self.failed or self.end:
                raise RuntimeError(f"the core failed: {self.failed or self.end}")

    def _next(self) -> pb.Submit:
        """A request whose prompt shares no prefix with others."""
        self._num_submitted += 1
        number, shape = self._num_submitted, self._shape
        prompt = [number % 30_000, number // 30_000] + [7] * (shape.prompt_tokens - 2)
        tokens = shape.output_tokens
        return submission(self.frontend_id, number, prompt, max_tokens=tokens, model=MODEL)

    def fold(self, message: pb.SchedulerMessage) -> None:
        """Count what ended, and tokens."""
        if message.HasField("models"):
            self.models = [model.name for model in message.models.models]
        self.failed |= {failed.handle: failed for failed in message.requests_failed}
        self.num_tokens += len(message.token_ids) // _INT32_BYTES
        if message.requests_finished:
            self.num_finished += len(message.requests_finished)
            self._has_room.set()


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

    def __init__(self, shape: Shape, cluster: Cluster, frontend: BareFrontend) -> None:
        self._shape = shape
        self._cluster = cluster
        self._frontend = frontend

    async def measure(self, num_groups: int, seconds: float) -> Row:
        """A line of the table."""
        for _ in range(num_groups - len(self._cluster.workers)):
            self._cluster.start_worker()
        await asyncio.to_thread(self._cluster.wait_num_ready, num_groups, _START_TIMEOUT_S)
        num_open = int(num_groups * self._shape.rows * OPEN_PER_PLACE)
        num_warm = self._frontend.num_finished + _WARM_UP_ANSWERS * num_open
        # Until ends are spread over steps.
        await self._frontend.run(num_open, lambda: self._frontend.num_finished >= num_warm)
        before = await self._sample()
        await self._frontend.run(num_open, lambda: time.monotonic() >= before.time + seconds)
        after = await self._sample()
        return self._row(num_groups, before, after)

    async def _sample(self) -> Sample:
        async with grpc.aio.insecure_channel(self._cluster.core_address) as channel:
            request = pb.SchedulerServiceGetStatusRequest()
            status = (await SchedulerServiceStub(channel).GetStatus(request)).status
        core = self._cluster.core
        assert core is not None
        return Sample(
            time=time.monotonic(),
            num_tokens=self._frontend.num_tokens,
            num_finished=self._frontend.num_finished,
            num_steps=sum(group.num_steps for group in status.groups),
            core_s=processor_seconds(core.process.pid),
            workers_s=[processor_seconds(worker.process.pid) for worker in self._cluster.workers],
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
    with (
        TemporaryDirectory(prefix="pagewire-") as folder,
        Cluster(
            Path(folder),
            core_flags=[
                *("--max-num-seqs", str(shape.rows)),
                *("--lease-ms", "60000"),  # an overloaded machine is measured, too
                *("--log-level", "warning"),
            ],
            worker_flags=[
                *("--simulate", "--simulate-step-us", str(shape.step_us)),
                *("--simulate-gpu-blocks", "16384", "--log-level", "warning"),
            ],
        ) as cluster,
    ):
        cluster.start_core()
        async with BareFrontend(cluster.core_address, shape) as frontend:
            bench = Bench(shape, cluster, frontend)
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
        )
        rows += asyncio.run(run(shape, args.groups, args.seconds))
    facts = (
        f"Batches of {args.rows}, prompts of {args.prompt_tokens} tokens, answers of "
        f"{args.output_tokens}; {args.seconds:g} s a line."
    )
    publish("many_groups", facts, COLUMNS, rows, load.cores, args.results)


if __name__ == "__main__":
    main()
