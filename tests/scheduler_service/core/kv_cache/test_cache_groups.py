"""Memory and prefixes where a model has several cache groups. A unit of keys has four tokens."""

from dataclasses import replace

import pytest

from scheduler_service.core.config import CacheGroup, CacheLifetime, SchedulerConfig
from scheduler_service.core.context import ContextKind, ContextPart
from scheduler_service.core.kv_cache.alloc_status import AllocStatus
from scheduler_service.core.kv_cache.manager import KVCacheManager
from scheduler_service.core.kv_cache.usage import usage_of
from tests.support.blocks import KnownSequence, num_free_blocks
from tests.support.core_driver import make_capacity

ALL = CacheGroup(block_tokens=12)
WINDOW = CacheGroup(lifetime=CacheLifetime.WINDOW, block_tokens=4, span=8)
CHUNK = CacheGroup(lifetime=CacheLifetime.CHUNK, block_tokens=4, span=16)
SOURCE = CacheGroup(lifetime=CacheLifetime.FIXED, block_tokens=4)
MEDIA = ContextPart(ContextKind.MEDIA, bytes(32), length=9)
OTHER_MEDIA = replace(MEDIA, digest=bytes([1]) * 32)
STEP_TOKENS = 8
"""Tokens of a prompt in a step."""


def make_cache(
    *groups: CacheGroup, num_blocks: int = 64, num_host_blocks: int = 0
) -> KVCacheManager:
    capacity = make_capacity(
        num_gpu_blocks=num_blocks, num_cpu_blocks=num_host_blocks, cache_groups=groups
    )
    return KVCacheManager(
        SchedulerConfig(watermark=0.0), replace(capacity, max_chunk_tokens=STEP_TOKENS)
    )


def make_seq(seq_id: int, num_tokens: int, *media: ContextPart) -> KnownSequence:
    return KnownSequence(seq_id, list(range(num_tokens)), context=media)


def prefill(cache: KVCacheManager, seq: KnownSequence) -> list[int]:
    """Compute a prompt, and offer what each step computes before the next one; returns the plan's
    `copy` of what was found of it."""
    hit = cache.prefixes.match(seq)
    assert cache.admission.can_admit(seq.length, hit) is AllocStatus.OK
    copies = cache.admission.admit(seq, hit).copy
    for start in range(hit.num_tokens, seq.length, STEP_TOKENS):
        end = min(seq.length, start + STEP_TOKENS)
        assert cache.extend_prompt(seq, start, end) is not None
        cache.prefixes.offer(seq, end)
    cache.tables.end_prompt(seq)
    cache.end_plan(has_rows=True)
    return copies


def tables(cache: KVCacheManager, seq: KnownSequence) -> list[tuple[int, int]]:
    """By group: the first index and the number of blocks."""
    return [(table.first_index, len(table.block_ids)) for table in cache.tables.of(seq)]


def test_a_window_has_blocks_from_the_first_token_that_its_next_row_sees() -> None:
    cache, seq = make_cache(ALL, WINDOW), make_seq(1, 40)
    prefill(cache, seq)
    assert tables(cache, seq) == [(0, 4), (6, 4)], "the last step began at token 32, and saw 25"
    seq.next_position = 40
    cache.released.slide(seq, seq.next_position)
    assert tables(cache, seq) == [(0, 4), (8, 2)], "33 to 39"
    [(group, index, _, copied_from)] = cache.tables.reserve(seq, 41)
    assert (group, index, copied_from) == (1, 10, None)


def test_a_chunk_is_released_at_multiples_of_its_length() -> None:
    cache, seq = make_cache(ALL, CHUNK), make_seq(1, 32)
    prefill(cache, seq)
    assert tables(cache, seq)[1] == (4, 4)
    seq.next_position = 32
    cache.released.slide(seq, seq.next_position)
    assert tables(cache, seq)[1] == (8, 0)


def test_a_prompt_is_admitted_if_a_window_and_a_step_of_it_fit() -> None:
    num_blocks = 4 + (8 - 1 + STEP_TOKENS + 3) // 4 + 1
    cache, seq = make_cache(ALL, WINDOW, num_blocks=num_blocks), make_seq(1, 48)
    prefill(cache, seq)
    cache.check([seq])
    assert cache.tables.num_tokens == 48
    assert cache.admission.can_admit(49, cache.prefixes.match(seq)) is AllocStatus.NEVER


def test_what_is_reserved_for_a_prompt_is_given_to_no_other() -> None:
    cache, seq, other = make_cache(ALL, WINDOW, num_blocks=10), make_seq(1, 48), make_seq(2, 12)
    cache.admission.admit(seq, cache.prefixes.match(seq))
    assert num_free_blocks(cache)[0] == 6
    assert cache.admission.can_admit(other.length, cache.prefixes.match(other)) is AllocStatus.LATER


@pytest.mark.parametrize(("num_equal", "found"), [(3, 0), (4, 4), (11, 8), (12, 12), (22, 20)])
def test_a_hit_may_end_inside_a_block_which_is_then_copied(num_equal: int, found: int) -> None:
    cache, first = make_cache(ALL), make_seq(1, 40)
    prefill(cache, first)
    second = make_seq(2, 40)
    second.tokens[num_equal:] = [90 + index for index in range(40 - num_equal)]
    assert cache.prefixes.match(second).num_tokens == found
    copies = prefill(cache, second)
    [ours], [theirs] = cache.tables.of(second), cache.tables.of(first)
    assert ours.block_ids[: found // 12] == theirs.block_ids[: found // 12]
    index = found // 12
    expected = [theirs.block_ids[index], ours.block_ids[index]] if found % 12 else []
    assert copies == expected
    cache.check([first, second])


def test_the_last_block_of_a_sequence_is_found_though_it_is_not_full() -> None:
    cache, first, second = make_cache(ALL), make_seq(1, 22), make_seq(2, 23)
    prefill(cache, first)
    cache.free(first)
    assert cache.prefixes.match(second).num_tokens == 20
    assert len(prefill(cache, second)) == 2


def test_without_room_for_a_copy_a_sequence_continues_in_the_block_that_it_has_found() -> None:
    cache, first, second = make_cache(ALL, num_blocks=2), make_seq(1, 22), make_seq(2, 23)
    prefill(cache, first)
    [table] = cache.tables.of(first)
    cache.free(first)
    assert prefill(cache, second) == []
    assert cache.tables.of(second) == [table]
    cache.check([second])


def test_a_prefix_is_found_at_the_end_of_a_prompt_whose_window_has_moved_on() -> None:
    cache, seq = make_cache(ALL, WINDOW), make_seq(1, 30)
    prefill(cache, seq)
    seq.next_position = 60
    for length in range(31, 62):
        cache.tables.reserve(seq, length)
    cache.released.slide(seq, seq.next_position)
    cache.free(seq)
    assert cache.prefixes.match(make_seq(2, 30)).num_tokens == 28


def test_windows_of_an_output_are_offered_when_it_ends() -> None:
    cache, seq = make_cache(ALL, WINDOW), make_seq(1, 30)
    prefill(cache, seq)
    num_cached = usage_of(cache)[1].num_cached
    for length in range(31, 131):
        seq.tokens.append(length - 1)
        seq.next_position = length - 1
        cache.advance(seq)
    assert usage_of(cache)[1].num_cached == num_cached
    assert cache.prefixes.match(make_seq(2, 131)).num_tokens == 28
    cache.prefixes.offer(seq, seq.num_confirmed)
    cache.free(seq)
    assert cache.prefixes.match(make_seq(2, 131)).num_tokens == 128
    cache.check([])


def test_results_may_arrive_after_a_window_has_moved_on() -> None:
    cache, seq = make_cache(ALL, WINDOW), make_seq(1, 40)
    cache.admission.admit(seq, cache.prefixes.match(seq))
    for start in range(0, 40, STEP_TOKENS):
        cache.extend_prompt(seq, start, start + STEP_TOKENS)
    for end in range(STEP_TOKENS, 41, STEP_TOKENS):
        cache.prefixes.offer(seq, end)
    assert cache.prefixes.match(make_seq(2, 40)).num_tokens == 36


def test_a_hit_is_cut_where_the_window_before_its_end_has_been_evicted() -> None:
    cache, seq = make_cache(ALL, WINDOW, num_blocks=16), make_seq(1, 30)
    prefill(cache, seq)
    cache.free(seq)
    assert cache.prefixes.match(make_seq(2, 30)).num_tokens == 28
    number = 3
    while (found := cache.prefixes.match(make_seq(2, 30)).num_tokens) == 28:
        other = make_seq(number, 9)
        other.tokens = [100 * number + index for index in range(9)]
        prefill(cache, other)
        number += 1
    assert found < 28
    hit = cache.prefixes.match(make_seq(2, 30))
    first = max(0, found - WINDOW.span + 1) // 4
    assert (hit.groups[1].first, len(hit.groups[1].blocks)) == (first, found // 4 - first)


def test_a_window_that_left_the_device_is_found_on_the_host_with_the_rest() -> None:
    cache, seq = make_cache(ALL, WINDOW, num_blocks=16, num_host_blocks=64), make_seq(1, 30)
    prefill(cache, seq)
    cache.free(seq)
    for number in (3, 4, 5):
        other = make_seq(number, 30)
        other.tokens = [100 * number + index for index in range(30)]
        prefill(cache, other)
        cache.free(other)
    assert cache.prefixes.match(make_seq(2, 30)).num_tokens == 0
    hit = cache.prefixes.match(make_seq(2, 30), is_fetched=lambda num_moves, num_tokens: True)
    assert hit.num_tokens == 28
    assert hit.num_moves == 3 + 2, "three blocks of all tokens, and 21 to 27"


def test_a_swapped_out_window_comes_back_with_its_first_index() -> None:
    cache, seq = make_cache(ALL, WINDOW, num_host_blocks=16), make_seq(1, 40)
    prefill(cache, seq)
    before = tables(cache, seq)
    cache.swap.swap_out([seq])
    cache.end_plan(has_rows=False)
    cache.swap.swap_in([seq])
    cache.end_plan(has_rows=False)
    assert tables(cache, seq) == before
    cache.check([seq])


def test_keys_do_not_depend_on_the_sizes_of_blocks() -> None:
    keys = []
    for group in (CacheGroup(block_tokens=16), CacheGroup(block_tokens=48), WINDOW_OF_320):
        cache, seq = make_cache(group), make_seq(1, 40)
        cache.prefixes.match(seq)
        [(kind, of_unit)] = seq.prefix_keys.items()
        assert kind == (16, 0)
        keys.append(of_unit)
    assert keys[0] == keys[1] == keys[2]


WINDOW_OF_320 = CacheGroup(lifetime=CacheLifetime.WINDOW, block_tokens=320, span=512)


def test_a_source_is_allocated_at_admission_and_stays_as_it_is() -> None:
    cache, seq = make_cache(SOURCE, ALL, num_blocks=7), make_seq(1, 20, MEDIA)
    found = cache.prefixes.match(make_seq(2, 20, MEDIA))
    assert cache.admission.can_admit(20, found) is AllocStatus.OK
    found = cache.prefixes.match(make_seq(2, 20, replace(MEDIA, length=9 + 4 * 3)))
    assert cache.admission.can_admit(20, found) is AllocStatus.NEVER
    prefill(cache, seq)
    source, _ = cache.tables.of(seq)
    assert len(source.block_ids) == 3
    child = make_seq(2, 20, MEDIA)
    cache.tables.fork(seq, child)
    for length in range(21, 30):
        cache.tables.reserve(seq, length)
    assert cache.tables.of(seq)[0] == cache.tables.of(child)[0] == source
    assert cache.admission.max_forks(20, 9) == cache.admission.max_forks(20, 0) - 3


def test_a_prefix_is_found_together_with_its_source() -> None:
    cache, first = make_cache(ALL, SOURCE), make_seq(1, 40, MEDIA)
    prefill(cache, first)
    hit = cache.prefixes.match(make_seq(2, 40, MEDIA))
    assert hit.num_tokens == 36
    assert hit.groups[1].blocks == cache.tables.of(first)[1].block_ids
    cache.free(first)
    cache.tables.pool.forget(hit.groups[1].blocks[1])
    assert cache.prefixes.match(make_seq(2, 40, MEDIA)).num_tokens == 0


@pytest.mark.parametrize(
    "media",
    [
        (),
        (OTHER_MEDIA,),
        (replace(OTHER_MEDIA, start=30),),
        (MEDIA, OTHER_MEDIA),
        (replace(MEDIA, start=30),),
    ],
)
def test_sequences_with_other_media_share_nothing_wherever_these_begin(
    media: tuple[ContextPart, ...],
) -> None:
    cache = make_cache(ALL, SOURCE)
    prefill(cache, make_seq(1, 40, MEDIA))
    prefill(cache, KnownSequence(2, [9] * 40, context=media))  # their source is found
    assert cache.prefixes.match(make_seq(3, 40, *media)).num_tokens == 0


def test_the_order_of_media_is_that_of_their_source() -> None:
    cache = make_cache(ALL, SOURCE)
    prefill(cache, make_seq(1, 40, MEDIA, OTHER_MEDIA))
    assert cache.prefixes.match(make_seq(2, 40, MEDIA, OTHER_MEDIA)).num_tokens == 36
    assert cache.prefixes.match(make_seq(3, 40, OTHER_MEDIA, MEDIA)).num_tokens == 0


def test_nobody_finds_the_source_of_a_sequence_that_failed() -> None:
    cache, seq = make_cache(ALL, SOURCE), make_seq(1, 40, MEDIA)
    prefill(cache, seq)
    source = cache.tables.of(seq)[1].block_ids
    cache.prefixes.withdraw(seq)
    cache.free(seq)
    assert not any(block in cache.tables.pool.cached for block in source)


def test_a_source_that_left_the_device_comes_back_from_the_host() -> None:
    cache = make_cache(ALL, SOURCE, num_blocks=8, num_host_blocks=8)
    seq = make_seq(1, 40, MEDIA)
    prefill(cache, seq)
    cache.free(seq)
    other = KnownSequence(2, [9] * 90)
    prefill(cache, other)
    cache.free(other)
    again = make_seq(3, 40, MEDIA)
    hit = cache.prefixes.match(again, is_fetched=lambda *_: True)
    assert (hit.num_tokens, hit.num_moves) == (36, 3 + 3)
    assert len(cache.admission.admit(again, hit).swap_in) == 2 * 6


def test_sequences_that_wait_are_counted_with_their_sources() -> None:
    cache, seq = make_cache(ALL, SOURCE, num_blocks=16), make_seq(1, 12, MEDIA)
    prefill(cache, seq)
    hit = cache.prefixes.match(KnownSequence(2, [9] * 12))
    shortages = [
        cache.admission.shortage(
            12, hit, num_waiting_tokens=24, num_waiting_source_tokens=size, num_waiting=2
        )
        for size in (0, 16, 24)
    ]
    in_use, free = 4, 12
    kept = 2 + 1  # by running sequences, and for the sequence itself
    promised = 2 + 2  # of those that wait, to grow as well
    assert shortages == [(kept + promised + n - free) / in_use for n in (0, 4, 6)]


@pytest.mark.parametrize("group", [WINDOW, CHUNK])
@pytest.mark.parametrize(("num_common", "num_shared"), [(48, 48), (36, 0)])
def test_a_sequence_shares_no_tokens_whose_window_another_one_has_not_found(
    group: CacheGroup, num_common: int, num_shared: int
) -> None:
    """What is fetched from another worker group has only the last window."""
    there, first, second = make_cache(ALL, group), make_seq(1, 61), make_seq(2, 61)
    first.tokens[48:] = [90] * 13
    second.tokens[num_common:] = [91] * (61 - num_common)
    prefill(there, make_seq(3, 61))
    cache = make_cache(ALL, group)
    _, entries = there.exchange.find(first)
    copies = cache.exchange.allocate(entries)
    cache.exchange.add(copies)
    cache.exchange.release(copies)
    starts = cache.admission.start_jointly([first, second], lambda seq, other: num_common)
    assert [start.num_tokens for start in starts] == [48, num_shared]
    cache.admission.admit_jointly(starts)
    cache.check([first, second])
