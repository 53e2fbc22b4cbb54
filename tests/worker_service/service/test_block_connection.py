"""Channels to other workers are kept between calls."""

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import grpc
import pytest

from pagewire.v1 import worker_service_pb2 as pb
from pagewire.v1 import worker_service_pb2_grpc as pb_grpc
from service_common import cluster
from service_common.cluster import NO_CLUSTER, Cluster, ClusterConfig
from tests.support.certificates import Authority
from tests.support.grpc_servers import grpc_server
from worker_service.block_transfer.transport import FetchFailed, ReadRequest
from worker_service.service.block_connection import MAX_IDLE_CHANNELS, BlockConnections

SOON_S = 20.0
REQUEST = ReadRequest(epoch=1, lease_id=1, token=b"", block_ids=[0], rank=0, reader=None)


class Source(pb_grpc.WorkerServiceServicer):
    """Answers with the name of the connection that a call came over."""

    error: grpc.StatusCode | None = None

    def ReadBlocks(
        self, request: pb.ReadBlocksRequest, context: grpc.ServicerContext
    ) -> Iterator[pb.ReadBlocksResponse]:
        yield pb.ReadBlocksResponse(data=context.peer().encode())
        if self.error is not None:
            context.abort(self.error, "made up")


@contextmanager
def serving(source: Source, credentials: grpc.ServerCredentials | None = None) -> Iterator[str]:
    """The address of a source."""
    add = partial(pb_grpc.add_WorkerServiceServicer_to_server, source)
    with grpc_server(add, credentials, 2 * MAX_IDLE_CHANNELS) as address:
        yield address


@pytest.fixture
def connections() -> Iterator[BlockConnections]:
    made = BlockConnections(Cluster(NO_CLUSTER))
    yield made
    made.close_idle()


def call(connections: BlockConnections, address: str) -> bytes:
    """The connection over which a call went that has ended well."""
    parts = connections.connect(address, REQUEST, SOON_S)
    try:
        return b"".join(bytes(part.data) for part in parts)
    finally:
        parts.cancel()  # as a fetch does in any case


def test_a_call_uses_the_connection_of_the_one_before(connections: BlockConnections) -> None:
    with serving(Source()) as address:
        assert call(connections, address) == call(connections, address)


def test_calls_at_the_same_time_have_connections_of_their_own(
    connections: BlockConnections,
) -> None:
    with serving(Source()) as address:
        first, second = (iter(connections.connect(address, REQUEST, SOON_S)) for _ in range(2))
        used = {bytes(next(first).data), bytes(next(second).data)}
        assert len(used) == 2
        assert not [*first, *second]
        assert call(connections, address) in used


def fail(source: Source, connections: BlockConnections, address: str) -> None:
    source.error = grpc.StatusCode.UNAVAILABLE
    with pytest.raises(FetchFailed):
        call(connections, address)
    source.error = None


def cancel(source: Source, connections: BlockConnections, address: str) -> None:
    parts = connections.connect(address, REQUEST, SOON_S)
    next(iter(parts))
    parts.cancel()


def close_idle(source: Source, connections: BlockConnections, address: str) -> None:
    connections.close_idle()


@pytest.mark.parametrize("end", [fail, cancel, close_idle])
def test_a_connection_is_not_used_again_after(
    connections: BlockConnections, end: Callable[[Source, BlockConnections, str], None]
) -> None:
    source = Source()
    with serving(source) as address:
        before = call(connections, address)
        end(source, connections, address)
        assert call(connections, address) != before


def test_a_source_that_was_started_again_is_reached_at_once(connections: BlockConnections) -> None:
    with serving(Source()) as address:
        call(connections, address)
    with pytest.raises(FetchFailed, match="UNAVAILABLE"):
        call(connections, address)
    server = grpc.server(ThreadPoolExecutor(1))
    pb_grpc.add_WorkerServiceServicer_to_server(Source(), server)
    server.add_insecure_port(address)
    server.start()
    assert call(connections, address)
    server.stop(None).wait()


def test_new_certificates_need_a_new_connection(tmp_path: Path) -> None:
    authority = Authority(tmp_path, "authority")
    issued = authority.issue("member")
    config = ClusterConfig(ca=authority.cert, cert=issued.cert, key=issued.key)
    member = Cluster(config)
    connections = BlockConnections(member)
    with serving(Source(), member.server_credentials()) as address:
        before = call(connections, address)
        assert call(connections, address) == before
        authority.issue("member")
        assert call(connections, address) != before
    connections.close_idle()


def test_a_limited_number_of_channels_is_kept(connections: BlockConnections) -> None:
    with serving(Source()) as address:
        open_ = [
            iter(connections.connect(address, REQUEST, SOON_S))
            for _ in range(MAX_IDLE_CHANNELS + 2)
        ]
        used = []
        for parts in open_:
            used += [bytes(part.data) for part in parts]
        again = [iter(connections.connect(address, REQUEST, SOON_S)) for _ in open_]
        kept = [bytes(next(parts).data) for parts in again]
        assert set(kept) & set(used) == set(used[2:])
        for parts in again:
            assert not list(parts)


def test_the_connection_of_an_idle_channel_closes(
    connections: BlockConnections, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cluster, "IDLE_TIMEOUT_MS", 1_000)
    states: list[Any] = []
    closed = threading.Event()

    def observe(state: grpc.ChannelConnectivity) -> None:
        states.append(state)
        if state is grpc.ChannelConnectivity.IDLE and grpc.ChannelConnectivity.READY in states:
            closed.set()

    with serving(Source()) as address:
        before = call(connections, address)
        (channel,) = connections._idle
        channel.connection.subscribe(observe)
        assert closed.wait(SOON_S), states
        channel.connection.unsubscribe(observe)
        assert call(connections, address) != before
