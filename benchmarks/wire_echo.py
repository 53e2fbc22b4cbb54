"""How long a message takes to another process and back, on the kind of stream that plans take.

Run as a program it is the other process: `python -m benchmarks.wire_echo ADDRESS`.
"""

import asyncio
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Sequence
from typing import Any, Self

import grpc

from service_common.grpc_options import channel_options, server_options
from tools.launch import ROOT, environment, module

SERVICE, METHOD = "benchmarks.Echo", "Echo"
SETTLING_ROUNDS = 50


class Echo:
    """A process that sends every message of a bidirectional stream back; an asynchronous context
    manager. The messages are bytes: what they are made of costs nothing here."""

    def __init__(self, address: str) -> None:
        """`address`: `HOST:0` for a free port, or `unix:PATH`."""
        self._process = subprocess.Popen(
            module("benchmarks.wire_echo", address),
            stdout=subprocess.PIPE,
            text=True,
            env=environment(),
            cwd=ROOT,
        )

    async def __aenter__(self) -> Self:
        assert self._process.stdout is not None
        address = (await asyncio.to_thread(self._process.stdout.readline)).strip()
        self._channel = grpc.aio.insecure_channel(address, options=channel_options())
        method = self._channel.stream_stream(f"/{SERVICE}/{METHOD}")
        self._call: Any = method()
        return self

    async def __aexit__(self, *_: object) -> None:
        self._call.cancel()
        await self._channel.close()
        self._process.terminate()
        await asyncio.to_thread(self._process.communicate)

    async def round_trips_us(self, num_bytes: int, count: int) -> list[float]:
        """Wall time of `count` consecutive round trips."""
        payload = bytes(num_bytes)
        for _ in range(SETTLING_ROUNDS):
            await self._round_trip(payload)
        times = []
        for _ in range(count):
            began = time.perf_counter_ns()
            await self._round_trip(payload)
            times.append((time.perf_counter_ns() - began) / 1000)
        return times

    async def _round_trip(self, payload: bytes) -> None:
        await self._call.write(payload)
        assert len(await self._call.read()) == len(payload)


async def _serve(address: str) -> None:
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
    is_unix = address.startswith("unix:")
    print(address if is_unix else f"{address.rpartition(':')[0]}:{port}", flush=True)
    await server.wait_for_termination()


def main(arguments: Sequence[str]) -> None:
    """Serve until terminated."""
    asyncio.run(_serve(arguments[0]))


if __name__ == "__main__":
    main(sys.argv[1:])
