"""A frontend's cost per streamed token, over gRPC and HTTP, with one frontend and several.

    python -m benchmarks.frontend

A core that sends a token to every stream per step, the frontends, and their clients run in
processes of their own. A frontend's processor time per token (all of its threads, from the first
request to the last response) shows how many tokens per second it can stream on a core of its own,
regardless of other load on this machine. `pace` is the number of steps per second of the core; 0:
as many as possible. The effect of more frontends is given relative to the cost of one: 1 means that
N of them stream N times as many tokens, given the cores.

The protocols take turns, so that a machine whose speed drifts affects them equally.
"""

import argparse
import asyncio
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection
from statistics import median

import aiohttp
import grpc

from benchmarks.measuring.machine import ForeignLoad
from benchmarks.measuring.processes import Processes
from benchmarks.measuring.tables import publish, script_parser
from pagewire.columns import pack
from pagewire.v1 import inference_service_pb2_grpc as pb_grpc
from tests.support.fake_core import FakeCore, FakeRequest
from tests.support.frontends import eventually, generate_request, model_ready, running_frontend
from tests.support.tokenizers import byte_level

WAYS = ("grpc", "http")
PROMPT = "hello"


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """One kind of run."""

    way: str
    frontends: int
    pace: float
    """Steps per second; 0: as fast as it goes."""
    streams: int
    tokens: int
    """Tokens of each stream."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Figures:
    """Cost of one run."""

    cpu_us_per_token: float
    """Processor time of all frontends together."""
    tokens_per_response: float
    tokens_per_s: float
    """By the clock, on this machine, clients and core included."""


async def run_core(pipe: Connection, streams: int, tokens: int, pace: float) -> None:
    """Accept all streams, then send each a token per step."""
    ids = byte_level().encode("the quick brown fox hello world " * tokens).ids
    async with FakeCore() as core:
        pipe.send(core.address)
        await asyncio.to_thread(pipe.recv)
        requests = [await core.next_request() for _ in range(streams)]
        by_frontend: dict[int, list[FakeRequest]] = {}
        for request in requests:
            by_frontend.setdefault(id(request.attachment), []).append(request)
        await asyncio.gather(*(_serve(group, ids[:tokens], pace) for group in by_frontend.values()))
        await asyncio.to_thread(pipe.recv)


async def _serve(requests: Sequence[FakeRequest], ids: Sequence[int], pace: float) -> None:
    """Serve the requests of one frontend."""
    attachment = requests[0].attachment
    handles = pack([request.handle for request in requests])
    await attachment.send(accepted=handles)
    due = time.monotonic()
    for token_id in ids:
        if pace:
            due += 1 / pace
            await asyncio.sleep(max(0.0, due - time.monotonic()))
        column = pack([token_id] * len(requests))
        await attachment.send(token_handles=handles, token_ids=column)
    for request in requests:
        await request.finish_choice()
        await request.finish()


async def run_frontend(pipe: Connection, core_address: str, way: str) -> None:
    """Serve until a message on `pipe`; send the processor time from the first request on."""
    http = "127.0.0.1:0" if way == "http" else None
    async with running_frontend(core_address, http=http) as frontend:
        await model_ready(frontend)
        await eventually(lambda: frontend.http is None or frontend.http.is_started)
        pipe.send(frontend.http.address if frontend.http else frontend.runner.address)
        began = time.process_time()
        await asyncio.to_thread(pipe.recv)
        pipe.send(time.process_time() - began)


async def run_grpc_clients(
    pipe: Connection, addresses: Sequence[str], streams: int, tokens: int
) -> None:
    """Read every stream as fast as possible; send the number of responses."""

    async def read(stub: pb_grpc.InferenceServiceStub) -> int:
        request = generate_request(PROMPT, max_tokens=tokens)
        return len([response async for response in stub.Generate(request)])

    channels = [grpc.aio.insecure_channel(address) for address in addresses]
    stubs = [pb_grpc.InferenceServiceStub(channel) for channel in channels]
    reads = (read(stubs[index % len(stubs)]) for index in range(streams))
    await _begin_together(pipe)
    pipe.send(sum(await asyncio.gather(*reads)))
    for channel in channels:
        await channel.close()


async def run_http_clients(
    pipe: Connection, addresses: Sequence[str], streams: int, tokens: int
) -> None:
    """As `run_grpc_clients`, over HTTP with one connection per stream."""
    wish = {"prompt": PROMPT, "max_tokens": tokens, "stream": True}

    async def read(session: aiohttp.ClientSession, address: str) -> int:
        async with session.post(f"http://{address}/v1/completions", json=wish) as answer:
            assert answer.status == 200, await answer.text()
            body = await answer.read()
        assert body.endswith(b"[DONE]\n\n")
        return body.count(b"data: ") - 1

    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(connector=connector) as session:
        reads = (read(session, addresses[index % len(addresses)]) for index in range(streams))
        await _begin_together(pipe)
        pipe.send(sum(await asyncio.gather(*reads)))


async def _begin_together(pipe: Connection) -> None:
    """Wait until the core is ready for requests."""
    pipe.send("ready")
    await asyncio.to_thread(pipe.recv)


def measure(case: Case) -> Figures:
    """Run once. Raises RuntimeError if a process fails."""
    processes = Processes()
    core = processes.start(run_core, case.streams, case.tokens, case.pace)
    core_address = processes.receive(core)
    frontends = [
        processes.start(run_frontend, core_address, case.way) for _ in range(case.frontends)
    ]
    addresses = [processes.receive(frontend) for frontend in frontends]
    role = run_http_clients if case.way == "http" else run_grpc_clients
    clients = processes.start(role, addresses, case.streams, case.tokens)
    processes.receive(clients)
    began = time.monotonic()
    for pipe in (core, clients):
        pipe.send("begin")
    responses = processes.receive(clients)
    wall_s = time.monotonic() - began
    for frontend in frontends:
        frontend.send("report")
    cpu_s = sum(processes.receive(frontend) for frontend in frontends)
    core.send("end")
    processes.join()
    num_tokens = case.streams * case.tokens
    return Figures(
        cpu_us_per_token=1e6 * cpu_s / num_tokens,
        tokens_per_response=num_tokens / responses,
        tokens_per_s=num_tokens / wall_s,
    )


def run(arguments: argparse.Namespace) -> list[dict[str, object]]:
    """All cases in turns; the median of each."""
    cases = [
        Case(
            way=way,
            frontends=frontends,
            pace=pace,
            streams=arguments.streams,
            tokens=arguments.tokens,
        )
        for pace in arguments.pace
        for frontends in arguments.frontends
        for way in WAYS
    ]
    figures: dict[Case, list[Figures]] = {case: [] for case in cases}
    for _ in range(arguments.turns):
        for case in cases:
            figures[case].append(measure(case))
    return rows_of(figures)


def rows_of(figures: dict[Case, list[Figures]]) -> list[dict[str, object]]:
    """One row per case; costs also as ratios to gRPC's and to one frontend's."""
    costs = {case: median(f.cpu_us_per_token for f in runs) for case, runs in figures.items()}

    def cost_of(case: Case, **other: object) -> float | None:
        return costs.get(Case(**(asdict(case) | other)))

    return [
        {
            **asdict(case),
            "pace": case.pace or "as they come",
            "cpu_us_per_token": round(costs[case], 1),
            "tokens_per_cpu_s": round(1e6 / costs[case]),
            "tokens_per_response": round(median(f.tokens_per_response for f in runs), 2),
            "tokens_per_s": round(median(f.tokens_per_s for f in runs)),
            "cost_to_grpc": _ratio(costs[case], cost_of(case, way="grpc")),
            "cost_to_one_frontend": _ratio(costs[case], cost_of(case, frontends=1)),
        }
        for case, runs in figures.items()
    ]


def _ratio(cost: float, other: float | None) -> float | None:
    return None if other is None else round(cost / other, 2)


COLUMNS = {
    "way": "way",
    "frontends": "frontends",
    "pace": "steps a second",
    "cpu_us_per_token": "CPU µs a token",
    "tokens_per_cpu_s": "tokens/s of a core",
    "tokens_per_s": "tokens/s of all",
    "cost_to_grpc": "÷ gRPC's cost",
    "cost_to_one_frontend": "÷ one frontend's cost",
}
"""Titles by the names in a row."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, print, and write the results."""
    parser = script_parser(__doc__)
    parser.add_argument("--streams", type=int, default=256)
    parser.add_argument("--tokens", type=int, default=128, help="of each stream")
    parser.add_argument("--pace", type=float, nargs="+", default=[10.0, 0.0])
    parser.add_argument("--frontends", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--turns", type=int, default=3)
    args = parser.parse_args(arguments)
    load = ForeignLoad()
    rows = run(args)
    facts = f"{args.streams} streams of {args.tokens} tokens."
    publish("frontend", facts, COLUMNS, rows, load.cores, args.results)


if __name__ == "__main__":
    main()
