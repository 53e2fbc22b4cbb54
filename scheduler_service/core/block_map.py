"""Whose the blocks of one memory are, as status pages show it."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from scheduler_service.core.kv_cache.block_pool import BlockPool

EMPTY = 0
CACHED = -1
"""Free, with contents that can be found again."""


@dataclass(slots=True)
class BlockMap:
    """Columns by block."""

    owners: list[int]
    """The number of a request that has it, EMPTY or CACHED."""
    num_references: list[int]
    """Block tables that it is in."""


def map_blocks(
    pool: BlockPool, tables: Mapping[int, Sequence[int]], owners: Iterable[tuple[int, int]]
) -> BlockMap:
    """The map of a pool whose block tables are known by sequence id.

    `owners`: (sequence id, number of its request); of those that share a block the last one has it.
    """
    column = [EMPTY] * pool.num_blocks
    for block in pool.cached.free_blocks():
        column[block] = CACHED
    for seq_id, number in owners:
        for block in tables.get(seq_id, ()):
            column[block] = number
    return BlockMap(column, pool.reference_counts())
