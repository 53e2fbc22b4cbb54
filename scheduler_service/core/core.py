"""The scheduler core: every request from its submission to its end."""

import logging
from collections.abc import Collection
from math import inf

from scheduler_service.attempts import taken_over
from scheduler_service.core import fitting
from scheduler_service.core.admission.admission_control import (
    AdmissionControl,
    adapter_refusal,
    refusal_of,
)
from scheduler_service.core.admission.deadlines import (
    DeadlineTimers,
    deadline_exceeded,
    late_error,
)
from scheduler_service.core.admission.request_registry import RequestRegistry
from scheduler_service.core.config import SchedulerConfig, WorkerGroupCapacity
from scheduler_service.core.endings import ABORTED, Endings
from scheduler_service.core.inspection import Inspection, InspectionDetail, Inspector
from scheduler_service.core.policies import POLICIES
from scheduler_service.core.request import EngineOutputs, Request
from scheduler_service.core.request_timing import RequestEvent, to_us
from scheduler_service.core.routing import moves, poison
from scheduler_service.core.routing.fleet import Fleet, ServedModel
from scheduler_service.core.routing.transfers import Transfers
from scheduler_service.core.scheduler_stats import CoreSnapshot
from scheduler_service.core.scheduling import results
from scheduler_service.core.scheduling.scheduler import Scheduler
from scheduler_service.core.sequence import SequenceGroup, SequenceStatus
from scheduler_service.core.step_plan import StepPlan, StepResult
from scheduler_service.core.tenants import Tenants
from scheduler_service.core.throughput import StepWork
from scheduler_service.errors import (
    GenerationFailed,
    PagewireError,
    RequestAborted,
    UnknownAdapter,
    UnknownRequest,
)

logger = logging.getLogger(__name__)


class SchedulerCore:
    """All requests and all worker groups; see the package's docstring for how to drive it.

    Times (`now`) are seconds on one clock of the caller's.
    """

    def __init__(self, config: SchedulerConfig) -> None:
        self._config = config
        self._tenants = Tenants(
            config.default_tenant, config.tenants, isolate=config.isolate_tenants
        )
        self.requests = RequestRegistry(POLICIES[config.policy].rank, self._tenants)
        """The live requests, for questions."""
        self._fleet = Fleet(config, self._tenants)
        self._admission = AdmissionControl(config, self.requests, self._fleet)
        self._deadlines = DeadlineTimers()
        self._transfers = Transfers(config)
        self._inspector = Inspector(self._fleet.schedulers, self._fleet.adapters)
        self._endings = Endings(
            config, self.requests, self._fleet, self._deadlines, self._inspector
        )

    # Worker groups.

    def add_worker_group(self, capacity: WorkerGroupCapacity, now: float) -> None:
        """Add a worker group that is ready; its plans count from step 1.

        Raises ValueError if a group with this id exists, or if the group cannot work with the
        configuration.
        """
        model = self._fleet.add(capacity, to_us(now))
        moves.migrate_from_draining(model, to_us(now))
        self._refuse_unservable(model, now)

    def remove_worker_group(self, worker_group_id: str, now: float) -> None:
        """Remove a lost worker group: its requests go to the head of the queue with their tokens.

        A request that was computed alone at `max_worker_losses` such losses fails; the end of a
        draining group is no loss. An unknown id has no effect.
        """
        scheduler = self._remove(worker_group_id, now)
        if scheduler is None:
            return
        seq_groups, computing = scheduler.lose(to_us(now))
        # A group without requests was most likely drained: no request is affected.
        level = logging.WARNING if seq_groups else logging.INFO
        logger.log(
            level, "group gone group_id=%s num_requests=%d", worker_group_id, len(seq_groups)
        )
        model = self._fleet.model_of(scheduler)
        model.requeue(seq_groups)
        self._fleet.totals[model.name].num_recovered += len(seq_groups)
        if not scheduler.is_draining:
            self._blame(computing, now)
        model.sort_queue()

    def fail_worker_group(self, worker_group_id: str, reason: str, now: float) -> None:
        """Remove a worker group after `schedule` or `update` raised an error that is none of those
        that they declare: a fault of this software.

        What it was doing to its requests may be half done, so that none of them could be continued
        with certainty: they fail with SCHEDULER_FAULT. An unknown id has no effect.
        """
        scheduler = self._remove(worker_group_id, now)
        if scheduler is None:
            return
        model = self._fleet.model_of(scheduler)
        error = GenerationFailed(
            f"the scheduler failed with {reason} while it worked on this request; it may be tried "
            "again, and the core's log says more",
            reason="SCHEDULER_FAULT",
            details={"model": model.name, "fault": reason},
        )
        intact = {*model.waiting, *model.recovery.unschedulable}.union(
            *(other.seq_groups for other in model.schedulers)
        )
        for seq_group in self.requests.seq_groups():
            if seq_group.request.model == model.name and seq_group not in intact:
                seq_group.error = error
                self._endings.close(seq_group, now)
        scheduler.empty_queues()
        model.sort_queue()

    def drain_worker_group(self, worker_group_id: str, now: float) -> None:
        """Route nothing new to a worker group; move its requests, with their tokens, to others of
        its model as soon as the results of steps in flight are in. Requests that no other group
        can hold continue there until one joins that can. An unknown id has no effect."""
        scheduler = self._fleet.schedulers.get(worker_group_id)
        if scheduler is not None:
            scheduler.is_draining = True
            model = self._fleet.model_of(scheduler)
            model.reopen()
            moves.migrate_from_draining(model, to_us(now))

    def is_drained(self, worker_group_id: str) -> bool:
        """True if the worker group is gone, or is draining, holds no requests, and no started
        request needs it, as the only group that can continue it, or for what it has computed."""
        scheduler = self._fleet.schedulers.get(worker_group_id)
        if scheduler is None:
            return True
        if scheduler.seq_groups or not scheduler.is_draining:
            return False
        model = self._fleet.model_of(scheduler)
        return not (
            moves.is_needed(model, scheduler) or self._transfers.is_source(model, scheduler)
        )

    # Adapters.

    def set_adapters(
        self, model: str, adapters: dict[str, str], now: float, *, is_settling: bool = False
    ) -> None:
        """Set the adapters that all worker groups of a model have: names by the digest, in
        hexadecimal digits. Requests with other ones are refused, and end if they are live; or they
        wait, if more may become known soon (`is_settling`)."""
        by_digest = {bytes.fromhex(digest): name for digest, name in adapters.items()}
        self._fleet.set_adapters(model, by_digest, is_settling=is_settling)
        self.requests.forget_adapters(model, by_digest)
        for seq_group in self.requests.seq_groups():
            try:
                if seq_group.request.model == model:
                    self._fleet.check_adapter(seq_group.request)
            except UnknownAdapter as error:
                self._endings.end(seq_group, SequenceStatus.FINISHED_ERROR, error, now)

    # Requests.

    def submit(self, request: Request, now: float) -> None:
        """Queue a request, and report it to its frontend as accepted. A later attempt at a live
        request ends the earlier one.

        Raises InvalidArgument, DuplicateRequest, RequestTakenOver, UnknownModel, UnknownAdapter,
        PromptTooLong, TenantLimit, QueueFull, DeadlineExceeded or DeadlineUnreachable; nothing has
        changed then.
        """
        seq_group, previous = self._admission.admit(request, now)
        if previous is not None:
            error = taken_over(request.request_id, request.attempt)
            self._endings.end(previous, ABORTED, error, now)
        self.requests.add(seq_group)
        seq_group.frontend.outbox.accepted.append(request.handle)
        is_continued = seq_group.request.is_continued  # also of a later attempt without tokens
        event = RequestEvent.RESUMED if is_continued else RequestEvent.QUEUED
        seq_group.record_event(event, to_us(now))
        for seq in seq_group.waiting():
            results.finish_resumed(seq)
        if seq_group.num_unfinished == 0:
            self._endings.close(seq_group, now)
        else:
            model = self._fleet.model(request.model)
            model.enqueue(seq_group)
            if request.deadline is not None:
                self._deadlines.watch(seq_group, model, now)

    def cancel(self, frontend_id: str, handle: int, now: float) -> None:
        """End a request that its client cancelled; nothing more is reported of it. An unknown
        handle has no effect."""
        seq = self.requests.find_sequence(frontend_id, handle)
        if seq is not None:
            self._endings.end(seq.seq_group, ABORTED, None, now)

    def abort(self, tenant: str, request_id: str, now: float) -> None:
        """End a tenant's request and report that to its frontend. Raises UnknownRequest."""
        seq_group = self.requests.find(tenant, request_id)
        if seq_group is None:
            raise UnknownRequest(
                f"no live request {request_id}", details={"request_id": request_id}
            )
        self._endings.end(seq_group, ABORTED, RequestAborted("the request was aborted"), now)

    def stop_choice(self, frontend_id: str, handle: int, num_tokens: int, now: float) -> None:
        """End a choice at a stop string; only its first `num_tokens` output tokens count. No effect
        on a choice that has ended meanwhile, or whose request reports only at its end."""
        seq = self.requests.find_sequence(frontend_id, handle)
        if seq is None or seq.status.is_finished or not seq.seq_group.strategy.streams:
            return
        seq.truncate(num_tokens)
        self._endings.end_sequence(seq, SequenceStatus.FINISHED_STOPPED, now)

    def remove_frontend(self, frontend_id: str, now: float) -> None:
        """Remove a lost frontend and end its requests."""
        for seq_group in self.requests.seq_groups_of(frontend_id):
            self._endings.end(seq_group, ABORTED, None, now)
        self.requests.remove_frontend(frontend_id)

    def expire(self, now: float) -> None:
        """End requests past their deadlines, waiting ones that can no longer meet theirs, and
        those that have waited too long for a lost worker group."""
        while (seq_group := self._deadlines.due(now)) is not None:
            deadline = seq_group.request.deadline
            assert deadline is not None
            if now >= deadline:
                self._endings.end(seq_group, ABORTED, deadline_exceeded(), now)
            elif not seq_group.num_running and (error := self._late_error(seq_group, now)):
                self._endings.end(seq_group, ABORTED, error, now)
            else:
                self._deadlines.watch(seq_group, self._fleet.models[seq_group.request.model], now)
        if self._fleet.next_given_up_us < inf:
            for model in self._fleet.give_up_lost(to_us(now)):
                self._refuse_unservable(model, now)
                self._fail_unroutable(model, now)

    def next_deadline(self) -> float | None:
        """When `expire` is due, at the latest; None if nothing is timed."""
        given_up_us = self._fleet.next_given_up_us
        if given_up_us == inf:
            return self._deadlines.next_time
        return min(given_up_us / 1e6, self._deadlines.next_time or inf)

    # Steps.

    def schedule(self, worker_group_id: str, now: float) -> StepPlan | None:
        """A group's next step; None if there is nothing to do, or its pipeline is full."""
        scheduler = self._fleet.schedulers[worker_group_id]
        model = self._fleet.model_of(scheduler)
        if scheduler.is_full(is_awaited=bool(model.waiting)):
            return None
        self.expire(now)
        plan = None
        may_retry = True
        # Requests that ended, and copies that were given up, may have made room for others.
        while plan is None and may_retry:
            # Routing may end requests in other groups, which have all the tokens possible there.
            changed = model.schedulers if model.waiting else [scheduler]
            late, placed = model.route(
                lambda seq_group: self._late_error(seq_group, now),
                self._fleet.adapters.get(model.name, {}),
                to_us(now),
            )
            for seq_group, error in late:
                self._endings.end(seq_group, ABORTED, error, now)
            self._transfers.consider(model, placed, to_us(now))
            plan = scheduler.schedule(to_us(now), is_awaited=bool(model.waiting))
            may_retry = moves.settle_exceeding(model, scheduler, to_us(now))
            may_retry |= self._endings.close_ended(changed, now)
            self._fail_unroutable(model, now)
            if plan is not None or not may_retry:
                is_idle = plan is None and scheduler.is_idle
                may_retry = self._transfers.settle(scheduler, is_idle=is_idle)
        return plan

    def newest_work(self, worker_group_id: str) -> StepWork:
        """Estimated duration of the open step that was planned last for a group."""
        return self._fleet.schedulers[worker_group_id].pipeline.newest_work

    def add_plan_time(self, worker_group_id: str, seconds: float) -> None:
        """Add time that the caller spent on planning for a worker group (schedule, serialise,
        update) since the last call. Timings include it as far as the worker waited for it. An
        unknown id has no effect."""
        scheduler = self._fleet.schedulers.get(worker_group_id)
        if scheduler is not None:
            scheduler.clock.unassigned_plan_us += to_us(seconds)

    def update(self, worker_group_id: str, result: StepResult, now: float) -> None:
        """Take in the result of a group's oldest open step.

        Raises ResultMismatch, with nothing changed, if it is not that: the group should be removed.
        """
        scheduler = self._fleet.schedulers[worker_group_id]
        model = self._fleet.model_of(scheduler)
        for seq in scheduler.update(result, to_us(now)):
            self._transfers.withdraw(model, scheduler, seq)
        self._endings.close_ended([scheduler], now)
        model.woken |= self._transfers.receive(
            scheduler, result.step_id, result.fetches, to_us(now)
        )
        if scheduler.is_draining and not len(scheduler.pipeline):
            moves.migrate_from_draining(model, to_us(now))
        elif scheduler.hands_over and not len(scheduler.pipeline):
            moves.hand_over(model, scheduler, to_us(now))
            self._transfers.copy_ahead(model, scheduler, to_us(now))
        elif not scheduler.hands_over:
            moves.rebalance(model, self._transfers, scheduler, to_us(now))
        model.requeue(scheduler.pop_moved())

    # Outputs.

    def pop_woken(self) -> set[str]:
        """Worker groups woken since the last call: `schedule` may return a plan for them now.

        Not among them are groups that got a result, nor are all groups when one joins or leaves:
        callers know of these. Whichever group plans first places waiting requests, also in other
        groups. A draining group is woken when the requests that it was kept for ended or moved.
        """
        return self._fleet.pop_woken()

    def pop_outboxes(self) -> dict[str, EngineOutputs]:
        """Outputs by frontend since the last call; frontends without any are absent."""
        return self.requests.pop_outboxes()

    def pop_traced(self) -> list[SequenceGroup]:
        """Requests that have ended since the last call, of those whose trace is recorded; without
        their sequences."""
        return self._endings.pop_traced()

    def snapshot(self) -> CoreSnapshot:
        """Counts of the present state. Linear in the live requests."""
        seq_groups = self.requests.seq_groups()
        models = self._fleet.model_snapshots(seq_groups)
        listed = [models[name] for name in self._fleet.totals]
        return self._inspector.snapshot(models.values(), listed, seq_groups)

    def inspect(self, detail: InspectionDetail) -> Inspection:
        """Details of requests and memory; takes time linear in the requested details."""
        return self._inspector.inspect(self.requests.seq_groups(), detail)

    def check(self) -> None:
        """Assert the invariants that hold between calls. Linear in all live state."""
        seq_groups = self.requests.seq_groups()
        for seq_group in seq_groups:
            seq_group.check()
        self._fleet.check(seq_groups)
        self._transfers.check()
        self._deadlines.check(set(seq_groups))
        self._check_tenants(seq_groups)

    # Inside.

    def _remove(self, worker_group_id: str, now: float) -> Scheduler | None:
        """Remove a worker group and end its transfers; None if the id is unknown."""
        scheduler = self._fleet.remove(worker_group_id, to_us(now))
        if scheduler is not None:
            self._fleet.model_of(scheduler).woken |= self._transfers.remove(scheduler, to_us(now))
        return scheduler

    def _check_tenants(self, seq_groups: list[SequenceGroup]) -> None:
        self._tenants.check()
        queued = {seq_group for queue in self._fleet.queues() for seq_group in queue}
        for tenant in {seq_group.tenant for seq_group in seq_groups}:
            of_tenant = [seq_group for seq_group in seq_groups if seq_group.tenant is tenant]
            assert tenant.num_requests == len(of_tenant)
            assert tenant.kv_quota == sum(seq_group.placement.kv_quota for seq_group in of_tenant)
            tokens = sum(
                seq_group.num_prompt_tokens for seq_group in of_tenant if seq_group in queued
            )
            assert tenant.num_queued_tokens == tokens

    def _late_error(self, seq_group: SequenceGroup, now: float) -> PagewireError | None:
        """The reason why a group outside all batches cannot meet its deadline; None if it can."""
        model = self._fleet.models[seq_group.request.model]
        return late_error(seq_group, model, self.requests.seq_groups, now)

    def _refuse_unservable(self, model: ServedModel, now: float) -> None:
        """End requests that have not started and fit no worker group, present or expected back."""
        recovery = model.recovery
        for seq_group in [*model.waiting, *recovery.unschedulable]:
            if seq_group.has_begun or seq_group in recovery.accepted_until_us:
                continue
            error = refusal_of(seq_group, model.capacities(), self._config)
            if error is not None:
                self._endings.end(seq_group, SequenceStatus.FINISHED_IGNORED, error, now)

    def _fail_unroutable(self, model: ServedModel, now: float) -> None:
        """End requests that no worker group, present or expected back, is large enough for, or has
        adapters for."""
        for seq_group in model.recovery.unroutable(model.capacities()):
            refusals = [adapter_refusal(seq_group, c) for c in model.capacities()]
            if refusals and all(refusals):
                status = SequenceStatus.FINISHED_ERROR
                self._endings.end(seq_group, status, refusals[0], now)
                continue
            caches = [fitting.num_cache_tokens(seq_group, c) for c in model.capacities()]
            too_small = [cache for cache in caches if cache < seq_group.max_known_tokens]
            tokens = max(seq_group.placement.exceeded_tokens, *too_small, 0)
            error = GenerationFailed(
                f"the request has outgrown the KV cache of {tokens} tokens, and no worker group "
                "with a larger one is there or expected back; lost ones are waited for "
                f"{self._config.max_outgrown_wait_s:g} s",
                reason="KV_CACHE_TOO_SMALL",
                details={
                    "num_tokens": seq_group.max_known_tokens,
                    "num_cache_tokens": tokens,
                    "max_outgrown_wait_s": self._config.max_outgrown_wait_s,
                },
            )
            self._endings.end(seq_group, SequenceStatus.FINISHED_ERROR, error, now)

    def _blame(self, computing: Collection[SequenceGroup], now: float) -> None:
        """Count a worker's death against the requests that it was computing."""
        is_alone = len(computing) == 1
        for seq_group in self.requests.seq_groups():
            if seq_group in computing:
                error = poison.count_loss(seq_group, self._config, is_alone=is_alone)
                if error is not None:
                    self._endings.end(seq_group, SequenceStatus.FINISHED_ERROR, error, now)
            elif not is_alone:
                seq_group.losses.num_lone = 0
