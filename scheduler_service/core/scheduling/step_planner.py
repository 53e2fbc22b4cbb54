"""Planning of one step: what `Scheduler.schedule` puts into the batch, in order."""

import logging
from functools import partial

from scheduler_service.core.scheduling.batch import Batch
from scheduler_service.core.scheduling.beams import BeamScheduler
from scheduler_service.core.scheduling.capacity_probe import CapacityProbe
from scheduler_service.core.scheduling.preemption import Preemption
from scheduler_service.core.scheduling.prefill import PrefillScheduler
from scheduler_service.core.scheduling.worker_group_state import WorkerGroupState
from scheduler_service.core.sequence import Sequence, SequenceGroup, SequenceStatus, extend_all
from scheduler_service.core.step_plan import StepPlan

logger = logging.getLogger(__name__)


class StepPlanner:
    """Plans steps: one token for each decoding sequence, with drafts of further ones in a small
    batch, then prompts, swap-ins and new requests. Where memory is short, sequences are preempted.
    """

    def __init__(self, state: WorkerGroupState, probe: CapacityProbe) -> None:
        self._state = state
        self._probe = probe
        self._cache = state.cache
        self._running = state.running
        self._pipeline = state.pipeline
        self._preemption = Preemption(state)
        self._prefill = PrefillScheduler(state)
        self._beams = BeamScheduler(state)

    def plan(self, now_us: int) -> tuple[StepPlan | None, list[SequenceGroup]]:
        """The next step's plan, None if there is nothing to do, and the groups that have outgrown
        the cache, which have no row in it. A suspect and the others have every other step."""
        self._running.drop_ended()
        if self._state.suspect is None:
            return self._plan_step(now_us)
        plan, outgrown = self._plan_turn(now_us)
        if plan is None:
            plan, further = self._plan_turn(now_us)
            outgrown += further
        return plan, outgrown

    def _plan_turn(self, now_us: int) -> tuple[StepPlan | None, list[SequenceGroup]]:
        self._state.change_turn()
        with self._running.only(self._state.has_turn):
            return self._plan_step(now_us)

    def _plan_step(self, now_us: int) -> tuple[StepPlan | None, list[SequenceGroup]]:
        state = self._state
        batch = Batch(now_us, state.config.max_num_batched_tokens)
        self._preemption.land()
        self._preempt_for_first(batch)
        self._add_decodes(batch)
        self._preemption.introduce_landed(batch)
        self._admit_first(batch)
        self._prefill.continue_prompts(batch)
        if not batch.has_preempted:  # a preemption means that running sequences are short of memory
            self._preemption.swap_in(batch)
        if not state.running.swapped:
            self._prefill.admit(state.waiting, batch)
        return self._to_plan(batch), batch.outgrown

    def _preempt_for_first(self, batch: Batch) -> None:
        """Preempt others for the group that takes precedence over them."""
        seq_group = self._state.preempting.head()
        if seq_group is not None and self._state.has_turn(seq_group):
            for victim in self._probe.find_victims(seq_group) or ():
                self._preemption.preempt_for_other(victim, batch)

    def _admit_first(self, batch: Batch) -> None:
        """Admit the group that others were preempted for. Once it has started, its remaining
        sequences wait with other groups."""
        state = self._state
        seq_group = state.preempting.head()
        if seq_group is None or not state.has_turn(seq_group):
            return
        self._prefill.admit(state.preempting, batch)
        if seq_group in state.preempting and seq_group.num_running:
            state.preempting.discard(seq_group)
            state.waiting.add(seq_group)

    def _add_decodes(self, batch: Batch) -> None:
        """Add a row for each decoding sequence.

        Preemption removes sequences from the ends of the lists: only sequences that the loop has
        not reached yet, or the one that it is at.
        """
        if num_drafts := self._num_drafts(batch):
            self._add_speculative_decodes(batch, num_drafts)
        else:
            reserve = partial(self._reserve, batch)
            batch.num_attended_pairs += extend_all(
                self._running.decoding, reserve, batch.seq_ids, batch.rows
            )
        batch.budget -= len(batch.rows) + sum(batch.lookahead)
        if batch.rows:
            self._limit_prefills(batch)

    def _limit_prefills(self, batch: Batch) -> None:
        """Keep a step with decodes within `max_step_ms` on a CPU."""
        config, rates = self._state.config, self._pipeline.rates
        if config.max_step_ms and config.enable_chunked_prefill and self._state.capacity.is_on_cpu:
            budget_us = config.max_step_ms * 1000 - (rates.us_per_decode_step or 0.0)
            batch.limit_prefills(rates.prefill_cost, budget_us)

    def _num_drafts(self, batch: Batch) -> int:
        """The most drafts of a row in this step: none in a large batch, where more sequences are a
        better use of the time."""
        most = self._state.capacity.num_speculative_tokens
        num_rows = len(self._running.decoding)
        if not most or not 0 < num_rows <= self._state.config.max_speculative_seqs:
            return 0
        return min(most, batch.budget // num_rows - 1)

    def _add_speculative_decodes(self, batch: Batch, num_drafts: int) -> None:
        """Like `extend_all`, with drafts."""
        for seq in self._running.decoding:
            if seq.length > seq.reserved_length and not self._reserve(batch, seq):
                continue
            num_granted = self._reserve_drafts(batch, seq, num_drafts)
            seq.extend_with_drafts(num_granted)
            batch.add_decode(seq, num_granted)

    def _reserve_drafts(self, batch: Batch, seq: Sequence, num_drafts: int) -> int:
        """Reserve memory for up to `num_drafts` drafts after a sequence's last token; returns
        how many it may have. Nothing is preempted for drafts, and each running sequence finds
        memory for its next token."""
        request = seq.seq_group.request
        if request.wants_prompt_logprobs:
            return 0
        if request.num_speculative_tokens is not None:
            num_drafts = min(num_drafts, request.num_speculative_tokens)
        max_length = seq.seq_group.num_prompt_tokens + seq.max_output_tokens
        end = min(seq.length + num_drafts, max_length - 1)
        if end <= seq.reserved_length:
            return end - seq.length
        num_kept = self._running.num_places
        while seq.reserved_length < end:
            length = seq.reserved_length + 1
            if not self._cache.can_reserve(seq, length, num_kept):
                break
            if (update := self._cache.reserve(seq, length)) is not None:
                batch.update_table(seq.seq_id, update)
            seq.reserve(self._cache.round_up(length))
        return min(end, seq.reserved_length) - seq.length

    def _reserve(self, batch: Batch, seq: Sequence) -> bool:
        """Reserve memory for a sequence's last token. Returns False if it gets no row in this
        step, or has one already, together with the other beams of its group."""
        if seq.seq_group.beams is not None:
            if not self._beams.add_rows(seq.seq_group, batch, self._preemption):
                batch.outgrown.append(seq.seq_group)
            return False
        if seq.length >= seq.seq_group.num_prompt_tokens + seq.max_output_tokens:
            return False  # its last token is in flight
        if seq.length > self._cache.num_tokens:
            if seq.num_in_flight == 0:
                batch.outgrown.append(seq.seq_group)
            return False  # its tokens in flight may end it
        if self._cache.is_full and not self._make_room(seq, batch):
            return False
        update = self._cache.reserve(seq, seq.length)
        if update is not None:
            batch.update_table(seq.seq_id, update)
        self._cache.offer(seq, seq.num_confirmed)
        seq.reserve(self._cache.round_up(seq.length))
        return True

    def _make_room(self, seq: Sequence, batch: Batch) -> bool:
        """Preempt others until there is memory for the sequence; False if it gets none."""
        while not self._cache.can_reserve(seq, seq.length):
            if not self._preemption.make_room(seq.seq_group, batch):
                batch.outgrown.append(seq.seq_group)
                return False
            if seq.status is not SequenceStatus.RUNNING:
                return False
        return True

    def _to_plan(self, batch: Batch) -> StepPlan | None:
        batch.swap_out += self._cache.end_plan(has_rows=bool(batch.rows))
        if batch.is_empty:
            return None
        forget_seq_ids = self._running.take_forget_seq_ids()
        plan, step = batch.to_plan(self._pipeline.next_step_id, forget_seq_ids)
        self._pipeline.push(step)
        self._state.totals.note_plan(plan, batch.num_prefill_tokens)
        if logger.isEnabledFor(logging.DEBUG):
            logger.debug(
                "step planned group_id=%s step_id=%d num_rows=%d num_prefill_tokens=%d "
                "num_waiting=%d num_free_tokens=%d",
                self._state.capacity.worker_group_id,
                plan.step_id,
                len(batch.rows),
                batch.num_prefill_tokens,
                len(self._state.waiting),
                self._cache.num_free_tokens,
            )
        return plan
