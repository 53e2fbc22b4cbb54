"""Plans the steps of one worker group, and processes their results."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace

from scheduler_service.core import fitting
from scheduler_service.core.config import Role, SchedulerConfig, WorkerGroupCapacity
from scheduler_service.core.kv_cache.manager import KVCacheManager
from scheduler_service.core.kv_cache.transfer_port import TransferPort
from scheduler_service.core.policies import Policy
from scheduler_service.core.request_timing import RequestEvent, RequestPhase
from scheduler_service.core.scheduler_stats import ModelTotals, MoveReason
from scheduler_service.core.scheduling.beams import Beams, BeamScheduler
from scheduler_service.core.scheduling.capacity_probe import CapacityProbe
from scheduler_service.core.scheduling.departures import Departures
from scheduler_service.core.scheduling.pipeline import Pipeline
from scheduler_service.core.scheduling.placed_groups import PlacedGroups
from scheduler_service.core.scheduling.pooling import Pooled, PoolingScheduler
from scheduler_service.core.scheduling.preemption import Preemption
from scheduler_service.core.scheduling.prefill import PrefillScheduler
from scheduler_service.core.scheduling.results import ResultProcessor
from scheduler_service.core.scheduling.running_set import RunningSet
from scheduler_service.core.scheduling.sampling import Sampling, SamplingScheduler
from scheduler_service.core.scheduling.step_planner import StepPlanner
from scheduler_service.core.scheduling.strategies import StrategySchedulers
from scheduler_service.core.sequence import Sequence, SequenceGroup, SequenceStatus
from scheduler_service.core.step_plan import StepPlan, StepResult
from scheduler_service.errors import GenerationFailed


@dataclass(eq=False)
class Scheduler:
    """Schedules the requests of one worker group.

    When a sequence leaves the batch, its memory and its id in the worker are released even if steps
    in flight use them: the worker executes plans in order, and the next owner uses them in
    a later plan. Tokens of its rows in flight are discarded if it has ended.
    """

    config: SchedulerConfig
    capacity: WorkerGroupCapacity
    policy: Policy
    totals: ModelTotals
    placed: PlacedGroups
    running: RunningSet
    pipeline: Pipeline
    probe: CapacityProbe
    planner: StepPlanner
    departures: Departures
    strategies: StrategySchedulers
    results: ResultProcessor
    port: TransferPort
    is_draining: bool = False
    has_partner: bool = True
    """Whether a group that does not drain is for the part of requests that this one is not for."""
    num_steps: int = 0
    _num_changes: int = 0
    _exceeding: list[SequenceGroup] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.cache = self.running.cache
        self.seq_groups = self.placed.seq_groups
        self.clock = self.pipeline.clock
        self.rates = self.pipeline.rates

    # The interface to the core.

    @property
    def num_changes(self) -> int:
        """Increases with every call that may change anything, so that there may be more room."""
        return self._num_changes + self.port.num_changes

    def is_full(self, *, is_awaited: bool) -> bool:
        """Whether no step can be planned before a result arrives. `is_awaited`: requests that are
        not routed yet wait for room."""
        if self.placed.suspect is not None:
            return len(self.pipeline) > 0  # it must be clear in whose step a worker dies
        if self.hands_over or (self.is_draining and self.capacity.kv_layout):
            return len(self.pipeline) > 0  # then all that its requests have computed can move
        return self.pipeline.is_full(self._max_results(is_awaited))

    @property
    def hands_over(self) -> bool:
        """Whether requests go elsewhere once their prompts are computed."""
        return self.has_partner and self.capacity.role is Role.PREFILL

    def is_partner_of(self, other: "Scheduler") -> bool:
        """Whether it does not drain, is for the part of requests that the other group is not for,
        and can read what is computed there."""
        here, there = self.capacity, other.capacity
        return not self.is_draining and here.role is not there.role and here.stores_like(there)

    @property
    def is_idle(self) -> bool:
        """Whether nothing runs, no step is in flight and no KV is on its way here."""
        return not (self.running.num_places or len(self.pipeline) or self.port.open_fetches)

    @property
    def is_at_rest(self) -> bool:
        """Whether the workers, which have executed plans, have none now: they begin the next one as
        soon as it arrives."""
        return self.num_steps > 0 and not len(self.pipeline)

    @property
    def is_short_of_memory(self) -> bool:
        """Whether a group preempts others here, or a preempted one waits to be swapped in."""
        return bool(self.placed.preempting or self.running.swapped)

    def accept(self, seq_group: SequenceGroup, now_us: int) -> None:
        """Queue a group that was routed here."""
        self._num_changes += 1
        self.placed.add(seq_group)
        seq_group.clock.end_kv_wait(now_us)
        seq_group.clock.timeline.add_placement(self.capacity.worker_group_id, now_us)
        is_inexact = fitting.is_inexact(seq_group, self.capacity)
        self.totals.num_inexact_recoveries += is_inexact
        seq_group.clock.timings.num_inexact_recoveries += is_inexact
        seq_group.placement.arithmetic = self.capacity.arithmetic
        max_output_tokens = fitting.max_output_tokens(seq_group, self.capacity)
        for seq in seq_group.sequences:
            seq.limit_output(max_output_tokens)
        self.strategies.of(seq_group).place(seq_group, now_us)
        if seq_group.num_unfinished:
            self.placed.enqueue(seq_group)

    def pop_not_started(self) -> list[SequenceGroup]:
        """Remove and return the groups that have not run here."""
        self._num_changes += 1
        return self.placed.pop_not_started()

    def start_moving(
        self, may_move: Callable[[SequenceGroup], bool], reason: MoveReason, now_us: int
    ) -> int:
        """Stop scheduling the groups that may move, and return their number. `pop_moved` returns
        them once they have no rows in flight."""
        self._num_changes += 1
        migrating = self.placed.migrating
        moving = [g for g in self.seq_groups if g not in migrating and may_move(g)]
        for seq_group in moving:
            if self.capacity.kv_layout:
                seq_group.placement.previous_id = self.capacity.worker_group_id
            self.departures.begin_move(seq_group, now_us)
        if moving:
            self.totals.num_moved[reason] += len(moving)
        return len(moving)

    def relieving(self) -> Iterator[SequenceGroup]:
        """The groups that would go first if another worker group served some of them: the first of
        those that were preempted, the first that was swapped out, and the one that will be
        preempted next."""
        waiting = (g for g in self.placed.waiting if g.clock.phase is RequestPhase.PREEMPTED)
        yield from sorted(waiting, key=lambda seq_group: seq_group.rank)[:1]
        if (swapped := self.running.swapped.peek()) is not None:
            yield swapped[1]
        decoding = reversed(self.running.decoding)
        last = next((s for s in decoding if s.status is SequenceStatus.RUNNING), None)
        if last is not None:
            yield last.seq_group

    def pop_moved(self) -> list[SequenceGroup]:
        """Remove and return the groups that are to move and have no rows in flight any more."""
        self._num_changes += 1
        if not self.placed.migrating:
            return []
        return self.placed.pop_moved({seq.seq_group for seq in self.pipeline.open_rows()})

    def lose(self, now_us: int) -> tuple[list[SequenceGroup], set[SequenceGroup]]:
        """Release everything: the worker is lost. Returns all groups, which start again with the
        tokens that they have, and those groups, ended ones included, that the worker was computing.
        Nothing may be scheduled here afterwards."""
        self._num_changes += 1
        computing = {seq.seq_group for seq in self.pipeline.open_rows()}
        self.empty_queues()
        for seq_group in self.seq_groups:
            seq_group.record_event(RequestEvent.WORKER_LOST, now_us)
            if seq_group.num_running:
                # What the worker did since its last result is lost.
                done_us = max(seq_group.clock.since_us, self.clock.mark_us)
                seq_group.clock.leave_batch(min(done_us, now_us), RequestPhase.RECOVERY)
            elif seq_group.clock.phase is RequestPhase.PREEMPTED:
                seq_group.clock.recover(now_us)
            seq_group.clock.end_kv_wait(now_us)
            if not seq_group.is_before_loss:
                seq_group.losses.pass_point()
            for seq in seq_group.unfinished():
                seq.restart()
        return list(self.seq_groups), computing

    def empty_queues(self) -> None:
        """Take all groups out of the queues, and their tokens off their tenants' accounts."""
        self.placed.waiting.pop_all()
        self.placed.preempting.pop_all()

    def prefilling_seq_groups(self) -> set[SequenceGroup]:
        """Running groups whose prompts are not computed yet, or whose KV is being swapped
        in."""
        sequences = (*self.running.prefilling, *self.running.swap_in_pending)
        # Those that have ended stay in the lists until the next plan.
        return {seq.seq_group for seq in sequences if seq.status is SequenceStatus.RUNNING}

    def end_sequence(self, seq: Sequence, status: SequenceStatus, now_us: int) -> None:
        """End a sequence and free what it held."""
        self._num_changes += 1
        self.departures.end_sequence(seq, status, now_us)

    def pop_exceeding(self) -> list[SequenceGroup]:
        """Remove and return the groups with a sequence that has become longer than the whole cache,
        or with beams that are too large for it together. They keep their memory until they fail or
        move.

        Must be called after the plan is complete: other sequences of these groups may have rows in
        it, so their ids and memory must not be released by the same plan.
        """
        self._num_changes += 1
        exceeding, self._exceeding = dict.fromkeys(self._exceeding), []
        return [seq_group for seq_group in exceeding if seq_group.num_unfinished]

    def fail_exceeding(self, seq_group: SequenceGroup, now_us: int) -> None:
        """End a group that exceeds the cache and that no other worker group can continue."""
        self._num_changes += 1
        tokens = seq_group.placement.num_cache_tokens
        num_joint = seq_group.num_joint
        error = GenerationFailed(
            f"the request has outgrown the KV cache of {tokens} tokens"
            if num_joint == 1
            else f"{num_joint} beams of {seq_group.max_known_tokens} tokens have outgrown the KV "
            "cache together: use fewer beams, or give the worker more memory",
            reason="KV_CACHE_TOO_SMALL",
            details={"num_tokens": seq_group.max_known_tokens, "num_cache_tokens": tokens},
        )
        self.departures.fail_seq_group(seq_group, error, now_us)

    def await_kv(self, seq_group: SequenceGroup, now_us: int) -> None:
        """Keep a group that is here waiting until KV has arrived for it."""
        self._num_changes += 1
        self.placed.awaiting_kv[seq_group] = None
        seq_group.clock.await_kv(now_us)

    def end_kv_wait(self, seq_group: SequenceGroup, now_us: int) -> None:
        """Let a group be admitted, if it is here and waits for KV."""
        self._num_changes += 1
        if seq_group in self.placed.awaiting_kv:
            del self.placed.awaiting_kv[seq_group]
            seq_group.clock.end_kv_wait(now_us)

    # One step.

    def schedule(self, now_us: int, *, is_awaited: bool) -> StepPlan | None:
        """The next step's plan; None if there is nothing to do, or the pipeline is full.

        Sequences that exceed the cache have no row in it; call `pop_exceeding` afterwards.
        """
        self._num_changes += 1
        if self.is_full(is_awaited=is_awaited):
            return None
        max_results = self._max_results(is_awaited)
        # With rows, a lease would not be granted before these are computed.
        plan, exceeding = self.planner.plan(now_us, leases_alone=self.hands_over)
        if plan is not None:
            plan.max_results = max_results
        self._exceeding += exceeding
        return plan

    def _max_results(self, is_awaited: bool) -> int:
        """Maximum number of results in a message: one while any request waits or prompts are
        computed, because requests that arrive then should follow at once."""
        placed = self.placed
        if (
            not self.pipeline.may_hold_results
            or is_awaited
            or self.is_draining
            or placed.suspect is not None
            or placed.waiting
            or placed.preempting
            or self.running.swapped
            or self.pipeline.is_prefilling
        ):
            return 1
        return self.pipeline.max_results(self.running.max_hold_us)

    def update(self, result: StepResult, now_us: int) -> list[Sequence]:
        """Process the result of the oldest step in flight; returns the sequences that failed.
        Raises ResultMismatch and changes nothing if it is another step's."""
        self._num_changes += 1
        failed = self.results.receive(result, now_us)
        self.num_steps += 1
        return failed

    def check(self) -> None:
        """Assert the invariants that hold between calls."""
        self.departures.check()
        self.placed.check()
        assert not self._exceeding
        self.running.check(self.seq_groups)
        assert self.running.num_places <= self.config.max_num_seqs


def make_scheduler(
    config: SchedulerConfig,
    capacity: WorkerGroupCapacity,
    totals: ModelTotals,
    policy: Policy,
    now_us: int,
) -> Scheduler:
    """A scheduler for a worker group that is ready. `totals`: of its model."""
    kept, capacity = capacity.kept, replace(capacity, kept=None)
    if capacity.whole_prompt:
        config = replace(config, enable_chunked_prefill=False, enable_prefix_caching=False)
    pipeline = Pipeline(config, capacity, now_us)
    placed = PlacedGroups(whole_prompts=capacity.whole_prompt, max_loras=capacity.max_loras)
    running = RunningSet(
        KVCacheManager(config, capacity, kept), pipeline.clock, config.max_num_seqs
    )
    rates = pipeline.rates
    preemption = Preemption(config.preemption_mode, placed, running, rates, totals)
    departures = Departures(placed, running)
    strategies = StrategySchedulers(
        {
            Sampling: SamplingScheduler(running, rates, preemption, departures),
            Beams: BeamScheduler(running, pipeline, preemption, departures, totals),
            Pooled: PoolingScheduler(running, rates, preemption, departures, config, capacity),
        }
    )
    port = TransferPort(running.cache.exchange, max(1, len(capacity.addresses)))
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
            config,
            capacity,
            placed,
            running,
            pipeline,
            probe,
            preemption,
            strategies,
            PrefillScheduler(placed, running, strategies),
            totals,
            port,
        ),
        departures=departures,
        strategies=strategies,
        results=ResultProcessor(running.cache, pipeline, departures, strategies, policy, totals),
        port=port,
    )
