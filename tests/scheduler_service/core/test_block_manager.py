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

    @initialize(num_blocks=st.integers(1, 12), watermark=st.sampled_from([0.0, 0.25]))
    def start(self, num_blocks: int, watermark: float) -> None:
        self.num_blocks = num_blocks
        self.watermark_blocks = int(watermark * num_blocks)
        self.manager = BlockManager(
            num_gpu_blocks=num_blocks, block_size=BLOCK_SIZE, watermark=watermark
        )
        self.tables: dict[int, list[int]] = {}
        self.tokens: dict[int, list[int]] = {}
        self.memory: dict[tuple[int, int], bytes] = {}
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

    @rule(
        target=sequences, tokens=st.lists(st.sampled_from([0, 0, 0, 0, 1]), min_size=1, max_size=20)
    )
    def allocate(self, tokens: list[int]) -> int | None:
        num_tokens = len(tokens)
        found = self.manager.find(keys_of(tokens[:-1]))
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
        table = self.manager.allocate(seq_id, num_tokens, found)
        assert len(table) == num_blocks
        assert table[: len(found)] == found
        assert not set(table[len(found) :]) & self.used()
        self.tables[seq_id] = table
        num_found = len(found) * BLOCK_SIZE
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
        if seq_id in self.tables:
            self.manager.forget_keys(seq_id)
            found = self.manager.find(keys_of(self.tokens[seq_id]))
            assert not set(found) & set(self.tables[seq_id])

    @rule(seq_id=sequences, token=st.sampled_from([0, 1]))
    def append(self, seq_id: int | None, token: int) -> None:
        if seq_id not in self.tables:
            return
        length = len(self.tokens[seq_id]) + 1
        if not self.manager.can_append(seq_id, length):
            assert len(self.used()) == self.num_blocks, "refused while blocks are free"
            return
        update = self.manager.append(seq_id, length)
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

    @rule(seq_id=consumes(sequences))
    def free(self, seq_id: int | None) -> None:
        if seq_id in self.tables:
            self.manager.free(seq_id)
            del self.tables[seq_id], self.tokens[seq_id]

    @invariant()
    def blocks_are_free_or_counted(self) -> None:
        if hasattr(self, "manager"):
            self.manager.check()
            assert self.manager.num_free_blocks == self.num_blocks - len(self.used())

    @invariant()
    def every_sequence_finds_its_tokens(self) -> None:
        for seq_id, tokens in getattr(self, "tokens", {}).items():
            for position in range(len(tokens)):
                index, offset = divmod(position, BLOCK_SIZE)
                wanted = bytes(tokens[: position + 1])
                assert self.memory[self.tables[seq_id][index], offset] == wanted


TestBlockManager = BlockManagerMachine.TestCase
TestBlockManager.settings = settings(
    max_examples=60, stateful_step_count=50, deadline=None, derandomize=True
)


def test_only_the_last_owner_writes_to_a_shared_block_in_place() -> None:
    manager = BlockManager(num_gpu_blocks=4, block_size=4, watermark=0.0)
    assert manager.allocate(1, 2) == [0]
    assert manager.fork(1, 2) == [0]
    assert manager.fork(1, 3) == [0]
    assert manager.append(2, 3) == BlockUpdate(index=0, block=1, copied_from=0)
    assert manager.append(1, 3) == BlockUpdate(index=0, block=2, copied_from=0)
    assert manager.append(3, 3) is None


def test_a_promise_to_others_counts_like_blocks_in_use() -> None:
    manager = BlockManager(num_gpu_blocks=4, block_size=4, watermark=0.0)
    assert manager.can_allocate(8, num_blocks_promised=2) is AllocStatus.OK
    assert manager.can_allocate(8, num_blocks_promised=3) is AllocStatus.LATER


def test_blocks_found_in_use_cost_nothing_and_free_ones_one_each() -> None:
    manager = BlockManager(num_gpu_blocks=4, block_size=4, watermark=0.0)
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
    manager = BlockManager(num_gpu_blocks=4, block_size=4, watermark=0.0)
    [first, _, third] = manager.allocate(1, 12)
    manager.set_keys(1, 0, [b"a"])
    manager.set_keys(1, 2, [b"c"])
    assert manager.find([b"a", b"b", b"c"]) == [first]
    assert manager.find([b"c"]) == [third]


def test_free_blocks_without_keys_go_first_then_the_longest_unused_and_deepest() -> None:
    manager = BlockManager(num_gpu_blocks=5, block_size=4, watermark=0.0)
    older, newer = manager.allocate(1, 8), manager.allocate(2, 8)
    manager.set_keys(1, 0, [b"a", b"b"])
    manager.set_keys(2, 0, [b"c", b"d"])
    manager.free(1)
    manager.free(2)
    [plain] = set(range(5)) - {*older, *newer}
    assert manager.allocate(3, 20) == [plain, older[1], older[0], newer[1], newer[0]]
    assert manager.find([b"a"]) == manager.find([b"c"]) == []


def test_a_block_that_is_found_counts_as_used_again() -> None:
    manager = BlockManager(num_gpu_blocks=2, block_size=4, watermark=0.0)
    [older], [newer] = manager.allocate(1, 4), manager.allocate(2, 4)
    manager.set_keys(1, 0, [b"a"])
    manager.set_keys(2, 0, [b"b"])
    manager.free(1)
    manager.free(2)
    assert manager.allocate(3, 4, [older]) == [older]
    manager.free(3)
    assert manager.allocate(4, 8) == [newer, older]


def test_of_two_blocks_with_the_same_contents_the_first_goes_on_being_found() -> None:
    manager = BlockManager(num_gpu_blocks=2, block_size=4, watermark=0.0)
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
