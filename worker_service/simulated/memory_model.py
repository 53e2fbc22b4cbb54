"""The memory model: the content of each block, the holders of each block, and the allowed uses.

A block of the device or host cache contains the `History` for which a real one would contain KV in
each of its slots, or the one for which it would contain a state, together with the sequence's salt,
or nothing; in a group of sources, a hash of its media. It belongs to one cache group at a time:
what another group wrote there counts as nothing.
A known sequence *holds* the blocks in its tables, until it is forgotten, the entry is replaced, or
no token of the sequence to come sees the block's tokens.

The rules, each of which ends in `InvalidPlan`:

- A block that is read (by attention, a swap or a copy) was written before, and attention finds the
  sequence's own history at every position of its context that it sees, before this step's rows
  write anything. A state that a row continues is the one after the token before the row, and so
  is a new sequence's own. A source that a row does not write was written, for the same media.
- A block that a row writes is held by no other sequence, except the row's own new forks.
- A block that a swap-in or a copy writes is held by no sequence, and written by one of them only;
  but a copy may also write the state of one sequence, which is a fork's.
- A block that a state is saved in is held by no sequence, and nothing else in the step uses it.
- A block that is swapped out is not written by a row of a sequence that held it.
- A block that is swapped in is not used by a row or a copy of the same step, because the swap runs
  concurrently with them.
- A block is in tables of one group only.
- A block that is leased was written before, and is not written as long as it is leased.
- A block that a fetch writes is held by no sequence and not leased; until the fetch has ended it
  contains nothing.

Together they ensure that a context that was checked once stays correct as long as it is held.
Plain integers only: neither numpy nor protobuf.
"""

from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from typing import NamedTuple

from worker_service.cache_groups import CacheGroup, CacheLifetime
from worker_service.errors import InvalidPlan
from worker_service.simulated.model import NO_BLOCK, History, SimulatedSequence


class Content(NamedTuple):
    """What a block contains."""

    group: int
    slots: list[History | None]
    """One entry per token; a single one in a block of a state."""


Pairs = Sequence[Sequence[int]]
_NO_IDS: frozenset[int] = frozenset()


class BlockHolders:
    """The sequences whose tables have a device block."""

    def __init__(self) -> None:
        self._holders: dict[int, set[int]] = {}
        """Ids of the sequences that hold a block; blocks without holders are absent."""
        self._group_of: dict[int, int] = {}
        """The group whose tables a held block is in."""

    def of(self, block: int) -> Collection[int]:
        """The ids of the sequences that hold a block."""
        return self._holders.get(block, _NO_IDS)

    def group_of(self, block: int) -> int | None:
        """The group whose tables a block is in, if it is in any."""
        return self._group_of.get(block)

    def hold(self, block: int, seq_id: int, group: int, field: str) -> None:
        """Enter a block into a sequence's table of a group. Raises InvalidPlan if it is in a table
        of another group."""
        if self._group_of.setdefault(block, group) != group:
            problem = f"device block {block} is in a table of group {self._group_of[block]}"
            raise InvalidPlan(field, f"{problem}, and of group {group}")
        self._holders.setdefault(block, set()).add(seq_id)

    def release(self, blocks: Collection[int], seq_id: int) -> None:
        """Remove blocks from a sequence's tables; their content stays."""
        for block in blocks:
            if block == NO_BLOCK:
                continue
            holders = self._holders[block]
            holders.remove(seq_id)
            if not holders:
                del self._holders[block], self._group_of[block]

    def check_none(self, field: str, pairs: Iterable[Sequence[int]]) -> None:
        """Raises InvalidPlan if a sequence holds a target of these moves."""
        for _, target in pairs:
            if holders := self.of(target):
                problem = f"device block {target} is in use by sequence {min(holders)}"
                raise InvalidPlan(field, problem)

    def check_exclusive(self, block: int, seq_id: int, row: int, forks: Collection[int]) -> None:
        """Raises InvalidPlan if others than a sequence and its new forks hold a block."""
        holders = self._holders[block]
        if len(holders) > 1 and (others := holders.difference(forks, (seq_id,))):
            raise InvalidPlan(
                "seq_ids",
                f"row {row}: sequence {seq_id} writes to device block {block}, which is shared"
                f" with sequence {min(others)}",
            )


class BlockLeases:
    """The blocks that other workers read, ~b for host block b."""

    def __init__(self) -> None:
        self._leases: dict[int, tuple[int, ...]] = {}
        self._leased: Counter[int] = Counter()
        """The number of leases of each block."""

    def begin(self, lease_id: int, blocks: Iterable[int]) -> tuple[int, ...]:
        """Keep blocks from being written; returns them."""
        leased = self._leases[lease_id] = tuple(blocks)
        self._leased.update(leased)
        return leased

    def end(self, lease_id: int) -> None:
        """Let blocks be written again, unless another lease has them."""
        for block in self._leases.pop(lease_id):
            self._leased[block] -= 1
            if self._leased[block] == 0:
                del self._leased[block]

    def check_none(self, block: int, field: str) -> None:
        """Raises InvalidPlan if a block is leased."""
        if block in self._leased:
            name = f"device block {block}" if block >= 0 else f"host block {~block}"
            raise InvalidPlan(field, f"{name} is leased and must not be written")


class MemoryModel:
    """The contents of both caches, and what a step may do with them."""

    def __init__(
        self, *, num_gpu_blocks: int, num_cpu_blocks: int, groups: Sequence[CacheGroup]
    ) -> None:
        self.groups = groups
        self._device: list[Content | None] = [None] * num_gpu_blocks
        """Per block; None as long as nothing was written to it."""
        self._host: list[Content | None] = [None] * num_cpu_blocks
        self.holders = BlockHolders()
        self.leases = BlockLeases()
        self._leaving: dict[int, frozenset[int]] = {}
        """Held blocks that this step swaps out, and their holders."""
        self._arriving: frozenset[int] = _NO_IDS
        """Blocks that this step swaps in."""
        self._moved: dict[int, str] = {}
        """Device blocks that this step copies, or that its swap-ins and fetches write, and the
        plan's field that names each."""

    def forget_sequences(self) -> None:
        """Remove all tables and leases; what was written stays."""
        self.holders, self.leases = BlockHolders(), BlockLeases()
        self._leaving, self._arriving, self._moved = {}, _NO_IDS, {}

    def check_block(self, block: int, field: str) -> None:
        """Raises InvalidPlan unless this is a block of the device cache."""
        if not 0 <= block < len(self._device):
            raise InvalidPlan(field, _expected(len(self._device), "device", block))

    def release_unseen(self, sequence: SimulatedSequence) -> None:
        """Remove the blocks whose tokens no token of the sequence to come sees."""
        for group, table in zip(self.groups, sequence.tables, strict=True):
            if not group.has_tokens:
                continue
            end = min(group.first_visible(sequence.num_computed) // group.block_tokens, len(table))
            while end and table[end - 1] != NO_BLOCK:
                end -= 1
                self.holders.release((table[end],), sequence.seq_id)
                table[end] = NO_BLOCK

    def swap_out(self, pairs: Pairs) -> None:
        """Device to host."""
        self._move("swap_out", pairs, self._device, self._host)
        self._leaving = {
            source: frozenset(held) for source, _ in pairs if (held := self.holders.of(source))
        }

    def swap_in(self, pairs: Pairs) -> None:
        """Host to device."""
        self.holders.check_none("swap_in", pairs)
        self._move("swap_in", pairs, self._host, self._device)
        self._arriving = frozenset(target for _, target in pairs)
        self._moved = dict.fromkeys(self._arriving, "swap_in")

    def copy(self, pairs: Pairs) -> None:
        """Device to device, after this step's swap-ins."""
        self.holders.check_none("copy", (pair for pair in pairs if not self._holds_state(pair[1])))
        for block in self._arriving.intersection(block for pair in pairs for block in pair):
            raise InvalidPlan("copy", f"device block {block} is a target of swap_in, too")
        self._move("copy", pairs, self._device, self._device)
        self._moved.update((block, "copy") for pair in pairs for block in pair)

    def begin_lease(self, lease_id: int, blocks: Iterable[int], field: str) -> None:
        """Keep blocks from being written. Raises InvalidPlan if one was never written."""
        for block in self.leases.begin(lease_id, blocks):
            if self.content(block) is None:
                raise InvalidPlan(field, f"block {block} was never written")

    def check_fetch(self, pairs: Pairs, field: str) -> None:
        """Raises InvalidPlan unless a fetch may write its targets."""
        self.holders.check_none(field, pairs)
        for _, target in pairs:
            self.leases.check_none(target, field)
            self._moved[target] = field

    def content(self, block: int) -> Content | None:
        """What a block contains, ~b for host block b."""
        return self._device[block] if block >= 0 else self._host[~block]

    def replace(self, block: int, content: Content | None) -> None:
        """Change the content of a device block."""
        self._device[block] = content

    def check_use(self, sequence: SimulatedSequence, row: int) -> None:
        """Raises InvalidPlan if a sequence with a row holds a block that this step swaps in."""
        for table in sequence.tables:
            for block in self._arriving.intersection(table):
                raise InvalidPlan(
                    "seq_ids",
                    f"row {row}: sequence {sequence.seq_id} uses device block {block}, which this"
                    " step swaps in",
                )

    def read(self, sequence: SimulatedSequence, row: int, *, states: bool = True) -> None:
        """Check that a sequence finds what its next token sees of the computed ones.

        `states`: False for a fork that samples from its parent's logits: they are copied later.
        """
        for index, group in enumerate(self.groups):
            if group.has_tokens:
                self._read_tokens(sequence, row, index)
            elif group.lifetime is CacheLifetime.STATE and states and sequence.num_computed:
                self._read_state(sequence, row, index)
            elif group.lifetime is CacheLifetime.FIXED and sequence.num_computed:
                self._read_source(sequence, row, index)
        sequence.num_checked = sequence.num_computed

    def _read_tokens(self, sequence: SimulatedSequence, row: int, group: int) -> None:
        size, table = self.groups[group].block_tokens, sequence.tables[group]
        first = self.groups[group].first_visible(sequence.num_computed)
        for position in range(max(sequence.num_checked, first), sequence.num_computed):
            index, offset = divmod(position, size)
            wrong = self._mismatch(group, table[index], offset, sequence.content(position))
            if wrong:
                raise _wrong_read(sequence, row, f"position {position}", wrong)

    def _read_state(self, sequence: SimulatedSequence, row: int, group: int) -> None:
        if wrong := self._wrong_state(sequence, group):
            what = f"the state after position {sequence.num_computed - 1}"
            raise _wrong_read(sequence, row, what, wrong)

    def _read_source(self, sequence: SimulatedSequence, row: int, group: int) -> None:
        if sequence.num_checked:
            return
        for place, content in enumerate(sequence.source()):
            index, offset = divmod(place, self.groups[group].block_tokens)
            if wrong := self._mismatch(group, sequence.tables[group][index], offset, content):
                raise _wrong_read(sequence, row, f"token {place} of its source", wrong)

    def check_new_states(self, sequence: SimulatedSequence, field: str) -> None:
        """Raises InvalidPlan unless a new sequence's states are those after its computed tokens."""
        for index, group in enumerate(self.groups):
            if group.lifetime is not CacheLifetime.STATE or not sequence.num_computed:
                continue
            if wrong := self._wrong_state(sequence, index):
                expected = f"expected a state after {sequence.num_computed} tokens"
                raise InvalidPlan(field, f"{expected} in {wrong}")

    def _wrong_state(self, sequence: SimulatedSequence, group: int) -> str | None:
        """What is wrong with the state after a sequence's computed tokens."""
        content = sequence.content(sequence.num_computed - 1)
        problems = (self._mismatch(group, b, 0, content) for b in sequence.tables[group])
        return next(filter(None, problems), None)

    def _mismatch(self, group: int, block: int, offset: int, wanted: History) -> str | None:
        """Where something else than `wanted` is; None if it is there."""
        if block == NO_BLOCK:
            return f"group {group}, where its table names no block"
        content = self._device[block]
        found = content.slots[offset] if content is not None and content.group == group else None
        if found == wanted:
            return None
        problem = "nothing was written" if found is None else "another history's KV is"
        if content is not None and content.group != group:
            problem = f"something of group {content.group} is"
        return f"device block {block} offset {offset}, where {problem}"

    def write(
        self,
        sequence: SimulatedSequence,
        end: int,
        row: int,
        forks: Collection[int] = _NO_IDS,
        *,
        states: bool = True,
    ) -> None:
        """Write a sequence's KV from its computed tokens up to `end`, and its states after them.

        `forks`: the new forks that take over what this row computes and may share its blocks.
        `states`: False for drafts, which may be wrong: they leave the states as they are.
        """
        for index, group in enumerate(self.groups):
            if group.has_tokens:
                self._write_tokens(sequence, end, row, forks, index)
            elif group.lifetime is CacheLifetime.STATE and states:
                self._write_state(sequence, end, row, forks, index)
            elif group.lifetime is CacheLifetime.FIXED and sequence.num_computed == 0:
                self._write_source(sequence, row, forks, index)
        sequence.num_computed = sequence.num_checked = end

    def accept(self, sequence: SimulatedSequence, row: int) -> None:
        """Write the states after drafts that were right, which are the sequence's last tokens."""
        for index, group in enumerate(self.groups):
            if group.lifetime is CacheLifetime.STATE:
                self._write_state(sequence, sequence.num_computed, row, _NO_IDS, index)

    def _write_tokens(
        self, sequence: SimulatedSequence, end: int, row: int, forks: Collection[int], group: int
    ) -> None:
        size, start = self.groups[group].block_tokens, sequence.num_computed
        while start < end:
            index, offset = divmod(start, size)
            stop = min(end, start - offset + size)
            block = sequence.tables[group][index]
            slots = self._writable(block, sequence.seq_id, row, forks, group, size)
            slots[offset : offset + stop - start] = map(sequence.content, range(start, stop))
            start = stop

    def _write_source(
        self, sequence: SimulatedSequence, row: int, forks: Collection[int], group: int
    ) -> None:
        size, source = self.groups[group].block_tokens, sequence.source()
        for block, start in zip(sequence.tables[group], range(0, len(source), size), strict=True):
            slots = self._writable(block, sequence.seq_id, row, forks, group, size)
            slots[: len(source) - start] = source[start : start + size]

    def _write_state(
        self, sequence: SimulatedSequence, end: int, row: int, forks: Collection[int], group: int
    ) -> None:
        for block in sequence.tables[group]:
            slots = self._writable(block, sequence.seq_id, row, forks, group, 1)
            slots[0] = sequence.content(end - 1)

    def save_state(
        self, sequence: SimulatedSequence, group: int, position: int, block: int
    ) -> None:
        """Write the state after the first `position` tokens of a sequence to a block."""
        field = "saved_states"
        self.check_block(block, field)
        self.holders.check_none(field, [(block, block)])
        self.leases.check_none(block, field)
        if (other := self._moved.get(block)) is not None:
            raise InvalidPlan(field, f"device block {block} is in {other}, too")
        self._device[block] = Content(group, [sequence.content(position - 1)])

    def _writable(
        self, block: int, seq_id: int, row: int, forks: Collection[int], group: int, size: int
    ) -> list[History | None]:
        """The slots of a block that a row of a sequence may write to."""
        self.holders.check_exclusive(block, seq_id, row, forks)
        self.leases.check_none(block, "seq_ids")
        self._check_stays(block, seq_id, row)
        content = self._device[block]
        if content is None or content.group != group:
            content = self._device[block] = Content(group, [None] * size)
        return content.slots

    def _check_stays(self, block: int, seq_id: int, row: int) -> None:
        if self._leaving and seq_id in self._leaving.get(block, _NO_IDS):
            raise InvalidPlan(
                "seq_ids",
                f"row {row}: sequence {seq_id} writes to device block {block}, which this step"
                " swaps out",
            )

    def _holds_state(self, block: int) -> bool:
        """Whether a block holds the state of one sequence."""
        group = self.holders.group_of(block)
        has_state = group is not None and self.groups[group].lifetime is CacheLifetime.STATE
        return has_state and len(self.holders.of(block)) == 1

    def _move(
        self,
        field: str,
        pairs: Pairs,
        sources: list[Content | None],
        targets: list[Content | None],
    ) -> None:
        """Copy whole blocks, all sources read before any target is written."""
        contents: dict[int, Content] = {}
        for source, target in pairs:
            if not 0 <= source < len(sources):
                raise InvalidPlan(field, _expected(len(sources), "source", source))
            if not 0 <= target < len(targets):
                raise InvalidPlan(field, _expected(len(targets), "target", target))
            if target in contents:
                raise InvalidPlan(field, f"target block {target} is named twice")
            self.leases.check_none(~target if targets is self._host else target, field)
            content = sources[source]
            if content is None:
                raise InvalidPlan(field, f"source block {source} was never written")
            contents[target] = Content(content.group, content.slots.copy())
        for target, content in contents.items():
            targets[target] = content


def _wrong_read(sequence: SimulatedSequence, row: int, what: str, where: str) -> InvalidPlan:
    reads = f"row {row}: sequence {sequence.seq_id} reads {what}"
    return InvalidPlan("seq_ids", f"{reads} from {where}")


def _expected(num_blocks: int, kind: str, got: int) -> str:
    return f"expected {kind} blocks from 0 to {num_blocks - 1}, got {got}"
