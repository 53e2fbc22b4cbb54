"""Sequences of an earlier core, whose last tokens no plan has recorded.

A new core has no sequence of theirs, but their requests come back with their tokens. So what the
workers hold of them is found by its tokens like everything else.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from scheduler_service.core.config import CacheGroup, KeptSequence
from scheduler_service.core.context import Context
from scheduler_service.core.kv_cache.block_pool import BlockPool, Contents
from scheduler_service.core.kv_cache.prefix_cache import PrefixCache
from scheduler_service.core.kv_cache.prefix_keys import PrefixKeys

Entry = tuple[tuple[int, ...], Contents]


@dataclass(slots=True, eq=False)
class _Tokens:
    """The tokens that keys are made of."""

    token_ids: list[int]
    context: Context
    prefix_keys: PrefixKeys = field(default_factory=PrefixKeys)

    def known_tokens(self, start: int, end: int) -> list[int]:
        """The values of the tokens from `start` to `end`, exclusive."""
        return self.token_ids[start:end]


def adopt_sequences(
    sequences: Sequence[KeptSequence],
    groups: Sequence[CacheGroup],
    device: BlockPool,
    prefixes: PrefixCache,
) -> None:
    """Let what is left of these sequences be found, in blocks that nobody uses. Each sequence's
    last blocks are evicted first. What these caches cannot have is not used."""
    adopted: dict[int, Entry] = {}
    used: set[int] = set()
    for kept in sequences:
        for blocks, contents in [*_entries(kept, groups, prefixes)][::-1]:
            if used.isdisjoint(blocks) and _is_more(blocks, contents, device):
                used.update(blocks)
                adopted[blocks[0]] = blocks, contents
    for block in adopted:
        device.forget(block)
    device.adopt(adopted.values())


def _is_more(blocks: tuple[int, ...], contents: Contents, device: BlockPool) -> bool:
    """Whether blocks exist and may have these contents, of which fewer are recorded."""
    if not 0 <= min(blocks) <= max(blocks) < device.num_blocks or len(set(blocks)) < len(blocks):
        return False
    recorded = [device.cached.contents[block] for block in blocks if block in device.cached]
    if not recorded:
        return True
    before = recorded[0]
    is_same = before is not None and before.group == contents.group and len(blocks) == 1
    return is_same and len(before.units) < len(contents.units)  # type: ignore[union-attr]


def _entries(
    kept: KeptSequence, groups: Sequence[CacheGroup], prefixes: PrefixCache
) -> Iterator[Entry]:
    """Blocks and contents, by groups, in the order of tokens."""
    seq, length = _Tokens(kept.token_ids, kept.context), len(kept.token_ids)
    sources = prefixes.source_keys(seq)
    for number, (first, blocks) in kept.tables.items() if length else ():
        group = groups[number] if number < len(groups) else None
        if group is None or not blocks:
            continue
        if group.is_state:
            if kept.is_exact and len(blocks) == group.num_blocks:
                tail = prefixes.tail(seq, length)
                key = prefixes.key(seq, length)
                yield tuple(blocks), Contents(number, (key,), is_full=True, tail=tail)
        elif group.is_fixed:
            for block, key in zip(blocks, sources[number], strict=False):
                yield (block,), Contents(number, (key,), is_full=True)
        else:
            tokens = group.block_tokens
            for start, block in enumerate(blocks, first):
                end = min((start + 1) * tokens, length)
                ends = [*range(start * tokens + prefixes.unit, end, prefixes.unit), end]
                if start * tokens < end:
                    keys = tuple(prefixes.key(seq, at) for at in ends)
                    yield (block,), Contents(number, keys, is_full=end == (start + 1) * tokens)
