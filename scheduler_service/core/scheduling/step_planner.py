"""Planning of one step: what `Scheduler.schedule` puts into the batch, in order."""

import logging
from dataclasses import dataclass
from functools import partial

from scheduler_service.core.config import SchedulerConfig, WorkerGroupCapacity
from scheduler_service.core.kv_cache.transfer_port import TransferPort
from scheduler_service.core.progress import extend_all
from scheduler_service.core.scheduler_stats import ModelTotals
from scheduler_service.core.scheduling.batch import Batch
from scheduler_service.core.scheduling.capacity_probe import CapacityProbe
from scheduler_service.core.scheduling.pipeline import Pipeline
from scheduler_service.core.scheduling.placed_groups import PlacedGroups
from scheduler_service.core.scheduling.preemption import Preemption
from scheduler_service.core.scheduling.prefill import PrefillScheduler
from scheduler_service.core.scheduling.running_set import RunningSet
from scheduler_service.core.scheduling.strategies import StrategySchedulers
from scheduler_service.core.sequence import Sequence, SequenceGroup
from scheduler_service.core.step_plan import StepPlan

logger = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class StepPlanner:
    """Plans steps: one token for each decoding sequence, with drafts of further ones in a small
    batch, then prompts, swap-ins and new requests. Where memory is short, sequences are preempted.
    """

    config: SchedulerConfig
    capacity: WorkerGroupCapacity
    placed: PlacedGroups
    running: RunningSet
    pipeline: Pipeline
    probe: CapacityProbe
    preemption: Preemption
    strategies: StrategySchedulers
    prefill: PrefillScheduler
    totals: ModelTotals
    port: TransferPort

    def plan(
        self, now_us: int, *, leases_alone: bool = False
    ) -> tuple[StepPlan | None, list[SequenceGroup]]:
        """The next step's plan, None if there is nothing to do, and the groups that exceed
        the cache, which have no row in it. A suspect and the others have every other step.
        leases_alone: a plan that begins leases has no rows."""
        self.running.drop_ended()
        if self.port.begins_leases and leases_alone:
            batch = Batch(self.config, self.pipeline.next_step_id, now_us)
            self.port.begin_plan()
            return self._to_plan(batch), []
        exceeding: list[SequenceGroup] = []
        num_idle = 0
        while num_idle < (1 if self.placed.suspect is None else 2):
            plan, batch = self._plan_turn(now_us)
            exceeding += batch.exceeding
            if plan is not None:
                return plan, exceeding
            # Whatever was preempted without a row has left its memory to others.
            num_idle = 0 if batch.has_preempted else num_idle + 1
        return None, exceeding

    def _plan_turn(self, now_us: int) -> tuple[StepPlan | None, Batch]:
        if self.placed.suspect is None:
            return self._plan_step(now_us)
        self.placed.change_turn()
        with self.running.only(self.placed.has_turn):
            return self._plan_step(now_us)

    def _plan_step(self, now_us: int) -> tuple[StepPlan | None, Batch]:
        batch = Batch(self.config, self.pipeline.next_step_id, now_us)
        self.port.begin_plan()
        self.preemption.resume_swapped_in(batch)
        self._preempt_for_first(batch)
        self._add_decodes(batch)
        self.preemption.introduce_swapped_in(batch)
        self._admit_first(batch)
        self.prefill.continue_prompts(batch)
        if not batch.has_preempted:  # a preemption means that running sequences are short of memory
            self.preemption.swap_in(batch)
        if not self.running.swapped:
            self.prefill.admit(self.placed.waiting, batch)
        return self._to_plan(batch), batch

    def _preempt_for_first(self, batch: Batch) -> None:
        """Preempt others for the group that takes precedence over them."""
        seq_group = self.placed.preempting.head()
        if seq_group is not None and self.placed.has_turn(seq_group):
            for victim in self.probe.find_victims(seq_group) or ():
                self.preemption.preempt_for_other(victim, batch)

    def _admit_first(self, batch: Batch) -> None:
        """Admit the group that others were preempted for. Once it has started, its remaining
        sequences wait with other groups."""
        seq_group = self.placed.preempting.head()
        if seq_group is not None and self.placed.has_turn(seq_group):
            self.prefill.admit(self.placed.preempting, batch)
            self.placed.settle_preempting()

    def _add_decodes(self, batch: Batch) -> None:
        """Add a row for each decoding sequence.

        Preemption removes sequences from the ends of the lists: only sequences that the loop has
        not reached yet, or the one that it is at.
        """
        if num_drafts := self._num_drafts(batch):
            self._add_speculative_decodes(batch, num_drafts)
        else:
            reserve = partial(self._reserve, batch)
            batch.num_attended_pairs += extend_all(self.running.decoding, reserve, batch.rows)
        batch.budget -= len(batch.rows) + sum(batch.lookahead)
        if batch.rows:
            self._limit_prefills(batch)

    def _limit_prefills(self, batch: Batch) -> None:
        """Keep a step with decodes within `max_step_ms` on a CPU."""
        config, rates = self.config, self.pipeline.rates
        if config.max_step_ms and config.enable_chunked_prefill and self.capacity.is_on_cpu:
            budget_us = config.max_step_ms * 1000 - (rates.us_per_decode_step or 0.0)
            batch.limit_prefills(rates.prefill_cost, budget_us)

    def _num_drafts(self, batch: Batch) -> int:
        """The most drafts of a row in this step: none in a large batch, where more sequences are a
        better use of the time, nor any that prompts would have to wait for."""
        max_drafts = self.capacity.num_speculative_tokens
        num_rows = len(self.running.decoding)
        if not max_drafts or not 0 < num_rows <= self.config.max_speculative_seqs:
            return 0
        # Texts whose vectors are in flight have no rows, and may be more than a step has tokens.
        num_tokens = max(0, batch.budget - num_rows)
        return min(max_drafts, (num_tokens - self._num_kept_for_prompts(num_tokens)) // num_rows)

    def _num_kept_for_prompts(self, num_tokens: int) -> int:
        """How many of the tokens that a step has besides those of decodes are not for drafts: half
        of them while prompts could use any, or what the longest prompt needs without chunks."""
        queues = self.placed.waiting, self.placed.preempting
        may_admit = any(queues) and self.running.places.has_room(1)
        if not (may_admit or self.running.prefilling):
            return 0
        num_needed = 0 if self.config.enable_chunked_prefill else self.capacity.max_model_len
        return min(num_tokens, max(num_needed, (num_tokens + 1) // 2))

    def _add_speculative_decodes(self, batch: Batch, num_drafts: int) -> None:
        """Like `extend_all`, with drafts."""
        for seq in self.running.decoding:
            if seq.growth.length > seq.growth.reserved_length and not self._reserve(batch, seq):
                continue
            num_granted = self._reserve_drafts(batch, seq, num_drafts)
            seq.growth.advance(num_granted)
            batch.add_decode(seq, num_granted)

    def _reserve_drafts(self, batch: Batch, seq: Sequence, num_drafts: int) -> int:
        """Reserve memory for up to `num_drafts` drafts after a sequence's last token; returns
        how many it may have. Nothing is preempted for drafts, and each running sequence finds
        memory for its next token."""
        request = seq.seq_group.request
        if request.work.wants_prompt_logprobs:
            return 0
        if request.work.num_speculative_tokens is not None:
            num_drafts = min(num_drafts, request.work.num_speculative_tokens)
        end = min(seq.growth.length + num_drafts, seq.growth.max_length - 1)
        if end <= seq.growth.reserved_length:
            return end - seq.growth.length
        num_kept, tables = self.running.num_places, self.running.cache.tables
        while seq.growth.reserved_length < end:
            length = seq.growth.reserved_length + 1
            if not tables.can_reserve(seq, length, num_kept):
                break
            batch.update_tables(seq.seq_id, tables.reserve(seq, length))
            seq.growth.reserve(tables.round_up(length))
        return min(end, seq.growth.reserved_length) - seq.growth.length

    def _reserve(self, batch: Batch, seq: Sequence) -> bool:
        """Reserve memory for a sequence's last token, as its strategy does."""
        return self.strategies.of(seq.seq_group).reserve(seq, batch)

    @property
    def _awaits_fetches(self) -> bool:
        """Whether a plan without rows is needed, whose result will report the end of a fetch."""
        return bool(self.port.open_fetches) and not len(self.pipeline)

    def _to_plan(self, batch: Batch) -> StepPlan | None:
        moves = self.running.cache.end_plan(batch.step_id, has_rows=bool(batch.rows))
        batch.swap_out += moves.swap_out
        batch.copy += moves.copy
        batch.saved_states += moves.saved_states
        if batch.is_empty and not self.port.has_news and not self._awaits_fetches:
            return None
        forget_seq_ids = self.running.end_plan()
        plan, step = batch.to_plan(forget_seq_ids)
        self.port.end_plan(plan)
        self.running.cache.records.add_to(plan)
        self.pipeline.push(step)
        self.totals.add_plan(plan, batch.num_prefill_tokens)
        if logger.isEnabledFor(logging.DEBUG):
            logger.debug(
                "step planned group_id=%s step_id=%d num_rows=%d num_prefill_tokens=%d "
                "num_waiting=%d num_free_tokens=%d",
                self.capacity.worker_group_id,
                plan.step_id,
                len(batch.rows),
                batch.num_prefill_tokens,
                len(self.placed.waiting),
                self.running.cache.tables.num_free_tokens,
            )
        return plan
