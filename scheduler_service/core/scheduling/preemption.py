"""Preemption: which groups leave the batch, by swap or by recompute, and how they come back.

When memory runs out, the last group in order is preempted as a whole: its sequences share memory,
and if only some of them left, the rest would hold memory without being able to finish. If the group
that needs memory is itself the last, only its last sequence is preempted; it is computed again
when the others have freed some. For a request that takes precedence over others, the policy says
which of them may be preempted.

*Swap* moves a group's KV to host memory and later back. *Recompute* frees its memory and
computes its tokens again later. `auto` chooses what costs less at the measured rates:

    swap         moves, out and back x us_per_move
    recompute    tokens to compute x us_per_prefill_token

A token moves once each way, and not to the host if a copy is there already. With the prefix cache,
sequences reuse tokens that others have computed: they then count once, and only if no other
sequence has them. (The cache may hold more, unless it is evicted meanwhile.)

Until both rates have been measured, a single sequence is recomputed, which takes one pass over its
tokens, and several sequences are swapped: the tokens that they share move once, but each sequence
may have to be recomputed alone.

The worker forgets a swapped-out group. It comes back as a whole, in two plans: the first one swaps
its KV in, which the worker does in parallel with the forward pass; the second one introduces
its sequences again, with all but their last tokens computed, and has their rows.
"""

import logging
from dataclasses import dataclass, field

from scheduler_service.core.config import PreemptionMode
from scheduler_service.core.request_timing import RequestEvent
from scheduler_service.core.scheduler_stats import ModelTotals
from scheduler_service.core.scheduling.batch import Batch, make_new_sequence
from scheduler_service.core.scheduling.placed_groups import PlacedGroups
from scheduler_service.core.scheduling.running_set import RunningSet
from scheduler_service.core.sequence import Sequence, SequenceGroup
from scheduler_service.core.step_plan import NewSequence
from scheduler_service.core.throughput import StepRates

logger = logging.getLogger(__name__)

SUMMARY_INTERVAL_US = 10_000_000
"""Time between two summaries of a worker group's preemptions in the log."""


def is_swap_cheaper(
    rates: StepRates, *, num_sequences: int, num_moves: int, num_tokens: int
) -> bool:
    """Whether to make `num_moves` moves to the host and back in all, rather than compute
    `num_tokens`.

    Until such costs have been measured: for several sequences, but not for a single one.
    """
    us_per_move, us_per_token = rates.us_per_move, rates.us_per_prefill_token
    if us_per_move is None or us_per_token is None:
        return num_sequences > 1
    return num_moves * us_per_move < num_tokens * us_per_token


def is_fetch_cheaper(rates: StepRates, num_moves: int, num_tokens: int) -> bool:
    """Whether to make `num_moves` moves from the host, rather than compute `num_tokens` tokens.

    Until such costs have been measured: yes.
    """
    us_per_move, us_per_token = rates.us_per_move, rates.us_per_prefill_token
    if us_per_move is None or us_per_token is None:
        return True
    return num_moves * us_per_move < num_tokens * us_per_token


@dataclass(slots=True, eq=False)
class Preemption:
    """Takes groups out of the batch, by swap or by recompute, and brings swapped-out ones back."""

    mode: PreemptionMode
    placed: PlacedGroups
    running: RunningSet
    rates: StepRates
    totals: ModelTotals

    _swapped_in: list[tuple[Sequence, NewSequence]] = field(default_factory=list)
    _log: "_PreemptionLog" = field(default_factory=lambda: _PreemptionLog())

    # Out of the batch.

    def make_room(self, seq_group: SequenceGroup, batch: Batch) -> bool:
        """Preempt the last group for `seq_group`, which needs memory; if it is itself the last,
        preempt its last sequence. Returns False if the group cannot continue even alone.

        Preempts only sequences that have no row in the batch yet, provided that decodes get their
        rows in order; a group in lockstep must ask before any of its sequences has a row.
        """
        running, last = self.running, self.running.last()
        is_last = last.seq_group is seq_group
        is_lockstep = seq_group.strategy.is_lockstep
        if is_last and is_lockstep and running.cache.tables.are_alone(seq_group.running()):
            return False
        batch.has_preempted = True
        self.totals.num_preemptions += 1
        if is_last and not is_lockstep and seq_group.num_running > 1:
            self._recompute([running.pop_last()], batch)
            return True
        swaps = self._should_swap(last.seq_group)
        self._preempt(running.pop_last_seq_group(), swaps, batch)
        return True

    def preempt_for_other(self, victim: SequenceGroup, batch: Batch) -> None:
        """Preempt a group for one that takes precedence over it. Must be called before any sequence
        has a row in the batch."""
        batch.has_preempted = True
        self.totals.num_preemptions += 1
        swaps = self._should_swap(victim)
        self._preempt(self.running.pop_seq_group(victim), swaps, batch)

    def _preempt(self, victims: list[Sequence], swaps: bool, batch: Batch) -> None:
        if swaps:
            self._swap_out(victims, batch)
        else:
            self._recompute(victims, batch)

    def _should_swap(self, seq_group: SequenceGroup) -> bool:
        """Whether to move a group's KV to the host, rather than free it."""
        if self.mode is PreemptionMode.RECOMPUTE:
            return False
        # A partly computed prompt has no output yet, and choices may be waiting to fork from it:
        # it starts again, with what the prefix cache has.
        if any(seq.seq_group is seq_group for seq in self.running.prefilling):
            return False
        sequences = seq_group.running()
        if any(seq.live_forks() for seq in sequences):
            return False  # a beam search that has not started
        if any(seq.growth.num_drafts for seq in sequences):
            return False  # it is unknown how many of its tokens will be written
        cache = self.running.cache
        changes_states = seq_group.strategy.is_lockstep and cache.tables.has_states
        if changes_states and any(seq.num_in_flight for seq in sequences):
            return False  # beams would compute their last tokens again
        if not cache.swap.can_swap_out(sequences):
            return False
        if self.mode is PreemptionMode.SWAP:
            return True
        return is_swap_cheaper(
            self.rates,
            num_sequences=len(sequences),
            num_moves=cache.swap.num_moves(sequences),
            num_tokens=cache.prefixes.num_tokens_to_recompute(sequences),
        )

    def _recompute(self, victims: list[Sequence], batch: Batch) -> None:
        """Free the memory of sequences of one group, and queue it to be computed again."""
        self._log.record("recompute", victims, batch.now_us)
        victims[0].seq_group.record_event(RequestEvent.PREEMPTED, batch.now_us)
        for seq in victims:
            self.running.cache.prefixes.offer(seq, seq.num_confirmed)
            self.running.vacate(seq, batch.now_us)
        self.placed.waiting.add(victims[0].seq_group)

    def _swap_out(self, victims: list[Sequence], batch: Batch) -> None:
        """Move the KV of all running sequences of a group to the host."""
        seq_group = victims[0].seq_group
        self._log.record("swap", victims, batch.now_us)
        seq_group.record_event(RequestEvent.SWAPPED_OUT, batch.now_us)
        for seq in victims:
            self.running.cache.prefixes.offer(seq, seq.num_confirmed)
        batch.swap_out += self.running.swap_out(victims, batch.now_us)

    # Back into the batch.

    def swap_in(self, batch: Batch) -> None:
        """Swap groups in, in the policy's order, while there are places and memory for them."""
        while (top := self.running.swapped.peek()) is not None:
            seq_group = top[1]
            if not self._can_swap_in(seq_group.swapped()):
                return
            seq_group.record_event(RequestEvent.SWAPPED_IN, batch.now_us)
            swapped = seq_group.swapped()
            batch.swap_in += self.running.swap_in(seq_group, batch)
            for seq in swapped:  # late results of beams are ignored
                seq.prefill.rejoin(batch.step_id)

    def _can_swap_in(self, sequences: list[Sequence]) -> bool:
        if any(seq.num_in_flight for seq in sequences):
            return False  # the worker will need all their tokens
        has_places = self.running.places.has_room(len(sequences))
        return has_places and self.running.cache.swap.can_swap_in(sequences)

    def resume_swapped_in(self, batch: Batch) -> None:
        """Resume the sequences whose KV the last plan swapped in: they were swapped out,
        or their prompts were found on the host."""
        for seq in self.running.pop_swapped_in():
            seq.prefill.rejoin(batch.step_id)
            self.running.cache.prefixes.offer(seq, seq.prefill.num_computed)
            if seq.prefill.is_complete:
                tables = self.running.cache.tables.of(seq)  # before the step changes it
                self._swapped_in.append((seq, make_new_sequence(seq, tables)))

    def introduce_swapped_in(self, batch: Batch) -> None:
        """Send the worker the swapped-in sequences that got decode rows; the others were preempted
        again, or exceed the cache."""
        for seq, new_sequence in self._swapped_in:
            if seq.num_in_flight:
                batch.add_new(new_sequence)
                self.running.mark_introduced(seq)
        self._swapped_in = []


class _PreemptionLog:
    """Logs each preemption at DEBUG, and a summary of them at WARNING every ten seconds at most.

    Logging is synchronous, and the core runs on the event loop of all requests: a line for each
    preemption would slow it down exactly when memory is short.
    """

    def __init__(self) -> None:
        self._counts = {"swap": 0, "recompute": 0}
        self._due_us = 0

    def record(self, mode: str, victims: list[Sequence], now_us: int) -> None:
        """Count the preemption of sequences of one group."""
        self._counts[mode] += 1
        if logger.isEnabledFor(logging.DEBUG):
            logger.debug(
                "preempted mode=%s request_id=%s seq_ids=%s num_tokens=%d",
                mode,
                victims[0].seq_group.request.request_id,
                ",".join(str(seq.seq_id) for seq in victims),
                max(seq.growth.length for seq in victims),
            )
        if now_us >= self._due_us:
            logger.warning(
                "requests were preempted because memory ran out num_swapped=%d num_recomputed=%d",
                self._counts["swap"],
                self._counts["recompute"],
            )
            self._counts = {"swap": 0, "recompute": 0}
            self._due_us = now_us + SUMMARY_INTERVAL_US
