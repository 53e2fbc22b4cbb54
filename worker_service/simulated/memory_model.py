"""The memory model: the content of each slot, the holders of each block, and the allowed uses.

A slot of the device or host cache contains the `History` for which a real one would contain KV,
or nothing.
A known sequence *holds* the blocks in its table, until it is forgotten or the entry is replaced.

The rules, each of which ends in `InvalidPlan`:

- A block that is read (by attention, a swap or a copy) was written before, and attention finds the
  sequence's own history at every position of its context, before this step's rows write anything.
- A block that a row writes is held by no other sequence, except the row's own new forks.
- A block that a swap-in or a copy writes is held by no sequence, and written by one of them only.
- A block that is swapped out is not written by a row of a sequence that held it.
- A block that is swapped in is not used by a row or a copy of the same step, because the swap runs
  concurrently with them.

Together they ensure that a context that was checked once stays correct as long as it is held.
Plain integers only: neither numpy nor protobuf.
"""

from collections.abc import Collection, Sequence

from worker_service.errors import InvalidPlan
from worker_service.simulated.model import History, SimulatedSequence

Slots = list[History | None]
Pairs = Sequence[Sequence[int]]
_NO_IDS: frozenset[int] = frozenset()


class MemoryModel:
    """The contents of both caches and the holders of the device's blocks."""

    def __init__(self, *, num_gpu_blocks: int, num_cpu_blocks: int, block_size: int) -> None:
        self.block_size = block_size
        self._device: list[Slots | None] = [None] * num_gpu_blocks
        """Per block; None as long as nothing was written to it."""
        self._host: list[Slots | None] = [None] * num_cpu_blocks
        self._holders: dict[int, set[int]] = {}
        """Ids of the sequences that hold a block; blocks without holders are absent."""
        self._leaving: dict[int, frozenset[int]] = {}
        """Held blocks that this step swaps out, and their holders."""
        self._arriving: frozenset[int] = _NO_IDS
        """Blocks that this step swaps in."""

    def check_block(self, block: int, field: str) -> None:
        """Raises InvalidPlan unless this is a block of the device cache."""
        if not 0 <= block < len(self._device):
            raise InvalidPlan(field, _expected(len(self._device), "device", block))

    def hold(self, block: int, seq_id: int) -> None:
        """Enter a block into a sequence's table."""
        self._holders.setdefault(block, set()).add(seq_id)

    def release(self, blocks: Collection[int], seq_id: int) -> None:
        """Remove blocks from a sequence's table; their content stays."""
        for block in blocks:
            holders = self._holders[block]
            holders.remove(seq_id)
            if not holders:
                del self._holders[block]

    def swap_out(self, pairs: Pairs) -> None:
        """Device to host."""
        self._move("swap_out", pairs, self._device, self._host)
        self._leaving = {
            source: frozenset(self._holders[source])
            for source, _ in pairs
            if source in self._holders
        }

    def swap_in(self, pairs: Pairs) -> None:
        """Host to device."""
        self._check_unheld("swap_in", pairs)
        self._move("swap_in", pairs, self._host, self._device)
        self._arriving = frozenset(target for _, target in pairs)

    def copy(self, pairs: Pairs) -> None:
        """Device to device, after this step's swap-ins."""
        self._check_unheld("copy", pairs)
        for block in self._arriving.intersection(block for pair in pairs for block in pair):
            raise InvalidPlan("copy", f"device block {block} is a target of swap_in, too")
        self._move("copy", pairs, self._device, self._device)

    def check_use(self, sequence: SimulatedSequence, row: int) -> None:
        """Raises InvalidPlan if a sequence with a row holds a block that this step swaps in."""
        for block in self._arriving.intersection(sequence.block_table):
            raise InvalidPlan(
                "seq_ids",
                f"row {row}: sequence {sequence.seq_id} uses device block {block}, which this step"
                " swaps in",
            )

    def read(self, sequence: SimulatedSequence, row: int) -> None:
        """Check that a sequence finds its computed tokens' KV in its blocks."""
        block_size, table = self.block_size, sequence.block_table
        for position in range(sequence.num_checked, sequence.num_computed):
            index, offset = divmod(position, block_size)
            slots = self._device[table[index]]
            found = None if slots is None else slots[offset]
            if found != sequence.histories[position]:
                what = "nothing was written" if found is None else "another history's KV is"
                raise InvalidPlan(
                    "seq_ids",
                    f"row {row}: sequence {sequence.seq_id} reads position {position} from device"
                    f" block {table[index]} offset {offset}, where {what}",
                )
        sequence.num_checked = sequence.num_computed

    def write(
        self, sequence: SimulatedSequence, end: int, row: int, forks: Collection[int] = _NO_IDS
    ) -> None:
        """Write a sequence's KV from its computed tokens up to `end`.

        `forks`: the new forks that take over what this row computes and may share its blocks.
        """
        block_size, histories = self.block_size, sequence.histories
        start = sequence.num_computed
        while start < end:
            index, offset = divmod(start, block_size)
            block = sequence.block_table[index]
            self._check_exclusive(block, sequence.seq_id, row, forks)
            self._check_stays(block, sequence.seq_id, row)
            slots = self._device[block]
            if slots is None:
                slots = self._device[block] = [None] * block_size
            stop = min(end, start - offset + block_size)
            slots[offset : offset + stop - start] = histories[start:stop]
            start = stop
        sequence.num_computed = sequence.num_checked = end

    def _check_exclusive(self, block: int, seq_id: int, row: int, forks: Collection[int]) -> None:
        holders = self._holders[block]
        if len(holders) > 1:
            others = holders.difference(forks, (seq_id,))
            if others:
                raise InvalidPlan(
                    "seq_ids",
                    f"row {row}: sequence {seq_id} writes to device block {block}, which is shared"
                    f" with sequence {min(others)}",
                )

    def _check_stays(self, block: int, seq_id: int, row: int) -> None:
        if self._leaving and seq_id in self._leaving.get(block, _NO_IDS):
            raise InvalidPlan(
                "seq_ids",
                f"row {row}: sequence {seq_id} writes to device block {block}, which this step"
                " swaps out",
            )

    def _check_unheld(self, field: str, pairs: Pairs) -> None:
        for _, target in pairs:
            holders = self._holders.get(target)
            if holders:
                problem = f"device block {target} is in use by sequence {min(holders)}"
                raise InvalidPlan(field, problem)

    def _move(
        self,
        field: str,
        pairs: Pairs,
        sources: list[Slots | None],
        targets: list[Slots | None],
    ) -> None:
        """Copy whole blocks, all sources read before any target is written."""
        contents: dict[int, Slots] = {}
        for source, target in pairs:
            if not 0 <= source < len(sources):
                raise InvalidPlan(field, _expected(len(sources), "source", source))
            if not 0 <= target < len(targets):
                raise InvalidPlan(field, _expected(len(targets), "target", target))
            if target in contents:
                raise InvalidPlan(field, f"target block {target} is named twice")
            slots = sources[source]
            if slots is None:
                raise InvalidPlan(field, f"source block {source} was never written")
            contents[target] = slots.copy()
        for target, slots in contents.items():
            targets[target] = slots


def _expected(num_blocks: int, kind: str, got: int) -> str:
    return f"expected {kind} blocks from 0 to {num_blocks - 1}, got {got}"
