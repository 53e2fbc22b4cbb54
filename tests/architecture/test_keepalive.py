"""Both ends of every connection notice when one direction loses all data.

Real connections with the services' own options, but shorter times, through a proxy that loses one
direction. gRPC ignores misspelt options, so that nothing less would show that they work.
"""

import asyncio
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from pagewire_client.connection import connection_options
from service_common.grpc_options import channel_options, server_options
from tests.support.one_way import OneWayProxy, one_way_proxy

INTERVAL_MS, TIMEOUT_MS = 1000, 3000
"""gRPC does not ping more often than once a second. On a busy machine an answer takes seconds."""

CLIENT = connection_options("localhost:1", None, None).channel_options("localhost:1")
SERVERS = {"service": server_options()}
CHANNELS = {"service": channel_options(), "client": CLIENT}
LINKS = [("client", "service"), ("service", "service")]


def sooner(options: Any) -> list[tuple[str, Any]]:
    """The options, with shorter times where they have any."""
    times = {
        "grpc.keepalive_time_ms": INTERVAL_MS,
        "grpc.keepalive_timeout_ms": TIMEOUT_MS,
        "grpc.http2.ping_timeout_ms": TIMEOUT_MS,
    }
    return [(name, times.get(name, value)) for name, value in options]


class Stream(health_pb2_grpc.HealthServicer):
    """One call that says one thing and then nothing."""

    def __init__(self) -> None:
        self.ended = asyncio.Event()

    async def Watch(self, request: Any, context: Any) -> None:
        try:
            await context.write(health_pb2.HealthCheckResponse())
            await asyncio.Event().wait()
        finally:
            self.ended.set()


async def notice(proxy: OneWayProxy, channel: grpc.aio.Channel, stream: Stream, way: str) -> None:
    """Return when both ends have noticed; the cut-off end cannot be notified."""
    call = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest())
    await call.read()
    setattr(proxy, way, True)
    with pytest.raises(grpc.aio.AioRpcError) as error:
        await call.read()
    assert error.value.code() == grpc.StatusCode.UNAVAILABLE
    await stream.ended.wait()


async def lose_one_way(caller: str, called: str, way: str) -> None:
    stream, server = Stream(), grpc.aio.server(options=sooner(SERVERS[called]))
    health_pb2_grpc.add_HealthServicer_to_server(stream, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        async with (
            one_way_proxy(f"127.0.0.1:{port}") as proxy,
            grpc.aio.insecure_channel(proxy.address, options=sooner(CHANNELS[caller])) as channel,
        ):
            # Far less than the minute that a ping's own timeout is by default.
            await asyncio.wait_for(notice(proxy, channel, stream, way), 45)
    finally:
        await server.stop(None)


async def test_both_ends_of_every_link_notice_a_partition_in_either_direction() -> None:
    await asyncio.gather(
        *(lose_one_way(*link, way) for link in LINKS for way in ("loses_up", "loses_down"))
    )


@pytest.mark.parametrize(("caller", "called"), LINKS)
def test_no_peer_of_ours_pings_more_often_than_it_may(caller: str, called: str) -> None:
    allowed_ms = dict(SERVERS[called])["grpc.http2.min_ping_interval_without_data_ms"]
    assert dict(CHANNELS[caller])["grpc.keepalive_time_ms"] >= 2 * allowed_ms
