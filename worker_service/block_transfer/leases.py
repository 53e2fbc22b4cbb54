"""The blocks of a worker that others may read, and how they are read."""

import hmac
import threading
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from worker_service.block_transfer.memory import BlockMemory, block_digest, has_block, new_digest
from worker_service.errors import InvalidPlan, LeaseDenied
from worker_service.plan import KEY_BYTES, BlockLease, monotonic_us


class _Lease:
    """An open lease. `is_over` changes once, to true, before anything may write to the blocks."""

    def __init__(self, lease: BlockLease, received_us: int, *, is_served: bool) -> None:
        keys = lease.keys
        self.token = lease.token
        self.keys = {
            block: keys[start : start + KEY_BYTES]
            for block, start in zip(
                lease.block_ids.tolist(), range(0, len(keys), KEY_BYTES), strict=True
            )
        }
        self.expires_us = received_us + lease.timeout_ms * 1000
        self.is_served = is_served
        """Whether readers may read; until then they wait as if it had not begun."""
        self.is_over = False

    def check(self) -> None:
        """Raises LeaseDenied if the lease has ended or expired."""
        if self.is_over or monotonic_us() >= self.expires_us:
            raise LeaseDenied("the lease has ended or expired")


class Piece(NamedTuple):
    """A part of a block as it was while it was leased."""

    data: bytes
    digest: bytes
    """The block's, with its last piece; else empty."""


class LeasedBlocks:
    """Some blocks of a lease, for one reader."""

    def __init__(self, memory: BlockMemory, lease: _Lease, blocks: Sequence[int]) -> None:
        self.memory = memory
        self.blocks = blocks
        self._lease = lease

    def pieces(self, max_bytes: int) -> Iterator[Piece]:
        """The blocks, in order. Raises LeaseDenied once the lease is over, for a piece that may
        have been written to meanwhile, too."""
        for block in self.blocks:
            self._lease.check()
            view = self.memory.source(block)
            digest = new_digest(self._lease.keys[block])
            for start in range(0, len(view), max_bytes):
                data = bytes(view[start : start + max_bytes])
                self._lease.check()
                digest.update(data)
                is_last = start + max_bytes >= len(view)
                yield Piece(data, digest.digest() if is_last else b"")

    def digests(self) -> Iterator[bytes]:
        """The blocks' digests alone, in order. Raises LeaseDenied as `pieces` does."""
        for block in self.blocks:
            self._lease.check()
            digest = block_digest(self._lease.keys[block], self.memory.source(block))
            self._lease.check()
            yield digest


class LeaseTable:
    """The leases of one stream of plans.

    Leases begin and end on the model thread; any thread may serve and read them.
    """

    def __init__(self, memory: BlockMemory) -> None:
        self._memory = memory
        self._lock = threading.Lock()
        self._leases: dict[int, _Lease] = {}

    def begin(
        self, lease: BlockLease, field: str, received_us: int, *, is_served: bool = True
    ) -> None:
        """Begin a lease, and serve it, or later with `serve`. Raises InvalidPlan if its id is in
        use or a block does not exist."""
        for block in lease.block_ids.tolist():
            if not has_block(self._memory, block):
                counts = self._memory.num_device_blocks, self._memory.num_host_blocks
                expected = "expected a block of %d device and %d host blocks, got %d"
                raise InvalidPlan(f"{field}.block_ids", expected % (*counts, block))
        with self._lock:
            if lease.lease_id in self._leases:
                raise InvalidPlan(f"{field}.lease_id", f"lease {lease.lease_id} has not ended")
            self._leases[lease.lease_id] = _Lease(lease, received_us, is_served=is_served)

    def serve(self, lease_ids: Sequence[int]) -> None:
        """Serve those of these leases that have not ended."""
        with self._lock:
            for lease_id in lease_ids:
                if (lease := self._leases.get(lease_id)) is not None:
                    lease.is_served = True

    def serves(self, lease_id: int) -> bool:
        """Whether a lease has begun, can be read, and has not ended."""
        with self._lock:
            lease = self._leases.get(lease_id)
            return lease is not None and lease.is_served

    def end(self, lease_ids: Sequence[int]) -> None:
        """Serve leases no longer; their blocks may be written to from now on. Raises InvalidPlan
        for an unknown id."""
        with self._lock:
            for lease_id in lease_ids:
                if (lease := self._leases.pop(lease_id, None)) is None:
                    raise InvalidPlan("ended_lease_ids", f"there is no lease {lease_id}")
                lease.is_over = True

    def end_all(self) -> None:
        """End every lease: the caches' contents become meaningless."""
        with self._lock:
            for lease in self._leases.values():
                lease.is_over = True
            self._leases.clear()

    def open(self, lease_id: int, token: bytes, blocks: Sequence[int]) -> LeasedBlocks:
        """The blocks for a reader. Raises LeaseDenied unless the token is that of a lease in force
        that names them all; the message does not reveal which of these it is."""
        with self._lock:
            lease = self._leases.get(lease_id)
            if lease is not None and not lease.is_served:
                lease = None
        wanted = token if lease is None else lease.token
        if not hmac.compare_digest(wanted, token) or lease is None:
            raise LeaseDenied(f"lease {lease_id} is not in force, or the token is another's")
        lease.check()
        for block in blocks:
            if block not in lease.keys:
                raise LeaseDenied(f"lease {lease_id} does not name block {block}")
        return LeasedBlocks(self._memory, lease, blocks)
