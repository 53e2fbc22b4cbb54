"""How device blocks are allocated, shared between sequences, and found again."""

import pytest

from scheduler_service.core.kv_cache.alloc_status import AllocStatus
from scheduler_service.core.kv_cache.block_manager import BlockUpdate
from scheduler_service.core.kv_cache.block_pool import BlockPool
from tests.support.blocks import make_manager


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
