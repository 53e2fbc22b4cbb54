"""`ReadBlocks` between workers: what a source answers, and the calls of a fetch."""

import os
import secrets
import threading
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import islice

import grpc

from pagewire.v1 import worker_service_pb2 as pb
from pagewire.v1 import worker_service_pb2_grpc as pb_grpc
from service_common.cluster import Cluster
from worker_service.block_transfer.leases import LeasedBlocks
from worker_service.block_transfer.process_memory import address_of, machine_name, permit
from worker_service.block_transfer.transport import FetchFailed, Part, Reader, ReadRequest
from worker_service.plan import FetchFailure
from worker_service.service import wire

CHUNK_BYTES = 1 << 19
"""Maximum number of bytes in a message: the fastest size, as larger ones are mapped and unmapped
for every message."""

DIGESTED_BYTES = 8 << 20
"""Maximum number of bytes of the blocks whose digests a message without bytes has; at least one
block."""

MAX_IDLE_CHANNELS = 8
"""Channels that are kept open for further calls. Their connections close after a time without one;
see `service_common.grpc_options`."""

_PROBE = bytearray(secrets.token_bytes(16))
"""Random bytes by which a reader recognizes this process."""

_FAILURES = {
    grpc.StatusCode.PERMISSION_DENIED: FetchFailure.DENIED,
    grpc.StatusCode.FAILED_PRECONDITION: FetchFailure.DENIED,
    grpc.StatusCode.UNAUTHENTICATED: FetchFailure.DENIED,
    grpc.StatusCode.ABORTED: FetchFailure.DENIED,
    grpc.StatusCode.UNIMPLEMENTED: FetchFailure.DENIED,
    grpc.StatusCode.INVALID_ARGUMENT: FetchFailure.DENIED,
    grpc.StatusCode.DEADLINE_EXCEEDED: FetchFailure.TIMED_OUT,
    grpc.StatusCode.INTERNAL: FetchFailure.MALFORMED,
    grpc.StatusCode.RESOURCE_EXHAUSTED: FetchFailure.MALFORMED,
}
"""Other statuses mean that the source was not reached or was lost."""


def memory_for(blocks: LeasedBlocks, reader: Reader | None) -> pb.ProcessMemory | None:
    """Where a process of this machine finds the blocks; None if it cannot read them."""
    device, host = blocks.memory.addresses
    has_all = all(device if block >= 0 else host for block in blocks.blocks)
    if reader is None or not has_all or not reader.machine or reader.machine != machine_name():
        return None
    permit(reader.pid)
    return pb.ProcessMemory(
        pid=os.getpid(),
        probe_address=address_of(memoryview(_PROBE)),
        probe=bytes(_PROBE),
        device_address=device,
        host_address=host,
        block_bytes=blocks.memory.block_bytes,
    )


def digest_parts(blocks: LeasedBlocks) -> Iterator[pb.ReadBlocksResponse]:
    """What follows the memory of the blocks; blocks while it is iterated. The reader compares the
    blocks of each message while the next ones are digested, so the first message has fewer. Raises
    LeaseDenied once the lease is over."""
    digests, num_left = blocks.digests(), len(blocks.blocks)
    max_blocks = max(1, DIGESTED_BYTES // blocks.memory.block_bytes)
    count = max(1, max_blocks // 2)
    while num_left > 0:
        yield pb.ReadBlocksResponse(digests=b"".join(islice(digests, count)))
        num_left -= count
        count = max_blocks


def data_parts(blocks: LeasedBlocks) -> Iterator[pb.ReadBlocksResponse]:
    """The bytes of the blocks, in messages of some small blocks, or of a part of a large one;
    blocks while it is iterated. Raises LeaseDenied once the lease is over."""
    data: list[bytes] = []
    digests, size = b"", 0
    for piece in blocks.pieces(CHUNK_BYTES):
        if size + len(piece.data) > CHUNK_BYTES:
            yield pb.ReadBlocksResponse(data=b"".join(data), digests=digests)
            data, digests, size = [], b"", 0
        data.append(piece.data)
        digests += piece.digest
        size += len(piece.data)
    yield pb.ReadBlocksResponse(data=b"".join(data), digests=digests)


@dataclass(frozen=True, slots=True, eq=False)
class _Channel:
    address: str
    credentials: grpc.ChannelCredentials | None
    """With which it was made."""
    connection: grpc.Channel
    stub: pb_grpc.WorkerServiceStub


class BlockConnections:
    """Calls of other workers, on channels with the cluster's credentials. A channel has one call at
    a time, and is kept for the next one if that has ended well."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._lock = threading.Lock()
        self._busy: set[_Channel] = set()
        self._idle: deque[_Channel] = deque()
        """Channels without a call, the one that was used last at the end."""

    def connect(self, address: str, request: ReadRequest, timeout_s: float) -> "Answer":
        """Send a request on a channel to this address that has no call, or a new one."""
        channel = self._pop_idle(address) or self._open(address)
        with self._lock:
            self._busy.add(channel)
        call = channel.stub.ReadBlocks(wire.encode_read_request(request), timeout=timeout_s)
        return Answer(call, partial(self._end_call, channel))

    def close_idle(self) -> None:
        """Close the channels without a call."""
        with self._lock:
            idle, self._idle = self._idle, deque()
        for channel in idle:
            channel.connection.close()

    def _open(self, address: str) -> _Channel:
        credentials = self._cluster.channel_credentials()
        connection = self._cluster.blocking_channel(address)
        stub = self._cluster.stub(pb_grpc.WorkerServiceStub, connection)
        return _Channel(address, credentials, connection, stub)

    def _pop_idle(self, address: str) -> _Channel | None:
        credentials = self._cluster.channel_credentials()
        with self._lock:
            for channel in reversed(self._idle):
                if channel.address == address and channel.credentials is credentials:
                    self._idle.remove(channel)
                    return channel
        return None

    def _end_call(self, channel: _Channel, *, is_usable: bool) -> None:
        """Keep or close a call's channel; on the first call of this alone."""
        with self._lock:
            if channel not in self._busy:
                return
            self._busy.remove(channel)
            surplus = channel
            if is_usable:
                self._idle.append(channel)
                if len(self._idle) <= MAX_IDLE_CHANNELS:
                    return
                surplus = self._idle.popleft()
        surplus.connection.close()


class Answer:
    """Implements `worker_service.block_transfer.transport.Parts`."""

    def __init__(
        self, call: "grpc.CallIterator[pb.ReadBlocksResponse]", on_end: Callable[..., None]
    ) -> None:
        """on_end: with `is_usable`, whether the call's channel may be used again; only the first
        call counts."""
        self._call = call
        self._on_end = on_end

    def __iter__(self) -> Iterator[Part]:
        try:
            yield from map(wire.decode_part, self._call)
        except grpc.RpcError as error:
            failure = _FAILURES.get(error.code(), FetchFailure.UNREACHABLE)
            raise FetchFailed(failure, f"{error.code().name}: {error.details()}") from None
        self._on_end(is_usable=True)

    def cancel(self) -> None:
        """End the call, and close its channel unless all was received."""
        self._call.cancel()
        self._on_end(is_usable=False)
