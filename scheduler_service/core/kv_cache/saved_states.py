"""States of sequences that are saved, so that others can continue from them.

A state is overwritten by each token. So it is found only where it was saved: copies are made at the
boundaries of prompts, every `ROLLING_TOKENS` tokens of an output, and a sequence that ends leaves
its own. A plan saves states of prompts where its rows reach them, and copies those that the plans
before it have reached in outputs; they are found once the results are in of the plans that reach
them. Copies get blocks that are free or hold older cached contents when the plan is complete, so
nothing waits or is preempted for them; all of them have at most a quarter of the blocks.

Beyond that quarter the state of least *worth* is evicted (GreedyDual; Young 1994): the tokens
between the previous saved state and this one, which would have to be computed again, plus the worth
of the last evicted state when this one was saved or found last.
"""

from collections import deque
from collections.abc import Collection, Iterable, Sequence
from heapq import heappop, heappush
from itertools import count

from scheduler_service.core.config import CacheGroup
from scheduler_service.core.kv_cache.block_pool import BlockPool, Contents
from scheduler_service.core.kv_cache.block_table import SavedState, SequenceTables
from scheduler_service.core.kv_cache.prefix_branches import BOUNDARY_TOKENS, PrefixBranches
from scheduler_service.core.kv_cache.prefix_cache import PrefixCache
from scheduler_service.core.kv_cache.prefix_hit import PrefixHit
from scheduler_service.core.kv_cache.prefix_keys import CacheableSequence

ROLLING_TOKENS = 32
"""Decoded tokens after which a state is saved; of each sequence the last two are kept."""

MAX_SHARE = 4
"""Saved states have at most one in this many blocks."""


class SavedStates:
    """Saves the states of one worker group's sequences."""

    def __init__(
        self,
        groups: Sequence[CacheGroup],
        device: BlockPool,
        prefixes: PrefixCache,
        branches: PrefixBranches,
    ) -> None:
        self._device = device
        self._prefixes, self._branches = prefixes, branches
        self._unit = prefixes.unit
        self._groups = {n: group.num_blocks for n, group in enumerate(groups) if group.is_state}
        num_blocks = sum(self._groups.values())
        self._most = device.num_blocks // MAX_SHARE // num_blocks if num_blocks else 0
        self.enabled = prefixes.is_enabled and self._most > 0
        """Whether any state can be saved."""
        self._saved: dict[int, SavedState] = {}
        """By first block; some have been evicted."""
        self._order: dict[int, list[tuple[int, int, SavedState]]] = {n: [] for n in self._groups}
        """By group: a heap of saved states by worth, as it was when they were added; it has grown
        if they were found since, or the states before them were evicted."""
        self._clocks = dict.fromkeys(self._groups, 0)
        """By group: the worth of the last evicted state."""
        self._numbers = count()
        self._chunks: list[tuple[CacheableSequence, SequenceTables, int, int]] = []
        """The rows of prompts in the plan under construction: sequence, start and end."""
        self._due: list[tuple[CacheableSequence, SequenceTables, int]] = []
        """States of outputs that the plan under construction copies: sequence, position."""
        self._ended: deque[tuple[int, int, list[tuple[int, Contents, Contents]]]] = deque()
        """Of sequences that have ended: the plan whose result is awaited, their ids, and blocks
        with what they hold until then and what is found afterwards."""
        self._last_plan = 0

    # While a sequence runs.

    def pass_by(self, seq: CacheableSequence, held: SequenceTables, start: int, end: int) -> None:
        """Save the states of a prompt at the boundaries after `start` and up to `end`, between
        which the plan under construction computes its tokens."""
        if self.enabled and not held.is_withdrawn:
            self._chunks.append((seq, held, start, end))

    def is_saving(self, seq: CacheableSequence, held: SequenceTables, position: int) -> bool:
        """Whether the state of a sequence at a position is saved, or can be by the plan under
        construction, and will be found soon."""
        is_passed = any(
            other is seq and start < position <= end for other, _, start, end in self._chunks
        )
        return is_passed or any(s.position == position and not s.is_found for s in held.saved)

    def roll(self, seq: CacheableSequence, held: SequenceTables) -> None:
        """Save the state of a sequence that decodes, if it is due. Where drafts are in flight, its
        position is unknown."""
        position = seq.growth.length - 1
        last = max(held.state_position, seq.num_prompt_tokens)
        is_due = position >= last + ROLLING_TOKENS and position % self._unit == 0
        if self.enabled and is_due and seq.growth.next_position == position:
            held.state_position = position
            self._due.append((seq, held, position))

    def save_due(self, plan: int, copied: Collection[int]) -> tuple[list[int], list[int]]:
        """The `copy` and `saved_states` of plan number `plan` for the states that are due, to free
        blocks that are not reserved, after evicting what ended sequences have left beyond the
        limit. States of outputs that the plan itself copies, by their first blocks, are left out.
        The caller releases the targets when nothing more is moved to the host before they are
        written."""
        self._last_plan = plan
        due, self._due = self._due, []
        chunks, self._chunks = self._chunks, []
        for number in self._groups:
            self._make_room(number, self._most)
        copy: list[int] = []
        saved: list[int] = []
        for seq, held, start, end in chunks:
            for position in self._branches.boundaries_within(seq, start, end):
                key = self._prefixes.key(seq, position)
                if None not in [self._device.cached.find(key, number) for number in self._groups]:
                    continue
                for number in self._groups:
                    for block in self._place(held, number, position):
                        saved += [seq.seq_id, number, position, block]
        for seq, held, position in due:
            for number in self._groups:
                sources = held.tables[number].blocks
                if sources[0] not in copied:
                    targets = self._place(held, number, position, is_rolling=True)
                    pairs = zip(sources, targets, strict=False)
                    copy += (block for pair in pairs for block in pair)
            self.confirm(seq, held)
        return copy, saved

    def _place(
        self, held: SequenceTables, number: int, position: int, *, is_rolling: bool = False
    ) -> list[int]:
        """Blocks for a sequence's state; none unless that many are available."""
        num_blocks = self._groups[number]
        if num_blocks > self._device.num_available or not self._make_room(number, self._most - 1):
            return []
        blocks = self._device.allocate(num_blocks)
        self._hold(held, SavedState(number, position, blocks[0], is_rolling), blocks)
        return blocks

    def _hold(self, held: SequenceTables, state: SavedState, blocks: list[int]) -> None:
        """Keep a copy until it can be found."""
        unconfirmed = Contents(state.group, (b"",), is_full=True)
        self._add(held, state, self._device.cached.hold(blocks[0], unconfirmed, blocks))
        held.saved.append(state)
        rolling = [s for s in held.saved if s.is_rolling and s.group == state.group]
        if len(rolling) > 2:
            held.saved.remove(rolling[0])
            self._device.forget_contents(rolling[0].block, rolling[0].contents)

    def _add(self, held: SequenceTables, state: SavedState, contents: Contents) -> None:
        state.contents, state.previous = contents, held.last_states.get(state.group)
        if not state.is_rolling:
            held.last_states[state.group] = state
        self._saved[state.block] = state
        state.clock = self._clocks[state.group]
        self._push(state)

    def confirm(self, seq: CacheableSequence, held: SequenceTables) -> None:
        """Let a sequence's states be found that are of offered tokens."""
        num_tokens = held.num_offered * self._unit
        for state in held.saved:
            if not state.is_found and state.position <= num_tokens:
                contents = self._contents(seq, state.group, state.position)
                self._confirm(state.block, state.contents, contents)
                state.contents, state.is_found = contents, True

    def _confirm(self, block: int, held: Contents, contents: Contents) -> None:
        """Let a state be found, unless an equal one is: then this one is forgotten."""
        cached = self._device.cached
        cached.confirm(block, held, contents)
        if cached.contents[block] is held and not cached.is_confirmed(block):
            self._device.forget(block)

    def _contents(self, seq: CacheableSequence, group: int, position: int) -> Contents:
        key, tail = self._prefixes.key(seq, position), self._prefixes.tail(seq, position)
        return Contents(group, (key,), is_full=True, tail=tail)

    # Eviction.

    def begin(self, held: SequenceTables, hit: PrefixHit) -> None:
        """Record that a sequence begins with the states of a hit."""
        for number in self._groups if hit.num_tokens else ():
            state = self._saved.get(next(iter(hit.groups[number].blocks), -1))
            if state is None or not self._is_kept(state):  # it is on the host, or of another cache
                state = SavedState(number, hit.num_tokens, -1, is_rolling=False)
                state.start = hit.num_tokens
            else:
                state.clock = self._clocks[number]
            held.last_states[number] = state

    def _push(self, state: SavedState) -> None:
        heappush(self._order[state.group], (self._worth(state), next(self._numbers), state))

    def _is_kept(self, state: SavedState) -> bool:
        return state.block >= 0 and self._device.cached.contents[state.block] is state.contents

    def _worth(self, state: SavedState) -> int:
        while (previous := state.previous) is not None and not self._is_kept(previous):
            state.previous, state.start = previous.previous, previous.start
        start = state.start if previous is None else previous.position
        return state.clock + max(0, state.position - start)

    def _make_room(self, number: int, num_states: int) -> bool:
        """Evict states that are not in use, the one of least worth first, until the group has
        `num_states` at most; False if it has more. Copies of them are kept on the host, but for
        those that later ones of the same sequence replace."""
        cached, in_use = self._device.cached, []
        self._tidy(number)
        while cached.num_entries[number] > num_states and self._order[number]:
            worth, _, state = heappop(self._order[number])
            if not self._is_kept(state):
                continue
            if self._device.is_used(state.block):
                in_use.append(state)
            elif self._worth(state) > worth:
                self._push(state)
            else:
                self._clocks[number] = max(self._clocks[number], worth)
                if state.previous is not None:  # who would have found this one finds that
                    state.previous.clock = max(state.previous.clock, state.clock)
                self._device.evict(state.block, is_kept=not state.is_rolling)
        for state in in_use:
            self._push(state)
        return cached.num_entries[number] <= num_states

    def _tidy(self, number: int) -> None:
        """Order the states again if some are missing, because an earlier core or another worker
        group has saved them, or if too many of the order have been evicted."""
        cached = self._device.cached
        size = cached.num_entries[number]
        if size <= len(self._order[number]) <= 4 * size + 16:
            return
        for block in cached.found(number):
            saved, contents = self._saved.get(block), cached.contents[block]
            if contents is not None and (saved is None or saved.contents is not contents):
                saved = SavedState(number, BOUNDARY_TOKENS, block, is_rolling=False)
                saved.contents = contents
                self._saved[block] = saved
        self._saved = {b: s for b, s in self._saved.items() if self._is_kept(s)}
        self._order[number] = []
        for state in self._saved.values():
            if state.group == number:
                self._push(state)

    # Ends.

    def end(self, seq: CacheableSequence, held: SequenceTables) -> None:
        """Let others find the state and the last tokens of a sequence that ends, whose blocks are
        about to be released: once the result of the last plan is in, if any of its rows are in
        flight."""
        position = seq.growth.length - 1
        if not self.enabled or held.is_prompt or held.is_withdrawn:
            return
        if seq.growth.next_position != position or not 0 < position <= seq.num_known:
            return  # the state is somewhere among drafts, or after tokens that are unknown
        if any(self._device.is_shared(held.tables[number].blocks[0]) for number in self._groups):
            return  # others continue in it
        blocks = []
        for number in self._groups:
            entry = list(held.tables[number].blocks)
            contents = self._contents(seq, number, position)
            cached = self._device.cached.hold(entry[0], contents, entry)
            blocks.append((entry[0], cached, contents))
            ended = SavedState(number, position, entry[0], is_rolling=False)
            self._add(held, ended, cached)
            for state in held.saved:
                if state.is_rolling and state.group == number:
                    state.previous = ended
                    self._push(state)  # it is worth nothing while the last one is kept
        blocks += [
            (block, self._device.cached.hold(block, contents), contents)
            for block, contents in self._prefixes.last_blocks(seq, held, position)
        ]
        if seq.growth.length == seq.num_known:
            self._confirm_ended(blocks)
        else:
            self._ended.append((self._last_plan, seq.seq_id, blocks))

    def _confirm_ended(self, blocks: Iterable[tuple[int, Contents, Contents]]) -> None:
        for block, held, contents in blocks:
            if held.group in self._groups:
                self._confirm(block, held, contents)
            else:
                self._device.cached.confirm(block, held, contents)

    def confirm_plan(self, plan: int) -> None:
        """Let the states be found that sequences have left: the results up to a plan's are in."""
        while self._ended and self._ended[0][0] <= plan:
            self._confirm_ended(self._ended.popleft()[2])

    def withdraw(self, seq: CacheableSequence) -> None:
        """Let nobody find what a failed sequence has left."""
        for ended in [ended for ended in self._ended if ended[1] == seq.seq_id]:
            self._ended.remove(ended)
            for block, held, contents in ended[2]:
                if held is contents:
                    self._device.forget_contents(block, held)
