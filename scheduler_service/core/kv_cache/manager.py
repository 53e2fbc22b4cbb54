"""The KV cache of one worker group: which tokens of which sequences are in its memory.

Memory is allocated in blocks, which only this folder and the plan's columns name; the rest of the
core speaks of tokens and sequences. Lists of ints that a method returns are in the plan's format:
pairs of blocks, unless stated otherwise.
"""

from collections import Counter
from collections.abc import Iterable

from scheduler_service.core.config import KeptBlocks, SchedulerConfig, WorkerGroupCapacity
from scheduler_service.core.kv_cache.admission import Admission
from scheduler_service.core.kv_cache.block_table import BlockUpdate, Moves
from scheduler_service.core.kv_cache.device_tables import DeviceTables
from scheduler_service.core.kv_cache.exchange import CacheExchange
from scheduler_service.core.kv_cache.host_cache import CopyAhead, HostCache
from scheduler_service.core.kv_cache.kept_sequences import adopt_sequences
from scheduler_service.core.kv_cache.prefix_branches import PrefixBranches
from scheduler_service.core.kv_cache.prefix_cache import PrefixCache
from scheduler_service.core.kv_cache.prefix_keys import CacheableSequence, key_tokens
from scheduler_service.core.kv_cache.records import CacheRecords
from scheduler_service.core.kv_cache.released_blocks import ReleasedBlocks
from scheduler_service.core.kv_cache.saved_states import SavedStates
from scheduler_service.core.kv_cache.shared_prefixes import SharedPrefixes
from scheduler_service.core.kv_cache.swap_space import SwapSpace

OFFERED_TOKENS = 64
"""Decoded tokens that are offered to the prefix cache together. The last ones are offered when
their sequence ends or is preempted, and so are those in windows and chunks: what slides out of them
before is no loss, as it is evicted first."""


class KVCacheManager:
    """What the steps of running sequences do to the parts of the cache, each of which owns its
    state:

        admission   memory for sequences that enter the batch
        tables      what sequences have on the device, over the pool of device blocks
        swap        what sequences have on the host
        host        cached blocks on the host, over the pool of host blocks
        prefixes    what sequences have computed and others find
        saved       copies of states, for others to find
        released    what sequences let go
        records     what workers record of the prefix cache for a later core
        exchange    what other worker groups read, and what is read from them

    A freed block may be handed out at once, even while a step that uses it is in flight: the
    worker executes plans in order, so the new owner writes to it in a later step, or in the same
    step after it is read. What has a key is computed: nothing in flight writes there.

    An evicted block is copied to the host, if there is room, and can be found there; the plan under
    construction copies it before anything is written to it, unless an earlier plan has copied it
    ahead.

    Invariant: a block's reference count is the number of tables that contain it, each at most once,
    plus those of `admission` while a plan is made, and those of `exchange`. A sequence has tables
    on the device or on the host, or none.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        capacity: WorkerGroupCapacity,
        kept: KeptBlocks | None = None,
    ) -> None:
        """`kept`: what the workers have recorded of earlier caches; None if they record nothing."""
        groups, seed = capacity.cache_groups, config.key_seed
        unit = key_tokens(group.block_tokens for group in groups if group.has_tokens)
        is_enabled = config.enable_prefix_caching
        self.host = HostCache(capacity.num_cpu_blocks)
        self.tables = tables = DeviceTables(capacity, config.watermark, self.host.keep)
        device, host = tables.pool, self.host.pool
        pools = [pool.cached for pool in (device, host) if pool.num_blocks]
        cache = PrefixCache(groups, pools, unit=unit, enabled=is_enabled, seed=seed)
        branches = PrefixBranches(groups, cache)
        self.records = CacheRecords(
            kept, groups, device, host, unit=unit, key_seed=seed if is_enabled else None
        )
        if kept is not None and is_enabled:
            adopt_sequences(kept.sequences, groups, device, cache)
        self.saved = SavedStates(groups, device, cache, branches)
        self.released = released = ReleasedBlocks(tables, branches)
        self.prefixes = SharedPrefixes(
            tables, host, cache, branches, self.saved, released, self.records
        )
        self.admission = Admission(tables, self.host, cache, branches, self.saved)
        self.swap = SwapSpace(tables, self.host, released)
        self.exchange = CacheExchange(tables, host, cache)
        self._copy_ahead = CopyAhead(device, self.host)

    def extend_prompt(
        self, seq: CacheableSequence, start: int, end: int
    ) -> list[BlockUpdate] | None:
        """Make the tokens of a prompt from `start` to `end`, which are computed next, writable, out
        of what is reserved for it; returns the changes of its tables that this takes. None if
        memory is short now, because blocks that it has released are used by others, which found
        them."""
        held = self.tables.held[seq.seq_id]
        updates: list[BlockUpdate] | None = []
        if self.tables.has_spans:
            self.released.slide(seq, start)
            self.tables.share_spans(held, start)
            updates = self.tables.extend(held, end)
        if self.tables.has_states and updates is not None:
            for position, seq_id in held.branches:
                if position == start and (other := self.tables.held.get(seq_id)) is not None:
                    self.tables.states.copy(held.tables, other.tables)
            self.saved.pass_by(seq, held, start, end)
        return updates

    def advance(self, seq: CacheableSequence) -> list[BlockUpdate] | None:
        """Release what no row to come of a decoding sequence reads, and make its last token
        writable; returns the changes of its tables, or None if memory is short. Now and then its
        tokens are offered, and its state is saved.

        It is called when a sequence has outgrown its memory, in few of its steps: whatever is to be
        done for decoding sequences is done here, so that their other steps cost nothing."""
        held, length = self.tables.held[seq.seq_id], seq.growth.length
        if self.tables.has_spans:
            self.released.slide(seq, seq.growth.next_position)
        if not self.tables.can_reserve(seq, length):
            return None
        updates = self.tables.reserve(seq, length)
        min_offered = held.num_offered * self.prefixes.unit + OFFERED_TOKENS
        if held.saved and not held.saved[-1].is_found:
            min_offered = held.saved[-1].position
        if length > min_offered and seq.num_confirmed >= min_offered:
            self.prefixes.offer(seq, seq.num_confirmed, in_spans=self.tables.has_states)
        if self.tables.has_states:
            self.saved.roll(seq, held)
        return updates

    def free(self, seq: CacheableSequence) -> None:
        """Release a sequence's memory. Offered tokens can be found until it is reused, the least
        recently used first, and a sequence's last block before its first."""
        if self.tables.has_states:
            self.saved.end(seq, self.tables.held[seq.seq_id])
        self.released.release(self.released.remove(seq))

    def end_plan(self, plan: int = 0, *, has_rows: bool) -> Moves:
        """Complete the plan under construction, of this number; returns what it must move in
        addition: `swap_out`, so that the host keeps what is evicted from the device now, and what
        will be evicted next; and the `copy` and `saved_states` of states."""
        copies: list[int] = []
        rolling: list[int] = []
        saved: list[int] = []
        states = self.tables.states
        if self.tables.has_states:
            states.settle()
            rolling, saved = self.saved.save_due(plan, states.written)
            copies = states.end_plan()
        self.admission.end_plan()
        self._copy_ahead.end_plan(has_rows=has_rows)
        self.tables.pool.release(rolling[1::2] + saved[3::4])
        return Moves(swap_out=self.host.end_plan(), copy=copies + rolling, saved_states=saved)

    def check(self, running: Iterable[CacheableSequence]) -> None:
        """Assert the invariants, between plans; `running`: the sequences with memory on the
        device."""
        on_device, on_host = self.tables.held, self.swap.held
        assert on_device.keys() == {seq.seq_id for seq in running}, "one table for each"
        assert not on_device.keys() & on_host.keys(), "a table is in both places"
        self.tables.check(self.exchange.references(on_host=False))
        references = Counter(block for held in on_host.values() for block in held.blocks())
        self.host.check(references + self.exchange.references(on_host=True))
