"""Blocks that sequences let go: those that no row of a sequence in progress will read, and all of
one that ends. What others may find stays cached, in the order of its tokens.
"""

from collections.abc import Sequence

from scheduler_service.core.kv_cache.block_pool import Contents
from scheduler_service.core.kv_cache.block_table import Retained, SequenceTables
from scheduler_service.core.kv_cache.device_tables import DeviceTables
from scheduler_service.core.kv_cache.prefix_branches import PrefixBranches
from scheduler_service.core.kv_cache.prefix_keys import CacheableSequence


class ReleasedBlocks:
    """Releases blocks of one worker group's device."""

    def __init__(self, tables: DeviceTables, branches: PrefixBranches) -> None:
        self._tables = tables
        self._groups = groups = tables.groups
        self._device = tables.pool
        self._branches = branches
        self._spans = [(n, g, g.block_tokens) for n, g in enumerate(groups) if g.span]
        self._is_simple = len(groups) == 1 and not groups[0].is_state

    def slide(self, seq: CacheableSequence, position: int) -> None:
        """Release the blocks that no row at `position` or after it reads. Those that are needed at
        a boundary stay cached as long as the sequence's other blocks."""
        held, num_freed = self._tables.held[seq.seq_id], 0
        for number, group, tokens in self._spans:
            table = held.tables[number]
            num_blocks = group.first_needed(position) // tokens - table.first
            if num_blocks <= 0:
                continue
            blocks = table.blocks[:num_blocks]
            if held.boundaries and table.first * tokens < held.boundaries[-1]:
                num_freed += self._retain(seq, held, number, blocks)
            else:  # decoded tokens, as a rule
                num_freed += self._device.release(blocks, is_expendable=True)
            del table.blocks[:num_blocks]
            table.first += num_blocks
        if held.is_prompt:
            held.num_reserved += num_freed
            self._device.num_reserved += num_freed

    def _retain(
        self, seq: CacheableSequence, held: SequenceTables, number: int, blocks: Sequence[int]
    ) -> int:
        """Release the first blocks of a table, of which some may be needed at a boundary; returns
        the number of blocks freed."""
        num_freed, tokens = 0, self._groups[number].block_tokens
        cached, boundaries = self._device.cached, held.boundaries
        for index, block in enumerate(blocks, held.tables[number].first):
            found = cached.contents[block]
            contents = self._branches.retained(seq, number, index, boundaries, found)
            if contents is not None:
                kept = found or cached.hold(block, contents)
                held.retained.append(Retained((index + 1) * tokens, block, contents, kept))
                if found is not contents:
                    held.unconfirmed.append(held.retained[-1])
            num_freed += self._device.release([block], is_expendable=contents is None)
        return num_freed

    def confirm(self, held: SequenceTables, num_tokens: int) -> None:
        """Let released blocks of a sequence's first tokens be found, which were in flight."""
        for retained in held.unconfirmed:
            if retained.end <= num_tokens:
                self._device.cached.confirm(retained.block, retained.cached, retained.contents)
        held.unconfirmed = [r for r in held.unconfirmed if r.end > num_tokens]

    def remove(self, seq: CacheableSequence) -> SequenceTables:
        """Remove and return a sequence's tables, whose blocks are to be released. Nobody finds what
        it has not confirmed."""
        held = self._tables.remove(seq)
        self._branches.forget(seq)
        for retained in held.unconfirmed:
            self._device.forget_contents(retained.block, retained.contents)
        for state in held.saved:
            if not state.is_found:
                self._device.forget_contents(state.block, state.contents)
        return held

    def release(self, held: SequenceTables) -> None:
        """Release all blocks of a removed table by the ends of their tokens, and renew the retained
        ones."""
        if self._is_simple and not held.retained:
            self._device.release(held.blocks())
            return
        placed: list[tuple[int, int, Contents | None]]
        placed = [(r.end, r.block, r.contents) for r in held.retained]
        placed += [(s.position, s.block, s.contents) for s in held.saved if s.is_found]
        for number, table in enumerate(held.tables):
            tokens = self._groups[number].block_tokens * self._groups[number].has_tokens
            for index, block in enumerate(table.blocks, table.first + 1):
                placed.append((index * tokens, block, None))
        for _, block, contents in sorted(placed, key=lambda entry: entry[:2], reverse=True):
            found = self._device.cached.contents[block]
            if contents is None:
                self._device.release([block])
            elif found is not None and found.units[0] == contents.units[0]:
                self._device.cached.touch(block)
        self._tables.states.settle()
