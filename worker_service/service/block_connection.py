"""`ReadBlocks` between workers: what a source answers, and the calls of a fetch."""

import os
import secrets
from collections.abc import Iterator

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
"""Bytes of the blocks whose digests a message without bytes has, at least one block."""

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


def read_parts(blocks: LeasedBlocks, reader: Reader | None) -> Iterator[pb.ReadBlocksResponse]:
    """The answer to a reader, which blocks while it is iterated. Raises LeaseDenied once the lease
    is over."""
    memory = None if reader is None else _memory_for(blocks, reader)
    return _data_parts(blocks) if memory is None else _memory_parts(blocks, memory)


def _memory_for(blocks: LeasedBlocks, reader: Reader) -> pb.ProcessMemory | None:
    """Where a process of this machine finds the blocks; None if it cannot read them."""
    device, host = blocks.memory.addresses
    has_all = all(device if block >= 0 else host for block in blocks.blocks)
    if not has_all or not reader.machine or reader.machine != machine_name():
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


def _memory_parts(
    blocks: LeasedBlocks, memory: pb.ProcessMemory
) -> Iterator[pb.ReadBlocksResponse]:
    yield pb.ReadBlocksResponse(memory=memory)
    digests = bytearray()
    count = max(1, DIGESTED_BYTES // memory.block_bytes)
    for number, digest in enumerate(blocks.digests(), start=1):
        digests += digest
        if number % count == 0 or number == len(blocks.blocks):
            yield pb.ReadBlocksResponse(digests=bytes(digests))
            digests.clear()


def _data_parts(blocks: LeasedBlocks) -> Iterator[pb.ReadBlocksResponse]:
    """Messages of some small blocks, or of a part of a large one."""
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


class BlockConnections:
    """Calls of other workers, whose channels have the cluster's credentials."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster

    def connect(self, address: str, request: ReadRequest, timeout_s: float) -> "Answer":
        """Send a request on a channel of its own."""
        channel = self._cluster.blocking_channel(address)
        stub = self._cluster.stub(pb_grpc.WorkerServiceStub, channel)
        return Answer(
            channel, stub.ReadBlocks(wire.encode_read_request(request), timeout=timeout_s)
        )


class Answer:
    """Implements `worker_service.block_transfer.transport.Parts`."""

    def __init__(
        self, channel: grpc.Channel, call: "grpc.CallIterator[pb.ReadBlocksResponse]"
    ) -> None:
        self._channel = channel
        self._call = call

    def __iter__(self) -> Iterator[Part]:
        try:
            yield from map(wire.decode_part, self._call)
        except grpc.RpcError as error:
            failure = _FAILURES.get(error.code(), FetchFailure.UNREACHABLE)
            raise FetchFailed(failure, f"{error.code().name}: {error.details()}") from None

    def cancel(self) -> None:
        """End the call and close its channel."""
        self._call.cancel()
        self._channel.close()
