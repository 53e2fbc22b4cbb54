"""What tokens leave in the KV cache, by layer, and where it lies in the pool of blocks.

All blocks of a worker have the same number of bytes. A block belongs to one cache group while it is
in use, and holds keys and values of some consecutive tokens of a sequence in the layers of that
group: layer after layer, keys before values. Groups differ in bytes per token, so they differ in
tokens per block, too, which are chosen so that little of a block remains unused.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import product
from math import ceil, floor

import torch
from torch import Tensor

from pagewire_kernels.batch import AttentionMetadata, LayerCaches, StepBatch
from pagewire_kernels.interface import stored_head_size
from worker_service.cache_groups import CacheGroup, CacheLifetime

BLOCK_ALIGNMENT = 128
"""Blocks have a multiple of this number of bytes: vector registers of CPUs need 64, GPUs 128."""

BLOCK_UNIT = 16
"""Tokens per block are a multiple of this, unless a smaller number is configured."""

MAX_BLOCK_TOKENS = 512
MAX_PADDING = 0.05
"""Share of a block that may remain unused, where tokens per block are not configured."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerKV:
    """Keys and values of one token in one layer, on one rank."""

    num_kv_heads: int
    head_dim: int
    window: int | None = None
    """Tokens that a token sees, itself included; None: all before it."""

    chunk: int | None = None
    """Tokens of a chunk: those from a multiple of it to the next one see each other alone. None:
    there are none."""

    has_values: bool = True
    """Whether values are stored, too; otherwise they are the first elements of keys."""

    def num_elements(self, dtype: torch.dtype) -> int:
        """Elements of key and value, with any scales."""
        num_stored = 2 if self.has_values else 1
        return num_stored * self.num_kv_heads * stored_head_size(self.head_dim, dtype)


@dataclass(frozen=True, kw_only=True)
class KVCacheSpec:
    """The KV of one token in a model, and its cache groups."""

    layers: tuple[LayerKV, ...]
    """Of all stages of a pipeline: they determine the groups, on which ranks must agree. Empty: the
    model keeps nothing of a sequence."""

    dtype: torch.dtype
    stage: range | None = None
    """Indices of this rank's layers, whose KV its blocks hold; None: all."""

    num_drafts: int = 0
    """The last layers, which are those of a draft model or head and keep all tokens."""

    has_shared_drafts: bool = False
    """Whether one of several ranks, this one or another, has such layers. They then do not affect
    tokens per block, on which ranks must agree."""

    releases_windows: bool = False
    """Whether layers with a window are cache groups of their own, so that the scheduler releases
    what no token sees any more; otherwise they are in the group that keeps all tokens. Layers with
    chunks always are."""

    @classmethod
    def uniform(
        cls, *, num_layers: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype
    ) -> "KVCacheSpec":
        """The specification of layers that are all equal."""
        layer = LayerKV(num_kv_heads=num_kv_heads, head_dim=head_dim)
        return cls(layers=(layer,) * num_layers, dtype=dtype)

    def with_drafts(self, drafts: "KVCacheSpec") -> "KVCacheSpec":
        """The same layers, followed by those of a draft model or head, which this rank holds
        whole."""
        assert drafts.dtype == self.dtype, "they are loaded with the same options"
        assert all(layer.chunk is None for layer in drafts.layers), "refused when it was loaded"
        kept = tuple(replace(layer, window=None) for layer in drafts.layers)
        layers, start = (*self.layers, *kept), 0 if self.stage is None else self.stage.start
        return replace(self, layers=layers, stage=range(start, len(layers)), num_drafts=len(kept))

    @cached_property
    def group_of(self) -> tuple[int, ...]:
        """The cache group of each of this rank's layers of the model. Drafts are in the first."""
        kinds, held = self._kinds, self._held
        of_model = held[: len(held) - self.num_drafts]
        return tuple(kinds.index(self._kind(layer)) for layer in of_model)

    def groups(self, block_size: int) -> tuple[CacheGroup, ...]:
        """The cache groups: the one that keeps all tokens, if any, then windows and chunks, those
        of fewest tokens first.

        block_size: tokens per block of the group with most. Blocks of chunks divide them.
        """
        if not self._kinds:
            return ()
        chunks = [kind.chunk for kind in self._kinds]
        tokens = _tokens_of_blocks(self._compared_bytes, chunks, block_size)
        return tuple(
            replace(kind, block_tokens=block_tokens)
            for kind, block_tokens in zip(self._kinds, tokens, strict=True)
        )

    def choose_block_size(self, preferred: int) -> int:
        """The block size without a configured one: the smallest with which no group has fewer than
        `preferred` tokens per block, and little of a block remains unused; of any, if there is no
        such one, that which leaves least unused."""
        token_bytes = self._compared_bytes
        if not token_bytes:
            return preferred
        if len(token_bytes) == 1:
            return self.groups(preferred)[0].block_tokens
        unit = _unit(BLOCK_UNIT, *(kind.chunk for kind in self._kinds))
        sizes = [*range(unit, MAX_BLOCK_TOKENS + 1, unit)]
        fits = {size: [group.block_tokens for group in self.groups(size)] for size in sizes}
        paddings = {size: _padding(token_bytes, fits[size]) for size in sizes}
        sizes = [size for size in sizes if max(fits[size]) == size] or sizes
        good = [size for size in sizes if paddings[size] <= MAX_PADDING]
        large = [size for size in good if min(fits[size]) >= preferred]
        if large:
            return min(large, key=lambda size: (min(fits[size]), paddings[size]))
        if good:
            return max(good, key=lambda size: (min(fits[size]), -paddings[size]))
        return min(sizes, key=lambda size: paddings[size])

    def num_blocks(self, num_tokens: int, chunk: int, block_size: int) -> int:
        """Blocks that a sequence of this length needs, computed in chunks of at most `chunk`
        tokens."""
        total = 0
        for group in self.groups(block_size):
            needed = -(-num_tokens // group.block_tokens)
            if group.span:
                seen = group.span - 1 + chunk
                needed = min(needed, -(-seen // group.block_tokens) + 1)
            total += needed
        return total

    def padding(self, block_size: int) -> float:
        """The largest share of a block that a group leaves unused on this rank."""
        groups = zip(self._token_bytes(self._held), self.groups(block_size), strict=True)
        held = [(size, group.block_tokens) for size, group in groups if size]
        return _padding(*map(list, zip(*held, strict=True)))

    def block_bytes(self, block_size: int) -> int:
        """Bytes of one block of this rank; 0 without layers."""
        if not self._kinds:
            return 0
        used = self._token_bytes(self._held)
        groups = zip(used, self.groups(block_size), strict=True)
        largest = max(token_bytes * group.block_tokens for token_bytes, group in groups)
        return -(-largest // BLOCK_ALIGNMENT) * BLOCK_ALIGNMENT

    def views(self, pool: Tensor, block_size: int) -> tuple[LayerCaches, ...]:
        """Keys and values of this rank's layers of the model, twice the keys where no values are
        stored. pool: uint8 [num_blocks, block_bytes]."""
        return tuple(self._views(pool, block_size))[: len(self.group_of)]

    def draft_views(self, pool: Tensor, block_size: int) -> tuple[LayerCaches, ...]:
        """The same for the layers of the draft model or head."""
        return tuple(self._views(pool, block_size))[len(self.group_of) :]

    def batch_of_ranges(
        self,
        token_ids: Tensor,
        ranges: Sequence[tuple[int, int]],
        tables: Sequence[Tensor],
        caches: Sequence[LayerCaches],
        block_size: int,
    ) -> StepBatch:
        """A batch of sequences that compute the positions from a first one up to an end. tables: by
        group, int32 [num_seqs, max_blocks], on the device of `token_ids`."""
        positions = torch.cat([torch.arange(*bounds) for bounds in ranges])
        if not tables:
            metadata = AttentionMetadata.of_texts([end for _, end in ranges], token_ids.device)
            return StepBatch(
                token_ids=token_ids,
                positions=positions.to(token_ids.device),
                attention=(metadata,),
                caches=(),
                token_types=torch.zeros_like(token_ids),
            )
        groups = zip(tables, self.groups(block_size), strict=True)
        return StepBatch(
            token_ids=token_ids,
            positions=positions.to(token_ids.device),
            attention=tuple(
                AttentionMetadata.of_ranges(ranges, rows, group.block_tokens, group.chunk)
                for rows, group in groups
            ),
            caches=caches,
        )

    def _views(self, pool: Tensor, block_size: int) -> Iterator[LayerCaches]:
        if not self._held:
            return
        groups, pool = self.groups(block_size), pool.view(self.dtype)
        ends = [0] * len(groups)  # elements of a block that layers before occupy
        for layer in self._held:
            index = self._kinds.index(self._kind(layer))
            tokens, start = groups[index].block_tokens, ends[index]
            ends[index] += tokens * layer.num_elements(self.dtype)
            heads = layer.num_kv_heads, stored_head_size(layer.head_dim, self.dtype)
            stored = pool[:, start : ends[index]].unflatten(1, (-1, tokens, *heads))
            yield stored[:, 0], stored[:, -1]

    @property
    def _held(self) -> tuple[LayerKV, ...]:
        return self.layers if self.stage is None else tuple(self.layers[i] for i in self.stage)

    @cached_property
    def _kinds(self) -> list[CacheGroup]:
        """The cache groups, without the tokens of their blocks."""
        kinds = {self._kind(layer) for layer in self.layers}
        kinds |= {CacheGroup()} if self.has_shared_drafts else set()
        return sorted(kinds, key=lambda kind: (kind.span, kind.lifetime.value))

    def _kind(self, layer: LayerKV) -> CacheGroup:
        if layer.chunk is not None:
            return CacheGroup(lifetime=CacheLifetime.CHUNK, span=layer.chunk)
        if layer.window is not None and self.releases_windows:
            return CacheGroup(lifetime=CacheLifetime.WINDOW, span=layer.window)
        return CacheGroup()

    @cached_property
    def _compared_bytes(self) -> list[int]:
        """Bytes of a token by group, which tokens per block make equal. A group of nothing but
        other ranks' drafts counts as one of few bytes."""
        drafts = self.num_drafts if self.has_shared_drafts else 0
        sizes = self._token_bytes(self.layers[: len(self.layers) - drafts])
        return [size or min(filter(None, sizes)) for size in sizes]

    def _token_bytes(self, layers: tuple[LayerKV, ...]) -> list[int]:
        """Bytes of a token by group, in these layers."""
        size = self.dtype.itemsize
        return [
            sum(size * kv.num_elements(self.dtype) for kv in layers if self._kind(kv) == kind)
            for kind in self._kinds
        ]


def _tokens_of_blocks(
    token_bytes: list[int], chunks: list[int], block_size: int
) -> tuple[int, ...]:
    """Tokens per block by group, of which the one with fewest bytes per token has `block_size`:
    the combination of roundings to units, and to divisors of chunks, that leaves least unused.
    chunks: 0 for a group without."""
    unit = _unit(block_size, *chunks)
    num_bytes = block_size // unit * unit * min(token_bytes)
    choices = [
        _roundings(num_bytes / size, unit, chunk)
        for size, chunk in zip(token_bytes, chunks, strict=True)
    ]
    return min(product(*choices), key=lambda tokens: _padding(token_bytes, tokens))


def _unit(*sizes: int) -> int:
    """What tokens per block are multiples of: `BLOCK_UNIT`, unless one of these sizes is not."""
    return 1 if any(size % BLOCK_UNIT for size in sizes) else BLOCK_UNIT


def _roundings(tokens: float, unit: int, chunk: int) -> list[int]:
    """The multiples of `unit` around a number of tokens: of those that divide a chunk, if there is
    one."""
    if chunk == 0:
        return sorted({max(1, floor(tokens / unit)) * unit, ceil(tokens / unit) * unit})
    sizes = [size for size in range(unit, chunk + 1, unit) if chunk % size == 0]
    below = [size for size in sizes if size <= tokens] or sizes[:1]
    above = [size for size in sizes if size >= tokens] or sizes[-1:]
    return [below[-1], above[0]]


def _padding(token_bytes: list[int], tokens: tuple[int, ...] | list[int]) -> float:
    used = [size * count for size, count in zip(token_bytes, tokens, strict=True)]
    return 1 - min(used) / max(used)
