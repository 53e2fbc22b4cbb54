"""Plans the steps of one worker group, and processes their results."""

from collections.abc import Callable, Collection
from dataclasses import replace

from scheduler_service.core.config import SchedulerConfig, WorkerGroupCapacity
from scheduler_service.core.kv_cache.manager import KVCacheManager
from scheduler_service.core.policies import Policy
from scheduler_service.core.request_queue import WaitingQueue
from scheduler_service.core.request_timing import RequestEvent, RequestPhase
from scheduler_service.core.scheduler_stats import ModelTotals
from scheduler_service.core.scheduling.beams import Beams, BeamScheduler
from scheduler_service.core.scheduling.capacity_probe import CapacityProbe
from scheduler_service.core.scheduling.departures import Departures
from scheduler_service.core.scheduling.pipeline import Pipeline
from scheduler_service.core.scheduling.placed_groups import PlacedGroups
from scheduler_service.core.scheduling.pooling import Pooled, PoolingScheduler
from scheduler_service.core.scheduling.preemption import Preemption
from scheduler_service.core.scheduling.results import ResultProcessor
from scheduler_service.core.scheduling.running_set import RunningSet
from scheduler_service.core.scheduling.sampling import Sampling, SamplingScheduler
from scheduler_service.core.scheduling.step_planner import StepPlanner
from scheduler_service.core.scheduling.strategies import StrategySchedulers
from scheduler_service.core.sequence import Sequence, SequenceGroup, SequenceStatus
from scheduler_service.core.step_plan import StepPlan, StepResult
from scheduler_service.core.throughput import StepWork
from scheduler_service.errors import GenerationFailed


class Scheduler:
    """Schedules the requests of one worker group.

    When a sequence leaves the batch, its memory and its id in the worker are released even if steps
    in flight use them: the worker executes plans in order, and the next owner uses them in
    a later plan. Tokens of its rows in flight are discarded if it has ended.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        capacity: WorkerGroupCapacity,
        *,
        policy: Policy,
        totals: ModelTotals,
        placed: PlacedGroups,
        running: RunningSet,
        pipeline: Pipeline,
        probe: CapacityProbe,
        planner: StepPlanner,
        departures: Departures,
        strategies: StrategySchedulers,
        results: ResultProcessor,
    ) -> None:
        self.config = config
        self.capacity = capacity
        self.cache = running.cache
        self.seq_groups = placed.seq_groups
        self.clock = pipeline.clock
        self.rates = pipeline.rates
        self.probe = probe
        self.is_draining = False
        self.num_steps = 0
        self.num_changes = 0
        """Increases whenever there may be more capacity than before."""
        self._policy = policy
        self._totals = totals
        self._placed = placed
        self._running = running
        self._pipeline = pipeline
        self._planner = planner
        self._departures = departures
        self._strategies = strategies
        self._results = results
        self._outgrown: list[SequenceGroup] = []

    # The interface to the core.

    def is_full(self, *, is_awaited: bool) -> bool:
        """Whether no step can be planned before a result arrives. `is_awaited`: requests that are
        not routed yet wait for room."""
        if self._placed.suspect is not None:
            return len(self._pipeline) > 0  # it must be clear in whose step a worker dies
        return self._pipeline.is_full(self._max_results(is_awaited))

    @property
    def is_short_of_memory(self) -> bool:
        """Whether a group preempts others here, or a preempted one waits to be swapped in."""
        return bool(self._placed.preempting or self._running.swapped)

    @property
    def num_swapped(self) -> int:
        """The number of swapped-out groups."""
        return len(self._running.swapped)

    @property
    def queues(self) -> tuple[WaitingQueue, WaitingQueue]:
        """The queues in which groups wait here."""
        return self._placed.waiting, self._placed.preempting

    @property
    def newest_work(self) -> StepWork:
        """The work of the newest step in flight."""
        return self._pipeline.newest_work

    def accept(self, seq_group: SequenceGroup, now_us: int) -> None:
        """Queue a group that was routed here."""
        self._placed.add(seq_group)
        if self._policy.preempts:  # it may be preempted for requests that had no room here
            self.num_changes += 1
        seq_group.clock.timeline.add_placement(self.capacity.worker_group_id, now_us)
        self._totals.num_inexact_recoveries += seq_group.enter(self.capacity)
        max_output_tokens = seq_group.max_output_tokens(self.capacity)
        for seq in seq_group.sequences:
            seq.limit_output(max_output_tokens)
        self._strategies.of(seq_group).place(seq_group, now_us)
        if seq_group.num_unfinished:
            self._placed.enqueue(seq_group)

    def pop_not_started(self) -> list[SequenceGroup]:
        """Remove and return the groups that have not run here."""
        self.num_changes += 1
        return self._placed.pop_not_started()

    def start_moving(self, may_move: Callable[[SequenceGroup], bool], now_us: int) -> int:
        """Stop scheduling the groups that may move, and return their number. `pop_moved` returns
        them once they have no rows in flight."""
        self.num_changes += 1
        migrating = self._placed.migrating
        moving = [g for g in self.seq_groups if g not in migrating and may_move(g)]
        for seq_group in moving:
            self._departures.begin_move(seq_group, now_us)
        return len(moving)

    @property
    def migrating(self) -> Collection[SequenceGroup]:
        """Groups that are to move and still have rows in flight."""
        return self._placed.migrating.keys()

    def pop_moved(self) -> list[SequenceGroup]:
        """Remove and return the groups that are to move and have no rows in flight any more."""
        self.num_changes += 1
        if not self._placed.migrating:
            return []
        return self._placed.pop_moved({seq.seq_group for seq in self._pipeline.open_rows()})

    def lose(self, now_us: int) -> tuple[list[SequenceGroup], set[SequenceGroup]]:
        """Release everything: the worker is lost. Returns all groups, which start again with the
        tokens that they have, and those groups, ended ones included, that the worker was computing.
        Nothing may be scheduled here afterwards."""
        computing = {seq.seq_group for seq in self._pipeline.open_rows()}
        self._placed.waiting.take_all()
        self._placed.preempting.take_all()
        for seq_group in self.seq_groups:
            seq_group.note(RequestEvent.WORKER_LOST, now_us)
            if seq_group.num_running:
                # What the worker did since its last result is lost.
                done_us = max(seq_group.clock.since_us, self.clock.mark_us)
                seq_group.clock.leave_batch(min(done_us, now_us), RequestPhase.RECOVERY)
            elif seq_group.clock.phase is RequestPhase.PREEMPTED:
                seq_group.clock.recover(now_us)
            seq_group.num_running = 0
            if not seq_group.is_before_loss:
                seq_group.num_repeated_losses = seq_group.num_lone_losses = 0
            for seq in seq_group.unfinished():
                seq.restart()
        return list(self.seq_groups), computing

    def prefilling_seq_groups(self) -> set[SequenceGroup]:
        """Running groups whose prompts are not computed yet, or whose KV is being swapped
        in."""
        return {
            seq.seq_group for seq in (*self._running.prefilling, *self._running.swap_in_pending)
        }

    def end_sequence(self, seq: Sequence, status: SequenceStatus, now_us: int) -> None:
        """End a sequence and free what it held."""
        self.num_changes += 1
        self._departures.end_sequence(seq, status, now_us)

    def pop_outgrown(self) -> list[SequenceGroup]:
        """Remove and return the groups with a sequence that has become longer than the whole cache,
        or with beams that are too large for it together. They keep their memory until they fail or
        move.

        Must be called after the plan is complete: other sequences of these groups may have rows in
        it, so their ids and memory must not be released by the same plan.
        """
        outgrown, self._outgrown = dict.fromkeys(self._outgrown), []
        return [seq_group for seq_group in outgrown if seq_group.num_unfinished]

    def fail_outgrown(self, seq_group: SequenceGroup, now_us: int) -> None:
        """End an outgrown group that no other worker group can continue."""
        tokens = self.capacity.num_cache_tokens
        error = GenerationFailed(
            f"the request has outgrown the KV cache of {tokens} tokens",
            reason="KV_CACHE_TOO_SMALL",
            details={"num_tokens": seq_group.max_known_tokens, "num_cache_tokens": tokens},
        )
        self.num_changes += 1
        self._departures.fail_seq_group(seq_group, error, now_us)

    def pop_ended(self) -> list[SequenceGroup]:
        """Groups whose sequences have all ended since the last call."""
        return self._departures.pop_ended()

    # One step.

    def schedule(self, now_us: int, *, is_awaited: bool) -> StepPlan | None:
        """The next step's plan; None if there is nothing to do, or the pipeline is full.

        Sequences that have outgrown the cache have no row in it; call `pop_outgrown` afterwards.
        """
        if self.is_full(is_awaited=is_awaited):
            return None
        max_results = self._max_results(is_awaited)
        self.num_changes += 1
        plan, outgrown = self._planner.plan(now_us)
        if plan is not None:
            plan.max_results = max_results
        self._outgrown += outgrown
        return plan

    def _max_results(self, is_awaited: bool) -> int:
        """Maximum number of results in a message: one while any request waits or prompts are
        computed, because requests that arrive then should follow at once."""
        placed = self._placed
        if (
            not self._pipeline.may_hold_results
            or is_awaited
            or self.is_draining
            or placed.suspect is not None
            or placed.waiting
            or placed.preempting
            or self._running.swapped
        ):
            return 1
        if self._pipeline.is_prefilling:
            return 1
        return self._pipeline.max_results(self._running.max_hold_us)

    def update(self, result: StepResult, now_us: int) -> None:
        """Process the result of the oldest step in flight. Raises ResultMismatch and changes
        nothing if it is another step's."""
        self._results.receive(result, now_us)
        self.num_changes += 1
        self.num_steps += 1

    def check(self) -> None:
        """Assert the invariants that hold between calls."""
        self._departures.check()
        self._placed.check()
        assert not self._outgrown
        self._running.check(self.seq_groups)
        assert self._running.num_places <= self.config.max_num_seqs


def make_scheduler(
    config: SchedulerConfig,
    capacity: WorkerGroupCapacity,
    totals: ModelTotals,
    policy: Policy,
    now_us: int,
) -> Scheduler:
    """A scheduler for a worker group that is ready. `totals`: of its model."""
    if capacity.whole_prompt:
        config = replace(config, enable_chunked_prefill=False, enable_prefix_caching=False)
    pipeline = Pipeline(config, capacity, now_us)
    placed = PlacedGroups()
    running = RunningSet(KVCacheManager(config, capacity), pipeline.clock, config.max_num_seqs)
    rates = pipeline.rates
    preemption = Preemption(config.preemption_mode, placed, running, rates, totals)
    departures = Departures(placed, running)
    strategies = StrategySchedulers(
        {
            Sampling: SamplingScheduler(running, rates, preemption, departures),
            Beams: BeamScheduler(running, pipeline, preemption, departures, totals),
            Pooled: PoolingScheduler(running, rates, preemption, departures, capacity),
        }
    )
    probe = CapacityProbe(config, capacity, placed, running, rates, policy)
    return Scheduler(
        config,
        capacity,
        policy=policy,
        totals=totals,
        placed=placed,
        running=running,
        pipeline=pipeline,
        probe=probe,
        planner=StepPlanner(
            config, capacity, placed, running, pipeline, probe, preemption, strategies, totals
        ),
        departures=departures,
        strategies=strategies,
        results=ResultProcessor(running.cache, pipeline, departures, strategies, policy, totals),
    )
