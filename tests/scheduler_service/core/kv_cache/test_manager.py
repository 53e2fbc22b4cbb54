"""The KV cache as the rest of the core sees it. Blocks have four tokens."""

import pytest

from scheduler_service.core.config import CacheGroup, SchedulerConfig, WorkerGroupCapacity
from scheduler_service.core.context import ContextKind, ContextPart
from scheduler_service.core.kv_cache.alloc_status import AllocStatus
from scheduler_service.core.kv_cache.manager import KVCacheManager
from tests.support.blocks import KnownSequence


def always(num_moves: int, num_tokens: int) -> bool:
    """Fetch all that the host has."""
    return True


def make_cache(num_blocks: int = 4, num_host_blocks: int = 0, **config: bool) -> KVCacheManager:
    capacity = WorkerGroupCapacity(
        worker_group_id="group",
        model="model",
        num_gpu_blocks=num_blocks,
        num_cpu_blocks=num_host_blocks,
        cache_groups=(CacheGroup(block_tokens=4),),
        max_model_len=64,
        vocab_size=100,
    )
    return KVCacheManager(SchedulerConfig(watermark=0.0, **config), capacity)


def make_seq(seq_id: int, num_tokens: int, first: int = 0) -> KnownSequence:
    return KnownSequence(seq_id, list(range(first, first + num_tokens)))


def admit(cache: KVCacheManager, *sequences: KnownSequence) -> None:
    """Admit sequences one by one, and offer all but the last token of each."""
    for seq in sequences:
        cache.admit(seq, cache.match_prefix(seq, is_fetched=always))
        cache.offer(seq, seq.length - 1)


def test_a_prefix_is_found_on_the_device_but_for_the_last_token() -> None:
    cache = make_cache()
    admit(cache, make_seq(1, 9))
    found = [
        cache.match_prefix(make_seq(2, n), is_fetched=always).num_tokens for n in (4, 5, 8, 9, 20)
    ]
    assert found == [0, 4, 4, 8, 8]


def test_a_prefix_that_left_the_device_is_found_on_the_host_in_moves() -> None:
    cache, seq = make_cache(num_host_blocks=8), make_seq(1, 9)
    admit(cache, seq)
    cache.free(seq)
    other = make_seq(2, 16, first=50)
    admit(cache, other)
    cache.end_plan(has_rows=True)
    cache.free(other)
    assert cache.match_prefix(seq).num_tokens == 0
    hit = cache.match_prefix(seq, is_fetched=always)
    assert (hit.num_tokens, hit.num_moves) == (8, 2)
    assert len(cache.admit(seq, hit).swap_in) == 2 * hit.num_moves, "pairs of host and device"
    cache.end_plan(has_rows=True)
    cache.check([seq])


def test_withdrawn_tokens_are_not_found() -> None:
    cache, seq = make_cache(), make_seq(1, 9)
    admit(cache, seq)
    cache.withdraw(seq)
    assert cache.match_prefix(make_seq(2, 9), is_fetched=always).num_tokens == 0


@pytest.mark.parametrize(
    ("start", "num_tokens"), [(0, 0), (1, 0), (3, 0), (4, 4), (7, 4), (8, 8), (9, 8)]
)
@pytest.mark.parametrize("kind", ContextKind)
def test_tokens_before_a_part_are_found_and_others_not(
    kind: ContextKind, start: int, num_tokens: int
) -> None:
    cache, other = make_cache(), make_seq(2, 9)
    admit(cache, make_seq(1, 9))
    other.context = (ContextPart(kind, bytes(32), start),)
    assert cache.match_prefix(other, is_fetched=always).num_tokens == num_tokens


def test_a_sequence_waits_for_one_that_computes_most_of_its_tokens_and_still_runs() -> None:
    cache, leader, follower = make_cache(), make_seq(1, 9), make_seq(2, 9)
    leader.is_prefilling = True
    cache.admit(leader, cache.match_prefix(leader, is_fetched=always))
    cache.match_prefix(leader, is_fetched=always)
    hit = cache.match_prefix(follower, is_fetched=always)
    assert cache.is_to_come(follower, hit)
    leader.is_prefilling = False
    assert not cache.is_to_come(follower, hit)
    leader.is_prefilling = True
    cache.free(leader)
    assert not cache.is_to_come(follower, hit), "the leader may compute elsewhere"


def test_admission_counts_what_is_found_and_what_others_would_free() -> None:
    cache, seq = make_cache(), make_seq(1, 13)
    admit(cache, seq)
    hit = cache.match_prefix(make_seq(2, 4), is_fetched=always)
    assert cache.can_admit(4, hit) is AllocStatus.LATER
    assert cache.can_admit(4, hit, memory_freed=cache.memory_freed([seq])) is AllocStatus.OK
    assert cache.can_admit(17, hit, memory_freed=16) is AllocStatus.NEVER
    assert cache.shortage(8, hit, num_waiting_tokens=4, num_waiting=1) == (2 + 2) / 4


def test_only_memory_that_no_other_sequence_shares_is_freed() -> None:
    cache, parent, child = make_cache(), make_seq(1, 9), make_seq(2, 9)
    admit(cache, parent)
    cache.fork(parent, child)
    assert cache.memory_freed([parent]) == 0
    assert cache.memory_freed([parent, child]) == 3
    assert cache.num_tokens_to_recompute([parent, child]) == 12
    assert cache.num_free_tokens == 4


def test_without_the_prefix_cache_every_token_of_every_sequence_is_recomputed() -> None:
    cache, parent, child = make_cache(enable_prefix_caching=False), make_seq(1, 9), make_seq(2, 9)
    admit(cache, parent)
    cache.fork(parent, child)
    assert cache.num_tokens_to_recompute([parent, child]) == 18
    assert cache.match_prefix(make_seq(3, 9), is_fetched=always).num_tokens == 0


def test_a_table_changes_where_a_sequence_outgrows_or_shares_its_memory() -> None:
    cache, seq = make_cache(), make_seq(1, 7)
    admit(cache, seq)
    assert cache.reserve(seq, 8) == []
    [update] = cache.reserve(seq, 9)
    assert update.copied_from is None
    assert cache.round_up(9) == 12
    cache.fork(seq, make_seq(2, 9))
    assert not cache.can_reserve(seq, 10, num_others=1), "one block is free"
    [update] = cache.reserve(seq, 10)
    assert update.copied_from is not None
    assert cache.is_full


def test_sequences_that_are_admitted_together_compute_their_common_tokens_once() -> None:
    cache, first, second = make_cache(), make_seq(1, 9), make_seq(2, 9)
    second.tokens[6] = 99
    starts = cache.start_jointly([first, second], lambda seq, other: 6)
    assert [(start.num_tokens, start.source) for start in starts] == [(0, None), (4, first)]
    assert cache.can_admit_jointly(starts) is AllocStatus.NEVER
    cache = make_cache(num_blocks=5)
    assert cache.can_admit_jointly(starts) is AllocStatus.OK
    cache.admit_jointly(starts)
    assert cache.device_blocks(first)[:1] == cache.device_blocks(second)[:1]
    assert cache.is_full
    cache.check([first, second])


def test_a_sequence_that_comes_back_from_the_host_is_offered_again() -> None:
    cache, seq = make_cache(num_host_blocks=4), make_seq(1, 9)
    admit(cache, seq)
    assert cache.can_swap_out([seq])
    cache.swap_out([seq])
    cache.withdraw(seq)
    cache.end_plan(has_rows=False)
    assert cache.can_swap_in([seq])
    cache.swap_in([seq])
    cache.end_plan(has_rows=False)
    assert cache.match_prefix(make_seq(2, 9)).num_tokens == 0
    cache.offer(seq, 8)
    assert cache.match_prefix(make_seq(2, 9)).num_tokens == 8


def test_a_running_sequence_without_memory_is_found() -> None:
    cache, seq = make_cache(), make_seq(1, 9)
    admit(cache, seq)
    cache.check([seq])
    with pytest.raises(AssertionError, match="one table for each"):
        cache.check([seq, make_seq(2, 3)])
