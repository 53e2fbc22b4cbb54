"""Keys of the prefix cache: hashes that identify tokens and all tokens before them.

The KV of a token depends on all tokens before it, and on the parts of the request's context that
begin there or before. So each *unit* of `KEY_TOKENS` tokens has a key that stands for all of them:
a 128-bit hash of the previous unit's key, its own tokens, and the parts that begin within it. Units
are the same for all models and worker groups, whatever the sizes of their blocks.
"""

from array import array
from collections import defaultdict
from collections.abc import Iterable
from math import gcd
from typing import Protocol

import xxhash

from scheduler_service.core.context import Context, ContextKind
from scheduler_service.core.kv_cache.block_pool import BlockKey

KEY_TOKENS = 16
"""Tokens of a unit."""

_TOKEN = "i"  # int32
_TOKEN_BYTES = array(_TOKEN).itemsize


def key_tokens(block_tokens: Iterable[int]) -> int:
    """Tokens of a unit where blocks have these numbers of tokens: `KEY_TOKENS`, of which they are
    multiples, or less in tests that have smaller blocks."""
    return gcd(KEY_TOKENS, *block_tokens)


def root_key(context: Context = (), seed: int = 0, *, reads_source: bool = False) -> BlockKey:
    """The parent of the first unit's key; sequences whose parts at position 0 differ share nothing.
    `seed`: without it, keys cannot be guessed. `reads_source`: whether all tokens depend on all
    media, wherever these begin, and on their order."""
    media = (part for part in context if part.kind is ContextKind.MEDIA and reads_source)
    parts = _beginning(context, 0, 1) + b"".join(part.packed() for part in media)
    return xxhash.xxh3_128_digest(parts, seed)


def tail_key(
    parent: BlockKey,
    tokens: Iterable[int],
    seed: int = 0,
    *,
    context: Context = (),
    start: int = 0,
) -> BlockKey:
    """The key of fewer tokens than a unit has, after the unit with key `parent`; `start` is the
    position of the first one. No unit has it, as that would have more tokens."""
    data = array(_TOKEN, tokens)
    later = tuple(part for part in context if part.start > 0)
    parts = _beginning(later, start, start + len(data))
    return xxhash.xxh3_128_digest(parent + data.tobytes() + parts, seed)


def unit_keys(
    parent: BlockKey,
    tokens: Iterable[int],
    unit: int,
    seed: int = 0,
    *,
    context: Context = (),
    start: int = 0,
) -> list[BlockKey]:
    """The keys of the units of `unit` tokens that these fill, after the unit with key `parent`;
    `start` is the position of the first one."""
    data = array(_TOKEN, tokens).tobytes()
    num_bytes = unit * _TOKEN_BYTES
    # Those at the start are in the root.
    later = tuple(part for part in context if part.start > 0) if context else ()
    keys = []
    for offset in range(0, len(data), num_bytes):
        parts = _beginning(later, start, start + unit) if later else b""
        parent = xxhash.xxh3_128_digest(parent + data[offset : offset + num_bytes] + parts, seed)
        start += unit
        keys.append(parent)
    return keys


def _beginning(context: Context, start: int, end: int) -> bytes:
    """The parts that begin at positions from `start` to `end`, exclusive, whatever their order."""
    return b"".join(part.packed() for part in sorted(context) if start <= part.start < end)


def source_keys(root: BlockKey, num_blocks: int, seed: int = 0) -> list[BlockKey]:
    """The keys of the blocks of a source, on which everything after the root key depends."""
    return unit_keys(root, range(num_blocks), 1, seed)


class PrefixKeys(defaultdict[tuple[int, int], list[BlockKey]]):
    """The keys of a sequence's first full units by their number of tokens, which worker groups with
    small blocks may change, and their seed; each is hashed once. The KV cache adds them, and a
    sequence drops them with its tokens.
    """

    def __init__(self) -> None:
        super().__init__(list)

    def fork(self) -> "PrefixKeys":
        """Keys for a sequence that continues the same tokens."""
        keys = PrefixKeys()
        keys.update((kind, list(of_kind)) for kind, of_kind in self.items())
        return keys


class KeyedTokens(Protocol):
    """Tokens that have keys."""

    prefix_keys: PrefixKeys

    @property
    def context(self) -> Context:
        """What their KV depends on besides them."""

    def known_tokens(self, start: int, end: int) -> list[int]:
        """The values of the tokens from `start` to `end`, exclusive."""


class CacheableLength(Protocol):
    """What the KV cache reads of a sequence's length; `core/progress.py` describes it."""

    @property
    def length(self) -> int:
        """Number of its tokens, including those that are being sampled."""

    @property
    def next_position(self) -> int:
        """While it decodes: the lowest position that its next row may have."""


class CacheableSequence(KeyedTokens, Protocol):
    """What the KV cache reads of a sequence; `core/sequence.py` describes it."""

    seq_id: int

    @property
    def growth(self) -> CacheableLength:
        """Its length."""

    @property
    def num_known(self) -> int:
        """Number of tokens whose values are known."""

    @property
    def num_prompt_tokens(self) -> int:
        """Number of tokens of its prompt."""

    @property
    def num_confirmed(self) -> int:
        """While it decodes: its first tokens whose KV is computed, by results that are in."""

    @property
    def max_reusable_tokens(self) -> int:
        """Maximum number of its first tokens that need not be computed."""

    @property
    def is_prefilling(self) -> bool:
        """Whether it is in the batch, and its first tokens are still being computed."""
