"""Preemption: which groups leave the batch, by swap or by recompute, and how they come back.

When memory runs out a whole group leaves, the last in order: its sequences share blocks, and some
of them alone would hold memory without coming to an end. Only where the group that needs a block is
itself the last, one of its sequences makes room for its siblings: the last of them, which is
computed again when they have freed something. For a request that takes precedence over others, the
policy says which of them may have to leave.

A group leaves by *swap*, its blocks to host memory and back, or by *recompute*: its blocks are
freed, and its tokens computed again later. `auto` does what costs less by the measured rates:

    swap         block moves, out and back x us_per_moved_block
    recompute    tokens to compute x us_per_prefill_token

Each block is moved once each way, and not to the host if it is there already. With the prefix
cache, sequences find what others have or have computed before them: then the tokens of each block
count once, and only if nobody else has it. (More may be found, unless it is evicted meanwhile.)

As long as nothing of the kind has been measured, a single sequence is recomputed, which takes one
pass over its tokens, and several are swapped: what they share is moved once, but each of them may
have to be computed on its own.

A swapped-out group is forgotten by the worker. It comes back as a whole, in two plans: the first
swaps its blocks in, which the worker does beside the forward pass; the next one introduces its
sequences again, with all but their last tokens computed, and has rows of them.
"""

import logging
from collections.abc import Iterable
from itertools import chain

from scheduler_service.core.config import PreemptionMode, SchedulerConfig
from scheduler_service.core.kv_cache.block_manager import AllocStatus, BlockManager
from scheduler_service.core.kv_cache.prefix_cache import PrefixCache
from scheduler_service.core.policies import Policy
from scheduler_service.core.request_queue import RemovableHeap, WaitingQueue
from scheduler_service.core.scheduling.batch import Batch, make_new_sequence
from scheduler_service.core.scheduling.pipeline import Pipeline
from scheduler_service.core.scheduling.worker_group_state import RunningSet
from scheduler_service.core.sequence import Sequence, SequenceGroup
from scheduler_service.core.stats.request_timing import RequestEvent
from scheduler_service.core.stats.scheduler_stats import ModelTotals
from scheduler_service.core.stats.throughput import StepRates
from scheduler_service.core.step_plan import NewSequence

logger = logging.getLogger(__name__)

SUMMARY_INTERVAL_US = 10_000_000
"""Time between two summaries of a worker group's preemptions in the log."""


class SwapManager:
    """The swapped-out groups of one worker group, in the policy's order.

    They come before all that wait: as long as there are any, nothing else is admitted. They cannot
    wait for ever: what they need, they have had before, and whatever runs comes to an end.
    """

    def __init__(
        self,
        max_num_seqs: int,
        blocks: BlockManager,
        prefixes: PrefixCache,
        running: RunningSet,
        pipeline: Pipeline,
    ) -> None:
        self._max_num_seqs = max_num_seqs
        self._blocks = blocks
        self._prefixes = prefixes
        self._running = running
        self._pipeline = pipeline
        self._seq_groups: RemovableHeap[SequenceGroup] = RemovableHeap()
        self._landed: list[tuple[Sequence, NewSequence]] = []

    def __len__(self) -> int:
        return len(self._seq_groups)

    def swap_out(self, sequences: list[Sequence], batch: Batch) -> None:
        """Move the blocks of all running sequences of a group, which are out of their lists."""
        batch.swap_out += self._running.swap_out(sequences, batch.now_us)
        seq_group = sequences[0].seq_group
        if seq_group not in self._seq_groups:
            self._seq_groups.push(seq_group.rank, seq_group)

    def swap_in(self, batch: Batch) -> None:
        """Begin to bring groups back, first in order first, as far as places and blocks go."""
        while (top := self._seq_groups.peek()) is not None:
            seq_group = top[1]
            sequences = seq_group.swapped()
            if not self._can_come_back(sequences):
                return
            self._seq_groups.remove(seq_group)
            seq_group.note(RequestEvent.SWAPPED_IN, batch.now_us)
            batch.swap_in += self._blocks.swap_in([seq.seq_id for seq in sequences])
            for seq in sequences:
                seq.swap_in()
            self._running.come_back(sequences, batch.now_us)

    def _can_come_back(self, sequences: list[Sequence]) -> bool:
        if any(seq.num_in_flight for seq in sequences):
            return False  # the worker must be sent all their tokens
        if self._running.num_places + len(sequences) > self._max_num_seqs:
            return False
        return self._blocks.can_swap_in([seq.seq_id for seq in sequences]) is AllocStatus.OK

    def land(self) -> None:
        """What the last plan swapped in, for a group that comes back or one that has found its
        prompt on the host, is on the device from now on."""
        for seq in self._running.land():
            seq.rejoin(self._pipeline.next_step_id)
            self._prefixes.note_arrival(seq)
            if seq.is_prefilled:
                table = self._blocks.table(seq.seq_id)  # before the step changes it
                self._landed.append((seq, make_new_sequence(seq, table)))

    def add_landed(self, batch: Batch) -> None:
        """Introduce sequences that decode again and got rows to the worker; the others were
        preempted once more, or have outgrown the cache."""
        for seq, new_sequence in self._landed:
            if seq.num_in_flight:
                batch.add_new(new_sequence)
                self._running.mark_introduced(seq)
        self._landed = []

    def end(self, seq: Sequence) -> None:
        """A swapped-out sequence is about to end: free its blocks."""
        self._blocks.free_swapped(seq.seq_id)
        if len(seq.seq_group.swapped()) == 1:
            self._seq_groups.remove(seq.seq_group)

    def check(self, seq_group: SequenceGroup) -> None:
        """Assert that a group is here if any of its sequences is swapped out."""
        assert (seq_group in self._seq_groups) == bool(seq_group.swapped())
        assert not self._landed


def is_swap_cheaper(
    rates: StepRates, *, num_sequences: int, num_moves: int, num_tokens: int
) -> bool:
    """Whether to move blocks to the host and back, `num_moves` in all, rather than compute
    `num_tokens`.

    As long as nothing of the kind was measured: for several sequences, but not for a single one.
    """
    us_per_block, us_per_token = rates.us_per_moved_block, rates.us_per_prefill_token
    if us_per_block is None or us_per_token is None:
        return num_sequences > 1
    return num_moves * us_per_block < num_tokens * us_per_token


def is_fetch_cheaper(rates: StepRates, block_size: int) -> bool:
    """Whether to bring a block back that is on the host already, rather than compute its tokens.

    As long as nothing of the kind was measured: yes.
    """
    us_per_block, us_per_token = rates.us_per_moved_block, rates.us_per_prefill_token
    if us_per_block is None or us_per_token is None:
        return True
    return us_per_block < block_size * us_per_token


class Preemption:
    """Makes room for running sequences, at the expense of the last of them."""

    def __init__(
        self,
        config: SchedulerConfig,
        blocks: BlockManager,
        prefixes: PrefixCache,
        waiting: WaitingQueue,
        swapping: SwapManager,
        running: RunningSet,
        rates: StepRates,
        totals: ModelTotals,
    ) -> None:
        self._config = config
        self._blocks = blocks
        self._prefixes = prefixes
        self._waiting = waiting
        self._swapping = swapping
        self._running = running
        self._rates = rates
        self._totals = totals
        self._log = _PreemptionLog()

    def make_room(self, seq_group: SequenceGroup, batch: Batch) -> bool:
        """Take the blocks of the last group, or of the last sequence if that is of this group,
        which needs one; False if the group cannot continue even alone.

        Takes only sequences that have no row in the batch yet, as long as decodes get their rows
        in order; a group in lockstep must ask before any of its sequences has a row.
        """
        running, last = self._running, self._running.last()
        is_own = last.seq_group is seq_group
        if is_own and seq_group.is_lockstep and self._is_alone(seq_group):
            return False
        batch.has_preempted = True
        self._totals.num_preemptions += 1
        if is_own and not seq_group.is_lockstep and seq_group.num_running > 1:
            self._recompute([running.pop_last()], batch)
            return True
        swaps = self._is_to_swap(last.seq_group)
        self._take_out(running.pop_last_seq_group(), swaps, batch)
        return True

    def make_way(self, victim: SequenceGroup, batch: Batch) -> None:
        """Take the places and blocks of a group for one of higher rank. Before anything has
        a row."""
        batch.has_preempted = True
        self._totals.num_preemptions += 1
        swaps = self._is_to_swap(victim)
        self._take_out(self._running.pop_seq_group(victim), swaps, batch)

    def _take_out(self, victims: list[Sequence], swaps: bool, batch: Batch) -> None:
        if swaps:
            self._swap_out(victims, batch)
        else:
            self._recompute(victims, batch)

    def _is_alone(self, seq_group: SequenceGroup) -> bool:
        """Whether nothing but the group is in the batch."""
        return self._running.num_places == seq_group.num_running

    def _is_to_swap(self, seq_group: SequenceGroup) -> bool:
        """Whether the last group's blocks are to be moved to the host."""
        mode = self._config.preemption_mode
        if mode is PreemptionMode.RECOMPUTE:
            return False
        # A prompt that is partly computed has little to lose, no tokens of its own yet, and
        # choices that wait for its end: it begins again, finding what the prefix cache has.
        if any(seq.seq_group is seq_group for seq in self._running.prefilling):
            return False
        sequences = seq_group.running()
        if any(seq.live_forks() for seq in sequences):
            return False  # a search that has not begun
        seq_ids = [seq.seq_id for seq in sequences]
        if self._blocks.can_swap_out(seq_ids) is not AllocStatus.OK:
            return False
        if mode is PreemptionMode.SWAP:
            return True
        return is_swap_cheaper(
            self._rates,
            num_sequences=len(sequences),
            num_moves=self._blocks.num_moves(seq_ids),
            num_tokens=self._num_tokens_to_recompute(sequences),
        )

    def _num_tokens_to_recompute(self, sequences: list[Sequence]) -> int:
        if not self._config.enable_prefix_caching:
            return sum(seq.length for seq in sequences)
        seq_ids = [seq.seq_id for seq in sequences]
        return self._blocks.num_own_blocks(seq_ids) * self._blocks.block_size

    def _recompute(self, victims: list[Sequence], batch: Batch) -> None:
        """Free the blocks of sequences of one group; they wait to be computed again."""
        self._log.note("recompute", victims, batch.now_us)
        victims[0].seq_group.note(RequestEvent.PREEMPTED, batch.now_us)
        for seq in victims:
            self._prefixes.note_decodes(seq)
            self._running.vacate(seq, batch.now_us)
        self._waiting.add(victims[0].seq_group)

    def _swap_out(self, victims: list[Sequence], batch: Batch) -> None:
        """Move the blocks of a whole group to the host, from where it will come back."""
        self._log.note("swap", victims, batch.now_us)
        victims[0].seq_group.note(RequestEvent.SWAPPED_OUT, batch.now_us)
        for seq in victims:
            self._prefixes.note_decodes(seq)
        self._swapping.swap_out(victims, batch)


class _PreemptionLog:
    """Logs each preemption at DEBUG, and a summary of them at WARNING every ten seconds at most.

    Logging is synchronous and the core runs on the event loop of all requests: a line for each
    preemption would slow it down exactly when memory is short.
    """

    def __init__(self) -> None:
        self._counts = {"swap": 0, "recompute": 0}
        self._due_us = 0

    def note(self, mode: str, victims: list[Sequence], now_us: int) -> None:
        """Count the preemption of sequences of one group."""
        self._counts[mode] += 1
        if logger.isEnabledFor(logging.DEBUG):
            logger.debug(
                "preempted mode=%s request_id=%s seq_ids=%s num_tokens=%d",
                mode,
                victims[0].seq_group.request.request_id,
                ",".join(str(seq.seq_id) for seq in victims),
                max(seq.length for seq in victims),
            )
        if now_us >= self._due_us:
            logger.warning(
                "requests were preempted because memory ran out num_swapped=%d num_recomputed=%d",
                self._counts["swap"],
                self._counts["recompute"],
            )
            self._counts = {"swap": 0, "recompute": 0}
            self._due_us = now_us + SUMMARY_INTERVAL_US


class VictimSelector:
    """Finds the groups that must leave the batch, among those that the policy allows.

    Groups of beams stay: their sequences change in every step, so that the number of blocks that
    they would free is unknown.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        policy: Policy,
        blocks: BlockManager,
        prefixes: PrefixCache,
        running: RunningSet,
    ) -> None:
        self._max_num_seqs = config.max_num_seqs
        self._policy = policy
        self._blocks = blocks
        self._prefixes = prefixes
        self._running = running
        self._in_vain: tuple[SequenceGroup, int] | None = None
        """Who asked last when nobody yielded, and the batch's changes until then: it asks in every
        step, and while the same are in the batch the answer is the same."""

    def find(
        self, seq_group: SequenceGroup, seq_groups: Iterable[SequenceGroup]
    ) -> list[SequenceGroup] | None:
        """Who must leave the batch for a waiting group to be admitted, the fewest, the first to
        leave first. None if it takes precedence over none of the `seq_groups` that are here,
        running or not, or if there is no room for it even so."""
        question = (seq_group, self._running.num_changes)
        if question == self._in_vain:
            return None
        yielding = self._policy.yielding(seq_group, seq_groups)
        first = next(yielding, None)
        if first is None:
            self._in_vain = question
            return None
        found = self._prefixes.find(seq_group.longest)
        victims: list[SequenceGroup] = []
        num_places = num_blocks = 0
        for other in chain([first], yielding):
            if self._has_room(seq_group, found, num_places, num_blocks):
                return victims
            if other.num_running and not other.is_lockstep:
                victims.append(other)
                num_places += other.num_running
                num_blocks += self._num_blocks_of(other)
        return victims if self._has_room(seq_group, found, num_places, num_blocks) else None

    def _has_room(
        self, seq_group: SequenceGroup, found: list[int], num_places: int, num_blocks: int
    ) -> bool:
        """Whether the group could be admitted with this many more free places and blocks."""
        num_taken = self._running.num_places - num_places + len(seq_group.waiting())
        verdict = self._blocks.can_allocate(seq_group.max_known_tokens, found, -num_blocks)
        return num_taken <= self._max_num_seqs and verdict is AllocStatus.OK

    def _num_blocks_of(self, seq_group: SequenceGroup) -> int:
        """Blocks that come free when the group leaves."""
        seq_ids = [seq.seq_id for seq in seq_group.running() if self._blocks.holds(seq.seq_id)]
        return self._blocks.num_own_blocks(seq_ids)
