"""CPU time of a frontend per streamed token.

    python -m benchmarks.frontend --streams 256 --tokens 128 --steps-per-second 50

A scheduler core that sends one token to every stream at a fixed pace, and the clients, run in
processes of their own; measured is the process in which the frontend runs, all of its threads.
"""

import argparse
import asyncio
import multiprocessing
import time
from multiprocessing.connection import Connection

import grpc

from pagewire.v1 import inference_service_pb2_grpc as pb_grpc
from scheduler_service.columns import to_column
from tests.support.fake_core import FakeCore
from tests.support.frontends import generate_request, running_frontend
from tests.support.tokenizers import byte_level


async def run_core(pipe: Connection, streams: int, tokens: int, pause_s: float) -> None:
    """Accept all streams, then a token each per step."""
    ids = byte_level().encode("the quick brown fox hello world " * tokens).ids
    async with FakeCore() as core:
        pipe.send(core.address)
        requests = [await core.next_request() for _ in range(streams)]
        attachment = requests[0].attachment
        handles = to_column([request.handle for request in requests])
        await attachment.send(accepted=handles)
        due = time.monotonic()
        for step in range(tokens):
            due += pause_s
            await asyncio.sleep(max(0.0, due - time.monotonic()))
            await attachment.send(token_handles=handles, token_ids=to_column([ids[step]] * streams))
        for request in requests:
            await request.finish_choice()
            await request.finish()
        await asyncio.to_thread(pipe.recv)


async def run_clients(pipe: Connection, address: str, streams: int, tokens: int) -> None:
    """Read every stream as fast as it comes."""

    async def read(stub: pb_grpc.InferenceServiceStub) -> int:
        request = generate_request("hello", max_tokens=tokens)
        return len([response async for response in stub.Generate(request)])

    async with grpc.aio.insecure_channel(address) as channel:
        stub = pb_grpc.InferenceServiceStub(channel)
        pipe.send(sum(await asyncio.gather(*(read(stub) for _ in range(streams)))))


def in_process(target: object, *arguments: object) -> tuple[multiprocessing.Process, Connection]:
    """A process that runs a coroutine function with one end of a pipe; the other end."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_run, args=(target, theirs, *arguments))
    process.start()
    return process, ours


def _run(target: object, *arguments: object) -> None:
    asyncio.run(target(*arguments))  # type: ignore[operator]


async def measure(streams: int, tokens: int, steps_per_second: float) -> None:
    """Run once and print."""
    core, core_pipe = in_process(run_core, streams, tokens, 1 / steps_per_second)
    address = await asyncio.to_thread(core_pipe.recv)
    async with running_frontend(address) as frontend:
        clients, client_pipe = in_process(run_clients, frontend.runner.address, streams, tokens)
        cpu, wall = time.process_time(), time.monotonic()
        responses = await asyncio.to_thread(client_pipe.recv)
        cpu, wall = time.process_time() - cpu, time.monotonic() - wall
    core_pipe.send("done")
    clients.join()
    core.join()
    print(
        f"streams={streams} tokens={streams * tokens} responses={responses} wall_s={wall:.2f} "
        f"cpu_s={cpu:.2f} cpu_us_per_token={1e6 * cpu / (streams * tokens):.1f} "
        f"cpu_us_per_response={1e6 * cpu / responses:.1f}"
    )


def main() -> None:
    """Parse the flags and measure."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--streams", type=int, default=256)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--steps-per-second", type=float, default=20.0)
    arguments = parser.parse_args()
    asyncio.run(measure(arguments.streams, arguments.tokens, arguments.steps_per_second))


if __name__ == "__main__":
    main()
