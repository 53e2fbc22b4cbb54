"""How device blocks are allocated, shared between sequences, and found again."""

import pytest

from scheduler_service.core.kv_cache.alloc_status import AllocStatus
from scheduler_service.core.kv_cache.block_manager import BlockUpdate
from scheduler_service.core.kv_cache.block_pool import BlockPool
from tests.support.blocks import allocate, find, hit, make_manager


def test_only_the_last_owner_writes_to_a_shared_block_in_place() -> None:
    manager = make_manager(4)
    assert allocate(manager, 1, 2) == [0]
    manager.fork(1, 2)
    manager.fork(1, 3)
    assert manager.append(2, 3) == [BlockUpdate(group=0, index=0, block=1, copied_from=0)]
    assert manager.append(1, 3) == [BlockUpdate(group=0, index=0, block=2, copied_from=0)]
    assert manager.append(3, 3) == []


def test_a_promise_to_others_counts_like_blocks_in_use() -> None:
    manager = make_manager(4)
    assert manager.can_allocate(8, hit(), num_blocks_promised=2) is AllocStatus.OK
    assert manager.can_allocate(8, hit(), num_blocks_promised=3) is AllocStatus.LATER


def test_blocks_found_in_use_cost_nothing_and_free_ones_one_each() -> None:
    manager = make_manager(4)
    keys = [b"a", b"b"]
    table = allocate(manager, 1, 8)
    manager.set_keys(1, keys)
    assert find(manager.gpu_pool.cached, keys) == table
    assert manager.can_allocate(16, hit(table)) is AllocStatus.OK
    assert manager.can_allocate(16, hit()) is AllocStatus.LATER
    manager.free(1)
    assert manager.num_free_blocks == 4
    allocate(manager, 2, 8)
    assert manager.can_allocate(8, hit(table)) is AllocStatus.OK
    assert manager.can_allocate(12, hit(table)) is AllocStatus.LATER


def test_a_search_ends_at_the_first_key_that_no_block_has() -> None:
    manager = make_manager(4)
    [first, _, third] = allocate(manager, 1, 12)
    manager.set_keys(1, [b"a"])
    manager.set_keys(1, [b"", b"", b"c"], 2)
    assert find(manager.gpu_pool.cached, [b"a", b"b", b"c"]) == [first]
    assert find(manager.gpu_pool.cached, [b"c"]) == [third]


def test_free_blocks_without_keys_go_first_then_the_longest_unused_and_deepest() -> None:
    manager = make_manager(5)
    older, newer = allocate(manager, 1, 8), allocate(manager, 2, 8)
    manager.set_keys(1, [b"a", b"b"])
    manager.set_keys(2, [b"c", b"d"])
    manager.free(1)
    manager.free(2)
    [plain] = set(range(5)) - {*older, *newer}
    assert allocate(manager, 3, 20) == [plain, older[1], older[0], newer[1], newer[0]]
    assert find(manager.gpu_pool.cached, [b"a"]) == find(manager.gpu_pool.cached, [b"c"]) == []


def test_a_block_that_is_found_counts_as_used_again() -> None:
    manager = make_manager(2)
    [older], [newer] = allocate(manager, 1, 4), allocate(manager, 2, 4)
    manager.set_keys(1, [b"a"])
    manager.set_keys(2, [b"b"])
    manager.free(1)
    manager.free(2)
    assert allocate(manager, 3, 4, [older]) == [older]
    manager.free(3)
    assert allocate(manager, 4, 8) == [newer, older]


def test_of_two_blocks_with_the_same_contents_the_first_goes_on_being_found() -> None:
    manager = make_manager(2)
    first, second = allocate(manager, 1, 4), allocate(manager, 2, 4)
    manager.set_keys(1, [b"a"])
    manager.set_keys(2, [b"a"])
    manager.free(2)
    assert find(manager.gpu_pool.cached, [b"a"]) == first
    assert allocate(manager, 3, 4) == second


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
