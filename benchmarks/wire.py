"""Cost of the wire between core and worker: sizes, conversions, round trips.

    python -m benchmarks.wire

- Sizes of plans and results, and the time of both ends to encode and decode them, with the
  services' own conversions, on plans of a real core. Bytes are those of the message; gRPC and
  HTTP/2 add 14 or more. Steady decoding has a budget of 16 bytes per sequence and step on average.
- Round trip time of messages of several sizes to another process, on a bidirectional gRPC stream
  like that of plans, with the services' channel options, by unix socket and loopback TCP.

`benchmarks.pipelining` measures the effect on a device.
"""

import asyncio
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from statistics import fmean, median
from time import thread_time_ns
from typing import Any

import grpc
import numpy as np

from benchmarks.machine import ForeignLoad, save
from benchmarks.processes import Processes
from benchmarks.steady_core import TOKEN_ID, Queue, SteadyCore
from benchmarks.tables import print_table, script_parser
from pagewire.v1 import plan_pb2
from pagewire.v1 import worker_service_pb2 as worker_pb
from pagewire_cli.load import percentile
from scheduler_service import wire as core_wire
from scheduler_service.core import StepPlan
from service_common.grpc_options import channel_options, server_options
from worker_service.plan import StepResult, StepTimings
from worker_service.service import wire as worker_wire

BUDGET_BYTES = 16
"""Budget of a plan, per sequence and step of steady decoding, on average."""

TURN = 200
"""Consecutive round trips of one size, before the turn of another."""

TIMINGS = StepTimings(
    received_us=3_600_000_000,
    started_us=3_600_000_100,
    finished_us=3_600_005_100,
    cache_ops_us=10,
    forward_us=4_500,
    sample_us=400,
)
"""Timings of a step of 5 ms, on a worker that has been up for an hour."""

_BATCH = 10
"""Calls between two readings of the clock, which itself takes as long as the smallest of them."""

Row = dict[str, object]


@dataclass(frozen=True, kw_only=True, slots=True)
class Message:
    """A plan and its result: sizes in bytes, and CPU microseconds to encode and decode them."""

    plan_bytes: int
    result_bytes: int
    encode_plan_us: float
    decode_plan_us: float
    encode_result_us: float
    decode_result_us: float

    @classmethod
    def of(cls, plan: StepPlan) -> "Message":
        """Measure a plan and its result, with the conversions of both ends."""
        request = _encode_plan(plan)
        result = _result(plan)
        answer = _encode_result(result)
        return cls(
            plan_bytes=len(request),
            result_bytes=len(answer),
            encode_plan_us=_cpu_us(lambda: _encode_plan(plan)),
            decode_plan_us=_cpu_us(lambda: _decode_plan(request)),
            encode_result_us=_cpu_us(lambda: _encode_result(result)),
            decode_result_us=_cpu_us(lambda: _decode_result(answer)),
        )


def steady_row(num_seqs: int, num_steps: int) -> Row:
    """Sequences that all decode, over `num_steps` steps. Bytes are means, since steps in which
    blocks fill up are larger than others; times are medians."""
    plans: list[StepPlan] = []
    core = SteadyCore(Queue(num_seqs=num_seqs, prompt_tokens=64), on_plan=plans.append)
    plans.clear()
    for _ in range(num_steps):
        core.round()
    return _row("steady decoding", num_seqs, [Message.of(plan) for plan in plans])


def new_row(prompt_tokens: int, num_repeats: int) -> Row:
    """One new sequence, its whole prompt in the plan."""
    plans: list[StepPlan] = []
    SteadyCore(Queue(num_seqs=1, prompt_tokens=prompt_tokens), on_plan=plans.append)
    first = plans[0]
    assert len(first.new_sequences) == 1
    messages = [Message.of(first) for _ in range(num_repeats)]
    return _row(f"a new prompt of {prompt_tokens:,} tokens", 1, messages)


def _row(case: str, num_seqs: int, messages: Sequence[Message]) -> Row:
    plan_bytes = fmean(message.plan_bytes for message in messages)
    row: Row = {
        "case": case,
        "sequences": num_seqs,
        "plan_bytes": round(plan_bytes, 1),
        "plan_bytes_per_sequence": round(plan_bytes / num_seqs, 2),
        "result_bytes": round(fmean(message.result_bytes for message in messages), 1),
    }
    for name in ("encode_plan_us", "decode_plan_us", "encode_result_us", "decode_result_us"):
        row[name] = round(median(getattr(message, name) for message in messages), 2)
    return row


def _encode_plan(plan: StepPlan) -> bytes:
    request = worker_pb.ExecuteStepsRequest(plan=core_wire.encode_plan(plan, 1))
    return request.SerializeToString()


def _decode_plan(data: bytes) -> object:
    return worker_wire.decode_plan(worker_pb.ExecuteStepsRequest.FromString(data).plan, 0)


def _result(plan: StepPlan) -> StepResult:
    """A token for each row that samples."""
    num_sampled = len(plan.seq_ids) if plan.sample is None else sum(plan.sample)
    token_ids = np.full(num_sampled, TOKEN_ID, np.int32)
    return StepResult(epoch=1, step_id=plan.step_id, token_ids=token_ids, timings=TIMINGS)


def _encode_result(result: StepResult) -> bytes:
    message: plan_pb2.StepResult = worker_wire.encode_result(result)
    return worker_pb.ExecuteStepsResponse(result=message).SerializeToString()


def _decode_result(data: bytes) -> object:
    return core_wire.decode_result(worker_pb.ExecuteStepsResponse.FromString(data).result)


def _cpu_us(call: Callable[[], object]) -> float:
    began = thread_time_ns()
    for _ in range(_BATCH):
        call()
    return (thread_time_ns() - began) / 1000 / _BATCH


SERVICE, METHOD = "benchmarks.Echo", "Echo"
SETTLING_ROUNDS = 50


async def run_echo(pipe: Connection, address: str) -> None:
    """Send every message of a bidirectional stream back, until one comes on the pipe.

    `address`: `HOST:0` for a free port, or `unix:PATH`. Messages are plain bytes, so that encoding
    costs nothing.
    """

    async def echo(messages: AsyncIterator[bytes], _: Any) -> AsyncIterator[bytes]:
        async for message in messages:
            yield message

    server = grpc.aio.server(options=server_options())
    handler = grpc.stream_stream_rpc_method_handler(echo)
    server.add_generic_rpc_handlers(
        (grpc.method_handlers_generic_handler(SERVICE, {METHOD: handler}),)
    )
    port = server.add_insecure_port(address)
    await server.start()
    pipe.send(address if address.startswith("unix:") else address.replace(":0", f":{port}"))
    await asyncio.to_thread(pipe.recv)
    await server.stop(None)


@asynccontextmanager
async def echo_stream(address: str) -> AsyncIterator[Any]:
    """A stream to a process that runs the echo."""
    processes = Processes()
    echo = processes.start(run_echo, address)
    try:
        bound = await asyncio.to_thread(processes.receive, echo)
        async with grpc.aio.insecure_channel(bound, options=channel_options()) as channel:
            call: Any = channel.stream_stream(f"/{SERVICE}/{METHOD}")()
            yield call
            call.cancel()
    finally:
        processes.kill()


async def round_trips_us(stream: Any, num_bytes: int, count: int) -> list[float]:
    """Wall time of `count` consecutive round trips."""
    payload = bytes(num_bytes)
    times = []
    for _ in range(SETTLING_ROUNDS + count):
        began = time.perf_counter_ns()
        await stream.write(payload)
        assert len(await stream.read()) == num_bytes
        times.append((time.perf_counter_ns() - began) / 1000)
    return times[SETTLING_ROUNDS:]


async def round_trip_rows(sizes: Sequence[int], count: int) -> list[Row]:
    """A row for each transport and size; they take turns."""
    with tempfile.TemporaryDirectory() as folder:
        addresses = {"unix socket": f"unix:{folder}/echo.sock", "loopback TCP": "127.0.0.1:0"}
        times: dict[tuple[str, int], list[float]] = {}
        async with AsyncExitStack() as stack:
            streams = {
                name: await stack.enter_async_context(echo_stream(address))
                for name, address in addresses.items()
            }
            for _ in range(-(-count // TURN)):
                for name, stream in streams.items():
                    for size in sizes:
                        seen = await round_trips_us(stream, size, min(count, TURN))
                        times.setdefault((name, size), []).extend(seen)
    return [
        {
            "transport": transport,
            "bytes": size,
            "round_trips": len(seen),
            "p50_us": round(percentile(seen, 50), 1),
            "p99_us": round(percentile(seen, 99), 1),
        }
        for (transport, size), seen in times.items()
    ]


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, print, and write the results."""
    parser = script_parser(__doc__)
    parser.add_argument("--running", type=int, nargs="+", default=[1, 16, 64, 256, 1024, 4096])
    parser.add_argument("--prompt-tokens", type=int, nargs="*", default=[512, 8192])
    parser.add_argument("--steps", type=int, default=64, help="plans of each kind; 16 at least")
    sizes = [64, 1024, 4096, 16_384, 65_536, 262_144]
    parser.add_argument("--bytes", type=int, nargs="+", default=sizes)
    parser.add_argument("--round-trips", type=int, default=2000, help="of each size")
    args = parser.parse_args(arguments)
    load = ForeignLoad()
    messages = [steady_row(num_seqs, args.steps) for num_seqs in args.running]
    messages += [new_row(length, args.steps) for length in args.prompt_tokens]
    round_trips = asyncio.run(round_trip_rows(args.bytes, args.round_trips))
    print_table(messages, "plans and results: bytes, and CPU time in microseconds", width=180)
    print_table(round_trips, "round trips on a bidirectional stream", width=180)
    figures = {"budget_bytes": BUDGET_BYTES, "messages": messages, "round_trips": round_trips}
    save("wire", figures, load.cores, args.results)


if __name__ == "__main__":
    main()
