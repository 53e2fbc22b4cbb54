"""Plans the steps of one worker group, and processes their results."""

import logging
from collections.abc import Callable, Iterable

from scheduler_service.core.config import SchedulerConfig, WorkerGroupCapacity
from scheduler_service.core.kv_cache.block_manager import BlockManager
from scheduler_service.core.kv_cache.block_pool import BlockMap
from scheduler_service.core.kv_cache.prefix_cache import PrefixCache
from scheduler_service.core.policies import Policy
from scheduler_service.core.request_queue import WaitingQueue
from scheduler_service.core.scheduling.batch import Batch
from scheduler_service.core.scheduling.beams import BeamScheduler
from scheduler_service.core.scheduling.capacity_probe import CapacityProbe
from scheduler_service.core.scheduling.step_planner import DecodeScheduler
from scheduler_service.core.scheduling.departures import MigratingGroups
from scheduler_service.core.scheduling.pipeline import Pipeline, PipelineDepth
from scheduler_service.core.scheduling.preemption import Preemption, SwapManager, VictimSelector
from scheduler_service.core.scheduling.prefill import BatchAdmitter, PrefillScheduler
from scheduler_service.core.scheduling.results import ResultProcessor, SequenceFinisher
from scheduler_service.core.scheduling.worker_group_state import RunningSet
from scheduler_service.core.sequence import Sequence, SequenceGroup, SequenceStatus, request_number
from scheduler_service.core.stats.request_timing import RequestEvent, RequestPhase, StepClock
from scheduler_service.core.stats.scheduler_stats import ModelTotals, WorkerGroupSnapshot
from scheduler_service.core.stats.throughput import StepRates, StepWork
from scheduler_service.core.step_plan import StepPlan, StepResult
from scheduler_service.errors import GenerationFailed

logger = logging.getLogger(__name__)


class Scheduler:
    """Queues, batch, blocks and open steps of one worker group.

    Whatever a sequence leaves (its blocks, its number in the worker) may be given up while steps
    that use it are in flight: the worker executes plans in order, and whatever replaces it comes
    in a later plan. Tokens of its rows in flight are discarded if it ended.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        capacity: WorkerGroupCapacity,
        policy: Policy,
        totals: ModelTotals,
        now_us: int,
    ) -> None:
        self.capacity = capacity
        self.blocks = BlockManager(
            num_gpu_blocks=capacity.num_gpu_blocks,
            num_cpu_blocks=capacity.num_cpu_blocks,
            block_size=capacity.block_size,
            watermark=config.watermark,
        )
        self._prefixes = PrefixCache(
            self.blocks,
            enabled=config.enable_prefix_caching,
            isolate_tenants=config.isolate_tenants,
        )
        self.waiting = WaitingQueue()
        self.ahead = WaitingQueue()
        """The waiting group, if any, that preempts others here; it has not run here yet."""
        self.seq_groups: dict[SequenceGroup, None] = {}
        """All groups placed here, in the order in which they came."""
        self.clock = StepClock(now_us)
        self.rates = StepRates()
        self.is_draining = False
        self.num_steps = 0
        self.num_changes = 0
        """Counts up whenever there may be more room than before."""
        self._config = config
        self._totals = totals
        self._pipeline = Pipeline(capacity.vocab_size)
        self._running = RunningSet(self.blocks, self.clock)
        self._depth = PipelineDepth(config, capacity, self._running, self.rates)
        self.swapping = SwapManager(
            config.max_num_seqs, self.blocks, self._prefixes, self._running, self._pipeline
        )
        self._preemption = Preemption(
            config,
            self.blocks,
            self._prefixes,
            self.waiting,
            self.swapping,
            self._running,
            self.rates,
            totals,
        )
        self._beams = BeamScheduler(
            config,
            self.blocks,
            self._prefixes,
            self._running,
            self._pipeline,
            self._preemption,
        )
        self._decode = DecodeScheduler(
            self.blocks, self._prefixes, self._running, self._preemption, self._beams
        )
        self._prefill = PrefillScheduler(
            config, self.blocks, self._running, self._pipeline, self._beams
        )
        self._admitter = BatchAdmitter(
            config,
            self.blocks,
            self._prefixes,
            self._running,
            self._pipeline,
            self._prefill,
            self._beams,
            self.rates,
        )
        self._victims = VictimSelector(config, policy, self.blocks, self._prefixes, self._running)
        self._migrating = MigratingGroups(
            self._prefixes, self._running, self.swapping, self._pipeline
        )
        self._finisher = SequenceFinisher(
            self._prefixes,
            self._running,
            self.swapping,
            self._migrating,
            waiting=self.waiting,
            ahead=self.ahead,
            seq_groups=self.seq_groups,
        )
        self._results = ResultProcessor(
            policy,
            self._prefixes,
            self._pipeline,
            self._beams,
            self._finisher,
            self.clock,
            self.rates,
            totals,
        )
        self.probe = CapacityProbe(
            config,
            capacity,
            self.blocks,
            self._prefixes,
            self._running,
            self.swapping,
            self.rates,
            self._victims,
            waiting=self.waiting,
            ahead=self.ahead,
            seq_groups=self.seq_groups,
        )
        self._outgrown: list[SequenceGroup] = []

    # The interface to the core.

    def is_full(self, *, is_awaited: bool) -> bool:
        """Whether no step can be planned before a result is in; is_awaited: requests that are not
        placed wait for room."""
        return len(self._pipeline) >= self._depth.depth(self._num_together(is_awaited))

    @property
    def newest_work(self) -> StepWork:
        """What the newest open step takes the worker."""
        return self._pipeline.newest_work

    def take(self, seq_group: SequenceGroup, now_us: int) -> None:
        """Queue a group for this batch."""
        self.seq_groups[seq_group] = None
        seq_group.clock.timeline.add_placement(self.capacity.worker_group_id, now_us)
        self._totals.num_inexact_recoveries += seq_group.enter(self.capacity)
        room = self.capacity.max_model_len - seq_group.num_prompt_tokens
        max_output_tokens = min(seq_group.request.max_tokens, room)
        for seq in seq_group.sequences:
            seq.limit_output(max_output_tokens)
        if seq_group.beams is not None:
            seq_group.beams.search.limit(max_output_tokens)
            if seq_group.beams.search.is_done:
                self._results.finish_search(seq_group, now_us)
        else:
            self._finisher.end_full(seq_group)
        if seq_group.num_unfinished:
            (self.ahead if seq_group.is_ahead else self.waiting).add(seq_group)

    def give_back(self) -> list[SequenceGroup]:
        """Part with the groups that have not run here."""
        self.num_changes += 1
        phases = (RequestPhase.QUEUE, RequestPhase.RECOVERY)
        waiting = (*self.ahead, *self.waiting)
        seq_groups = [seq_group for seq_group in waiting if seq_group.clock.phase in phases]
        for seq_group in seq_groups:
            self._finisher.discard(seq_group)
            del self.seq_groups[seq_group]
        return seq_groups

    def send_away(self, may_go: Callable[[SequenceGroup], bool], now_us: int) -> int:
        """Stop planning for the groups that may go, and return their number; `take_gone` returns
        them once they are gone."""
        self.num_changes += 1
        leaving = [g for g in self.seq_groups if g not in self._migrating and may_go(g)]
        for seq_group in leaving:
            self._finisher.discard(seq_group)
            self._migrating.begin(seq_group, now_us)
        return len(leaving)

    @property
    def migrating(self) -> Iterable[SequenceGroup]:
        """Groups that were sent away, and have steps in flight still."""
        return self._migrating

    def take_gone(self) -> list[SequenceGroup]:
        """Remove and return the groups that were sent away and have no rows in flight."""
        self.num_changes += 1
        gone = self._migrating.take_gone()
        for seq_group in gone:
            del self.seq_groups[seq_group]
        return gone

    def lose(self, now_us: int) -> tuple[list[SequenceGroup], set[SequenceGroup]]:
        """The worker is gone: all groups, to start again with the tokens they have; and those
        that it was computing. Nothing may be scheduled here afterwards."""
        computing = {seq.seq_group for seq in self._pipeline.open_rows()} & self.seq_groups.keys()
        self.waiting.take_all()
        self.ahead.take_all()
        for seq_group in self.seq_groups:
            seq_group.note(RequestEvent.WORKER_LOST, now_us)
            if seq_group.num_running:
                # What it has done since its last result is lost with it.
                done_us = max(seq_group.clock.since_us, self.clock.mark_us)
                seq_group.clock.leave_batch(min(done_us, now_us), RequestPhase.RECOVERY)
            elif seq_group.clock.phase is RequestPhase.PREEMPTED:
                seq_group.clock.recover(now_us)
            seq_group.num_running = 0
            for seq in seq_group.unfinished():
                seq.restart()
        return list(self.seq_groups), computing

    def snapshot(self) -> WorkerGroupSnapshot:
        """Counts of the present state."""
        return WorkerGroupSnapshot(
            worker_group_id=self.capacity.worker_group_id,
            model=self.capacity.model,
            draining=self.is_draining,
            num_gpu_blocks=self.capacity.num_gpu_blocks,
            num_free_gpu_blocks=self.blocks.num_free_blocks,
            num_cpu_blocks=self.capacity.num_cpu_blocks,
            num_free_cpu_blocks=self.blocks.num_free_host_blocks,
            num_running_sequences=self._running.num_places,
            num_steps=self.num_steps,
            block_size=self.capacity.block_size,
            max_num_seqs=self._config.max_num_seqs,
            us_per_decode_step=self.rates.us_per_decode_step or 0.0,
            us_per_prefill_token=self.rates.us_per_prefill_token or 0.0,
            plan_us=self.clock.plan_us,
            wire_us=self.clock.wire_us,
            forward_us=self.clock.forward_us,
            sample_us=self.clock.sample_us,
        )

    def block_maps(self) -> tuple[BlockMap, BlockMap]:
        """Whose the blocks are on the device and on the host; what several requests share is the
        one's that came here first."""
        owners = [
            (seq.seq_id, request_number(seq_group))
            for seq_group in reversed(self.seq_groups)
            for seq in seq_group.sequences
        ]
        return self.blocks.device_map(owners), self.blocks.host_map(owners)

    def prefilling_seq_groups(self) -> set[SequenceGroup]:
        """Running groups with tokens to compute besides their newest ones, or blocks to come."""
        return {seq.seq_group for seq in (*self._running.prefilling, *self._running.arriving)}

    def end_sequence(self, seq: Sequence, status: SequenceStatus, now_us: int) -> None:
        """End a sequence; what it held is free at once."""
        self.num_changes += 1
        self._finisher.end_sequence(seq, status, now_us)

    def take_outgrown(self) -> list[SequenceGroup]:
        """Groups with a sequence that has become longer than the whole cache, and beams that are
        too large for it together. They hold what they have until they fail or are sent away.

        Not before the plan is complete: others of their sequences may have rows in it, and must
        not be forgotten by it, nor their blocks go to another row of the same step.
        """
        outgrown, self._outgrown = dict.fromkeys(self._outgrown), []
        return [seq_group for seq_group in outgrown if seq_group.num_unfinished]

    def fail_outgrown(self, seq_group: SequenceGroup, now_us: int) -> None:
        """End an outgrown group that no other worker group can continue."""
        tokens = self.capacity.num_cache_tokens
        who = "beams have" if seq_group.is_lockstep else "sequence has"
        error = GenerationFailed(
            f"the {who} outgrown the KV cache of {tokens} tokens",
            reason="KV_CACHE_TOO_SMALL",
            details={"num_tokens": seq_group.max_known_tokens, "num_cache_tokens": tokens},
        )
        self.num_changes += 1
        self._finisher.fail_seq_group(seq_group, error, now_us)

    def take_ended(self) -> list[SequenceGroup]:
        """Groups whose sequences have all ended since the last call."""
        return self._finisher.take_ended()

    # One step.

    def schedule(self, now_us: int, *, is_awaited: bool) -> StepPlan | None:
        """The next step's plan; None if there is nothing to do, or too much is in flight.

        What has outgrown the cache has no row in it; `take_outgrown` is to be called after it.
        """
        num_together = self._num_together(is_awaited)
        if len(self._pipeline) >= self._depth.depth(num_together):
            return None
        self.num_changes += 1
        self._running.drop_ended()
        batch = Batch(now_us, self._config.max_num_batched_tokens)
        self.swapping.land()
        self._make_way(batch)
        self._decode.add_rows(batch)
        self.swapping.add_landed(batch)
        self._admit_ahead(batch)
        self._prefill.go_on(batch)
        self._swap_in(batch)
        self._admit(batch)
        plan = self._emit(batch)
        if plan is not None:
            plan.num_together = num_together
        self._outgrown += batch.outgrown
        return plan

    def update(self, result: StepResult, now_us: int) -> None:
        """Take in the oldest open step's result. Raises ResultMismatch, changing nothing."""
        self._results.receive(result, now_us)
        self.num_changes += 1
        self.num_steps += 1

    def check(self) -> None:
        """Assert the invariants that hold between calls."""
        self.blocks.check()
        self._finisher.check()
        assert not self._outgrown
        self._running.check(self.seq_groups)
        assert self._running.num_places <= self._config.max_num_seqs
        for seq_group in self.seq_groups:
            is_queued = sum(seq_group in at for at in (self.waiting, self.ahead, self._migrating))
            assert is_queued == bool(seq_group.waiting()), "queued once if it waits"
            self.swapping.check(seq_group)

    # The phases of schedule().

    def _num_together(self, is_awaited: bool) -> int:
        """How many steps may travel together: one where anybody waits for a place, and while
        prompts are computed, as requests that come meanwhile are to follow them at once."""
        if is_awaited or self.is_draining or self.waiting or self.ahead or self.swapping:
            return 1
        return 1 if self._pipeline.is_prefilling else self._depth.num_together()

    def _make_way(self, batch: Batch) -> None:
        """Preempt others for the group that takes precedence over them."""
        seq_group = self.ahead.head()
        if seq_group is not None:
            for victim in self._victims.find(seq_group, self.seq_groups) or ():
                self._preemption.make_way(victim, batch)

    def _admit_ahead(self, batch: Batch) -> None:
        """The group that goes ahead. Once it has begun, what is left of it waits with others."""
        seq_group = self.ahead.head()
        if seq_group is None:
            return
        self._admitter.admit(self.ahead, batch)
        if seq_group in self.ahead and seq_group.num_running:
            self.ahead.discard(seq_group)
            self.waiting.add(seq_group)

    def _swap_in(self, batch: Batch) -> None:
        """Swapped-out groups, unless what runs is already short of memory."""
        if not batch.has_preempted:
            self.swapping.swap_in(batch)

    def _admit(self, batch: Batch) -> None:
        """Waiting groups, where none is swapped out."""
        if not self.swapping:
            self._admitter.admit(self.waiting, batch)

    def _emit(self, batch: Batch) -> StepPlan | None:
        batch.swap_out += self.blocks.end_plan()
        if batch.is_empty:
            return None
        forget_seq_ids = self._running.take_forget_seq_ids()
        plan, step = batch.to_plan(self._pipeline.next_step_id, forget_seq_ids)
        self._pipeline.push(step)
        self._totals.num_prefill_tokens += batch.num_prefill_tokens
        self._totals.num_swapped_out_blocks += len(plan.swap_out) // 2
        self._totals.num_swapped_in_blocks += len(plan.swap_in) // 2
        self._totals.num_copied_blocks += len(plan.copy) // 2
        if logger.isEnabledFor(logging.DEBUG):
            logger.debug(
                "step planned group_id=%s step_id=%d num_rows=%d num_prefill_tokens=%d "
                "num_waiting=%d num_free_blocks=%d",
                self.capacity.worker_group_id,
                plan.step_id,
                len(batch.rows),
                batch.num_prefill_tokens,
                len(self.waiting),
                self.blocks.num_free_blocks,
            )
        return plan
