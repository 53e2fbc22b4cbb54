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

CHUNK_BYTES = 1 << 20
"""Maximum number of bytes in a message."""

DIGESTS_AT_ONCE = 64
"""Digests in a message without bytes."""

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
    for leased in blocks.digests():
        digests += leased.digest
        if len(digests) >= DIGESTS_AT_ONCE * len(leased.digest):
            yield pb.ReadBlocksResponse(digests=bytes(digests))
            digests.clear()
    if digests:
        yield pb.ReadBlocksResponse(digests=bytes(digests))


def _data_parts(blocks: LeasedBlocks) -> Iterator[pb.ReadBlocksResponse]:
    """Messages of some small blocks, or of a part of a large one."""
    data, digests = bytearray(), bytearray()
    for leased in blocks.copies():
        if len(data) + len(leased.data) > CHUNK_BYTES and data:
            yield pb.ReadBlocksResponse(data=bytes(data), digests=bytes(digests))
            data.clear()
            digests.clear()
        start = 0
        while len(leased.data) - start > CHUNK_BYTES:
            chunk = leased.data[start : start + CHUNK_BYTES]
            yield pb.ReadBlocksResponse(data=bytes(chunk))
            start += CHUNK_BYTES
        data += leased.data[start:]
        digests += leased.digest
    yield pb.ReadBlocksResponse(data=bytes(data), digests=bytes(digests))


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
