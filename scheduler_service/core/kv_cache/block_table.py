"""The blocks of one sequence, in a table per cache group."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple, TypeAlias

from scheduler_service.core.kv_cache.block_pool import BlockPool, Contents

BlockUpdate: TypeAlias = tuple[int, int, int, int | None]
"""A change of one entry of a block table: group, index, block, and the shared block that is copied
to it, if any. A plain tuple, because a step has one for each sequence that enters a block."""


@dataclass(frozen=True, slots=True)
class Moves:
    """What a plan moves; pairs of blocks, in the plan's format."""

    swap_out: list[int] = field(default_factory=list)
    swap_in: list[int] = field(default_factory=list)
    copy: list[int] = field(default_factory=list)
    saved_states: list[int] = field(default_factory=list)
    """Quadruples: sequence id, cache group, position, block."""


@dataclass(slots=True)
class Table:
    """Blocks of one cache group, in order; those of the first tokens may have been released."""

    first: int = 0
    """Index of the first block: block i has a sequence's tokens from i * block_tokens on."""
    blocks: list[int] = field(default_factory=list)

    @property
    def end(self) -> int:
        """Index after that of the last block."""
        return self.first + len(self.blocks)

    def append(self, block: int) -> int:
        """Add a block at the end; returns its index."""
        self.blocks.append(block)
        return self.end - 1

    def needs_block(self, index: int, pool: BlockPool) -> bool:
        """Whether a token for entry `index` cannot be written to the block there."""
        offset = index - self.first
        assert 0 <= offset <= len(self.blocks), "tokens are appended one by one"
        return offset == len(self.blocks) or pool.is_shared(self.blocks[offset])


class Retained(NamedTuple):
    """A block that a sequence has released, and that is to stay cached as long as its others."""

    end: int
    """End of its tokens."""
    block: int
    contents: Contents
    cached: Contents
    """Those that it had in the cache when it was released: the same, or a part of them."""


@dataclass(slots=True, eq=False)
class SavedState:
    """A copy of a sequence's state, which is to stay cached as long as its blocks."""

    group: int
    position: int
    """The number of tokens before it."""
    block: int
    """The first of its blocks."""
    is_rolling: bool
    """Whether later ones replace it."""
    contents: Contents = field(init=False)
    """What it has in the cache: nothing that is found until the results are in."""
    is_found: bool = False
    previous: "SavedState | None" = None
    """The saved state from which this one would be computed again, while it is kept."""
    start: int = 0
    """Position from which it would be computed again without that."""
    clock: int = 0
    """The worth of the last evicted state when this one was saved or found last."""


@dataclass(slots=True)
class SequenceTables:
    """The tables of a sequence, in the order of the groups."""

    tables: list[Table]
    num_offered: int = 0
    """Its first units of keys that were offered to the prefix cache, or found there."""
    num_offered_in_spans: int = 0
    """The same for windows and chunks, which are offered less often."""
    boundaries: list[int] = field(default_factory=list)
    """Where its windows are to stay cached, in order; those after the last one are not. The list
    is the prefix cache's, which adds to it."""
    is_prompt: bool = False
    """Whether blocks are reserved for it; released ones are then reserved again."""
    num_reserved: int = 0
    """Blocks that it may allocate while its prompt is computed."""
    num_forks: int = 0
    """Sequences that will fork from it, for whose states blocks are reserved."""
    branches: list[tuple[int, int]] = field(default_factory=list)
    """Positions at which others, by id, begin with a copy of its state, and with what windows and
    chunks have of the tokens before."""
    state_position: int = 0
    """Position at which its state was saved last while it decodes."""
    saved: list[SavedState] = field(default_factory=list)
    last_states: dict[int, SavedState] = field(default_factory=dict)
    """By group: the last saved state that it has passed and that nothing replaces."""
    is_withdrawn: bool = False
    """Whether nobody may find what it has computed."""
    retained: list[Retained] = field(default_factory=list)
    unconfirmed: list[Retained] = field(default_factory=list)
    """Those whose contents were in flight when they were released, in order."""

    def blocks(self) -> list[int]:
        """All its blocks."""
        if len(self.tables) == 1:
            return self.tables[0].blocks
        return [block for table in self.tables for block in table.blocks]

    def fork(self) -> "SequenceTables":
        """The same tables for another sequence."""
        tables = [Table(table.first, list(table.blocks)) for table in self.tables]
        return SequenceTables(
            tables,
            self.num_offered,
            self.num_offered_in_spans,
            last_states=dict(self.last_states),
        )

    def mapped(self, targets: Mapping[int, int]) -> "SequenceTables":
        """The same tables of other blocks."""
        tables = [Table(t.first, [targets[b] for b in t.blocks]) for t in self.tables]
        return SequenceTables(tables, last_states=self.last_states)
