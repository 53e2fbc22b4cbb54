"""Blocks that move between device and host, for sequences or to be found again."""

from collections.abc import Sequence

from scheduler_service.core.kv_cache.manager import KVCacheManager
from tests.support.blocks import BLOCK_SIZE, allocate, find, hit, make_manager, sequence, set_keys


def test_blocks_swapped_out_are_free_at_once_and_host_blocks_swapped_in_after_the_plan() -> None:
    manager = make_manager(2, 2)
    allocate(manager, 1, 8)
    assert manager.swap_out([sequence(1)]) == [0, 0, 1, 1]
    assert allocate(manager, 2, 8) == [0, 1]
    manager.end_plan(has_rows=False)
    manager.free(sequence(2))
    assert manager.swap_in([sequence(1)]) == [0, 0, 1, 1]
    assert not manager.can_swap_out([sequence(1)])
    manager.end_plan(has_rows=False)
    assert manager.can_swap_out([sequence(1)])


def test_what_sequences_share_is_moved_once_and_shared_again() -> None:
    manager = make_manager(4, 4)
    allocate(manager, 1, 6)
    manager.fork(sequence(1), sequence(2))
    manager.reserve(sequence(1), 7)
    manager.end_plan(has_rows=False)
    assert [manager.device_blocks(sequence(1)), manager.device_blocks(sequence(2))] == [
        [0, 2],
        [0, 1],
    ]
    assert manager.swap_out([sequence(1), sequence(2)]) == [0, 0, 2, 1, 1, 2]
    manager.end_plan(has_rows=False)
    assert manager.num_free_blocks[1] == 1
    assert len(manager.swap_in([sequence(1), sequence(2)])) == 6
    [first, second] = [manager.device_blocks(sequence(1)), manager.device_blocks(sequence(2))]
    assert first[0] == second[0]
    assert first[1] != second[1]
    assert manager.reserve(sequence(2), 7) == [], "its last block is its own"


def test_swapped_out_blocks_come_back_beside_others_only_with_room_to_grow() -> None:
    manager = make_manager(4, 4)
    allocate(manager, 1, 12)
    manager.swap_out([sequence(1)])
    manager.end_plan(has_rows=False)
    allocate(manager, 2, 4)
    assert not manager.can_swap_in([sequence(1)])
    manager.free(sequence(2))
    assert manager.can_swap_in([sequence(1)])


def test_more_blocks_than_the_host_has_are_never_swapped_out() -> None:
    manager = make_manager(4, 2)
    allocate(manager, 1, 12)
    assert not manager.can_swap_out([sequence(1)])


def test_only_blocks_that_nobody_else_has_are_freed_by_leaving() -> None:
    manager = make_manager(8, 0)
    table = allocate(manager, 1, 12)
    set_keys(manager, 1, [b"a", b"b"])
    allocate(manager, 2, 12, table[:2])
    assert manager.memory_freed([sequence(1)]) == manager.memory_freed([sequence(2)]) == 1
    assert manager.memory_freed([sequence(1), sequence(2)]) == 4
    assert manager.num_moves([sequence(1)]) == 6
    assert manager.num_moves([sequence(1), sequence(2)]) == 8


def keyed(manager: KVCacheManager, seq_id: int, keys: Sequence[bytes]) -> list[int]:
    """Blocks that a sequence has computed and left."""
    table = allocate(manager, seq_id, len(keys) * BLOCK_SIZE)
    set_keys(manager, seq_id, keys)
    manager.free(sequence(seq_id))
    return table


def test_what_is_evicted_goes_to_the_host_and_is_found_there() -> None:
    manager = make_manager(2, 4)
    assert keyed(manager, 1, [b"a", b"b"]) == [0, 1]
    assert manager.end_plan(has_rows=False) == []
    assert allocate(manager, 2, 8) == [1, 0]
    assert manager.end_plan(has_rows=False) == [1, 0, 0, 1], (
        "the last block of the sequence goes first"
    )
    assert find(manager.device.cached, [b"a", b"b"]) == []
    assert find(manager.host.pool.cached, [b"a", b"b"]) == [1, 0]
    assert manager.num_free_blocks[1] == 4
    manager.free(sequence(2))
    assert manager.admit(sequence(3, 8), hit(stored=[1, 0])).swap_in[::2] == [1, 0]


def test_host_blocks_go_the_longest_unused_first_and_of_a_sequence_the_last() -> None:
    manager = make_manager(2, 3)
    for seq_id, keys in enumerate(([b"a", b"b"], [b"c", b"d"], [b"e", b"f"]), 1):
        keyed(manager, seq_id, keys)
        manager.end_plan(has_rows=False)
    assert find(manager.host.pool.cached, [b"a"]) != []
    assert find(manager.host.pool.cached, [b"b"]) == []
    assert find(manager.host.pool.cached, [b"d"]) != []
    manager.admit(sequence(4, 8), hit(stored=find(manager.host.pool.cached, [b"a"])))
    manager.end_plan(has_rows=False)
    assert [find(manager.host.pool.cached, [key]) != [] for key in (b"a", b"d")] == [True, False]


def test_swapped_out_sequences_come_before_what_is_cached_on_the_host() -> None:
    manager = make_manager(2, 2)
    keyed(manager, 1, [b"a", b"b"])
    allocate(manager, 2, 8)
    manager.end_plan(has_rows=False)
    assert find(manager.host.pool.cached, [b"a", b"b"]) != []
    assert manager.can_swap_out([sequence(2)])
    manager.swap_out([sequence(2)])
    manager.end_plan(has_rows=False)
    assert find(manager.host.pool.cached, [b"a"]) == find(manager.host.pool.cached, [b"b"]) == []
    keyed(manager, 3, [b"c", b"d"])
    allocate(manager, 4, 8)
    assert manager.end_plan(has_rows=False) == [], "there is no room"


def test_what_the_host_has_is_not_moved_again() -> None:
    manager = make_manager(3, 4)
    allocate(manager, 1, 10)
    set_keys(manager, 1, [b"a", b"b"])
    assert len(manager.swap_out([sequence(1)])) == 6
    manager.end_plan(has_rows=False)
    manager.swap_in([sequence(1)])
    set_keys(manager, 1, [b"a", b"b"])
    manager.end_plan(has_rows=False)
    last = manager.device_blocks(sequence(1))[2]
    assert manager.num_moves([sequence(1)]) == 4
    assert manager.swap_out([sequence(1)])[::2] == [last]
    manager.end_plan(has_rows=False)


def test_a_host_block_is_no_target_twice_in_a_plan_nor_where_it_is_read() -> None:
    manager = make_manager(3, 1)
    keyed(manager, 1, [b"a", b"b"])
    allocate(manager, 2, 12)
    assert manager.end_plan(has_rows=False) == [0, 0], "room for one of two: the first"
    [kept] = find(manager.host.pool.cached, [b"a"])
    manager.free(sequence(2))
    keyed(manager, 3, [b"c"])
    manager.admit(sequence(4, 12), hit(stored=[kept]))
    assert manager.end_plan(has_rows=False) == [], "the only host block is read"


def test_a_host_block_that_a_plan_writes_is_not_given_to_what_it_swaps_out() -> None:
    manager = make_manager(3, 1)
    keyed(manager, 1, [b"a"])
    allocate(manager, 2, 8)
    allocate(manager, 3, 4)  # in place of the first one's
    assert not manager.can_swap_out([sequence(3)])
    assert manager.end_plan(has_rows=False) == [0, 0]
    assert manager.can_swap_out([sequence(3)])


def test_keys_are_forgotten_on_device_and_host() -> None:
    manager = make_manager(4, 4)
    allocate(manager, 1, 4)
    set_keys(manager, 1, [b"a"])
    manager.swap_out([sequence(1)])
    manager.end_plan(has_rows=False)
    manager.swap_in([sequence(1)])
    set_keys(manager, 1, [b"a"])
    manager.end_plan(has_rows=False)
    assert [] not in (find(manager.device.cached, [b"a"]), find(manager.host.pool.cached, [b"a"]))
    manager.withdraw(sequence(9, keys=[b"a"]))
    assert find(manager.device.cached, [b"a"]) == find(manager.host.pool.cached, [b"a"]) == []
    manager.check([sequence(1)])
