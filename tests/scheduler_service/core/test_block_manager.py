"""The block manager against a dictionary of what each sequence wrote where."""

from collections.abc import Sequence

import hypothesis.strategies as st
import pytest
from hypothesis import settings
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    consumes,
    initialize,
    invariant,
    rule,
)

from scheduler_service.core.block_manager import AllocStatus, BlockManager, BlockUpdate
from scheduler_service.core.block_pool import BlockPool

BLOCK_SIZE = 4


def keys_of(tokens: Sequence[int]) -> list[bytes]:
    """Keys of the blocks that these tokens fill: the tokens themselves."""
    ends = range(BLOCK_SIZE, len(tokens) + 1, BLOCK_SIZE)
    return [bytes(tokens[:end]) for end in ends]


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
        self.manager = BlockManager(
            num_gpu_blocks=num_blocks,
            num_cpu_blocks=num_host_blocks,
            block_size=BLOCK_SIZE,
            watermark=watermark,
        )
        self.num_host_blocks = num_host_blocks
        self.tables: dict[int, list[int]] = {}
        self.tokens: dict[int, list[int]] = {}
        self.memory: dict[tuple[int, int], bytes] = {}
        self.host_memory: dict[tuple[int, int], bytes] = {}
        self.swapped: list[dict[int, list[int]]] = []
        """Groups of block tables, in device blocks as they were."""
        self.num_sequences = 0

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

    def end_plan(self, swap_in: Sequence[int] = (), swap_out: Sequence[int] = ()) -> None:
        """Move blocks as a worker does: out, those that are evicted as well, then in."""
        out = [*swap_out, *self.manager.end_plan()]
        assert len(set(out[1::2])) == len(out) // 2, "a target twice"
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
        found = self.manager.find(keys)
        stored = self.manager.find_on_host(keys[len(found) :]) if fetches else []
        num_blocks = -(-num_tokens // BLOCK_SIZE)
        free = self.num_blocks - len(self.used() | set(found))
        verdict = self.manager.can_allocate(num_tokens, found)
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
        swap_in = self.manager.fetch(seq_id, num_tokens, found, stored)
        table = self.manager.table(seq_id)
        assert len(table) == num_blocks
        assert swap_in[::2] == stored
        assert swap_in[1::2] == table[len(found) :][: len(stored)]
        assert table[: len(found)] == found
        assert not set(table[len(found) :]) & self.used()
        self.end_plan(swap_in)
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
            self.manager.set_keys(seq_id, 0, keys)
            found = self.manager.find(keys)
            assert len(found) == len(keys)

    @rule(seq_id=sequences)
    def forget_keys(self, seq_id: int | None) -> None:
        if seq_id in self.tokens:
            keys = keys_of(self.tokens[seq_id])
            self.manager.forget_keys(keys)
            assert not any(self.manager.find([key]) for key in keys)
            assert not any(self.manager.find_on_host([key]) for key in keys)

    @rule(seq_id=sequences, token=st.sampled_from([0, 1]))
    def append(self, seq_id: int | None, token: int) -> None:
        if seq_id not in self.tables:
            return
        length = len(self.tokens[seq_id]) + 1
        if not self.manager.can_append(seq_id, length):
            assert len(self.used()) == self.num_blocks, "refused while blocks are free"
            return
        update = self.manager.append(seq_id, length)
        self.end_plan()
        if update is not None:
            self.apply(seq_id, update)
        self.write(seq_id, token)

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
        self.tables[seq_id] = self.manager.fork(parent_id, seq_id)
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
        self.end_plan(back, out)

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
        blocks = {block for seq_id in group for block in self.manager.host.tables[seq_id]}
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
        self.tables |= {seq_id: self.manager.table(seq_id) for seq_id in group}
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
            host = {b for table in self.manager.host.tables.values() for b in table}
            assert self.manager.num_free_host_blocks == self.num_host_blocks - len(host)
            assert self.manager.num_free_blocks == self.num_blocks - len(self.used())

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


def make_manager(num_gpu_blocks: int, num_cpu_blocks: int = 0) -> BlockManager:
    return BlockManager(
        num_gpu_blocks=num_gpu_blocks, num_cpu_blocks=num_cpu_blocks, block_size=4, watermark=0.0
    )


def test_only_the_last_owner_writes_to_a_shared_block_in_place() -> None:
    manager = make_manager(4)
    assert manager.allocate(1, 2) == [0]
    assert manager.fork(1, 2) == [0]
    assert manager.fork(1, 3) == [0]
    assert manager.append(2, 3) == BlockUpdate(index=0, block=1, copied_from=0)
    assert manager.append(1, 3) == BlockUpdate(index=0, block=2, copied_from=0)
    assert manager.append(3, 3) is None


def test_a_promise_to_others_counts_like_blocks_in_use() -> None:
    manager = make_manager(4)
    assert manager.can_allocate(8, num_blocks_promised=2) is AllocStatus.OK
    assert manager.can_allocate(8, num_blocks_promised=3) is AllocStatus.LATER


def test_blocks_found_in_use_cost_nothing_and_free_ones_one_each() -> None:
    manager = make_manager(4)
    keys = [b"a", b"b"]
    table = manager.allocate(1, 8)
    manager.set_keys(1, 0, keys)
    assert manager.find(keys) == table
    assert manager.can_allocate(16, table) is AllocStatus.OK
    assert manager.can_allocate(16) is AllocStatus.LATER
    manager.free(1)
    assert manager.num_free_blocks == 4
    manager.allocate(2, 8)
    assert manager.can_allocate(8, table) is AllocStatus.OK
    assert manager.can_allocate(12, table) is AllocStatus.LATER


def test_a_search_ends_at_the_first_key_that_no_block_has() -> None:
    manager = make_manager(4)
    [first, _, third] = manager.allocate(1, 12)
    manager.set_keys(1, 0, [b"a"])
    manager.set_keys(1, 2, [b"c"])
    assert manager.find([b"a", b"b", b"c"]) == [first]
    assert manager.find([b"c"]) == [third]


def test_free_blocks_without_keys_go_first_then_the_longest_unused_and_deepest() -> None:
    manager = make_manager(5)
    older, newer = manager.allocate(1, 8), manager.allocate(2, 8)
    manager.set_keys(1, 0, [b"a", b"b"])
    manager.set_keys(2, 0, [b"c", b"d"])
    manager.free(1)
    manager.free(2)
    [plain] = set(range(5)) - {*older, *newer}
    assert manager.allocate(3, 20) == [plain, older[1], older[0], newer[1], newer[0]]
    assert manager.find([b"a"]) == manager.find([b"c"]) == []


def test_a_block_that_is_found_counts_as_used_again() -> None:
    manager = make_manager(2)
    [older], [newer] = manager.allocate(1, 4), manager.allocate(2, 4)
    manager.set_keys(1, 0, [b"a"])
    manager.set_keys(2, 0, [b"b"])
    manager.free(1)
    manager.free(2)
    assert manager.allocate(3, 4, [older]) == [older]
    manager.free(3)
    assert manager.allocate(4, 8) == [newer, older]


def test_of_two_blocks_with_the_same_contents_the_first_goes_on_being_found() -> None:
    manager = make_manager(2)
    first, second = manager.allocate(1, 4), manager.allocate(2, 4)
    manager.set_keys(1, 0, [b"a"])
    manager.set_keys(2, 0, [b"a"])
    manager.free(2)
    assert manager.find([b"a"]) == first
    assert manager.allocate(3, 4) == second


def test_the_pool_refuses_to_free_a_block_twice() -> None:
    pool = BlockPool(2)
    blocks = pool.allocate(1)
    pool.release(blocks)
    with pytest.raises(AssertionError, match="block 0 freed twice"):
        pool.release(blocks)


def test_a_freed_table_is_given_out_again_from_its_head() -> None:
    pool = BlockPool(4)
    blocks = pool.allocate(3)
    pool.release(blocks)
    assert pool.allocate(4) == [*blocks, 3]


def test_blocks_swapped_out_are_free_at_once_and_host_blocks_swapped_in_after_the_plan() -> None:
    manager = make_manager(2, 2)
    manager.allocate(1, 8)
    assert manager.swap_out([1]) == [0, 0, 1, 1]
    assert manager.allocate(2, 8) == [0, 1]
    manager.end_plan()
    manager.free(2)
    assert manager.swap_in([1]) == [0, 0, 1, 1]
    assert manager.can_swap_out([1]) is AllocStatus.LATER
    manager.end_plan()
    assert manager.can_swap_out([1]) is AllocStatus.OK


def test_what_sequences_share_is_moved_once_and_shared_again() -> None:
    manager = make_manager(4, 4)
    manager.allocate(1, 6)
    manager.fork(1, 2)
    manager.append(1, 7)
    manager.end_plan()
    assert [manager.table(1), manager.table(2)] == [[0, 2], [0, 1]]
    assert manager.swap_out([1, 2]) == [0, 0, 2, 1, 1, 2]
    manager.end_plan()
    assert manager.num_free_host_blocks == 1
    assert len(manager.swap_in([1, 2])) == 6
    [first, second] = [manager.table(1), manager.table(2)]
    assert first[0] == second[0]
    assert first[1] != second[1]
    assert manager.append(2, 7) is None, "its last block is its own"


def test_swapped_out_blocks_come_back_beside_others_only_with_room_to_grow() -> None:
    manager = make_manager(4, 4)
    manager.allocate(1, 12)
    manager.swap_out([1])
    manager.end_plan()
    manager.allocate(2, 4)
    assert manager.can_swap_in([1]) is AllocStatus.LATER
    manager.free(2)
    assert manager.can_swap_in([1]) is AllocStatus.OK


def test_more_blocks_than_the_host_has_are_never_swapped_out() -> None:
    manager = make_manager(4, 2)
    manager.allocate(1, 12)
    assert manager.can_swap_out([1]) is AllocStatus.NEVER


def test_only_blocks_that_nobody_else_has_are_freed_by_leaving() -> None:
    manager = make_manager(8, 0)
    table = manager.allocate(1, 12)
    manager.set_keys(1, 0, [b"a", b"b"])
    manager.allocate(2, 12, table[:2])
    assert manager.num_own_blocks([1]) == manager.num_own_blocks([2]) == 1
    assert manager.num_own_blocks([1, 2]) == 4
    assert manager.num_moves([1]) == 6
    assert manager.num_moves([1, 2]) == 8


def keyed(manager: BlockManager, seq_id: int, keys: Sequence[bytes]) -> list[int]:
    """Blocks that a sequence has computed and left."""
    table = manager.allocate(seq_id, len(keys) * BLOCK_SIZE)
    manager.set_keys(seq_id, 0, keys)
    manager.free(seq_id)
    return table


def test_what_is_evicted_goes_to_the_host_and_is_found_there() -> None:
    manager = make_manager(2, 4)
    assert keyed(manager, 1, [b"a", b"b"]) == [0, 1]
    assert manager.end_plan() == []
    assert manager.allocate(2, 8) == [1, 0]
    assert manager.end_plan() == [1, 0, 0, 1], "the last block of the sequence goes first"
    assert manager.find([b"a", b"b"]) == []
    assert manager.find_on_host([b"a", b"b"]) == [1, 0]
    assert manager.num_free_host_blocks == 4
    manager.free(2)
    assert manager.fetch(3, 8, [], [1, 0])[::2] == [1, 0]


def test_host_blocks_go_the_longest_unused_first_and_of_a_sequence_the_last() -> None:
    manager = make_manager(2, 3)
    for seq_id, keys in enumerate(([b"a", b"b"], [b"c", b"d"], [b"e", b"f"]), 1):
        keyed(manager, seq_id, keys)
        manager.end_plan()
    assert manager.find_on_host([b"a"]) != []
    assert manager.find_on_host([b"b"]) == []
    assert manager.find_on_host([b"d"]) != []
    manager.fetch(4, 8, [], manager.find_on_host([b"a"]))
    manager.end_plan()
    assert [manager.find_on_host([key]) != [] for key in (b"a", b"d")] == [True, False]


def test_swapped_out_sequences_come_before_what_is_cached_on_the_host() -> None:
    manager = make_manager(2, 2)
    keyed(manager, 1, [b"a", b"b"])
    manager.allocate(2, 8)
    manager.end_plan()
    assert manager.find_on_host([b"a", b"b"]) != []
    assert manager.can_swap_out([2]) is AllocStatus.OK
    manager.swap_out([2])
    manager.end_plan()
    assert manager.find_on_host([b"a"]) == manager.find_on_host([b"b"]) == []
    keyed(manager, 3, [b"c", b"d"])
    manager.allocate(4, 8)
    assert manager.end_plan() == [], "there is no room"


def test_what_the_host_has_is_not_moved_again() -> None:
    manager = make_manager(3, 4)
    manager.allocate(1, 10)
    manager.set_keys(1, 0, [b"a", b"b"])
    assert len(manager.swap_out([1])) == 6
    manager.end_plan()
    manager.swap_in([1])
    manager.set_keys(1, 0, [b"a", b"b"])
    manager.end_plan()
    last = manager.table(1)[2]
    assert manager.num_moves([1]) == 4
    assert manager.swap_out([1])[::2] == [last]
    manager.end_plan()


def test_a_host_block_is_no_target_twice_in_a_plan_nor_where_it_is_read() -> None:
    manager = make_manager(3, 1)
    keyed(manager, 1, [b"a", b"b"])
    manager.allocate(2, 12)
    assert manager.end_plan() == [0, 0], "room for one of two: the first"
    [kept] = manager.find_on_host([b"a"])
    manager.free(2)
    keyed(manager, 3, [b"c"])
    manager.fetch(4, 12, [], [kept])
    assert manager.end_plan() == [], "the only host block is read"


def test_a_host_block_that_a_plan_writes_is_not_given_to_what_it_swaps_out() -> None:
    manager = make_manager(3, 1)
    keyed(manager, 1, [b"a"])
    manager.allocate(2, 8)
    manager.allocate(3, 4)  # in place of the first one's
    assert manager.can_swap_out([3]) is AllocStatus.LATER
    assert manager.end_plan() == [0, 0]
    assert manager.can_swap_out([3]) is AllocStatus.OK


def test_keys_are_forgotten_on_device_and_host() -> None:
    manager = make_manager(4, 4)
    manager.allocate(1, 4)
    manager.set_keys(1, 0, [b"a"])
    manager.swap_out([1])
    manager.end_plan()
    manager.swap_in([1])
    manager.set_keys(1, 0, [b"a"])
    manager.end_plan()
    assert [] not in (manager.find([b"a"]), manager.find_on_host([b"a"]))
    manager.forget_keys([b"a"])
    assert manager.find([b"a"]) == manager.find_on_host([b"a"]) == []
    manager.check()
