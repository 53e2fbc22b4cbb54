"""The KV cache of one worker group, as the rest of the core sees it: in tokens and sequences.

Memory is allocated in blocks, which only this folder and the plan's columns name. Lists of ints
that a method returns are in the plan's format.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from scheduler_service.core.config import SchedulerConfig, WorkerGroupCapacity
from scheduler_service.core.kv_cache.alloc_status import AllocStatus
from scheduler_service.core.kv_cache.block_manager import BlockManager, BlockUpdate
from scheduler_service.core.kv_cache.block_pool import BlockMap
from scheduler_service.core.kv_cache.prefix_cache import PrefixCache
from scheduler_service.core.kv_cache.prefix_keys import CacheableSequence
from scheduler_service.core.step_plan import BlockTable

S = TypeVar("S", bound=CacheableSequence)


@dataclass(frozen=True, slots=True)
class PrefixHit:
    """The first tokens of a waiting sequence that the cache has, until something is allocated."""

    num_tokens: int
    """On device and host together."""
    device_blocks: Sequence[int]
    host_blocks: Sequence[int] = ()
    """They hold the tokens after those on the device."""

    @property
    def num_moves(self) -> int:
        """Number of moves from the host that it takes to use them all."""
        return len(self.host_blocks)


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
        self.num_tokens = capacity.num_cache_tokens
        """Tokens of the longest sequence that fits in an empty cache."""
        self.tokens_per_move = capacity.block_size
        """Tokens that are allocated, found and moved together."""
        self._blocks = BlockManager(
            num_gpu_blocks=capacity.num_gpu_blocks,
            num_cpu_blocks=capacity.num_cpu_blocks,
            block_size=capacity.block_size,
            watermark=config.watermark,
        )
        self._pool = self._blocks.gpu_pool
        self._prefixes = PrefixCache(
            self._blocks,
            enabled=config.enable_prefix_caching,
            isolate_tenants=config.isolate_tenants,
        )
        self._caches_prefixes = config.enable_prefix_caching
        self._num_offered: dict[int, int] = {}
        """By id of a sequence with a block table: its first blocks that were offered, or found."""

    # Capacity.

    @property
    def is_full(self) -> bool:
        """Whether nothing more can be allocated on the device."""
        return self._pool.num_free_blocks == 0

    @property
    def num_free_tokens(self) -> int:
        """Tokens that can be allocated on the device; what is only cached there counts as free."""
        return self._pool.num_free_blocks * self.tokens_per_move

    def round_up(self, num_tokens: int) -> int:
        """The length up to which a sequence can grow in what holds its `num_tokens` tokens."""
        return -(-num_tokens // self.tokens_per_move) * self.tokens_per_move

    def shortage(
        self, num_tokens: int, hit: PrefixHit, *, num_waiting_tokens: int, num_waiting: int
    ) -> float:
        """The share of the memory in use that must be freed before a sequence of `num_tokens`
        tokens can be admitted after `num_waiting` groups with `num_waiting_tokens` tokens; 0 or
        less if none."""
        num_promised = self._blocks.num_blocks_for(num_waiting_tokens) + num_waiting
        num_new = self._blocks.num_blocks_for(num_tokens) - len(hit.device_blocks)
        num_short = self._blocks.num_blocks_short(num_new, hit.device_blocks, num_promised)
        return num_short / max(1, self._pool.num_blocks - self._pool.num_free_blocks)

    def num_tokens_freed(self, sequences: Iterable[CacheableSequence]) -> int:
        """Tokens that could be allocated if these sequences were freed."""
        seq_ids = [seq.seq_id for seq in sequences if self._blocks.holds(seq.seq_id)]
        return self._blocks.num_own_blocks(seq_ids) * self.tokens_per_move

    # Prefixes.

    def match_prefix(self, seq: CacheableSequence, *, on_host: bool) -> PrefixHit:
        """The longest cached prefix of a waiting sequence. `on_host`: continue in host memory where
        the device has no more; a hit there is fetched when the sequence is admitted."""
        found = self._prefixes.find(seq)
        stored = self._prefixes.find_on_host(seq, len(found)) if on_host else ()
        return PrefixHit((len(found) + len(stored)) * self.tokens_per_move, found, stored)

    def is_to_come(self, seq: CacheableSequence, hit: PrefixHit) -> bool:
        """Whether most of the tokens that a waiting sequence would compute are being computed for
        another one, and will be found soon."""
        return self._prefixes.is_to_come(seq, len(hit.device_blocks) + len(hit.host_blocks))

    def offer(self, seq: CacheableSequence, num_tokens: int) -> None:
        """Let others find a sequence's first `num_tokens` tokens, which are computed: the results
        are in."""
        first, num_blocks = self._num_offered.get(seq.seq_id, 0), num_tokens // self.tokens_per_move
        if self._caches_prefixes and num_blocks > first:
            keys = self._prefixes.keys(seq, num_blocks)[first:num_blocks]
            self._blocks.set_keys(seq.seq_id, first, keys)
            self._num_offered[seq.seq_id] = num_blocks

    def withdraw(self, seq: CacheableSequence) -> None:
        """Let nobody find any token that a failed sequence may have computed."""
        self._blocks.forget_keys(seq.prefix_keys[self.tokens_per_move])

    # Admission.

    def can_admit(
        self, num_tokens: int, hit: PrefixHit, *, num_freed_tokens: int = 0
    ) -> AllocStatus:
        """Whether a sequence of `num_tokens` tokens can be admitted, once others have freed
        `num_freed_tokens`. Some memory stays reserved for running sequences, if there are any."""
        num_freed = num_freed_tokens // self.tokens_per_move
        return self._blocks.can_allocate(num_tokens, hit.device_blocks, -num_freed)

    def admit(self, seq: CacheableSequence, hit: PrefixHit) -> list[int]:
        """Allocate memory for all tokens of a sequence; returns the `swap_in` of its tokens on the
        host. Followers that share more of its tokens will wait for them."""
        self._prefixes.expect(seq)
        self._num_offered[seq.seq_id] = len(hit.device_blocks)
        return self._blocks.fetch(seq.seq_id, seq.length, hit.device_blocks, hit.host_blocks)

    def start_jointly(
        self, sequences: Iterable[S], num_common_tokens: Callable[[S, S], int]
    ) -> list[JointStart[S]]:
        """Where the first tokens of sequences come from that are admitted together: the device, or
        a sequence before it that will compute more of them. `num_common_tokens`: in how many first
        tokens two sequences are equal; the last token of a sequence is not shared."""
        unit = self.tokens_per_move
        starts: list[JointStart[S]] = []
        for seq in sequences:
            hit = self.match_prefix(seq, on_host=False)
            limit = seq.num_known - 1
            commons = [(min(limit, num_common_tokens(seq, s.seq)) // unit, s.seq) for s in starts]
            num_shared, source = max(commons, key=lambda pair: pair[0], default=(0, None))
            num_tokens = num_shared * unit
            if num_tokens > hit.num_tokens:
                starts.append(JointStart(seq, PrefixHit(0, ()), source, num_tokens))
            else:
                starts.append(JointStart(seq, hit, None, hit.num_tokens))
        return starts

    def can_admit_jointly(self, starts: Sequence[JointStart[S]]) -> AllocStatus:
        """Whether all these sequences can be admitted."""
        num_blocks = sum(
            self._blocks.num_blocks_for(start.seq.length) - start.num_tokens // self.tokens_per_move
            for start in starts
        )
        found = {block for start in starts for block in start.hit.device_blocks}
        return self._blocks.can_provide(num_blocks, found)

    def admit_jointly(self, starts: Sequence[JointStart[S]]) -> None:
        """Allocate memory for all these sequences, without reusing for one what was found for
        another."""
        found = list({block for start in starts for block in start.hit.device_blocks})
        self._pool.share(found)
        for start in starts:
            given = start.hit.device_blocks
            if start.source is not None:
                num_shared = start.num_tokens // self.tokens_per_move
                given = self._blocks.table(start.source.seq_id)[:num_shared]
            self._num_offered[start.seq.seq_id] = len(given)
            self._blocks.allocate(start.seq.seq_id, start.seq.length, given)
        self._pool.release(found)

    # Running sequences.

    def holds(self, seq: CacheableSequence) -> bool:
        """Whether the sequence has memory on the device."""
        return self._blocks.holds(seq.seq_id)

    def tables(self, seq: CacheableSequence) -> list[BlockTable]:
        """The sequence's block tables on the device, for the plan."""
        return [BlockTable(group=0, first_index=0, block_ids=self._blocks.table(seq.seq_id))]

    def can_reserve(self, seq: CacheableSequence, length: int, num_others: int = 0) -> bool:
        """Whether the sequence's token number `length` can be made writable, so that `num_others`
        sequences can grow nevertheless."""
        return self._blocks.can_append(seq.seq_id, length, num_others)

    def reserve(self, seq: CacheableSequence, length: int) -> BlockUpdate | None:
        """Make the sequence's token number `length` writable; returns the change of its table that
        this takes, if any."""
        return self._blocks.append(seq.seq_id, length)

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
        if not self._caches_prefixes:
            return sum(seq.length for seq in sequences)
        return self.num_tokens_freed(sequences)

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
        return self._blocks.table(seq.seq_id)

    def host_blocks(self, seq: CacheableSequence) -> list[int]:
        """A swapped-out sequence's blocks on the host, in order."""
        return self._blocks.host_table(seq.seq_id)

    def check(self, running: Iterable[CacheableSequence]) -> None:
        """Assert the invariants, between plans; `running`: the sequences with memory on the
        device."""
        self._blocks.check()
        assert self._num_offered.keys() == self._blocks.seq_ids()
        assert self._num_offered.keys() == set(_ids(running)), "one table for each"

    def _forget(self, seq: CacheableSequence) -> None:
        """Drop the record of a sequence whose memory on the device is freed."""
        del self._num_offered[seq.seq_id]
        self._prefixes.forget(seq)


def _ids(sequences: Iterable[CacheableSequence]) -> list[int]:
    return [seq.seq_id for seq in sequences]
