"""The part of a core that workers register with."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import grpc

from pagewire.v1 import scheduler_service_pb2 as pb
from pagewire.v1 import scheduler_service_pb2_grpc as pb_grpc

LEASE_MS = 80


@dataclass
class Registered:
    """One registration stream."""

    registration: pb.WorkerRegistration
    heartbeats: list[pb.WorkerHeartbeat] = field(default_factory=list)
    directives: asyncio.Queue[pb.WorkerDirective | None] = field(default_factory=asyncio.Queue)
    """What to send next; None ends the stream."""
    is_open: bool = True


class FakeRegistry(pb_grpc.SchedulerServiceServicer):
    """Welcomes every worker and remembers what it says."""

    def __init__(self) -> None:
        self.streams: list[Registered] = []
        self.loads: list[Registered] = []
        """Streams of workers that report how far they have loaded their model."""

    async def RegisterWorker(  # type: ignore[no-untyped-def,override]
        self, request_iterator, context
    ) -> None:
        first = (await anext(aiter(request_iterator))).heartbeat
        stream = Registered(first.registration, [first])
        (self.loads if first.HasField("loading") else self.streams).append(stream)
        stream.directives.put_nowait(pb.WorkerDirective(serve=pb.Serve(lease_ms=LEASE_MS)))
        reading = asyncio.create_task(self._read(request_iterator, stream))
        try:
            while (directive := await stream.directives.get()) is not None:
                await context.write(pb.RegisterWorkerResponse(directive=directive))
        finally:
            stream.is_open = False
            reading.cancel()

    async def _read(
        self, requests: AsyncIterator[pb.RegisterWorkerRequest], stream: Registered
    ) -> None:
        async for request in requests:
            stream.heartbeats.append(request.heartbeat)


@asynccontextmanager
async def fake_registry(address: str) -> AsyncIterator[FakeRegistry]:
    """A registry that listens at an address."""
    registry = FakeRegistry()
    server = grpc.aio.server(options=(("grpc.so_reuseport", 0),))
    pb_grpc.add_SchedulerServiceServicer_to_server(registry, server)
    server.add_insecure_port(address)
    await server.start()
    try:
        yield registry
    finally:
        await server.stop(None)
