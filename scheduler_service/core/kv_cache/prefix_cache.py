"""The prefix cache: sequences that share a prefix share its KV blocks.

A block is found by its tokens (see `prefix_keys.py`) once the results of the steps that computed
them are in. Plans are executed in order, so an earlier use would find the right KV too, unless that
step fails; because of the wait, blocks that were never confirmed are never found. The last token of
a sequence is always computed, for its logits, even if all are found.

The first p tokens can be used if every cache group has what a row at position p reads: all of them,
those of its window, or those of its chunk. A block in which they end is copied, as the sequence
will write to it; so nothing that can be found is ever overwritten. Where a window has been evicted,
the hit is cut.
"""

from collections.abc import Iterator, Mapping, Sequence

from scheduler_service.core.config import CacheGroup
from scheduler_service.core.context import num_source_tokens
from scheduler_service.core.kv_cache.block_pool import BlockKey, CachedBlocks, Contents, Tail
from scheduler_service.core.kv_cache.block_table import SequenceTables
from scheduler_service.core.kv_cache.prefix_hit import GroupHit, PrefixHit, no_hit
from scheduler_service.core.kv_cache.prefix_keys import (
    CacheableSequence,
    KeyedTokens,
    root_key,
    source_keys,
    tail_key,
    unit_keys,
)


class _GroupMatch:
    """The blocks of one cache group that hold a sequence's first tokens, looked up as needed."""

    def __init__(
        self,
        number: int,
        group: CacheGroup,
        pools: Sequence[CachedBlocks],
        keys: Sequence[BlockKey],
        unit: int,
    ) -> None:
        """`pools`: the device's blocks, then the host's if they count; `keys`: of all units of
        `unit` tokens that may be used, and then of a tail of fewer, if any."""
        self._number = number
        self._group = group
        self._pools = pools
        self._keys = keys
        self._unit = unit
        self._units_per_block = group.block_tokens // unit
        self._found: dict[int, tuple[int, int]] = {}

    def usable_end(self, end: int) -> int:
        """The most tokens that can be used, up to `end`; a multiple of the unit."""
        while end > 0 and (gap := self._end_before_gap(end)) < end:
            end = gap
        return end

    def hit(self, end: int) -> GroupHit:
        """What rows after the first `end` tokens read; these can be used."""
        tokens = self._group.block_tokens
        indices = self._indices(end)
        blocks = [self._find(index)[0] for index in indices]
        first = self._group.first_needed(end) // tokens
        return GroupHit(first, blocks, num_copied=int(bool(blocks) and end % tokens != 0))

    def _indices(self, end: int) -> range:
        """The blocks that rows after the first `end` tokens read."""
        tokens, first = self._group.block_tokens, self._group.first_needed(end)
        return range(first // tokens, -(-end // tokens)) if first < end else range(0)

    def _end_before_gap(self, end: int) -> int:
        """`end` if all that is needed there is found; otherwise the end of what is found before the
        first gap, or before the last one in a window or chunk."""
        tokens, indices = self._group.block_tokens, self._indices(end)
        for index in reversed(indices) if self._group.span else indices:
            found_end = index * tokens + self._find(index)[1] * self._unit
            if found_end < min(end, (index + 1) * tokens):
                return found_end  # of a tail, all or nothing is found
        return end

    def _find(self, index: int) -> tuple[int, int]:
        """The block with most of the units of block `index`, and their number; ~b for block b on
        the host."""
        if index not in self._found:
            start = index * self._units_per_block
            self._found[index] = self._look_up(self._keys[start : start + self._units_per_block])
        return self._found[index]

    def _look_up(self, units: Sequence[BlockKey]) -> tuple[int, int]:
        best = (0, 0)
        for is_on_host, cached in enumerate(self._pools):
            block, length = _longest(cached, self._number, units)
            if length > best[1]:
                best = (~block if is_on_host else block, length)
            if length == len(units):
                break
        return best


def _longest(cached: CachedBlocks, group: int, units: Sequence[BlockKey]) -> tuple[int, int]:
    """The block that begins with the most of these units, and their number."""
    block = cached.find(units[-1], group) if units else None
    if block is not None:
        return block, len(units)
    best, length = 0, 0
    for end in (1, *range(len(units) - 1, 1, -1)):
        block = cached.find(units[end - 1], group) if end > length and units else None
        if block is not None and (number := _num_equal(cached.contents[block], units)) > length:
            best, length = block, number
    return best, length


def _num_equal(contents: Contents | None, units: Sequence[BlockKey]) -> int:
    """Number of first units that are equal."""
    held = contents.units if contents is not None else ()
    pairs = enumerate(zip(held, units, strict=False))
    return next((n for n, (ours, theirs) in pairs if ours != theirs), min(len(held), len(units)))


def _common_end(matches: Mapping[int, _GroupMatch], end: int, multiple: int = 1) -> int:
    """The most tokens, up to `end`, that can be used in all groups."""
    previous = -1
    while end != previous:
        previous = end
        for match in matches.values():
            end = match.usable_end(end // multiple * multiple)
    return end


def _entry(group: int, key: BlockKey, pools: Sequence[CachedBlocks]) -> Sequence[int]:
    """All blocks of what has a key, ~b for block b on the host; none if nothing has it."""
    for is_on_host, cached in enumerate(pools):
        if (block := cached.find(key, group)) is not None:
            entry = cached.entry(block)
            return [~block for block in entry] if is_on_host else entry
    return ()


class PrefixCache:
    """Finds the blocks that hold a sequence's first tokens."""

    def __init__(
        self,
        groups: Sequence[CacheGroup],
        pools: Sequence[CachedBlocks],
        *,
        unit: int,
        enabled: bool,
        seed: int,
    ) -> None:
        """`pools`: the device's blocks, then the host's if it has any; `unit`: tokens of a unit of
        keys; `enabled`: if False, nothing is found, and every sequence is computed in full; `seed`:
        of keys."""
        self.is_enabled = enabled
        self._groups = groups
        self._pools = pools
        self.unit = unit
        self._seed = seed
        self._states = [number for number, group in enumerate(groups) if group.is_state]
        self._sources = [(number, group) for number, group in enumerate(groups) if group.is_fixed]

    def reseed(self, seed: int) -> None:
        """Make keys with another seed from now on; nothing has one yet."""
        self._seed = seed

    def keys_to_withdraw(self, seq: CacheableSequence) -> set[BlockKey]:
        """The keys of all units of a sequence that were needed so far, that before them, and those
        of its source."""
        sources = self.source_keys(seq).values()
        return {self.root(seq), *seq.prefix_keys[self.unit, self._seed]}.union(*sources)

    def find(
        self, seq: CacheableSequence, *, on_host: bool = False, multiple: int = 1
    ) -> PrefixHit:
        """The longest usable prefix of a waiting sequence, on the device, or on host and device
        together, of a multiple of `multiple` tokens."""
        limit = self.max_reusable_tokens(seq)
        if not limit:
            return no_hit(len(self._groups), num_source_tokens(seq.context))
        pools = self._pools if on_host else self._pools[:1]
        keys = self.keys(seq, limit // self.unit)
        if len(keys) > limit // self.unit:
            keys = keys[: limit // self.unit]
        if self._states:
            hit = self._find_state(seq, limit, keys, pools, multiple)
        else:
            every = self._find_all(seq, limit, keys, pools) if multiple == 1 else None
            matches = self._matches(keys, pools)
            end = _common_end(matches, len(keys) * self.unit, multiple) if every is None else 0
            hit = every or self._hit(matches, end)
        return self._with_source(seq, hit, pools) if self._sources else hit

    def found_by_group(self, seq: CacheableSequence) -> list[int]:
        """How many of a waiting sequence's first tokens each group has, on device or host; all of
        them in a group of sources that are found."""
        limit, pools = self.max_reusable_tokens(seq), self._pools
        keys = self.keys(seq, limit // self.unit)[: limit // self.unit]
        found = [0] * len(self._groups)
        for number, match in self._matches(keys, pools).items():
            found[number] = match.usable_end(len(keys) * self.unit)
        for number in self._states:
            ends = self._state_ends(seq, limit, keys, pools)
            found[number] = next((end for end, key in ends if _entry(number, key, pools)), 0)
        for number, source in self.source_keys(seq).items():
            found[number] = limit if all(_entry(number, key, pools) for key in source) else 0
        return found

    def _with_source(
        self, seq: CacheableSequence, hit: PrefixHit, pools: Sequence[CachedBlocks]
    ) -> PrefixHit:
        """A hit with the source that its rows read. As the row at position 0 writes that, it is
        either found with the first tokens, or computed with them."""
        hits = list(hit.groups)
        for number, keys in self.source_keys(seq).items() if hit.num_tokens else ():
            blocks = [block for key in keys for block in _entry(number, key, pools)]
            if len(blocks) < len(keys):
                return no_hit(len(hits), num_source_tokens(seq.context))
            hits[number] = GroupHit(0, blocks)
        return PrefixHit(hit.num_tokens, hits, num_source_tokens(seq.context))

    def source_keys(self, seq: KeyedTokens) -> dict[int, list[BlockKey]]:
        """By group: the keys of the blocks of a sequence's source."""
        sizes = {n: g.max_blocks(0, 0, num_source_tokens(seq.context)) for n, g in self._sources}
        return {n: source_keys(self.root(seq), size, self._seed) for n, size in sizes.items()}

    def _matches(
        self, keys: Sequence[BlockKey], pools: Sequence[CachedBlocks]
    ) -> dict[int, _GroupMatch]:
        groups = ((n, group) for n, group in enumerate(self._groups) if group.has_tokens)
        return {n: _GroupMatch(n, group, pools, keys, self.unit) for n, group in groups}

    def _hit(
        self,
        matches: Mapping[int, _GroupMatch],
        end: int,
        states: Mapping[int, Sequence[int]] | None = None,
    ) -> PrefixHit:
        hits = [GroupHit()] * len(self._groups)
        for number, match in matches.items():
            hits[number] = match.hit(end)
        for number, blocks in (states or {}).items():
            hits[number] = GroupHit(0, blocks, num_copied=len(blocks))
        return PrefixHit(end, hits)

    def _find_all(
        self,
        seq: CacheableSequence,
        limit: int,
        keys: Sequence[BlockKey],
        pools: Sequence[CachedBlocks],
    ) -> PrefixHit | None:
        """The first `limit` tokens of a sequence with output, if they do not end with a unit and
        can be used nevertheless."""
        if not limit % self.unit or limit < seq.num_prompt_tokens:
            return None
        key = self.key(seq, limit)
        number = next(number for number, group in enumerate(self._groups) if group.has_tokens)
        if all(cached.find(key, number) is None for cached in pools):
            return None
        matches = self._matches([*keys, key], pools)
        return self._hit(matches, limit) if _common_end(matches, limit) == limit else None

    def _find_state(
        self,
        seq: CacheableSequence,
        limit: int,
        keys: Sequence[BlockKey],
        pools: Sequence[CachedBlocks],
        multiple: int,
    ) -> PrefixHit:
        """The longest prefix of up to `limit` tokens with a state after exactly its last token."""
        aligned, most = self._matches(keys, pools), limit
        for end, key in self._state_ends(seq, limit, keys, pools):
            if end > most or end % multiple:
                continue
            states = {number: _entry(number, key, pools) for number in self._states}
            if not all(states.values()):
                continue
            matches = aligned
            if end % self.unit:
                matches = self._matches([*keys[: end // self.unit], key], pools)
            common = _common_end(matches, end)
            if common == end:
                return self._hit(matches, end, states)
            most = common + self.unit - 1  # a tail may follow
        return self._hit({}, 0)

    def _state_ends(
        self,
        seq: CacheableSequence,
        limit: int,
        keys: Sequence[BlockKey],
        pools: Sequence[CachedBlocks],
    ) -> Iterator[tuple[int, BlockKey]]:
        """Positions of up to `limit` tokens after which there may be a state, the last first, and
        the keys of all tokens before them."""
        group = self._states[0]
        pools = [cached for cached in pools if cached.has_any(group)]
        for number in range(len(keys), -1, -1) if pools else ():
            start = number * self.unit
            parent = keys[number - 1] if number else self.root(seq)
            lengths = {length for cached in pools for length in cached.tails(group, parent)}
            for length in sorted(lengths, reverse=True):
                if start + length <= limit:
                    yield start + length, self.key(seq, start + length)
            if number:
                yield start, parent

    def key(self, seq: KeyedTokens, num_tokens: int) -> BlockKey:
        """The key of all of a sequence's first tokens, whose values are known."""
        number, length = divmod(num_tokens, self.unit)
        parent = self.keys(seq, number)[number - 1] if number else self.root(seq)
        if not length:
            return parent
        start = number * self.unit
        tokens = seq.known_tokens(start, num_tokens)
        return tail_key(parent, tokens, self._seed, context=seq.context, start=start)

    def last_blocks(
        self, seq: CacheableSequence, held: SequenceTables, end: int
    ) -> list[tuple[int, Contents]]:
        """The blocks with the last of a sequence's first `end` tokens, and what is in them up to
        these; none in groups of which a row after them reads nothing."""
        blocks = []
        for number, group in enumerate(self._groups):
            if group.has_tokens and group.first_needed(end) < end:
                tokens = group.block_tokens
                index = (end - 1) // tokens
                block = held.tables[number].blocks[index - held.tables[number].first]
                ends = [*range(index * tokens + self.unit, end, self.unit), end]
                keys = tuple(self.key(seq, position) for position in ends)
                is_full = end == (index + 1) * tokens
                blocks.append((block, Contents(number, keys, is_full=is_full)))
        return blocks

    def tail(self, seq: KeyedTokens, num_tokens: int) -> Tail | None:
        """The last of a sequence's first tokens, which are fewer than a unit, if any."""
        number, length = divmod(num_tokens, self.unit)
        if not length:
            return None
        return Tail(self.keys(seq, number)[number - 1] if number else self.root(seq), length)

    def root(self, seq: KeyedTokens) -> BlockKey:
        """The key before a sequence's first unit."""
        return root_key(seq.context, self._seed, reads_source=bool(self._sources))

    def keys(self, seq: KeyedTokens, num_units: int) -> list[BlockKey]:
        """Keys of at least `num_units` units, whose tokens are known; each is hashed once."""
        unit = self.unit
        keys = seq.prefix_keys[unit, self._seed]
        if len(keys) < num_units:
            start, context = len(keys) * unit, seq.context
            parent = keys[-1] if keys else self.root(seq)
            tokens = seq.known_tokens(start, num_units * unit)
            keys += unit_keys(parent, tokens, unit, self._seed, context=context, start=start)
        return keys

    def max_reusable_tokens(self, seq: CacheableSequence) -> int:
        """The most tokens of a sequence that may be found."""
        return min(seq.num_known - 1, seq.max_reusable_tokens) if self.is_enabled else 0
