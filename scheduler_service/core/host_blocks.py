"""Host memory of one worker group: where the blocks of swapped-out sequences are."""

from collections import Counter

from scheduler_service.core.block_pool import BlockPool


class HostBlocks:
    """Block tables of swapped-out sequences, over one pool of host blocks.

    A block that a plan reads stays taken until `end_plan`: the same plan's swap-outs, which run
    before its swap-ins, must not write to it.

    Invariant: a block's reference count is the number of tables it is in, and one more while the
    plan in the making reads it.
    """

    def __init__(self, num_blocks: int) -> None:
        self.pool = BlockPool(num_blocks)
        self.tables: dict[int, list[int]] = {}
        self._pinned: list[int] = []

    def put(self, tables: dict[int, list[int]]) -> dict[int, int]:
        """Take in block tables by sequence id, given in device blocks; there must be room. The
        host block of each device block: what sequences share, they go on sharing."""
        blocks = list(dict.fromkeys(block for table in tables.values() for block in table))
        targets = dict(zip(blocks, self.pool.allocate(len(blocks)), strict=True))
        for seq_id, table in tables.items():
            self.tables[seq_id] = [targets[block] for block in table]
            self.pool.share(self.tables[seq_id])
        self.pool.release(list(targets.values()))  # the first reference was nobody's
        return targets

    def take(self, seq_ids: list[int]) -> dict[int, list[int]]:
        """Part with the tables of these sequences, which the plan in the making swaps in."""
        tables = {seq_id: self.tables.pop(seq_id) for seq_id in seq_ids}
        for table in tables.values():
            self._pinned += table
        return tables

    def num_blocks_of(self, seq_ids: list[int]) -> int:
        """Distinct blocks of these sequences."""
        return len({block for seq_id in seq_ids for block in self.tables[seq_id]})

    def free(self, seq_id: int) -> None:
        """Drop a swapped-out sequence's blocks."""
        self.pool.release(self.tables.pop(seq_id))

    def end_plan(self) -> None:
        """The plan is complete: what it read may be written by the next one."""
        self.pool.release(self._pinned)
        self._pinned = []

    def check(self) -> None:
        """Assert the invariant, between plans."""
        assert not self._pinned
        counts = Counter(block for table in self.tables.values() for block in table)
        self.pool.check(dict(counts))
