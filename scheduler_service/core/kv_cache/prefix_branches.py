"""What prompts share that are computed at the same time, and where they branch off.

A sequence whose tokens are mostly being computed for another one waits for it, so that among many
simultaneous requests only the first one computes a shared prefix.
"""

from bisect import bisect, insort
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence

from scheduler_service.core.config import CacheGroup
from scheduler_service.core.kv_cache.block_pool import BlockKey, Contents
from scheduler_service.core.kv_cache.prefix_cache import PrefixCache
from scheduler_service.core.kv_cache.prefix_keys import CacheableSequence

BOUNDARY_TOKENS = 512
"""Windows that end at a multiple of this number of prompt tokens stay cached as long as the
prompt."""

MIN_BRANCH_TOKENS = 64
"""Fewest tokens that it has to spare the next prompt to keep a window, or save a state, where one
branches off from what was computed for others."""

MAX_COMPUTED_UNITS = 65_536
"""Units of tokens that have been computed and are remembered, whether or not anything of them is
still cached: about 10 MiB."""


class PrefixBranches:
    """What is being computed for admitted sequences, and the positions at which what a window
    sees, or a state, is kept for others."""

    def __init__(self, groups: Sequence[CacheGroup], cache: PrefixCache) -> None:
        self._groups, self._cache, self._unit = groups, cache, cache.unit
        self._has_states = any(group.is_state for group in groups)
        self._has_boundaries = any(group.is_state or group.span for group in groups)
        self._computed: OrderedDict[BlockKey, None] = OrderedDict()
        """Keys of the units that were computed last, the oldest first, if there are boundaries."""
        self._unconfirmed: dict[CacheableSequence, None] = {}
        """Sequences whose first tokens are being computed, and at most as many others."""
        self._max_unconfirmed = 0
        self._boundaries: dict[CacheableSequence, list[int]] = {}
        """Where windows are to stay cached, in addition to the multiples of BOUNDARY_TOKENS in a
        prompt: before its last tokens, where others branched off, and where it branched off from
        others; in order."""

    def is_to_come(
        self,
        seq: CacheableSequence,
        num_found: int,
        is_coming: Callable[[CacheableSequence, int], bool],
    ) -> bool:
        """Whether most of the tokens that a waiting sequence would compute after its first
        `num_found` ones are those of another one whose first units, up to this number, are coming:
        they will be found soon. It then keeps what the waiting sequence reads."""
        num_units = self._cache.max_reusable_tokens(seq) // self._unit
        first = num_found // self._unit
        if num_units <= first:
            return False
        keys = self._cache.keys(seq, num_units)
        most_shared, leader = first, None
        for other in self._unconfirmed:
            if other.is_prefilling or self._has_states:
                end = self._num_common(keys, other, first, num_units)
                if end > most_shared and is_coming(other, end):
                    most_shared, leader = end, other
        num_missing = seq.num_known - num_found
        if leader is None or 2 * (most_shared - first) * self._unit <= num_missing:
            return False
        self.add_boundary(leader, most_shared * self._unit)
        return True

    def _num_common(
        self, keys: Sequence[BlockKey], other: CacheableSequence, first: int, num_units: int
    ) -> int:
        """How many of the first `num_units` units another sequence has, of which it has `first`."""
        others = self._cache.keys(other, 0)
        end, most = first, min(num_units, len(others))
        while end < most and keys[end] == others[end]:
            end += 1
        return end

    def expect(self, seq: CacheableSequence, num_found: int) -> None:
        """Record that a sequence is admitted: its tokens after the first `num_found` will be
        computed.

        If more of its first ones were computed for others, it shares that prefix, and so may more:
        the next one is to find the window or the state that this one lacks."""
        if len(self._unconfirmed) > self._max_unconfirmed:
            self._unconfirmed = {other: None for other in self._unconfirmed if other.is_prefilling}
            self._max_unconfirmed = 2 * len(self._unconfirmed)
        self._unconfirmed[seq] = None
        self.add_boundary(seq, (seq.num_prompt_tokens - 1) // self._unit * self._unit)
        if self._has_boundaries:
            num_units = self._cache.max_reusable_tokens(seq) // self._unit
            keys = self._cache.keys(seq, num_units)
            min_units = -(-(num_found + MIN_BRANCH_TOKENS) // self._unit)
            ends = range(num_units, min_units - 1, -1)
            branch = next((end for end in ends if keys[end - 1] in self._computed), 0)
            if branch:
                self.add_boundary(seq, branch * self._unit)

    def record_computed(self, keys: Iterable[BlockKey]) -> None:
        """Remember units that have been computed, so that it is seen where others branch off."""
        if self._has_boundaries:
            self._computed.update(dict.fromkeys(keys))
            while len(self._computed) > MAX_COMPUTED_UNITS:
                self._computed.popitem(last=False)

    def forget(self, seq: CacheableSequence) -> None:
        """Record that a sequence has lost its memory."""
        self._unconfirmed.pop(seq, None)
        self._boundaries.pop(seq, None)

    def boundaries_within(self, seq: CacheableSequence, start: int, end: int) -> list[int]:
        """The positions after `start` and up to `end` at which states of a prompt are saved."""
        first = (start // BOUNDARY_TOKENS + 1) * BOUNDARY_TOKENS
        found = {*range(first, min(end + 1, seq.num_prompt_tokens), BOUNDARY_TOKENS)}
        found.update(at for at in self._boundaries.get(seq, ()) if start < at <= end)
        return sorted(found)

    def add_boundary(self, seq: CacheableSequence, end: int) -> None:
        """Keep what a row after a sequence's first `end` tokens reads."""
        boundaries = self._boundaries.setdefault(seq, [])
        if end not in boundaries:
            insort(boundaries, end)

    def boundaries(self, seq: CacheableSequence) -> list[int]:
        """Where windows of an admitted sequence are to stay cached, in order, in addition to the
        multiples of BOUNDARY_TOKENS in its prompt; others are added while it runs."""
        return self._boundaries.get(seq, [])

    def retained(
        self,
        seq: CacheableSequence,
        number: int,
        index: int,
        boundaries: Sequence[int],
        cached: Contents | None,
    ) -> Contents | None:
        """What to keep cached of a block that a sequence releases while it continues, if nothing
        more than what is; None unless it is needed at a boundary, of which there are some."""
        group = self._groups[number]
        start = index * group.block_tokens
        end = start + group.block_tokens
        if start >= boundaries[-1]:
            return None  # decoded tokens, as a rule
        following = boundaries[bisect(boundaries, start)]
        multiple = (start // BOUNDARY_TOKENS + 1) * BOUNDARY_TOKENS
        if multiple < seq.num_prompt_tokens:
            following = min(following, multiple)
        if group.first_needed(following) >= end:
            return None
        if cached is not None and cached.is_full:
            return cached
        if not self._cache.is_enabled or end > seq.num_known:
            return None
        units = self._cache.keys(seq, end // self._unit)[start // self._unit : end // self._unit]
        return Contents(number, tuple(units), is_full=True)

    def reseed(self) -> None:
        """Forget what has been computed, as keys have another seed."""
        self._computed.clear()
