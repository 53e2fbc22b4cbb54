"""What layers keep of a sequence, and where it lies in the pool of blocks.

All blocks of a worker have the same number of bytes. A block belongs to one cache group while it is
in use, and holds keys and values of some consecutive tokens of a sequence in the layers of that
group: layer after layer, keys before values. Groups differ in bytes per token, so they differ in
tokens per block, too, which are chosen so that little of a block remains unused.

A layer with a state keeps the same number of bytes of every sequence. A state divides into units,
such as the matrix of one head, which are packed one after the other into as few blocks as hold
them, and of which none lies in two. Blocks are at least as large as the largest unit.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import islice, product
from math import ceil, floor, prod

import torch
from torch import Tensor

from pagewire_kernels.batch import AttentionMetadata, LayerMemory, StateUnits, StepBatch
from pagewire_kernels.interface import stored_head_size
from worker_service.cache_groups import CacheGroup, CacheLifetime

BLOCK_ALIGNMENT = 128
"""Blocks have a multiple of this number of bytes: vector registers of CPUs need 64, GPUs 128."""

BLOCK_UNIT = 16
"""Tokens per block are a multiple of this, unless a smaller number is configured."""

UNIT_ALIGNMENT = 64
"""Units of a state begin at a multiple of this number of bytes in their block."""

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


@dataclass(frozen=True, kw_only=True, slots=True)
class StateArray:
    """A part of a layer's state on one rank: units of one shape."""

    num_units: int
    shape: tuple[int, ...]
    """Of a unit."""

    dtype: torch.dtype

    @property
    def unit_bytes(self) -> int:
        """Bytes of a unit, and of what remains unused behind it."""
        num_bytes = prod(self.shape) * self.dtype.itemsize
        return -(-num_bytes // UNIT_ALIGNMENT) * UNIT_ALIGNMENT


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerState:
    """The state of a sequence in one layer, on one rank."""

    arrays: tuple[StateArray, ...]


@dataclass(frozen=True, kw_only=True)
class KVCacheSpec:
    """What layers keep of a sequence, and the cache groups."""

    layers: tuple[LayerKV | LayerState, ...]
    """Of all stages of a pipeline: they determine the groups, on which ranks must agree. A layer
    that keeps keys and values beside a state is twice among them, one that keeps nothing is not.
    Empty: the model keeps nothing of a sequence."""

    dtype: torch.dtype
    stage: range | None = None
    """Indices of this rank's layers, which its blocks hold; None: all."""

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
        assert not drafts.has_states, "refused when it was loaded"
        assert all(layer.chunk is None for layer in drafts._of_tokens), "refused, too"
        kept = tuple(replace(layer, window=None) for layer in drafts._of_tokens)
        layers, start = (*self.layers, *kept), 0 if self.stage is None else self.stage.start
        return replace(self, layers=layers, stage=range(start, len(layers)), num_drafts=len(kept))

    @cached_property
    def group_of(self) -> tuple[int, ...]:
        """The cache group of each of this rank's layers of the model. Drafts are in the first."""
        kinds, held = self._kinds, self._held
        of_model = held[: len(held) - self.num_drafts]
        return tuple(
            len(kinds) if isinstance(layer, LayerState) else kinds.index(self._kind(layer))
            for layer in of_model
        )

    @property
    def has_states(self) -> bool:
        """Whether any layer keeps a state."""
        return any(isinstance(layer, LayerState) for layer in self.layers)

    def groups(self, block_size: int) -> tuple[CacheGroup, ...]:
        """The cache groups: the one that keeps all tokens, if any, then windows and chunks, those
        of fewest tokens first, then states.

        block_size: tokens per block of the group with most. Blocks of chunks divide them.
        """
        groups = self._token_groups(block_size)
        if not self.has_states:
            return groups
        size = self._common_bytes(self.layers, block_size)
        num_blocks = _pack(self._units(self.layers), size)[-1][0] + 1
        return *groups, CacheGroup(lifetime=CacheLifetime.STATE, num_blocks=num_blocks)

    def _token_groups(self, block_size: int) -> tuple[CacheGroup, ...]:
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
        `preferred` tokens per block, nor fewer bytes than a unit of a state, and little of a block
        remains unused; of any, if there is no such one, that which leaves least unused."""
        token_bytes = self._compared_bytes
        if not token_bytes:
            return preferred
        largest = max([unit for unit, _ in self._units(self.layers)], default=0)
        preferred = max(preferred, -(-largest // max(token_bytes) // BLOCK_UNIT) * BLOCK_UNIT)
        if len(token_bytes) == 1:
            return self._token_groups(preferred)[0].block_tokens
        unit = _unit(BLOCK_UNIT, *(kind.chunk for kind in self._kinds))
        sizes = [*range(unit, MAX_BLOCK_TOKENS + 1, unit)]
        fits = {size: [group.block_tokens for group in self._token_groups(size)] for size in sizes}
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
            if not group.has_tokens:
                total += group.num_blocks
                continue
            needed = -(-num_tokens // group.block_tokens)
            if group.span:
                seen = group.span - 1 + chunk
                needed = min(needed, -(-seen // group.block_tokens) + 1)
            total += needed
        return total

    def padding(self, block_size: int) -> float:
        """The largest share of blocks that a group leaves unused on this rank."""
        size = self.block_bytes(block_size)
        groups = zip(self._token_bytes(self._held), self._token_groups(block_size), strict=True)
        used = [count * group.block_tokens for count, group in groups if count]
        if units := self._units(self._held):
            num_blocks = self.groups(block_size)[-1].num_blocks
            used.append(sum(count * number for count, number in units) // num_blocks)
        return 1 - min(used) / (size if self.has_states else max(used))

    def block_bytes(self, block_size: int) -> int:
        """Bytes of one block of this rank; 0 without layers."""
        if not self.layers:
            return 0
        size = self._common_bytes(self._held, block_size)
        if (units := self._units(self._held)) and len(self._held) < len(self.layers):
            # A stage has as many blocks of a state as all layers together would need.
            num_blocks = self.groups(block_size)[-1].num_blocks
            size = max(size, _aligned(sum(map(prod, units)) // num_blocks))
            while _pack(units, size)[-1][0] >= num_blocks:
                size += BLOCK_ALIGNMENT
        return size

    def _common_bytes(self, layers: tuple[LayerKV | LayerState, ...], block_size: int) -> int:
        """Bytes of a block that holds the tokens of any group in some layers, and each unit of
        their states: all units, if no layer keeps tokens."""
        groups = zip(self._token_bytes(layers), self._token_groups(block_size), strict=True)
        tokens = [token_bytes * group.block_tokens for token_bytes, group in groups]
        units = self._units(layers)
        of_states = [size for size, _ in units] if self._kinds else [sum(map(prod, units))]
        return _aligned(max([*tokens, *of_states], default=0))

    def _units(self, layers: tuple[LayerKV | LayerState, ...]) -> list[tuple[int, int]]:
        """The bytes and the number of units of each part of the states of some layers."""
        states = [layer for layer in layers if isinstance(layer, LayerState)]
        return [(part.unit_bytes, part.num_units) for state in states for part in state.arrays]

    def views(self, pool: Tensor, block_size: int) -> tuple[LayerMemory, ...]:
        """Keys and values of this rank's layers of the model, twice the keys where no values are
        stored; or the parts of their state. pool: uint8 [num_blocks, block_bytes]."""
        return tuple(self._views(pool, block_size))[: len(self.group_of)]

    def draft_views(self, pool: Tensor, block_size: int) -> tuple[LayerMemory, ...]:
        """The same for the layers of the draft model or head."""
        return tuple(self._views(pool, block_size))[len(self.group_of) :]

    def batch_of_ranges(
        self,
        token_ids: Tensor,
        ranges: Sequence[tuple[int, int]],
        tables: Sequence[Tensor],
        caches: Sequence[LayerMemory],
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
                if group.has_tokens
                else AttentionMetadata.of_states(ranges, rows)
                for rows, group in groups
            ),
            caches=caches,
        )

    def _views(self, pool: Tensor, block_size: int) -> Iterator[LayerMemory]:
        if not self._held:
            return
        groups, of_bytes, pool = self._token_groups(block_size), pool, pool.view(self.dtype)
        ends = [0] * len(groups)  # elements of a block that layers before occupy
        places = iter(_pack(self._units(self._held), of_bytes.shape[1]))
        for layer in self._held:
            if isinstance(layer, LayerState):
                yield tuple(_state_units(part, of_bytes, places) for part in layer.arrays)
                continue
            index = self._kinds.index(self._kind(layer))
            tokens, start = groups[index].block_tokens, ends[index]
            ends[index] += tokens * layer.num_elements(self.dtype)
            heads = layer.num_kv_heads, stored_head_size(layer.head_dim, self.dtype)
            stored = pool[:, start : ends[index]].unflatten(1, (-1, tokens, *heads))
            yield stored[:, 0], stored[:, -1]

    @property
    def _of_tokens(self) -> tuple[LayerKV, ...]:
        return tuple(layer for layer in self.layers if isinstance(layer, LayerKV))

    @property
    def _held(self) -> tuple[LayerKV | LayerState, ...]:
        return self.layers if self.stage is None else tuple(self.layers[i] for i in self.stage)

    @cached_property
    def _kinds(self) -> list[CacheGroup]:
        """The cache groups that hold tokens, without the tokens of their blocks."""
        kinds = {self._kind(layer) for layer in self._of_tokens}
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

    def _token_bytes(self, layers: tuple[LayerKV | LayerState, ...]) -> list[int]:
        """Bytes of a token by group, in these layers."""
        size, kept = self.dtype.itemsize, [kv for kv in layers if isinstance(kv, LayerKV)]
        return [
            sum(size * kv.num_elements(self.dtype) for kv in kept if self._kind(kv) == kind)
            for kind in self._kinds
        ]


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // BLOCK_ALIGNMENT) * BLOCK_ALIGNMENT


def _pack(units: Sequence[tuple[int, int]], block_bytes: int) -> list[tuple[int, int]]:
    """The block of a state, and the byte in it, at which each unit begins. units: bytes and number
    of units, which follow each other."""
    places, block, start = [], 0, 0
    for size, count in units:
        for _ in range(count):
            if start + size > block_bytes:
                block, start = block + 1, 0
            places.append((block, start))
            start += size
    return places


def _state_units(part: StateArray, pool: Tensor, places: Iterator[tuple[int, int]]) -> StateUnits:
    """pool: uint8 [num_blocks, block_bytes]; places: of this part's units, and those after it."""
    size = part.dtype.itemsize
    found = [(block, start // size) for block, start in islice(places, part.num_units)]
    return StateUnits(pool.view(part.dtype), torch.tensor(found, device=pool.device))


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
