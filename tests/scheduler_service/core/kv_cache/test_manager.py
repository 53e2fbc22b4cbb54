"""The KV cache as the rest of the core sees it. Blocks have four tokens."""

import pytest

from scheduler_service.core.context import ContextKind, ContextPart
from scheduler_service.core.kv_cache.alloc_status import AllocStatus
from scheduler_service.core.kv_cache.block_pool import BlockPool
from scheduler_service.core.kv_cache.manager import KVCacheManager
from tests.support.blocks import (
    KnownSequence,
    allocate,
    device_blocks,
    find,
    hit,
    make_manager,
    num_free_blocks,
    sequence,
    set_keys,
)


def always(num_moves: int, num_tokens: int) -> bool:
    """Fetch all that the host has."""
    return True


def make_seq(seq_id: int, num_tokens: int, first: int = 0) -> KnownSequence:
    return KnownSequence(seq_id, list(range(first, first + num_tokens)))


def admit(cache: KVCacheManager, *sequences: KnownSequence) -> None:
    """Admit sequences one by one, and offer all but the last token of each."""
    for seq in sequences:
        cache.admission.admit(seq, cache.prefixes.match(seq, is_fetched=always))
        cache.prefixes.offer(seq, seq.length - 1)


@pytest.mark.parametrize(
    ("start", "num_tokens"), [(0, 0), (1, 0), (3, 0), (4, 4), (7, 4), (8, 8), (9, 8)]
)
@pytest.mark.parametrize("kind", ContextKind)
def test_tokens_before_a_part_are_found_and_others_not(
    kind: ContextKind, start: int, num_tokens: int
) -> None:
    cache, other = make_manager(), make_seq(2, 9)
    admit(cache, make_seq(1, 9))
    other.context = (ContextPart(kind, bytes(32), start),)
    assert cache.prefixes.match(other, is_fetched=always).num_tokens == num_tokens


def test_admission_counts_what_is_found_and_what_others_would_free() -> None:
    cache, seq = make_manager(), make_seq(1, 13)
    admit(cache, seq)
    hit = cache.prefixes.match(make_seq(2, 4), is_fetched=always)
    assert cache.admission.can_admit(4, hit) is AllocStatus.LATER
    freed = cache.tables.memory_freed([seq])
    assert cache.admission.can_admit(4, hit, memory_freed=freed) is AllocStatus.OK
    assert cache.admission.can_admit(17, hit, memory_freed=16) is AllocStatus.NEVER
    assert cache.admission.shortage(8, hit, num_waiting_tokens=4, num_waiting=1) == (2 + 2) / 4


def test_only_memory_that_no_other_sequence_shares_is_freed() -> None:
    cache, parent, child = make_manager(), make_seq(1, 9), make_seq(2, 9)
    admit(cache, parent)
    cache.tables.fork(parent, child)
    assert cache.tables.memory_freed([parent]) == 0
    assert cache.tables.memory_freed([parent, child]) == 3
    assert cache.prefixes.num_tokens_to_recompute([parent, child]) == 12
    assert cache.tables.num_free_tokens == 4


def test_without_the_prefix_cache_every_token_of_every_sequence_is_recomputed() -> None:
    cache, parent, child = make_manager(enable_prefix_caching=False), make_seq(1, 9), make_seq(2, 9)
    admit(cache, parent)
    cache.tables.fork(parent, child)
    assert cache.prefixes.num_tokens_to_recompute([parent, child]) == 18
    assert cache.prefixes.match(make_seq(3, 9), is_fetched=always).num_tokens == 0


def test_a_table_changes_where_a_sequence_outgrows_or_shares_its_memory() -> None:
    cache, seq = make_manager(), make_seq(1, 7)
    admit(cache, seq)
    assert cache.tables.reserve(seq, 8) == []
    [(*_, copied_from)] = cache.tables.reserve(seq, 9)
    assert copied_from is None
    assert cache.tables.round_up(9) == 12
    cache.tables.fork(seq, make_seq(2, 9))
    assert not cache.tables.can_reserve(seq, 10, num_others=1), "one block is free"
    [(*_, copied_from)] = cache.tables.reserve(seq, 10)
    assert copied_from is not None
    assert cache.tables.num_free_tokens == 0


def test_sequences_that_are_admitted_together_compute_their_common_tokens_once() -> None:
    cache, first, second = make_manager(), make_seq(1, 9), make_seq(2, 9)
    second.tokens[6] = 99
    starts = cache.admission.start_jointly([first, second], lambda seq, other: 6)
    assert [(start.num_tokens, start.source) for start in starts] == [(0, None), (4, first)]
    assert cache.admission.can_admit_jointly(starts) is AllocStatus.NEVER
    cache = make_manager(5)
    assert cache.admission.can_admit_jointly(starts) is AllocStatus.OK
    cache.admission.admit_jointly(starts)
    assert device_blocks(cache, first)[:1] == device_blocks(cache, second)[:1]
    assert cache.tables.num_free_tokens == 0
    cache.check([first, second])


def test_a_sequence_that_comes_back_from_the_host_is_offered_again() -> None:
    cache, seq = make_manager(4, 4), make_seq(1, 9)
    admit(cache, seq)
    assert cache.swap.can_swap_out([seq])
    cache.swap.swap_out([seq])
    cache.prefixes.withdraw(seq)
    cache.end_plan(has_rows=False)
    assert cache.swap.can_swap_in([seq])
    cache.swap.swap_in([seq])
    cache.end_plan(has_rows=False)
    assert cache.prefixes.match(make_seq(2, 9)).num_tokens == 0
    cache.prefixes.offer(seq, 8)
    assert cache.prefixes.match(make_seq(2, 9)).num_tokens == 8


# Blocks.


def test_blocks_found_in_use_cost_nothing_and_free_ones_one_each() -> None:
    manager = make_manager(4)
    keys = [b"a", b"b"]
    table = allocate(manager, 1, 8)
    set_keys(manager, 1, keys)
    assert find(manager.tables.pool.cached, keys) == table
    assert manager.admission.can_admit(16, hit(table)) is AllocStatus.OK
    assert manager.admission.can_admit(16, hit()) is AllocStatus.LATER
    manager.free(sequence(1))
    assert num_free_blocks(manager)[0] == 4
    allocate(manager, 2, 8)
    assert manager.admission.can_admit(8, hit(table)) is AllocStatus.OK
    assert manager.admission.can_admit(12, hit(table)) is AllocStatus.LATER


def test_a_search_ends_at_the_first_key_that_no_block_has() -> None:
    manager = make_manager(4)
    [first, _, third] = allocate(manager, 1, 12)
    set_keys(manager, 1, [b"a", b"b", b"c"])
    manager.prefixes.withdraw(sequence(9, keys=[b"b"]))
    assert find(manager.tables.pool.cached, [b"a", b"b", b"c"]) == [first]
    assert find(manager.tables.pool.cached, [b"c"]) == [third]


def test_free_blocks_without_keys_go_first_then_the_longest_unused_and_deepest() -> None:
    manager = make_manager(5)
    older, newer = allocate(manager, 1, 8), allocate(manager, 2, 8)
    set_keys(manager, 1, [b"a", b"b"])
    set_keys(manager, 2, [b"c", b"d"])
    manager.free(sequence(1))
    manager.free(sequence(2))
    [plain] = set(range(5)) - {*older, *newer}
    assert allocate(manager, 3, 20) == [plain, older[1], older[0], newer[1], newer[0]]
    cached = manager.tables.pool.cached
    assert find(cached, [b"a"]) == find(cached, [b"c"]) == []


def test_a_block_that_is_found_counts_as_used_again() -> None:
    manager = make_manager(2)
    [older], [newer] = allocate(manager, 1, 4), allocate(manager, 2, 4)
    set_keys(manager, 1, [b"a"])
    set_keys(manager, 2, [b"b"])
    manager.free(sequence(1))
    manager.free(sequence(2))
    assert allocate(manager, 3, 4, [older]) == [older]
    manager.free(sequence(3))
    assert allocate(manager, 4, 8) == [newer, older]


def test_of_two_blocks_with_the_same_contents_the_first_goes_on_being_found() -> None:
    manager = make_manager(2)
    first, second = allocate(manager, 1, 4), allocate(manager, 2, 4)
    set_keys(manager, 1, [b"a"])
    set_keys(manager, 2, [b"a"])
    manager.free(sequence(2))
    assert find(manager.tables.pool.cached, [b"a"]) == first
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
