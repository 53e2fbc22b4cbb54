"""What sequences have computed and others may find: offered to the prefix cache, and withdrawn."""

from collections.abc import Callable, Sequence

from scheduler_service.core.kv_cache.block_pool import BlockKey, BlockPool, Contents
from scheduler_service.core.kv_cache.block_table import SequenceTables
from scheduler_service.core.kv_cache.device_tables import DeviceTables
from scheduler_service.core.kv_cache.prefix_branches import PrefixBranches
from scheduler_service.core.kv_cache.prefix_cache import PrefixCache
from scheduler_service.core.kv_cache.prefix_hit import PrefixHit
from scheduler_service.core.kv_cache.prefix_keys import CacheableSequence
from scheduler_service.core.kv_cache.records import CacheRecords
from scheduler_service.core.kv_cache.released_blocks import ReleasedBlocks
from scheduler_service.core.kv_cache.saved_states import SavedStates


class SharedPrefixes:
    """The tokens that the sequences of one worker group share, on device and host."""

    def __init__(
        self,
        tables: DeviceTables,
        host: BlockPool,
        cache: PrefixCache,
        branches: PrefixBranches,
        states: SavedStates,
        released: ReleasedBlocks,
        records: CacheRecords,
    ) -> None:
        self._tables = tables
        self._device, self._host = tables.pool, host
        self._cache, self._branches = cache, branches
        self._states, self._released, self._records = states, released, records
        self.unit = cache.unit
        """Tokens that are found together."""
        groups = tables.groups
        self._growing = [number for number, group in enumerate(groups) if group.is_growing]
        self._spans = [number for number, group in enumerate(groups) if group.span]

    @property
    def num_cached(self) -> int:
        """Blocks on device and host that have keys, in use or free."""
        return self._device.cached.num_blocks + self._host.cached.num_blocks

    def reseed(self, seed: int) -> None:
        """Make all keys with another seed from now on. What is cached is found no more; running
        sequences offer what they have computed again."""
        for pool in (self._device, self._host):
            for block in range(pool.num_blocks):
                pool.forget(block)
        for held in self._tables.held.values():
            held.num_offered = held.num_offered_in_spans = 0
        self._cache.reseed(seed)
        self._branches.reseed()
        self._records.reseed(seed)

    # What is found.

    def match(
        self, seq: CacheableSequence, *, is_fetched: Callable[[int, int], bool] | None = None
    ) -> PrefixHit:
        """The longest usable prefix of a waiting sequence on the device, or, with what the host
        has, one that `is_fetched` prefers: it gets the number of moves and the number of further
        tokens that need not be computed."""
        hit = self._cache.find(seq)
        if is_fetched is None or not self._host.num_blocks:
            return hit
        further = self._cache.find(seq, on_host=True)
        num_more = further.num_tokens - hit.num_tokens
        return further if num_more and is_fetched(further.num_moves, num_more) else hit

    def is_to_come(self, seq: CacheableSequence, hit: PrefixHit) -> bool:
        """Whether most of the tokens that a waiting sequence would compute are being computed for
        another one, and will be found soon."""
        return self._branches.is_to_come(seq, hit.num_tokens, self._is_coming)

    def _is_coming(self, seq: CacheableSequence, num_units: int) -> bool:
        """Whether a sequence's first units are being computed, or the state after them is saved."""
        held = self._tables.held.get(seq.seq_id)
        if seq.is_prefilling and num_units > (held.num_offered if held else 0):
            return True
        return held is not None and self._states.is_saving(seq, held, num_units * self.unit)

    def num_tokens_to_recompute(self, sequences: Sequence[CacheableSequence]) -> int:
        """Tokens that must be computed again if these sequences are freed: with the prefix cache,
        those that no other sequence has, each once."""
        if not self._cache.is_enabled or not self._growing:
            return sum(seq.growth.length for seq in sequences)
        growing = self._growing[0]
        return self._tables.memory_freed(sequences, growing) * self._tables.block_tokens[growing]

    # What is offered.

    def offer(self, seq: CacheableSequence, num_tokens: int, *, in_spans: bool = True) -> None:
        """Let others find a sequence's first `num_tokens` tokens, which are computed: the results
        are in. If another block has the same contents, they still find that one. A sequence that
        has yet to fork has computed none. `in_spans`: also what windows and chunks have of them."""
        held, end = self._tables.held.get(seq.seq_id), num_tokens // self.unit
        if held is None or not self._cache.is_enabled:
            return
        if end <= (held.num_offered_in_spans if in_spans else held.num_offered):
            return
        keys = self._cache.keys(seq, end)
        self._branches.record_computed(keys[held.num_offered : end])
        if not held.num_offered:
            self._offer_source(seq, held)
        for number in self._growing:
            self._offer_blocks(held, number, keys, held.num_offered, end)
        held.num_offered = end
        if in_spans:
            for number in self._spans:
                self._offer_blocks(held, number, keys, held.num_offered_in_spans, end)
            held.num_offered_in_spans = end
        if held.unconfirmed:
            self._released.confirm(held, end * self.unit)
        if held.saved:
            self._states.confirm(seq, held)

    def _offer_source(self, seq: CacheableSequence, held: SequenceTables) -> None:
        for number, keys in self._cache.source_keys(seq).items():
            for block, key in zip(held.tables[number].blocks, keys, strict=True):
                self._device.cached.add(block, Contents(number, (key,), is_full=True))

    def _offer_blocks(
        self, held: SequenceTables, number: int, keys: Sequence[BlockKey], start: int, end: int
    ) -> None:
        """Let others find what a cache group has of the units of keys from `start` to `end`."""
        table = held.tables[number]
        num_units = self._tables.block_tokens[number] // self.unit
        first = max(start // num_units, table.first)  # others have been released
        starts = range(first * num_units, end, num_units)
        for unit, block in zip(starts, table.blocks[first - table.first :], strict=False):
            units = tuple(keys[unit : min(unit + num_units, end)])
            self._device.cached.add(block, Contents(number, units, len(units) == num_units))

    def offer_all(self, seq: CacheableSequence) -> None:
        """Let others find all that a sequence has computed, also after its last whole unit: its
        memory is about to be released, so nothing is written after it. States are found anyway."""
        end = seq.num_confirmed
        self.offer(seq, end)
        held = self._tables.held[seq.seq_id]
        is_plain = self._cache.is_enabled and not self._tables.has_states and not held.is_withdrawn
        if end % self.unit and is_plain and seq.growth.length == seq.num_known:
            for block, contents in self._cache.last_blocks(seq, held, end):
                self._device.cached.add(block, contents)

    def withdraw(self, seq: CacheableSequence) -> set[BlockKey]:
        """Let nobody find any token, on device or host, that a failed sequence may have computed,
        here or elsewhere; returns the keys of these tokens."""
        if (held := self._tables.held.get(seq.seq_id)) is not None:
            held.is_withdrawn = True
        self._states.withdraw(seq)
        keys = self._cache.keys_to_withdraw(seq)
        for pool in (self._device, self._host):
            for block in pool.cached.blocks_with(keys):
                pool.forget(block)
        return keys
