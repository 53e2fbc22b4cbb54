"""A process's registry, and its port while there is one."""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager

from prometheus_client import CollectorRegistry, PlatformCollector, ProcessCollector
from prometheus_client.metrics_core import Metric as Family

from scheduler_service.metrics.collector import LoopCollector
from service_common.metrics_server import MetricsServer


def make_registry(collect: Callable[[], Iterable[Family]]) -> CollectorRegistry:
    """What a service tells, with what the client library tells of the process: its memory, CPU
    time and open files. To be made on the service's event loop."""
    registry = CollectorRegistry()
    registry.register(LoopCollector(collect))
    ProcessCollector(registry=registry)
    PlatformCollector(registry=registry)
    return registry


@asynccontextmanager
async def published(
    registry: CollectorRegistry, address: str | None
) -> AsyncIterator[MetricsServer | None]:
    """Serve the registry at HOST:PORT, or nowhere, for as long as this lasts.

    Raises CannotListen.
    """
    if address is None:
        yield None
        return
    server = MetricsServer(address, registry)
    try:
        yield server
    finally:  # off the loop, which a scrape that is under way may be waiting for
        await asyncio.to_thread(server.close)
