"""Blocks that move between device and host, for sequences or to be found again."""

from collections.abc import Sequence

from scheduler_service.core.kv_cache.manager import KVCacheManager
from tests.support.blocks import BLOCK_SIZE, allocate, find, hit, make_manager, sequence, set_keys


def test_blocks_swapped_out_are_free_at_once_and_host_blocks_swapped_in_after_the_plan() -> None:
    manager = make_manager(2, 2)
    allocate(manager, 1, 8)
    assert manager.swap.swap_out([sequence(1)]) == [0, 0, 1, 1]
    assert allocate(manager, 2, 8) == [0, 1]
    manager.end_plan(has_rows=False)
    manager.free(sequence(2))
    assert manager.swap.swap_in([sequence(1)]) == [0, 0, 1, 1]
    assert not manager.swap.can_swap_out([sequence(1)])
    manager.end_plan(has_rows=False)
    assert manager.swap.can_swap_out([sequence(1)])


def test_only_blocks_that_nobody_else_has_are_freed_by_leaving() -> None:
    manager = make_manager(8, 0)
    table = allocate(manager, 1, 12)
    set_keys(manager, 1, [b"a", b"b"])
    allocate(manager, 2, 12, table[:2])
    memory_freed = manager.tables.memory_freed
    assert memory_freed([sequence(1)]) == memory_freed([sequence(2)]) == 1
    assert memory_freed([sequence(1), sequence(2)]) == 4
    assert manager.swap.num_moves([sequence(1)]) == 6
    assert manager.swap.num_moves([sequence(1), sequence(2)]) == 8


def keyed(manager: KVCacheManager, seq_id: int, keys: Sequence[bytes]) -> list[int]:
    """Blocks that a sequence has computed and left."""
    table = allocate(manager, seq_id, len(keys) * BLOCK_SIZE)
    set_keys(manager, seq_id, keys)
    manager.free(sequence(seq_id))
    return table


def test_a_host_block_is_no_target_twice_in_a_plan_nor_where_it_is_read() -> None:
    manager = make_manager(3, 1)
    keyed(manager, 1, [b"a", b"b"])
    allocate(manager, 2, 12)
    assert manager.end_plan(has_rows=False).swap_out == [0, 0], "room for one of two: the first"
    [kept] = find(manager.host.pool.cached, [b"a"])
    manager.free(sequence(2))
    keyed(manager, 3, [b"c"])
    manager.admission.admit(sequence(4, 12), hit(stored=[kept]))
    assert manager.end_plan(has_rows=False).swap_out == [], "the only host block is read"


def test_a_host_block_that_a_plan_writes_is_not_given_to_what_it_swaps_out() -> None:
    manager = make_manager(3, 1)
    keyed(manager, 1, [b"a"])
    allocate(manager, 2, 8)
    allocate(manager, 3, 4)  # in place of the first one's
    assert not manager.swap.can_swap_out([sequence(3)])
    assert manager.end_plan(has_rows=False).swap_out == [0, 0]
    assert manager.swap.can_swap_out([sequence(3)])
