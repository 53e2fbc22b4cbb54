"""Keys of the prefix cache: hashes that identify a block's tokens and all tokens before them.

The KV of a token depends on all tokens before it. So a full block has a key that stands for its
tokens and all before them: a 128-bit hash of the previous block's key and its own tokens.
"""

from array import array
from collections import defaultdict
from collections.abc import Iterable
from typing import Protocol

import xxhash

from scheduler_service.core.kv_cache.block_pool import BlockKey

_TOKEN = "i"  # int32
_TOKEN_BYTES = array(_TOKEN).itemsize


def root_key(salt: bytes = b"") -> BlockKey:
    """The parent of the first block's key; sequences with different salts share nothing."""
    return xxhash.xxh3_128_digest(salt)


def block_keys(parent: BlockKey, tokens: Iterable[int], block_size: int) -> list[BlockKey]:
    """The keys of the blocks that these tokens fill, which follow the block with key `parent`."""
    data = array(_TOKEN, tokens).tobytes()
    num_bytes = block_size * _TOKEN_BYTES
    keys = []
    for start in range(0, len(data), num_bytes):
        parent = xxhash.xxh3_128_digest(parent + data[start : start + num_bytes])
        keys.append(parent)
    return keys


class PrefixKeys(defaultdict[int, list[BlockKey]]):
    """The keys of a sequence's first full blocks by block size, which may differ among worker
    groups; each is hashed once. The KV cache adds them, and a sequence drops them with its tokens.
    """

    def __init__(self) -> None:
        super().__init__(list)

    def fork(self) -> "PrefixKeys":
        """Keys for a sequence that continues the same tokens."""
        keys = PrefixKeys()
        keys.update((size, list(of_size)) for size, of_size in self.items())
        return keys


class CacheableSequence(Protocol):
    """What the KV cache reads of a sequence; `core/sequence.py` describes it."""

    seq_id: int
    prefix_keys: PrefixKeys

    @property
    def length(self) -> int:
        """Number of its tokens, including those that are being sampled."""

    @property
    def num_known(self) -> int:
        """Number of tokens whose values are known."""

    @property
    def max_reusable_tokens(self) -> int:
        """Maximum number of its first tokens that need not be computed."""

    @property
    def is_prefilling(self) -> bool:
        """Whether it is in the batch, and its first tokens are still being computed."""

    @property
    def tenant_name(self) -> str:
        """The tenant for which it is computed."""

    def known_tokens(self, start: int, end: int) -> list[int]:
        """The values of its tokens from `start` to `end`, exclusive."""
