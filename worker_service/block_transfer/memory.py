"""What transfers need of a worker's caches, and the identity of a block's bytes."""

from typing import NamedTuple, Protocol

import xxhash

DIGEST_BYTES = 16


class CacheAddresses(NamedTuple):
    """Where the first block of each cache is in this process's memory; 0: not there."""

    device: int
    host: int


class BlockMemory(Protocol):
    """The device and host caches of an epoch. Block b of the device is b, block b of the host ~b.

    May be used from any thread.
    """

    num_device_blocks: int
    num_host_blocks: int
    block_bytes: int

    @property
    def addresses(self) -> CacheAddresses:
        """Where blocks follow each other, `block_bytes` apart."""
        ...

    def source(self, block: int) -> memoryview:
        """The bytes of a block: the cache itself, or a copy made by this call."""
        ...

    def target(self, block: int) -> memoryview:
        """Writable memory of a device block's size: the cache itself, or a buffer for `commit`."""
        ...

    def commit(self, block: int, data: memoryview) -> None:
        """Make a device block contain what was written to its `target`."""
        ...


def has_block(memory: BlockMemory, block: int) -> bool:
    """Whether a cache has this block."""
    if block >= 0:
        return block < memory.num_device_blocks
    return ~block < memory.num_host_blocks


def new_digest(key: bytes) -> xxhash.xxh3_128:
    """The digest of a block, before its bytes."""
    return xxhash.xxh3_128(key, seed=int.from_bytes(key[:8], "little"))


def block_digest(key: bytes, data: memoryview | bytes) -> bytes:
    """XXH3-128 of a block's key and bytes. The same bytes under another key, and the bytes of
    another block, have another digest."""
    digest = new_digest(key)
    digest.update(data)
    return digest.digest()
