"""States of sequences that are saved, so that others can continue from them.

A state is overwritten by each token. So it is found only where it was saved: copies are made at the
boundaries of prompts, every `ROLLING_TOKENS` tokens of an output, and a sequence that ends leaves
its own. A plan copies the states that the plans before it reach, and they are found once those
plans' results are in. Copies get blocks that are free or hold older cached contents when the plan
is complete, so nothing waits or is preempted for them; all of them have at most a quarter of the
blocks.
"""

from collections import OrderedDict, deque
from collections.abc import Collection, Iterable, Sequence

from scheduler_service.core.config import CacheGroup
from scheduler_service.core.kv_cache.block_pool import BlockPool, Contents
from scheduler_service.core.kv_cache.block_table import SavedState, SequenceTables
from scheduler_service.core.kv_cache.prefix_cache import PrefixCache
from scheduler_service.core.kv_cache.prefix_keys import CacheableSequence

ROLLING_TOKENS = 32
"""Decoded tokens after which a state is saved; of each sequence the last two are kept."""

MAX_SHARE = 4
"""Saved states have at most one in this many blocks."""


class SavedStates:
    """Saves the states of one worker group's sequences."""

    def __init__(
        self, groups: Sequence[CacheGroup], device: BlockPool, prefixes: PrefixCache
    ) -> None:
        self._device = device
        self._prefixes = prefixes
        self._unit = prefixes.unit
        self._groups = {n: group.num_blocks for n, group in enumerate(groups) if group.is_state}
        num_blocks = sum(self._groups.values())
        self._most = device.num_blocks // MAX_SHARE // num_blocks if num_blocks else 0
        self.enabled = prefixes.is_enabled and self._most > 0
        """Whether any state can be saved."""
        self._saved: dict[int, OrderedDict[int, None]] = {n: OrderedDict() for n in self._groups}
        """By group: first blocks of saved states, the oldest first; some have been evicted."""
        self._due: list[tuple[CacheableSequence, SequenceTables, int, bool]] = []
        """States that the plan under construction copies: sequence, position, and whether it is
        rolling."""
        self._ended: deque[tuple[int, int, list[tuple[int, Contents, Contents]]]] = deque()
        """Of sequences that have ended: the plan whose result is awaited, their ids, and blocks
        with what they hold until then and what is found afterwards."""

    # While a sequence runs.

    def save(self, seq: CacheableSequence, held: SequenceTables, position: int) -> None:
        """Save the state of a prompt that has reached a position, unless it is found there."""
        if self.enabled and not held.is_withdrawn:
            key = self._prefixes.key(seq, position)
            if any(self._device.cached.find(key, number) is None for number in self._groups):
                self._due.append((seq, held, position, False))

    def is_saving(self, seq: CacheableSequence, held: SequenceTables, position: int) -> bool:
        """Whether the state of a sequence at a position is saved, and will be found soon."""
        is_due = any(other is seq and at == position for other, _, at, _ in self._due)
        return is_due or any(s.position == position and not s.is_found for s in held.saved)

    def roll(self, seq: CacheableSequence, held: SequenceTables) -> None:
        """Save the state of a sequence that decodes, if it is due. Where drafts are in flight, its
        position is unknown."""
        position = seq.length - 1
        last = max(held.state_position, seq.num_prompt_tokens)
        is_due = position >= last + ROLLING_TOKENS and position % self._unit == 0
        if self.enabled and is_due and seq.next_position == position:
            held.state_position = position
            self._due.append((seq, held, position, True))

    def copy_due(self, num_available: int, copied: Collection[int]) -> list[int]:
        """The plan's `copy` for the states that are due, to up to `num_available` free blocks.
        Those that the plan itself copies, by their first blocks, are left out. The caller releases
        the targets when nothing more is moved to the host before they are written."""
        due, self._due = self._due, []
        pairs: list[tuple[int, int]] = []
        for seq, held, position, is_rolling in due:
            for number, num_blocks in self._groups.items():
                sources = held.tables[number].blocks
                num_left = num_available - len(pairs)
                if sources[0] not in copied and num_blocks <= num_left and self._make_room(number):
                    targets = self._device.allocate(num_blocks)
                    pairs += zip(sources, targets, strict=True)
                    self._hold(held, SavedState(number, position, targets[0], is_rolling), targets)
            self.confirm(seq, held)
        return [block for pair in pairs for block in pair]

    def _hold(self, held: SequenceTables, state: SavedState, blocks: list[int]) -> None:
        """Keep a copy until it can be found."""
        unconfirmed = Contents(state.group, (b"",), is_full=True)
        state.contents = self._device.cached.hold(blocks[0], unconfirmed, blocks)
        self._saved[state.group][blocks[0]] = None
        self._saved[state.group].move_to_end(blocks[0])
        held.saved.append(state)
        rolling = [s for s in held.saved if s.is_rolling and s.group == state.group]
        if len(rolling) > 2:
            held.saved.remove(rolling[0])
            self._device.forget_contents(rolling[0].block, rolling[0].contents)

    def _make_room(self, number: int) -> bool:
        """Forget the oldest states where there is one too many; False if they are in use."""
        saved = self._saved[number]
        while len(saved) >= self._most:
            block = next(iter(saved))
            contents = self._device.cached.contents_of(block)
            if contents is not None and contents.group == number:
                if self._device.is_used(block):
                    return False
                self._device.forget(block)
            del saved[block]
        return True

    def confirm(self, seq: CacheableSequence, held: SequenceTables) -> None:
        """Let a sequence's states be found that are of offered tokens."""
        num_tokens = held.num_offered * self._unit
        for state in held.saved:
            if not state.is_found and state.position <= num_tokens:
                contents = self._contents(seq, state.group, state.position)
                self._device.cached.confirm(state.block, state.contents, contents)
                state.contents, state.is_found = contents, True

    def _contents(self, seq: CacheableSequence, group: int, position: int) -> Contents:
        key, tail = self._prefixes.key(seq, position), self._prefixes.tail(seq, position)
        return Contents(group, (key,), is_full=True, tail=tail)

    def adopt(self, block: int, group: int) -> None:
        """Count a state that an earlier core has saved."""
        self._saved[group][block] = None

    # Ends.

    def end(self, seq: CacheableSequence, held: SequenceTables, plan: int) -> None:
        """Let others find the state and the last tokens of a sequence that ends, whose blocks are
        about to be released: once the result of `plan` is in, if any of its rows are in flight."""
        position = seq.length - 1
        if not self.enabled or held.is_prompt or held.is_withdrawn:
            return
        if seq.next_position != position or not 0 < position <= seq.num_known:
            return  # the state is somewhere among drafts, or after tokens that are unknown
        if any(self._device.is_shared(held.tables[number].blocks[0]) for number in self._groups):
            return  # others continue in it
        blocks = []
        for number in self._groups:
            if not self._make_room(number):
                return
            entry = list(held.tables[number].blocks)
            contents = self._contents(seq, number, position)
            blocks.append((entry[0], self._device.cached.hold(entry[0], contents, entry), contents))
            self._saved[number][entry[0]] = None
            self._saved[number].move_to_end(entry[0])
        blocks += [
            (block, self._device.cached.hold(block, contents), contents)
            for block, contents in self._prefixes.last_blocks(seq, held, position)
        ]
        is_computed = seq.length == seq.num_known
        self._ended.append((0 if is_computed else plan, seq.seq_id, blocks))
        if is_computed:
            self._confirm_ended(blocks)
            self._ended.pop()

    def _confirm_ended(self, blocks: Iterable[tuple[int, Contents, Contents]]) -> None:
        for block, held, contents in blocks:
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
