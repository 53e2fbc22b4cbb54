"""How the bytes of leased blocks reach their targets: in the messages of a call, to any machine and
under its TLS, or from the memory of the source's process, if it is one of this machine and agrees.
"""

import threading
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple, Protocol

from worker_service.block_transfer.memory import DIGEST_BYTES, BlockMemory, block_digest
from worker_service.block_transfer.process_memory import (
    MemoryUnreadable,
    Piece,
    read_memory,
)
from worker_service.plan import KEY_BYTES, BlockFetch, FetchFailure


class FetchFailed(Exception):
    """Why a fetch cannot continue."""

    def __init__(self, failure: FetchFailure, message: str) -> None:
        super().__init__(message)
        self.failure = failure


class Stopped(Exception):
    """The fetch's stream of plans has ended, and with it the fetch."""


class Reader(NamedTuple):
    """A process that can read the memory of others of its machine."""

    machine: str
    pid: int


class SourceMemory(NamedTuple):
    """The wire's `ProcessMemory`: the caches of a source in its memory."""

    pid: int
    probe_address: int
    probe: bytes
    device_address: int
    host_address: int
    block_bytes: int


class Part(NamedTuple):
    """The wire's `ReadBlocksResponse`."""

    data: memoryview | bytes = b""
    digests: bytes = b""
    memory: SourceMemory | None = None


class ReadRequest(NamedTuple):
    """The wire's `ReadBlocksRequest`."""

    epoch: int
    lease_id: int
    token: bytes
    block_ids: Sequence[int]
    rank: int
    reader: Reader | None


class Parts(Protocol):
    """The answer to a request. Iterating raises FetchFailed."""

    def __iter__(self) -> Iterator[Part]: ...

    def cancel(self) -> None:
        """End the iteration, which waits on another thread, with FetchFailed."""
        ...


COPIED_AHEAD_BYTES = 8 << 20
"""Maximum number of bytes of the blocks that are copied from another process's memory before their
digests arrive, which the source computes meanwhile; at least one block. The processors' caches
still have these bytes when they are compared."""

Connect = Callable[[str, ReadRequest, float], Parts]
"""Sends a request to the worker at an address, with a time limit in seconds for the answer."""


class WriteGuard:
    """Lets one thread at a time write to the targets of a stream's fetches, until it is closed."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.is_closed = False

    def __enter__(self) -> None:
        self._lock.acquire()
        if self.is_closed:
            self._lock.release()
            raise Stopped

    def __exit__(self, *error: object) -> None:
        self._lock.release()

    def close(self) -> None:
        """Refuse writes from now on, without waiting for the present one."""
        self.is_closed = True

    def wait(self) -> None:
        """Wait for the present write; after `close` there are none after that."""
        with self._lock:
            pass


class ArrivingBlocks:
    """The target blocks of a fetch, filled in order and then compared with their digests."""

    def __init__(self, memory: BlockMemory, fetch: BlockFetch, guard: WriteGuard) -> None:
        self.sources: list[int] = fetch.blocks[:, 0].tolist()
        self.num_bytes = 0
        """Bytes received."""
        self._memory = memory
        self._guard = guard
        self._block_bytes = memory.block_bytes
        self._targets: list[int] = fetch.blocks[:, 1].tolist()
        self._keys = fetch.keys
        self._views: dict[int, memoryview] = {}
        """Where the blocks that are not committed are written, by index in the fetch."""
        self._source: SourceMemory | None = None
        """Where the bytes are, if they do not come in messages."""
        self._num_checked = 0

    @property
    def num_complete(self) -> int:
        """The number of blocks that have all their bytes."""
        return self.num_bytes // self._block_bytes

    def write(self, data: memoryview | bytes) -> None:
        """Append bytes. Raises FetchFailed if there are more than the blocks have."""
        rest = memoryview(data)
        if self.num_bytes + len(rest) > len(self._targets) * self._block_bytes:
            raise FetchFailed(FetchFailure.MALFORMED, "the source sent more bytes than requested")
        while len(rest):
            index, offset = divmod(self.num_bytes, self._block_bytes)
            some = rest[: self._block_bytes - offset]
            with self._guard:
                self._view(index)[offset : offset + len(some)] = some
            self.num_bytes += len(some)
            rest = rest[len(some) :]

    def read_from(self, memory: SourceMemory) -> None:
        """Copy the first blocks from another process's memory, and the others in `check`. Raises
        MemoryUnreadable, as `check` does then."""
        probe = memoryview(bytearray(len(memory.probe)))
        read_memory(memory.pid, [Piece(memory.probe_address, probe)])
        if bytes(probe) != memory.probe:
            raise MemoryUnreadable(f"process {memory.pid} is not the source")
        if memory.block_bytes != self._block_bytes:
            expected = f"expected blocks of {self._block_bytes} bytes, got {memory.block_bytes}"
            raise FetchFailed(FetchFailure.MALFORMED, expected)
        self._source = memory
        self._copy_ahead()

    def _copy_ahead(self) -> None:
        num_ahead = max(1, COPIED_AHEAD_BYTES // self._block_bytes)
        self._copy_until(min(self._num_checked + num_ahead, len(self.sources)))

    def _copy_until(self, end: int) -> None:
        """Copy the blocks before this index, if they do not come in messages."""
        memory, indices = self._source, range(self.num_complete, end)
        if memory is None or not indices:
            return
        with self._guard:
            views = [self._view(index) for index in indices]
            addresses = [_address(memory, self.sources[index]) for index in indices]
            read_memory(memory.pid, list(map(Piece, addresses, views)))
        self.num_bytes += len(indices) * self._block_bytes

    def check(self, digests: bytes) -> None:
        """Compare the next blocks with their digests, and commit them. Raises FetchFailed for a
        block that has another."""
        if len(digests) % DIGEST_BYTES:
            raise FetchFailed(FetchFailure.MALFORMED, "the source sent a part of a digest")
        end = self._num_checked + len(digests) // DIGEST_BYTES
        self._copy_until(min(end, len(self.sources)))
        if end > self.num_complete:
            raise FetchFailed(FetchFailure.MALFORMED, "the source sent a digest before its block")
        for start in range(0, len(digests), DIGEST_BYTES):
            self._check_next(digests[start : start + DIGEST_BYTES])
        self._copy_ahead()

    def _check_next(self, digest: bytes) -> None:
        index = self._num_checked
        view = self._views.pop(index)
        key = self._keys[index * KEY_BYTES : (index + 1) * KEY_BYTES]
        if block_digest(key, view) != digest:
            problem = f"block {self.sources[index]} of the source arrived with another digest"
            raise FetchFailed(FetchFailure.DIGEST_MISMATCH, problem)
        with self._guard:
            self._memory.commit(self._targets[index], view)
        self._num_checked += 1

    @property
    def have_arrived(self) -> bool:
        """Whether all have been compared with their digests, and committed."""
        return self._num_checked == len(self._targets)

    def finish(self) -> None:
        """Raises FetchFailed unless all blocks have arrived."""
        if not self.have_arrived:
            missing = f"{self._num_checked} of {len(self._targets)} blocks arrived"
            raise FetchFailed(FetchFailure.MALFORMED, f"the source ended after {missing}")

    def _view(self, index: int) -> memoryview:
        if index not in self._views:
            self._views[index] = self._memory.target(self._targets[index])
        return self._views[index]


def _address(memory: SourceMemory, block: int) -> int:
    start, number = (memory.device_address, block) if block >= 0 else (memory.host_address, ~block)
    if start == 0:
        raise FetchFailed(FetchFailure.MALFORMED, f"the source has no address of block {block}")
    return start + number * memory.block_bytes
