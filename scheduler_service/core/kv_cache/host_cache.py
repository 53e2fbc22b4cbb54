"""Host memory of one worker group: swapped-out sequences, and the prefix cache's second tier.

The second tier holds cached blocks that were evicted from the device.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from scheduler_service.core.kv_cache.block_pool import BlockKey, BlockPool


class HostCache:
    """Block tables of swapped-out sequences, and cached blocks, over one pool of host blocks.

    A block with a key holds the same as a device block that has or had it. Those that no table
    needs are cached: they stay until somebody needs the room, swapped-out sequences or what was
    cached later, the longest unused first.

    What the plan in the making reads or writes stays taken until `end_plan`. Its swap-outs run
    before its swap-ins, so a block that it reads must not be a target; and no block may be a
    target twice.

    Invariant: a block's reference count is the number of tables it is in, and one more for each
    time the plan in the making reads or writes it.
    """

    def __init__(self, num_blocks: int) -> None:
        self.pool = BlockPool(num_blocks)
        self.tables: dict[int, list[int]] = {}
        self._pinned: list[int] = []
        """References that end with the plan; of a sequence's blocks the last first."""
        self._kept: dict[int, int] = {}
        """What this plan moves to keep what is evicted: the device block by host block, those first
        that were evicted first."""

    # Swapped-out sequences.

    def num_missing(self, keys: Iterable[BlockKey | None]) -> int:
        """How many of distinct device blocks with these keys are not here."""
        return sum(key is None or self.pool.cached.find(key) is None for key in keys)

    def num_needed(self, keys: Iterable[BlockKey | None]) -> int:
        """Free blocks that it takes to put distinct device blocks with these keys."""
        needed = 0
        for key in keys:
            block = None if key is None else self.pool.cached.find(key)
            needed += block is None or not self.pool.is_used(block)
        return needed

    def put(
        self, tables: Mapping[int, Sequence[int]], keys: Mapping[int, BlockKey | None]
    ) -> dict[int, int]:
        """Take in block tables by sequence id, given in device blocks, whose keys are `keys`; there
        must be room. The host block of each device block that is to be moved: what sequences
        share, they keep sharing, and what the host has is not moved."""
        targets: dict[int, int] = {}
        moved: dict[int, int] = {}
        for block, key in keys.items():
            found = None if key is None else self.pool.cached.find(key)
            if found is not None:
                self.pool.share([found])
                targets[block] = found
        for block, key in keys.items():
            if block not in targets:
                [target] = self.pool.allocate(1)
                targets[block] = moved[block] = target
                if key is not None:
                    self.pool.cached.add(target, key)
        for seq_id, table in tables.items():
            self.tables[seq_id] = [targets[block] for block in table]
            self.pool.share(self.tables[seq_id])
        self._pinned += reversed(targets.values())  # the first reference of each
        return moved

    def take(self, seq_ids: Sequence[int]) -> dict[int, list[int]]:
        """Part with the tables of these sequences, which the plan in the making swaps in."""
        tables = {seq_id: self.tables.pop(seq_id) for seq_id in seq_ids}
        for table in tables.values():
            self._pinned += reversed(table)
        return tables

    def num_blocks_of(self, seq_ids: Sequence[int]) -> int:
        """Distinct blocks of these sequences."""
        return len({block for seq_id in seq_ids for block in self.tables[seq_id]})

    def free(self, seq_id: int) -> None:
        """Drop a swapped-out sequence's blocks."""
        self.pool.release(self.tables.pop(seq_id))

    # Cached blocks.

    def keep(self, device_block: int, key: BlockKey) -> None:
        """A device block with this key is about to get other contents: take them over, if there
        is room and they are not here."""
        found = self.pool.cached.find(key)
        if found is not None:
            self.pool.cached.touch(found)
            return
        block = self.pool.allocate(1)[0] if self.pool.num_free_blocks else self._give_up_first()
        if block is not None:
            self.pool.cached.add(block, key)
            self._pinned.append(block)
            self._kept[block] = device_block

    def _give_up_first(self) -> int | None:
        """The host block of what was evicted first for this plan and that nobody has asked for:
        of one sequence its last block, which would not be found without those before."""
        for block in self._kept:
            if self.pool.num_references(block) == 1:
                del self._kept[block]
                self._pinned.remove(block)
                self.pool.cached.discard(block)
                return block
        return None

    def fetch(self, blocks: Sequence[int]) -> None:
        """The plan in the making reads these blocks, which were found by their keys."""
        self.pool.share(blocks)
        self._pinned += reversed(blocks)

    # Plans.

    def end_plan(self) -> list[int]:
        """The plan is complete, but for the (device block, host block) pairs returned: what it
        must swap out beside, to keep what is evicted. What it reads and writes may be written by
        the next one."""
        self.pool.release(self._pinned[::-1])
        self._pinned = []
        kept, self._kept = self._kept, {}
        return [block for host, device in kept.items() for block in (device, host)]

    def check(self) -> None:
        """Assert the invariant, between plans."""
        assert not self._pinned
        assert not self._kept
        counts = Counter(block for table in self.tables.values() for block in table)
        self.pool.check(dict(counts))
