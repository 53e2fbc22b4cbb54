"""Idle time of a device between steps, by pipeline depth.

    python -m benchmarks.pipelining

A worker process is driven by the core service's own driver and step stream over gRPC on a unix
socket; only registration is left out. It is a simulated one whose steps cost 2, 5 and 10 ms, and
the real one on CPU with the embedded model. The worker's own clock gives the start and end of each
step; idle is the time from one step's end to the next one's start. All sequences decode throughout.
At depth 1 that is the round trip, with results, scheduling and plan in it; from depth 2 on the next
plan should be there already.

The depths take turns, so that a machine whose speed drifts affects them equally.
"""

import argparse
import asyncio
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import median, quantiles
from typing import Any, Self

import grpc

from benchmarks.machine import ForeignLoad, save
from benchmarks.tables import print_table, script_parser
from pagewire.v1 import plan_pb2, sampling_pb2
from pagewire.v1 import worker_service_pb2 as worker_pb
from pagewire.v1.worker_service_pb2_grpc import WorkerServiceStub
from scheduler_service.core import (
    EngineOutputs,
    Request,
    SchedulerConfig,
    SchedulerCore,
    WorkerGroupCapacity,
)
from scheduler_service.core_service.counters import StepCounters
from scheduler_service.core_service.driver import CoreDriver
from scheduler_service.core_service.step_stream import StepStream
from scheduler_service.core_service.step_watchdog import StepTimeout, StepTimes
from scheduler_service.tasks import run_until_first
from service_common.grpc_options import channel_options
from tools.launch import Service, module

PROMPT_TOKENS = 16
SETTLING_STEPS = 10
"""Steps at a run's start, with the prefills, and at its end that do not count."""

Row = dict[str, object]


GROUP = "g"
FRONTEND = "f"
START_TIMEOUT_S = 60.0
END_TIMEOUT_S = 30.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Load:
    """Sequences that run together, all of one shape."""

    num_seqs: int
    prompt_tokens: int
    output_tokens: int

    def request(self, index: int, model: str) -> Request:
        """One of them; nothing but its length ends it."""
        return Request(
            frontend_id=FRONTEND,
            handle=index + 1,
            request_id=str(index),
            model=model,
            prompt_token_ids=[10 + index] * self.prompt_tokens,
            max_tokens=self.output_tokens,
            sampling=sampling_pb2.SamplerParams(top_p=1.0, repetition_penalty=1.0),
        )


class ObservedCall:
    """An `ExecuteSteps` call that keeps the timings of all results."""

    def __init__(self, call: Any) -> None:
        self.timings: list[plan_pb2.StepTimings] = []
        self.num_written_at_result: list[int] = []
        """Plans that had left when each result came in."""
        self._call = call
        self._num_written = 0

    async def write(self, request: worker_pb.ExecuteStepsRequest) -> None:
        """Send a plan."""
        self._num_written += 1
        await self._call.write(request)

    async def read(self) -> Any:
        """The next result, or EOF."""
        response = await self._call.read()
        if response is not grpc.aio.EOF:
            self.timings.append(response.result.timings)
            self.num_written_at_result.append(self._num_written)
        return response

    async def code(self) -> grpc.StatusCode:
        """The status of a call that has ended."""
        code: grpc.StatusCode = await self._call.code()
        return code

    async def details(self) -> str:
        """The message of that status."""
        details: str = await self._call.details()
        return details


class Ends:
    """A frontend that only waits until all of its requests have ended."""

    def __init__(self, num_requests: int) -> None:
        self.all_ended = asyncio.Event()
        self._num_left = num_requests

    def deliver(self, outbox: EngineOutputs) -> None:
        """Count the ends."""
        for _, error in outbox.requests_failed:
            raise error
        self._num_left -= len(outbox.requests_finished)
        if self._num_left == 0:
            self.all_ended.set()


class ObservedWorker:
    """A worker process on a unix socket; an asynchronous context manager."""

    def __init__(self, folder: Path, flags: Sequence[str]) -> None:
        self._address = f"unix:{folder}/worker.sock"
        command = module("worker_service", "--listen", self._address, *flags)
        self._service = Service("worker", command, folder / "worker.log")
        self._epoch = 0

    async def __aenter__(self) -> Self:
        self._channel = grpc.aio.insecure_channel(self._address, options=channel_options())
        self._stub = WorkerServiceStub(self._channel)
        async with asyncio.timeout(START_TIMEOUT_S):
            self._info = await self._wait_loaded()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._channel.close()
        await asyncio.to_thread(self._service.end, END_TIMEOUT_S)

    async def _wait_loaded(self) -> worker_pb.GetInfoResponse:
        while True:
            try:
                return await self._stub.GetInfo(worker_pb.GetInfoRequest(), wait_for_ready=True)
            except grpc.aio.AioRpcError as error:
                if error.code() is not grpc.StatusCode.UNAVAILABLE:
                    raise
                await asyncio.sleep(0.05)

    async def run(self, load: Load, *, pipeline_depth: int) -> ObservedCall:
        """Run all sequences together from first to last token; returns the observed call."""
        self._epoch += 1
        capacity = self._capacity(load)
        await self._stub.InitializeCache(
            worker_pb.InitializeCacheRequest(
                num_gpu_blocks=capacity.num_gpu_blocks, num_cpu_blocks=0, epoch=self._epoch
            )
        )
        config = SchedulerConfig(
            max_num_seqs=load.num_seqs,
            max_num_batched_tokens=load.num_seqs * (load.prompt_tokens + 1),
            watermark=0.0,
            pipeline_depth=pipeline_depth,
        )
        driver = CoreDriver(SchedulerCore(config))
        ends = Ends(load.num_seqs)
        driver.add_frontend(FRONTEND, ends)
        for index in range(load.num_seqs):
            driver.core.submit(load.request(index, capacity.model), driver.clock())
        driver.follow_up()
        call = self._stub.ExecuteSteps()
        try:
            return await self._execute(ObservedCall(call), driver, capacity, ends)
        finally:
            call.cancel()
            driver.close()

    async def _execute(
        self, call: ObservedCall, driver: CoreDriver, capacity: WorkerGroupCapacity, ends: Ends
    ) -> ObservedCall:
        """Step until all requests have ended. Raises the error that ends the stream before."""
        work = driver.add_worker_group(capacity)
        stream = StepStream(
            [call],  # type: ignore[list-item]
            driver,
            group_id=GROUP,
            epoch=self._epoch,
            sampler=0,
            times=StepTimes(StepTimeout()),
            meter=StepCounters(),
        )
        await run_until_first(stream.run(work), ends.all_ended.wait())
        return call

    def _capacity(self, load: Load) -> WorkerGroupCapacity:
        """Room for all of a load's sequences."""
        model = self._info.model
        blocks_each = -(-(load.prompt_tokens + load.output_tokens) // model.block_size)
        return WorkerGroupCapacity(
            worker_group_id=GROUP,
            model=model.name,
            num_gpu_blocks=blocks_each * load.num_seqs,
            num_cpu_blocks=0,
            block_size=model.block_size,
            max_model_len=model.max_model_len,
            vocab_size=model.vocab_size,
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """A kind of worker."""

    name: str
    flags: Sequence[str]


@dataclass(frozen=True, kw_only=True, slots=True)
class Steps:
    """The steps of a run by the worker's clock, in microseconds."""

    idle_us: list[int]
    """Between each step and the next."""
    step_us: list[int]
    ahead: list[bool]
    """Whether the next plan had left the core when a step's result came in."""

    @classmethod
    def of(cls, call: ObservedCall) -> "Steps":
        """The steps of steady decoding."""
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
    """A worker whose steps all take `step_us` microseconds."""
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
    title = f"the device between steps of steady decoding, {args.running} sequences"
    print_table(rows, title, COLUMNS, width=140)
    save("pipelining", {"rows": rows}, load.cores, args.results)


if __name__ == "__main__":
    main()
