"""The KV cache of one worker group, as the rest of the core sees it: in tokens and sequences.

Memory is allocated in blocks, which only this folder and the plan's columns name. Lists of ints
that a method returns are in the plan's format.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from math import lcm
from typing import Generic, TypeVar

from scheduler_service.core.config import SchedulerConfig, WorkerGroupCapacity
from scheduler_service.core.kv_cache.alloc_status import AllocStatus
from scheduler_service.core.kv_cache.block_manager import BlockManager, BlockUpdate, Moves
from scheduler_service.core.kv_cache.block_pool import BlockMap
from scheduler_service.core.kv_cache.prefix_cache import PrefixCache
from scheduler_service.core.kv_cache.prefix_hit import PrefixHit, no_hit
from scheduler_service.core.kv_cache.prefix_keys import CacheableSequence, key_tokens
from scheduler_service.core.step_plan import BlockTable

S = TypeVar("S", bound=CacheableSequence)

OFFERED_TOKENS = 64
"""Decoded tokens that are offered to the prefix cache together. The last ones are offered when
their sequence ends or is preempted."""


@dataclass(frozen=True, slots=True)
class JointStart(Generic[S]):
    """Where the first tokens of one of several sequences come from that are admitted together."""

    seq: S
    hit: PrefixHit
    source: S | None
    """The sequence before it that shares more of its tokens with it than are found, if any."""
    num_tokens: int
    """Tokens that are found or shared, and need not be computed for it."""


class KVCacheManager:
    """Which tokens of which sequences are in the memory of one worker group, and the room there.

    A running sequence has a table on the device from its admission on, and a swapped-out one on the
    host. What others may find of its tokens is offered to the prefix cache.
    """

    def __init__(self, config: SchedulerConfig, capacity: WorkerGroupCapacity) -> None:
        groups = capacity.cache_groups
        self.num_tokens = capacity.num_cache_tokens
        """Tokens of the longest sequence that fits in an empty cache."""
        self.tokens_per_unit = key_tokens(group.block_tokens for group in groups)
        """Tokens that are found together."""
        self._block_tokens = [group.block_tokens for group in groups]
        self._smallest, *self._other_tokens = sorted(set(self._block_tokens))
        self._common_tokens = lcm(*self._block_tokens)
        self._blocks = BlockManager(
            num_gpu_blocks=capacity.num_gpu_blocks,
            num_cpu_blocks=capacity.num_cpu_blocks,
            groups=groups,
            watermark=config.watermark,
            max_chunk=capacity.max_chunk_tokens,
            key_tokens=self.tokens_per_unit,
        )
        self._pool = self._blocks.gpu_pool
        self._no_hit = no_hit(len(groups))
        self._prefixes = PrefixCache(
            self._blocks,
            unit=self.tokens_per_unit,
            enabled=config.enable_prefix_caching,
            seed=config.key_seed,
        )
        self._caches_prefixes = config.enable_prefix_caching
        self._num_offered: dict[int, int] = {}
        """By id of a sequence with block tables: its first units that were offered, or found."""

    # Capacity.

    @property
    def is_full(self) -> bool:
        """Whether a sequence may find no memory for its next token."""
        num_needed = len(self._block_tokens) + self._blocks.num_reserved
        return not self._pool.has_free_blocks(num_needed)

    @property
    def num_free_tokens(self) -> int:
        """Tokens of one sequence that would fit on the device; what is only cached there counts as
        free."""
        return max(0, self._blocks.num_available) * self.num_tokens // self._pool.num_blocks

    def round_up(self, num_tokens: int) -> int:
        """The length up to which a sequence can grow in what holds its `num_tokens` tokens."""
        end = -(-num_tokens // self._smallest) * self._smallest
        for tokens in self._other_tokens:
            end = min(end, -(-num_tokens // tokens) * tokens)
        return end

    def shortage(
        self, num_tokens: int, hit: PrefixHit, *, num_waiting_tokens: int, num_waiting: int
    ) -> float:
        """The share of the memory in use that must be freed before a sequence of `num_tokens`
        tokens can be admitted after `num_waiting` groups with `num_waiting_tokens` tokens; 0 or
        less if none."""
        num_promised = self._blocks.num_blocks_for_all(num_waiting_tokens, num_waiting)
        num_new = sum(self._blocks.num_needed(num_tokens, hit))
        num_short = self._blocks.num_blocks_short(num_new, num_promised)
        return num_short / max(1, self._pool.num_blocks - self._pool.num_free_blocks)

    def memory_freed(self, sequences: Iterable[CacheableSequence]) -> int:
        """The memory that comes free with these sequences, for `can_admit`."""
        seq_ids = [seq.seq_id for seq in sequences if self._blocks.holds(seq.seq_id)]
        return self._blocks.num_own_blocks(seq_ids)

    # Prefixes.

    def match_prefix(
        self, seq: CacheableSequence, *, is_fetched: Callable[[int, int], bool] | None = None
    ) -> PrefixHit:
        """The longest usable prefix of a waiting sequence on the device, or, with what the host
        has, one that `is_fetched` prefers: it gets the number of moves and the number of further
        tokens that need not be computed."""
        hit = self._prefixes.find(seq)
        if is_fetched is None or not self._blocks.host.pool.num_blocks:
            return hit
        further = self._prefixes.find(seq, on_host=True)
        num_more = further.num_tokens - hit.num_tokens
        return further if num_more and is_fetched(further.num_moves, num_more) else hit

    def is_to_come(self, seq: CacheableSequence, hit: PrefixHit) -> bool:
        """Whether most of the tokens that a waiting sequence would compute are being computed for
        another one, and will be found soon."""
        return self._prefixes.is_to_come(seq, hit.num_tokens, self._num_offered)

    def offer(self, seq: CacheableSequence, num_tokens: int) -> None:
        """Let others find a sequence's first `num_tokens` tokens, which are computed: the results
        are in."""
        first, end = self._num_offered.get(seq.seq_id, 0), num_tokens // self.tokens_per_unit
        if self._caches_prefixes and end > first:
            self._blocks.set_keys(seq.seq_id, self._prefixes.keys(seq, end), first, end)
            self._num_offered[seq.seq_id] = end

    def offer_decoded(self, seq: CacheableSequence, num_tokens: int) -> None:
        """Like `offer`, for a sequence that decodes: only if there are many more tokens."""
        num_offered = self._num_offered[seq.seq_id] * self.tokens_per_unit
        if num_tokens >= num_offered + OFFERED_TOKENS:
            self.offer(seq, num_tokens)

    def withdraw(self, seq: CacheableSequence) -> None:
        """Let nobody find any token that a failed sequence may have computed."""
        self._blocks.forget_keys(set(seq.prefix_keys[self.tokens_per_unit]))

    # Admission.

    def can_admit(self, num_tokens: int, hit: PrefixHit, *, memory_freed: int = 0) -> AllocStatus:
        """Whether a sequence of `num_tokens` tokens can be admitted, once others have freed as much
        memory. Some stays reserved for running sequences, if there are any."""
        return self._blocks.can_allocate(num_tokens, hit, -memory_freed)

    def admit(self, seq: CacheableSequence, hit: PrefixHit) -> Moves:
        """Allocate or reserve memory for all tokens of a sequence; returns the `swap_in` and `copy`
        of its tokens that were found. Followers that share more of its tokens will wait for them.
        """
        self._prefixes.expect(seq)
        # What is fetched is offered again where it arrives.
        num_found = 0 if hit.num_moves else hit.num_tokens
        self._num_offered[seq.seq_id] = num_found // self.tokens_per_unit
        return self._blocks.allocate(seq.seq_id, seq.length, hit)

    def start_jointly(
        self, sequences: Iterable[S], num_common_tokens: Callable[[S, S], int]
    ) -> list[JointStart[S]]:
        """Where the first tokens of sequences come from that are admitted together: the device, or
        a sequence before it that will compute more of them. `num_common_tokens`: in how many first
        tokens two sequences are equal; the last token of a sequence is not shared."""
        unit = self._common_tokens
        starts: list[JointStart[S]] = []
        for seq in sequences:
            hit = self._prefixes.find(seq, multiple=unit)
            limit = seq.num_known - 1
            commons = [(min(limit, num_common_tokens(seq, s.seq)) // unit, s.seq) for s in starts]
            num_shared, source = max(commons, key=lambda pair: pair[0], default=(0, None))
            num_tokens = num_shared * unit
            if num_tokens > hit.num_tokens:
                starts.append(JointStart(seq, self._no_hit, source, num_tokens))
            else:
                starts.append(JointStart(seq, hit, None, hit.num_tokens))
        return starts

    def can_admit_jointly(self, starts: Sequence[JointStart[S]]) -> AllocStatus:
        """Whether all these sequences can be admitted."""
        shared = {block for start in starts for block in start.hit.shared}
        num_blocks = sum(not self._pool.is_used(block) for block in shared)
        for start in starts:
            hit = start.hit if start.source is None else self._blocks.hit_of(start.num_tokens)
            num_upfront = _num_upfront(start.seq, starts)
            num_blocks += sum(
                self._blocks.num_needed(start.seq.length, hit, num_upfront, lambda _: True)
            )
        return self._blocks.can_provide(num_blocks)

    def admit_jointly(self, starts: Sequence[JointStart[S]]) -> None:
        """Allocate memory for all these sequences, without reusing for one what was found for
        another."""
        found = list({block for start in starts for block in start.hit.shared})
        self._pool.share(found)
        for start in starts:
            seq, hit = start.seq, start.hit
            if start.source is not None:
                hit = self._blocks.hit_in(start.source.seq_id, start.num_tokens)
            self._num_offered[seq.seq_id] = hit.num_tokens // self.tokens_per_unit
            num_upfront = _num_upfront(seq, starts)
            self._blocks.allocate(seq.seq_id, seq.length, hit, num_upfront)
        self._pool.release(found)

    def extend_prompt(
        self, seq: CacheableSequence, start: int, end: int
    ) -> list[BlockUpdate] | None:
        """Make the tokens of a prompt from `start` to `end`, which are computed next, writable;
        returns the changes of its tables that this takes. None if memory is short now."""
        if not self._blocks.slides:
            return []
        self._slide(seq, start)
        return self._blocks.extend(seq.seq_id, end)

    def end_prompt(self, seq: CacheableSequence) -> None:
        """Give up what is reserved for a sequence: the rest of its prompt is planned."""
        self._blocks.end_prompt(seq.seq_id)

    # Running sequences.

    def holds(self, seq: CacheableSequence) -> bool:
        """Whether the sequence has memory on the device."""
        return self._blocks.holds(seq.seq_id)

    def tables(self, seq: CacheableSequence) -> list[BlockTable]:
        """The sequence's block tables on the device, for the plan."""
        tables = enumerate(self._blocks.tables(seq.seq_id))
        return [
            BlockTable(group=group, first_index=table.first, block_ids=list(table.blocks))
            for group, table in tables
        ]

    def can_reserve(self, seq: CacheableSequence, length: int, num_others: int = 0) -> bool:
        """Whether the sequence's token number `length` can be made writable, so that `num_others`
        sequences can grow nevertheless."""
        return self._blocks.can_append(seq.seq_id, length, num_others)

    def reserve(self, seq: CacheableSequence, length: int) -> list[BlockUpdate]:
        """Make the sequence's token number `length` writable; returns the changes of its tables
        that this takes."""
        return self._blocks.append(seq.seq_id, length)

    def release_unread(self, seq: CacheableSequence) -> None:
        """Release what no row to come of a decoding sequence will read."""
        if self._blocks.slides:
            self._slide(seq, seq.next_position)

    def can_reserve_all(self, sequences: Iterable[CacheableSequence]) -> bool:
        """Whether all these sequences can write their last tokens."""
        return self._blocks.can_append_all((seq.seq_id, seq.length) for seq in sequences)

    def trim(self, seq: CacheableSequence, num_tokens: int) -> bool:
        """Release what was reserved after the sequence's first `num_tokens` tokens, for drafts;
        returns whether there was any."""
        return self._blocks.trim(seq.seq_id, num_tokens)

    def fork(self, parent: CacheableSequence, child: CacheableSequence) -> None:
        """Make a new sequence share the memory of another one; the first to write copies."""
        self._num_offered[child.seq_id] = self._num_offered[parent.seq_id]
        self._blocks.fork(parent.seq_id, child.seq_id)

    def free(self, seq: CacheableSequence) -> None:
        """Release a sequence's memory. Offered tokens can be found until it is reused."""
        self._forget(seq)
        self._blocks.free(seq.seq_id)

    # Swapping.

    def num_moves(self, sequences: Iterable[CacheableSequence]) -> int:
        """Number of moves to swap these sequences out and in again."""
        return self._blocks.num_moves(_ids(sequences))

    def num_tokens_to_recompute(self, sequences: Sequence[CacheableSequence]) -> int:
        """Tokens that must be computed again if these sequences are freed: with the prefix cache,
        those that no other sequence has, each once."""
        growing = [n for n, group in enumerate(self._blocks.groups) if not group.span]
        if not self._caches_prefixes or not growing:
            return sum(seq.length for seq in sequences)
        seq_ids = [seq.seq_id for seq in sequences if self._blocks.holds(seq.seq_id)]
        num_blocks = self._blocks.num_own_blocks(seq_ids, growing[0])
        return num_blocks * self._block_tokens[growing[0]]

    def can_swap_out(self, sequences: Iterable[CacheableSequence]) -> bool:
        """Whether the host has room for these sequences."""
        return self._blocks.can_swap_out(_ids(sequences)) is AllocStatus.OK

    def swap_out(self, sequences: Sequence[CacheableSequence]) -> list[int]:
        """Move these sequences to the host; returns the plan's `swap_out`."""
        for seq in sequences:
            self._forget(seq)
        return self._blocks.swap_out(_ids(sequences))

    def can_swap_in(self, sequences: Iterable[CacheableSequence]) -> bool:
        """Whether there is room on the device for these swapped-out sequences, and to grow."""
        return self._blocks.can_swap_in(_ids(sequences)) is AllocStatus.OK

    def swap_in(self, sequences: Sequence[CacheableSequence]) -> list[int]:
        """Move these sequences to the device; returns the plan's `swap_in`."""
        for seq in sequences:
            self._num_offered[seq.seq_id] = 0
        return self._blocks.swap_in(_ids(sequences))

    def free_swapped(self, seq: CacheableSequence) -> None:
        """Release a swapped-out sequence's memory."""
        self._blocks.free_swapped(seq.seq_id)

    # Plans and status.

    def end_plan(self, *, has_rows: bool) -> list[int]:
        """Complete the plan under construction; returns what it must swap out in addition, so that
        the host keeps what is evicted from the device."""
        return self._blocks.end_plan(has_rows=has_rows)

    @property
    def num_free_blocks(self) -> tuple[int, int]:
        """For status pages: blocks not in use on the device, those with cached contents included,
        and blocks that no sequence uses on the host."""
        return self._blocks.num_free_blocks, self._blocks.num_free_host_blocks

    def maps(self, owners: Sequence[tuple[int, int]]) -> tuple[BlockMap, BlockMap]:
        """Owners of the device's and the host's blocks; `owners`: (sequence id, number of its
        request)."""
        return self._blocks.maps(owners)

    def device_blocks(self, seq: CacheableSequence) -> list[int]:
        """A sequence's blocks on the device, in order."""
        return [block for table in self._blocks.tables(seq.seq_id) for block in table.blocks]

    def host_blocks(self, seq: CacheableSequence) -> list[int]:
        """A swapped-out sequence's blocks on the host, in order."""
        return self._blocks.host_table(seq.seq_id)

    def check(self, running: Iterable[CacheableSequence]) -> None:
        """Assert the invariants, between plans; `running`: the sequences with memory on the
        device."""
        self._blocks.check()
        assert self._num_offered.keys() == self._blocks.seq_ids()
        assert self._num_offered.keys() == set(_ids(running)), "one table for each"

    def _slide(self, seq: CacheableSequence, position: int) -> None:
        self._blocks.slide(seq.seq_id, position, partial(self._prefixes.retained, seq))

    def _forget(self, seq: CacheableSequence) -> None:
        """Drop the record of a sequence whose memory on the device is freed."""
        del self._num_offered[seq.seq_id]
        self._prefixes.forget(seq)


def _num_upfront(seq: S, starts: Sequence[JointStart[S]]) -> int:
    """Tokens that others share with a sequence before they are computed."""
    return max((start.num_tokens for start in starts if start.source is seq), default=0)


def _ids(sequences: Iterable[CacheableSequence]) -> list[int]:
    return [seq.seq_id for seq in sequences]
