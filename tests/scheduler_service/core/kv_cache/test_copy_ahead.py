"""Cached blocks are copied to the host before they are evicted."""

import math

import hypothesis.strategies as st
from hypothesis import given

from scheduler_service.core.kv_cache.block_pool import BlockPool, Contents
from scheduler_service.core.kv_cache.host_cache import DECAY, SPARE_COPIES
from scheduler_service.core.kv_cache.manager import KVCacheManager
from tests.support.blocks import BLOCK_SIZE, allocate, find, make_manager, sequence, set_keys


def fill(manager: KVCacheManager, *, per_plan: int) -> None:
    """Let one sequence per plan compute this many blocks and leave, until no block is empty; the
    keys are the numbers of the blocks."""
    for first in range(0, manager.tables.pool.num_blocks, per_plan):
        keys = [bytes([first + index]) for index in range(per_plan)]
        allocate(manager, first, per_plan * BLOCK_SIZE)
        set_keys(manager, first, keys)
        manager.free(sequence(first))
        assert manager.end_plan(has_rows=False).swap_out == []


def num_copied(manager: KVCacheManager) -> int:
    return len(manager.end_plan(has_rows=True).swap_out) // 2


def test_the_blocks_that_are_evicted_next_are_copied_and_stay_cached() -> None:
    manager = make_manager(40, 80)
    fill(manager, per_plan=2)
    assert manager.end_plan(has_rows=True).swap_out == [1, 0, 0, 1, 3, 2, 2, 3]
    assert find(manager.tables.pool.cached, [b"\0", b"\1", b"\2", b"\3"]) == [0, 1, 2, 3]
    manager.check([])
    assert allocate(manager, 100, 2 * BLOCK_SIZE) == [1, 0]
    assert manager.end_plan(has_rows=True).swap_out == [5, 4, 4, 5], "1 and 0 have been copied"
    assert find(manager.tables.pool.cached, [b"\0"]) == []
    assert find(manager.host.pool.cached, [b"\0", b"\1"]) == [1, 0]
    manager.check([sequence(100)])


def test_empty_blocks_need_no_copies() -> None:
    manager = make_manager(10, 80)
    fill(manager, per_plan=2)
    manager.prefixes.withdraw(sequence(9, keys=[bytes([index]) for index in range(4)]))
    assert num_copied(manager) == 0
    allocate(manager, 100, 4 * BLOCK_SIZE)
    assert num_copied(manager) == 6, "four were allocated, six are left"


def test_without_rows_or_without_host_memory_nothing_is_copied_ahead() -> None:
    manager = make_manager(40, 80)
    fill(manager, per_plan=2)
    assert manager.end_plan(has_rows=False).swap_out == []
    manager = make_manager(40, 0)
    fill(manager, per_plan=2)
    allocate(manager, 100, 2 * BLOCK_SIZE)
    assert manager.end_plan(has_rows=True).swap_out == []


def test_a_plan_copies_little_more_than_it_allocates() -> None:
    manager = make_manager(200, 400)
    fill(manager, per_plan=20)
    assert num_copied(manager) == SPARE_COPIES
    allocate(manager, 201, 3 * BLOCK_SIZE)
    assert num_copied(manager) == 2 * 3 + SPARE_COPIES
    copies = [num_copied(manager) for _ in range(10)]
    assert copies[0] == SPARE_COPIES
    assert copies[-1] == 0
    assert 2 * 3 + 2 * SPARE_COPIES < manager.tables.pool.num_ready_blocks < 2 * 20


def test_the_demand_of_a_large_plan_is_forgotten_slowly() -> None:
    manager = make_manager(40, 80)
    fill(manager, per_plan=20)
    for _ in range(200):
        manager.end_plan(has_rows=False)
    assert num_copied(manager) == math.ceil(2 * 20 * DECAY**201) == 6


def test_at_most_a_quarter_of_the_hosts_free_blocks_holds_copies_made_ahead() -> None:
    manager = make_manager(40, 36)
    fill(manager, per_plan=20)
    assert [num_copied(manager) for _ in range(3)] == [SPARE_COPIES, 1, 0]
    allocate(manager, 100, 2 * BLOCK_SIZE)
    assert num_copied(manager) == 2


def test_a_small_host_holds_no_copies_made_ahead() -> None:
    manager = make_manager(40, 31)
    fill(manager, per_plan=20)
    assert num_copied(manager) == 0


def test_copies_ahead_do_not_take_the_room_of_evicted_blocks() -> None:
    manager = make_manager(8, 4)
    fill(manager, per_plan=1)
    allocate(manager, 100, 4 * BLOCK_SIZE)
    assert manager.end_plan(has_rows=True).swap_out[::2] == [0, 1, 2, 3]
    assert find(manager.host.pool.cached, [bytes([0]), bytes([1]), bytes([2]), bytes([3])]) == [
        0,
        1,
        2,
        3,
    ]


def test_a_copied_block_that_is_used_again_is_not_copied_again() -> None:
    manager = make_manager(8, 80)
    fill(manager, per_plan=1)
    assert manager.end_plan(has_rows=True).swap_out == [0, 0, 1, 1]
    allocate(manager, 100, BLOCK_SIZE, find(manager.tables.pool.cached, [b"\0"]))
    manager.free(sequence(100))
    assert manager.end_plan(has_rows=True).swap_out == [2, 2]
    assert allocate(manager, 101, 8 * BLOCK_SIZE) == [1, 2, 3, 4, 5, 6, 7, 0]
    assert manager.end_plan(has_rows=False).swap_out[::2] == [3, 4, 5, 6, 7]


@given(
    st.lists(
        st.one_of(
            st.tuples(st.just("allocate"), st.integers(1, 4)),
            st.tuples(st.sampled_from(["release", "share", "touch", "forget"]), st.integers(0, 9)),
        )
    ),
    st.data(),
)
def test_blocks_are_evicted_in_the_same_order_whatever_is_saved(
    operations: list[tuple[str, int]], data: st.DataObject
) -> None:
    saving, plain = BlockPool(10), BlockPool(10)
    for number, (name, value) in enumerate(operations):
        saving.cached.save(data.draw(st.integers(0, 3)))
        for pool in (saving, plain):
            is_cached, is_used = value in pool.cached, pool.is_used(value)
            if name == "allocate" and pool.num_free_blocks >= value:
                for index, block in enumerate(pool.allocate(value)):
                    key = bytes([number % 256, number // 256, index])
                    pool.cached.add(block, Contents(0, (key,), is_full=True))
            elif name == "release" and is_used:
                pool.release([value])
            elif name == "share" and (is_used or is_cached):
                pool.share([value])
            elif name == "touch":
                pool.cached.touch(value)
            elif name == "forget":
                pool.forget(value)
            counts = {b: pool.num_references(b) for b in range(10) if pool.is_used(b)}
            pool.check(counts)
        assert [*saving.cached.free_blocks()] == [*plain.cached.free_blocks()]
        assert saving.reference_counts() == plain.reference_counts()
    num_free = saving.num_free_blocks
    assert saving.allocate(num_free) == plain.allocate(num_free)
