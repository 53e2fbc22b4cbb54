"""The block manager against a dictionary of what each sequence wrote where."""

from collections.abc import Sequence

import hypothesis.strategies as st
from hypothesis import settings
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    consumes,
    initialize,
    invariant,
    rule,
)

from scheduler_service.core.kv_cache.alloc_status import AllocStatus
from scheduler_service.core.kv_cache.block_manager import BlockUpdate
from tests.support.blocks import BLOCK_SIZE, find, hit, keys_of, make_manager, table_of


class BlockManagerMachine(RuleBasedStateMachine):
    """Sequences are lists of tokens, few of them unlike; memory is what the block tables say they
    wrote: all tokens of the sequence up to there, since a token's KV depends on those."""

    sequences = Bundle("sequences")

    @initialize(
        num_blocks=st.integers(1, 12),
        num_host_blocks=st.sampled_from([0, 2, 6, 20]),
        watermark=st.sampled_from([0.0, 0.25]),
    )
    def start(self, num_blocks: int, num_host_blocks: int, watermark: float) -> None:
        self.num_blocks = num_blocks
        self.watermark_blocks = int(watermark * num_blocks)
        self.manager = make_manager(num_blocks, num_host_blocks, watermark)
        self.num_host_blocks = num_host_blocks
        self.tables: dict[int, list[int]] = {}
        self.tokens: dict[int, list[int]] = {}
        self.memory: dict[tuple[int, int], bytes] = {}
        self.host_memory: dict[tuple[int, int], bytes] = {}
        self.swapped: list[dict[int, list[int]]] = []
        """Groups of block tables, in device blocks as they were."""
        self.num_sequences = 0
        self.keys: set[bytes] = set()
        """All that blocks ever had."""

    def write(self, seq_id: int, token: int) -> None:
        """The sequence's next token."""
        index, offset = divmod(len(self.tokens[seq_id]), BLOCK_SIZE)
        block = self.tables[seq_id][index]
        owners = [other for other, table in self.tables.items() if block in table]
        assert owners == [seq_id], "a write to a shared block"
        self.tokens[seq_id].append(token)
        self.memory[block, offset] = bytes(self.tokens[seq_id])

    def used(self) -> set[int]:
        return {block for table in self.tables.values() for block in table}

    def end_plan(
        self,
        swap_in: Sequence[int] = (),
        swap_out: Sequence[int] = (),
        *,
        has_rows: bool = True,
    ) -> None:
        """Move blocks as a worker does: out, those that are evicted or will be as well, then in."""
        kept = self.manager.end_plan(has_rows=has_rows)
        out = [*swap_out, *kept]
        assert len(set(out[1::2])) == len(out) // 2, "a target twice"
        assert not {*kept[::2]} & self.used() - {*swap_in[1::2]}, "a block in use is copied"
        self.move(out, self.memory, self.host_memory)
        self.move(swap_in, self.host_memory, self.memory)

    def move(
        self,
        pairs: Sequence[int],
        sources: dict[tuple[int, int], bytes],
        targets: dict[tuple[int, int], bytes],
    ) -> None:
        """Whole blocks."""
        for source, target in zip(pairs[::2], pairs[1::2], strict=True):
            for offset in range(BLOCK_SIZE):
                targets.pop((target, offset), None)
                if (source, offset) in sources:
                    targets[target, offset] = sources[source, offset]

    @rule(
        target=sequences,
        tokens=st.lists(st.sampled_from([0, 0, 0, 0, 1]), min_size=1, max_size=20),
        fetches=st.booleans(),
    )
    def allocate(self, tokens: list[int], fetches: bool) -> int | None:
        num_tokens = len(tokens)
        keys = keys_of(tokens[:-1])
        found = find(self.manager.gpu_pool.cached, keys)
        rest = keys[len(found) :]
        stored = find(self.manager.host.pool.cached, rest) if fetches else []
        num_blocks = -(-num_tokens // BLOCK_SIZE)
        free = self.num_blocks - len(self.used() | set(found))
        verdict = self.manager.can_allocate(num_tokens, hit(found))
        kept = self.watermark_blocks if self.tables else 0
        if num_blocks > self.num_blocks:
            assert verdict is AllocStatus.NEVER
        elif num_blocks - len(found) > free - kept:
            assert verdict is AllocStatus.LATER
        else:
            assert verdict is AllocStatus.OK
        if verdict is not AllocStatus.OK:
            return None
        self.num_sequences += 1
        seq_id = self.num_sequences
        swap_in = self.manager.allocate(seq_id, num_tokens, hit(found, stored)).swap_in
        table = table_of(self.manager, seq_id)
        assert len(table) == num_blocks
        assert swap_in[::2] == stored
        assert swap_in[1::2] == table[len(found) :][: len(stored)]
        assert table[: len(found)] == found
        assert not set(table[len(found) :]) & self.used()
        self.end_plan(swap_in, has_rows=not swap_in)
        self.tables[seq_id] = table
        num_found = (len(found) + len(stored)) * BLOCK_SIZE
        self.tokens[seq_id] = tokens[:num_found]
        for token in tokens[num_found:]:
            self.write(seq_id, token)
        return seq_id

    @rule(seq_id=sequences)
    def set_keys(self, seq_id: int | None) -> None:
        if seq_id in self.tables:
            keys = keys_of(self.tokens[seq_id])
            self.manager.set_keys(seq_id, keys)
            found = find(self.manager.gpu_pool.cached, keys)
            assert len(found) == len(keys)
            self.keys.update(keys)

    @rule(seq_id=sequences)
    def forget_keys(self, seq_id: int | None) -> None:
        if seq_id in self.tokens:
            keys = keys_of(self.tokens[seq_id])
            self.manager.forget_keys(keys)
            for pool in (self.manager.gpu_pool, self.manager.host.pool):
                assert not any(find(pool.cached, [key]) for key in keys)

    @rule(seq_id=sequences, token=st.sampled_from([0, 1]))
    def append(self, seq_id: int | None, token: int) -> None:
        if seq_id not in self.tables:
            return
        length = len(self.tokens[seq_id]) + 1
        if not self.manager.can_append(seq_id, length):
            assert len(self.used()) == self.num_blocks, "refused while blocks are free"
            return
        updates = self.manager.append(seq_id, length)
        self.end_plan()
        for update in updates:
            self.apply(seq_id, update)
        self.write(seq_id, token)

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
        if seq_id not in self.tables:
            return
        num_tokens = len(self.tokens[seq_id])
        if not self.manager.can_append(seq_id, num_tokens + 1):
            return
        self.append(seq_id, drafts[0])
        for length in range(num_tokens + 2, num_tokens + len(drafts) + 1):
            num_free = self.manager.num_free_blocks
            if not self.manager.can_append(seq_id, length, num_spare):
                assert num_free <= num_spare
                break
            updates = self.manager.append(seq_id, length)
            self.end_plan()
            for update in updates:
                assert num_free > num_spare, "a block that is kept for others"
                self.apply(seq_id, update)
            self.write(seq_id, drafts[length - num_tokens - 1])
        kept = min(len(self.tokens[seq_id]), num_tokens + 1 + num_right)
        del self.tokens[seq_id][kept:]  # what others wrote is overwritten

    @rule(seq_id=sequences)
    def trim(self, seq_id: int | None) -> None:
        """Give back the blocks after a sequence's last token."""
        if seq_id not in self.tables:
            return
        num_blocks = -(-len(self.tokens[seq_id]) // BLOCK_SIZE)
        has_more = len(self.tables[seq_id]) > num_blocks
        assert self.manager.trim(seq_id, len(self.tokens[seq_id])) == has_more
        del self.tables[seq_id][num_blocks:]
        assert table_of(self.manager, seq_id) == self.tables[seq_id]

    def apply(self, seq_id: int, update: BlockUpdate) -> None:
        assert update.block not in self.used(), "a block in use is given out"
        table = self.tables[seq_id]
        if update.copied_from is not None:
            assert table[update.index] == update.copied_from
            for offset in range(BLOCK_SIZE):
                if (update.copied_from, offset) in self.memory:
                    content = self.memory[update.copied_from, offset]
                    self.memory[update.block, offset] = content
        assert update.index <= len(table)
        table[update.index : update.index + 1] = [update.block]

    @rule(target=sequences, parent_id=sequences)
    def fork(self, parent_id: int | None) -> int | None:
        if parent_id not in self.tables:
            return None
        self.num_sequences += 1
        seq_id = self.num_sequences
        self.manager.fork(parent_id, seq_id)
        self.tables[seq_id] = table_of(self.manager, seq_id)
        assert self.tables[seq_id] == self.tables[parent_id]
        self.tokens[seq_id] = list(self.tokens[parent_id])
        return seq_id

    @rule(
        seq_ids=st.lists(sequences, min_size=1, max_size=3),
        comes_back=st.booleans(),
        pick=st.integers(0, 100),
    )
    def swap(self, seq_ids: list[int | None], comes_back: bool, pick: int) -> None:
        """A plan that swaps out a group and may bring back another, planned first or last."""
        if comes_back and pick % 2:
            back = self.plan_swap_in(pick)
            out = self.plan_swap_out(seq_ids)
        else:
            out = self.plan_swap_out(seq_ids)
            back = self.plan_swap_in(pick) if comes_back else []
        assert not {*out[1::2]} & {*back[::2]} or not pick % 2, "read after it is overwritten"
        self.end_plan(back, out, has_rows=pick % 3 == 0)

    def plan_swap_out(self, seq_ids: list[int | None]) -> list[int]:
        group = {seq_id: self.tables[seq_id] for seq_id in seq_ids if seq_id in self.tables}
        if not group:
            return []
        ids = list(group)
        blocks = {block for table in group.values() for block in table}
        num_free, num_free_host = self.manager.num_free_blocks, self.manager.num_free_host_blocks
        verdict = self.manager.can_swap_out(ids)
        assert (verdict is AllocStatus.NEVER) == (len(blocks) > self.num_host_blocks)
        if len(blocks) <= num_free_host:
            assert verdict is AllocStatus.OK
        if verdict is not AllocStatus.OK:
            return []
        own = self.manager.num_own_blocks(ids)
        pairs = self.manager.swap_out(ids)
        assert self.manager.num_free_blocks == num_free + own
        assert set(pairs[::2]) <= blocks
        assert len(set(pairs[::2])) == len(pairs) // 2, "no block is moved twice"
        assert num_free_host - self.manager.num_free_host_blocks <= len(blocks)
        for seq_id in ids:
            del self.tables[seq_id]
        self.swapped.append(group)
        return pairs

    def plan_swap_in(self, pick: int) -> list[int]:
        if not self.swapped:
            return []
        group = self.swapped[pick % len(self.swapped)]
        blocks = {block for seq_id in group for block in self.manager.host_table(seq_id)}
        kept = self.watermark_blocks + len(group) if self.tables else 0
        enough = self.num_blocks - len(self.used()) - len(blocks) >= kept
        verdict = self.manager.can_swap_in(list(group))
        assert verdict is (AllocStatus.OK if enough else AllocStatus.LATER)
        if not enough:
            return []
        self.swapped.remove(group)
        num_free = self.manager.num_free_host_blocks
        pairs = self.manager.swap_in(list(group))
        assert self.manager.num_free_host_blocks == num_free, "read until the plan is done"
        assert len(pairs) // 2 == len(set(pairs[::2])) == len(blocks), "each is moved once"
        assert not set(pairs[1::2]) & self.used()
        self.tables |= {seq_id: table_of(self.manager, seq_id) for seq_id in group}
        for ours, theirs in ((a, b) for a in group for b in group):
            same = [x == y for x, y in zip(group[ours], group[theirs], strict=False)]
            pairs_now = zip(self.tables[ours], self.tables[theirs], strict=False)
            assert [x == y for x, y in pairs_now] == same, "shared as before"
        return pairs

    @rule(pick=st.integers(0, 100))
    def free_swapped(self, pick: int) -> None:
        if self.swapped:
            group = self.swapped[pick % len(self.swapped)]
            seq_id, _ = group.popitem()
            self.manager.free_swapped(seq_id)
            del self.tokens[seq_id]
            self.swapped = [group for group in self.swapped if group]

    @rule(seq_id=consumes(sequences))
    def free(self, seq_id: int | None) -> None:
        if seq_id in self.tables:
            self.manager.free(seq_id)
            del self.tables[seq_id], self.tokens[seq_id]

    @invariant()
    def blocks_are_free_or_counted(self) -> None:
        if hasattr(self, "manager"):
            self.manager.check()
            host = {b for held in self.manager.host.tables.values() for b in held.blocks()}
            assert self.manager.num_free_host_blocks == self.num_host_blocks - len(host)
            assert self.manager.num_free_blocks == self.num_blocks - len(self.used())

    @invariant()
    def whatever_is_found_is_right(self) -> None:
        for key in getattr(self, "keys", ()):
            contents = [key[: len(key) - BLOCK_SIZE + n + 1] for n in range(BLOCK_SIZE)]
            for block in find(self.manager.gpu_pool.cached, [key]):
                assert [self.memory[block, n] for n in range(BLOCK_SIZE)] == contents
            for block in find(self.manager.host.pool.cached, [key]):
                assert [self.host_memory[block, n] for n in range(BLOCK_SIZE)] == contents

    @invariant()
    def every_sequence_finds_its_tokens(self) -> None:
        for seq_id, tokens in getattr(self, "tokens", {}).items():
            if seq_id not in self.tables:
                continue  # when it is back
            for position in range(len(tokens)):
                index, offset = divmod(position, BLOCK_SIZE)
                wanted = bytes(tokens[: position + 1])
                assert self.memory[self.tables[seq_id][index], offset] == wanted


TestBlockManager = BlockManagerMachine.TestCase
TestBlockManager.settings = settings(
    max_examples=100, stateful_step_count=50, deadline=None, derandomize=True
)
