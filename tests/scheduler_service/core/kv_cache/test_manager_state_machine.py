"""The KV cache against a dictionary of what each sequence wrote where, with groups of every
lifetime."""

from collections.abc import Iterator, Sequence

import hypothesis.strategies as st
from hypothesis import settings
from hypothesis.stateful import (
    Bundle,
    MultipleResults,
    RuleBasedStateMachine,
    consumes,
    initialize,
    invariant,
    multiple,
    rule,
)

from scheduler_service.core.config import CacheGroup, CacheLifetime
from scheduler_service.core.context import Context, ContextKind, ContextPart, num_source_tokens
from scheduler_service.core.kv_cache.alloc_status import AllocStatus
from scheduler_service.core.kv_cache.block_table import BlockUpdate
from scheduler_service.core.kv_cache.prefix_hit import PrefixHit
from tests.support.blocks import (
    BLOCK_SIZE,
    KnownSequence,
    device_blocks,
    host_blocks,
    make_manager,
    num_free_blocks,
)
from tests.support.symbolic_worker import grouped

ALL = CacheGroup(block_tokens=BLOCK_SIZE)
WINDOW = CacheGroup(lifetime=CacheLifetime.WINDOW, block_tokens=4, span=6)
CHUNK = CacheGroup(lifetime=CacheLifetime.CHUNK, block_tokens=4, span=8)
STATE = CacheGroup(lifetime=CacheLifetime.STATE, num_blocks=2)
FIXED = CacheGroup(lifetime=CacheLifetime.FIXED, block_tokens=4)
GROUPS = [
    (ALL,),
    (WINDOW,),
    (CacheGroup(block_tokens=8), WINDOW),
    (ALL, CHUNK),
    (CHUNK, CacheGroup(block_tokens=12), WINDOW),
    (STATE,),
    (ALL, STATE),
    (ALL, FIXED),
    (FIXED, WINDOW, STATE, CacheGroup(lifetime=CacheLifetime.FIXED, block_tokens=6)),
]
CONTEXTS: list[Context] = [
    (),
    (ContextPart(ContextKind.MEDIA, bytes(32), length=7),),
    (ContextPart(ContextKind.MEDIA, bytes(32), start=9, length=2),),
]
STEP_TOKENS = 8

Cell = tuple[int, int]
"""A block and a place in it."""
Content = tuple[int, bytes]
"""The cache group, and what its KV depends on: the media, and all tokens of a sequence up to one
position. In a source: the media and a place."""
Pairs = Sequence[int]


class KVCacheMachine(RuleBasedStateMachine):
    """Sequences are lists of tokens, few of them unlike; memory is what the block tables say they
    wrote. Each rule is a plan."""

    sequences = Bundle("sequences")

    @initialize(
        groups=st.sampled_from(GROUPS),
        num_blocks=st.integers(1, 24),
        num_host_blocks=st.sampled_from([0, 2, 6, 20]),
        watermark=st.sampled_from([0.0, 0.25]),
    )
    def start(
        self,
        groups: tuple[CacheGroup, ...],
        num_blocks: int,
        num_host_blocks: int,
        watermark: float,
    ) -> None:
        self.groups = groups
        self.per_token = sum(group.has_tokens for group in groups)
        self.per_fork = sum(group.num_blocks for group in groups)
        num_blocks = self.num_blocks = max(num_blocks, self.per_fork)
        self.num_host_blocks = num_host_blocks
        self.manager = make_manager(
            num_blocks, num_host_blocks, *groups, max_chunk_tokens=STEP_TOKENS, watermark=watermark
        )
        self.running: dict[int, KnownSequence] = {}
        self.memory: dict[Cell, Content] = {}
        self.host_memory: dict[Cell, Content] = {}
        self.swapped: list[list[KnownSequence]] = []
        self.num_sequences = 0

    # What a worker does.

    def cells(self, seq: KnownSequence, number: int, first: int, end: int) -> Iterator[Cell]:
        """Where a group has a sequence's tokens from `first` to `end`."""
        table, tokens = self.manager.tables.of(seq)[number], self.groups[number].block_tokens
        for position in range(first, end):
            index = position // tokens - table.first_index
            assert index >= 0, "a block that is still read was released"
            yield table.block_ids[index], position % tokens

    def content(self, seq: KnownSequence, number: int, num_tokens: int) -> Content:
        """What a group has after as many tokens of a sequence."""
        reads_source = any(group.is_fixed for group in self.groups)
        parts = media(seq, 2**31 if reads_source else num_tokens)
        return number, parts + bytes(seq.tokens[:num_tokens])

    def lasting(self, seq: KnownSequence, num_tokens: int) -> Iterator[tuple[Cell, Content]]:
        """A sequence's states and sources: cells, and what they hold after as many tokens."""
        for table, group in zip(self.manager.tables.of(seq), self.groups, strict=True):
            if group.is_state:
                state = self.content(seq, table.group, num_tokens)
                yield from (((block, 0), state) for block in table.block_ids)
            elif group.is_fixed:
                yield from source(seq, table.group, group, table.block_ids)

    def owners(self, block: int) -> set[int]:
        return {n for n, seq in self.running.items() if block in device_blocks(self.manager, seq)}

    def write(self, seq: KnownSequence, first: int, end: int) -> None:
        """A row of tokens, which reads what came before."""
        self.read(seq, first)
        written = dict(self.lasting(seq, end))
        if first:
            written = {cell: state for cell, state in written.items() if self.is_state(state)}
        for number, group in enumerate(self.groups):
            cells = self.cells(seq, number, first, end) if group.has_tokens else ()
            for position, cell in enumerate(cells, first):
                written[cell] = self.content(seq, number, position + 1)
        for (block, _), _ in written.items():
            assert self.owners(block) == {seq.seq_id}, "a write to a shared block"
        self.memory |= written

    def is_state(self, content: Content) -> bool:
        return self.groups[content[0]].is_state

    def read(self, seq: KnownSequence, position: int) -> None:
        """What the row at a position sees."""
        for number, group in enumerate(self.groups):
            first = group.first_needed(position)
            cells = self.cells(seq, number, first, position) if group.has_tokens else ()
            for at, cell in enumerate(cells, first):
                assert self.memory[cell] == self.content(seq, number, at + 1)
        for cell, content in self.lasting(seq, position) if position else ():
            assert self.memory[cell] == content

    def end_plan(
        self,
        *,
        swap_out: Pairs = (),
        swap_in: Pairs = (),
        copy: Pairs = (),
        has_rows: bool = True,
    ) -> None:
        """Move blocks: out, those that are evicted or will be as well, then in, then copies."""
        moves = self.manager.end_plan(has_rows=has_rows)
        out = [*swap_out, *moves.swap_out]
        assert len(set(out[1::2])) == len(out) // 2, "a target twice"
        self.move(out, self.memory, self.host_memory)
        self.move(swap_in, self.host_memory, self.memory)
        self.move([*copy, *moves.copy], self.memory, self.memory)
        for seq_id, number, position, block in grouped(moves.saved_states, 4):
            assert not self.owners(block), "a state is saved in a block in use"
            assert block not in (*copy, *moves.copy, *swap_in[1::2]), "nothing else is moved there"
            for place in range(max(1, *(group.block_tokens for group in self.groups))):
                self.memory.pop((block, place), None)
            self.memory[block, 0] = self.content(self.running[seq_id], number, position)

    def move(
        self, pairs: Pairs, sources: dict[Cell, Content], targets: dict[Cell, Content]
    ) -> None:
        """Whole blocks, all sources read before any target is written."""
        read = {(block, place): content for (block, place), content in sources.items()}
        for source, target in zip(pairs[::2], pairs[1::2], strict=True):
            for place in range(max(1, *(group.block_tokens for group in self.groups))):
                targets.pop((target, place), None)
                if (source, place) in read:
                    targets[target, place] = read[source, place]

    @staticmethod
    def copies(updates: Sequence[BlockUpdate]) -> list[int]:
        return [
            block
            for _, _, target, source in updates
            if source is not None
            for block in (source, target)
        ]

    # Rules.

    @rule(
        target=sequences,
        tokens=st.lists(st.sampled_from([0, 0, 0, 0, 1]), min_size=1, max_size=40),
        context=st.sampled_from(CONTEXTS),
        fetches=st.booleans(),
        lag=st.integers(0, 3),
        num_forks=st.sampled_from([0, 0, 0, 1, 2]),
    )
    def admit(
        self, tokens: list[int], context: Context, fetches: bool, lag: int, num_forks: int
    ) -> MultipleResults[int]:
        """Compute a prompt, whose results arrive `lag` steps later, and let others fork from it."""
        manager = self.manager
        seq = KnownSequence(self.num_sequences + 1, tokens, context=context)
        hit = manager.prefixes.match(seq, is_fetched=lambda *_: fetches)
        verdict = manager.admission.can_admit(len(tokens), hit, num_forks=num_forks)
        if not self.running and not self.swapped and verdict is not AllocStatus.NEVER:
            assert verdict is AllocStatus.OK, "an empty cache"
        if verdict is not AllocStatus.OK:
            return multiple()
        self.num_sequences += 1
        moves = manager.admission.admit(seq, hit, num_forks=num_forks)
        self.running[seq.seq_id] = seq
        self.end_plan(swap_in=moves.swap_in, copy=moves.copy, has_rows=not moves.swap_in)
        ends = [hit.num_tokens]
        while (start := ends[-1]) < len(tokens):
            ends.append(manager.tables.chunk_end(seq, start, min(start + STEP_TOKENS, len(tokens))))
            if manager.extend_prompt(seq, start, ends[-1]) is None:
                self.leave(seq)
                return multiple()
            self.end_plan()
            self.write(seq, start, ends[-1])
            if len(ends) > lag + 1:
                manager.prefixes.offer(seq, ends[-1 - lag])
        manager.tables.end_prompt(seq)
        manager.prefixes.offer(seq, len(tokens))
        return multiple(seq.seq_id, *(self.add_fork(seq) for _ in range(num_forks)))

    def leave(self, seq: KnownSequence) -> None:
        """Its last token has been sampled, and is not computed."""
        seq.next_position = seq.length
        seq.tokens.append(0)
        own = self.manager.tables.memory_freed([seq])
        num_free, _ = num_free_blocks(self.manager)
        self.manager.free(seq)
        assert num_free_blocks(self.manager)[0] == num_free + own
        del self.running[seq.seq_id]

    @rule(seq_id=sequences)
    def withdraw(self, seq_id: int | None) -> None:
        if (seq := self.running.get(seq_id or 0)) is not None:
            self.manager.prefixes.match(seq)
            self.manager.prefixes.withdraw(seq)
            other = KnownSequence(0, [*seq.tokens, 0], context=seq.context)
            assert self.manager.prefixes.match(other, is_fetched=lambda *_: True).num_tokens == 0

    @rule(seq_id=sequences, token=st.sampled_from([0, 1]), is_offered=st.booleans())
    def append(self, seq_id: int | None, token: int, is_offered: bool) -> None:
        if (seq := self.running.get(seq_id or 0)) is not None:
            self.decode(seq, token)
            if is_offered:
                self.manager.prefixes.offer(seq, seq.length)

    def decode(self, seq: KnownSequence, token: int) -> bool:
        seq.next_position = seq.length
        self.manager.released.slide(seq, seq.next_position)
        return self.grow(seq, token)

    def grow(self, seq: KnownSequence, token: int, num_others: int = 0) -> bool:
        length = seq.length + 1
        num_free, _ = num_free_blocks(self.manager)
        if not self.manager.tables.can_reserve(seq, length, num_others):
            num_kept = num_others * self.per_token + len(self.running) * self.per_fork
            assert num_free < self.per_token + num_kept, "refused while blocks are free"
            return False
        updates = self.manager.tables.reserve(seq, length)
        assert not updates or num_free - len(updates) >= num_others * self.per_token
        self.end_plan(copy=self.copies(updates))
        seq.tokens.append(token)
        self.write(seq, length - 1, length)
        return True

    @rule(
        seq_id=sequences,
        drafts=st.lists(st.sampled_from([0, 1]), min_size=1, max_size=9),
        num_right=st.integers(0, 9),
        num_spare=st.integers(0, 3),
    )
    def look_ahead(
        self, seq_id: int | None, drafts: list[int], num_right: int, num_spare: int
    ) -> None:
        """A row with drafts, of which some are right; blocks for the others stay with it."""
        if (seq := self.running.get(seq_id or 0)) is None or not self.decode(seq, drafts[0]):
            return
        num_tokens = seq.length
        for draft in drafts[1:]:
            if not self.grow(seq, draft, num_spare):
                break
        del seq.tokens[num_tokens + num_right :]  # what others wrote is overwritten
        states = self.lasting(seq, seq.length)
        self.memory |= {cell: state for cell, state in states if self.is_state(state)}

    @rule(seq_id=sequences)
    def trim(self, seq_id: int | None) -> None:
        """Give back the blocks after a sequence's last token."""
        if (seq := self.running.get(seq_id or 0)) is None:
            return
        before = device_blocks(self.manager, seq)
        had_more = self.manager.tables.trim(seq, seq.length)
        assert had_more == (before != device_blocks(self.manager, seq))
        for table, group in zip(self.manager.tables.of(seq), self.groups, strict=True):
            size = group.max_blocks(seq.length, 0, num_source_tokens(seq.context))
            assert table.first_index + len(table.block_ids) <= size

    @rule(target=sequences, parent_id=sequences)
    def fork(self, parent_id: int | None) -> int | None:
        parent = self.running.get(parent_id or 0)
        return None if parent is None else self.add_fork(parent)

    def add_fork(self, parent: KnownSequence) -> int:
        self.num_sequences += 1
        keys = parent.prefix_keys.fork()
        child = KnownSequence(self.num_sequences, list(parent.tokens), keys, parent.context)
        self.manager.tables.fork(parent, child)
        self.running[child.seq_id] = child
        return child.seq_id

    @rule(
        seq_ids=st.lists(sequences, min_size=1, max_size=3),
        comes_back=st.booleans(),
        pick=st.integers(0, 100),
    )
    def swap(self, seq_ids: list[int | None], comes_back: bool, pick: int) -> None:
        """A plan that swaps out a group and may bring back another, planned first or last."""
        if comes_back and pick % 2:
            before = set(self.running)
            back = self.plan_swap_in(pick)
            out = self.plan_swap_out([seq_id for seq_id in seq_ids if seq_id in before])
        else:
            out = self.plan_swap_out(seq_ids)
            back = self.plan_swap_in(pick) if comes_back else []
        assert not {*out[1::2]} & {*back[::2]} or not pick % 2, "read after it is overwritten"
        self.end_plan(swap_out=out, swap_in=back, has_rows=pick % 3 == 0)

    def plan_swap_out(self, seq_ids: list[int | None]) -> list[int]:
        group = [seq for n in {*seq_ids} if (seq := self.running.get(n or 0)) is not None]
        for seq in group:  # memory for drafts that were refused may never have been written
            self.manager.tables.trim(seq, seq.length)
        if not group or not self.manager.swap.can_swap_out(group):
            blocks = {block for seq in group for block in device_blocks(self.manager, seq)}
            assert not group or len(blocks) > num_free_blocks(self.manager)[1]
            return []
        own, (num_free, num_free_host) = self.manager.tables.memory_freed(group), self.num_free
        blocks = {block for seq in group for block in device_blocks(self.manager, seq)}
        pairs = self.manager.swap.swap_out(group)
        assert self.num_free[0] == num_free + own
        assert set(pairs[::2]) <= blocks
        assert len(set(pairs[::2])) == len(pairs) // 2, "no block is moved twice"
        assert num_free_host - self.num_free[1] <= len(blocks)
        for seq in group:
            del self.running[seq.seq_id]
        self.swapped.append(group)
        return pairs

    def plan_swap_in(self, pick: int) -> list[int]:
        if not self.swapped:
            return []
        group = self.swapped[pick % len(self.swapped)]
        if not self.manager.swap.can_swap_in(group):
            assert self.running, "an empty device has room for what was there"
            return []
        self.swapped.remove(group)
        before = [host_blocks(self.manager, seq) for seq in group]
        num_free_host, used = self.num_free[1], self.used()
        pairs = self.manager.swap.swap_in(group)
        assert self.num_free[1] <= num_free_host, "read until the plan is done"
        assert not set(pairs[1::2]) & used
        targets = dict(zip(pairs[::2], pairs[1::2], strict=True))
        assert len(targets) == len(pairs) // 2, "each is moved once"
        for seq, blocks in zip(group, before, strict=True):
            assert device_blocks(self.manager, seq) == [targets[block] for block in blocks]
        self.running |= {seq.seq_id: seq for seq in group}
        return pairs

    @rule(pick=st.integers(0, 100))
    def free_swapped(self, pick: int) -> None:
        if self.swapped:
            self.manager.swap.free(self.swapped[pick % len(self.swapped)].pop())
            self.swapped = [group for group in self.swapped if group]

    @rule(seq_id=consumes(sequences))
    def free(self, seq_id: int | None) -> None:
        if (seq := self.running.get(seq_id or 0)) is not None:
            self.leave(seq)

    # What always holds.

    @property
    def num_free(self) -> tuple[int, int]:
        return num_free_blocks(self.manager)

    def used(self) -> set[int]:
        return {b for seq in self.running.values() for b in device_blocks(self.manager, seq)}

    @invariant()
    def blocks_are_free_or_counted(self) -> None:
        if hasattr(self, "manager"):
            self.manager.check(self.running.values())
            swapped = (seq for group in self.swapped for seq in group)
            host = {block for seq in swapped for block in host_blocks(self.manager, seq)}
            assert self.num_free == (
                self.num_blocks - len(self.used()),
                self.num_host_blocks - len(host),
            )

    @invariant()
    def whatever_is_found_is_right(self) -> None:
        for seq in getattr(self, "running", {}).values():
            other = KnownSequence(0, [*seq.tokens, 0], seq.prefix_keys, seq.context)
            for fetches in (False, True):
                hit = self.manager.prefixes.match(other, is_fetched=lambda *_, all=fetches: all)
                for (block, place), content in self.found(other, hit):
                    memory = self.memory if block >= 0 else self.host_memory
                    assert memory[block if block >= 0 else ~block, place] == content

    def found(self, seq: KnownSequence, hit: PrefixHit) -> Iterator[tuple[Cell, Content]]:
        """The cells of a hit, and what they must hold."""
        for number, (group, found) in enumerate(zip(self.groups, hit.groups, strict=True)):
            if group.is_state:
                state = self.content(seq, number, hit.num_tokens)
                yield from (((block, 0), state) for block in found.blocks)
            elif group.is_fixed and hit.num_tokens:
                yield from source(seq, number, group, found.blocks)
            elif group.has_tokens:
                for position in range(group.first_needed(hit.num_tokens), hit.num_tokens):
                    index, place = divmod(position, group.block_tokens)
                    block = found.blocks[index - found.first]
                    yield (block, place), self.content(seq, number, position + 1)

    @invariant()
    def every_sequence_finds_its_tokens(self) -> None:
        for seq in getattr(self, "running", {}).values():
            self.read(seq, seq.length)


def media(seq: KnownSequence, end: int = 2**31) -> bytes:
    """The media that begin before a position."""
    return b"".join(part.packed() for part in seq.context if part.start < end)


def source(
    seq: KnownSequence, number: int, group: CacheGroup, blocks: Sequence[int]
) -> Iterator[tuple[Cell, Content]]:
    """The cells of a sequence's source, and what they hold."""
    for place in range(num_source_tokens(seq.context)):
        index, offset = divmod(place, group.block_tokens)
        yield (blocks[index], offset), (number, media(seq) + b"source" + bytes([place]))


TestKVCacheManager = KVCacheMachine.TestCase
TestKVCacheManager.settings = settings(max_examples=100, stateful_step_count=50, derandomize=True)
