"""The scheduler core: every request from its submission to its end."""

import logging
from collections import Counter
from collections.abc import Iterable

from scheduler_service.attempts import taken_over
from scheduler_service.core import delivery
from scheduler_service.core.admission import (
    Queue,
    check_queue,
    check_request,
    check_tenant,
    why_not,
)
from scheduler_service.core.config import GroupCapacity, SchedulerConfig, check_capacity
from scheduler_service.core.deadlines import check_deadline, next_look, passed, why_too_late
from scheduler_service.core.heap import RemovableHeap
from scheduler_service.core.inspection import Inspection, InspectionDetail, Inspector
from scheduler_service.core.latency_histogram import summed
from scheduler_service.core.models import Model
from scheduler_service.core.outbox import Outbox
from scheduler_service.core.plan import StepPlan, StepResult
from scheduler_service.core.policies import POLICIES
from scheduler_service.core.rates import StepWork
from scheduler_service.core.registry import Registry
from scheduler_service.core.request import Request
from scheduler_service.core.request_clock import to_us
from scheduler_service.core.scheduler import Scheduler
from scheduler_service.core.sequence import Sequence, SequenceGroup, SequenceStatus
from scheduler_service.core.snapshot import CoreSnapshot, ModelSnapshot, Totals
from scheduler_service.core.takeover import check_takes_over, continuation
from scheduler_service.core.tenants import Tenants
from scheduler_service.core.timeline import RequestEvent, TracedRequest
from scheduler_service.errors import (
    DuplicateRequest,
    GenerationFailed,
    PagewireError,
    RequestAborted,
    UnknownModel,
    UnknownRequest,
)

logger = logging.getLogger(__name__)

ABORTED = SequenceStatus.FINISHED_ABORTED


class SchedulerCore:
    """All requests, all worker groups; the package's docstring tells how to drive it.

    Times (`now`) are seconds on one clock of the caller's.
    """

    def __init__(self, config: SchedulerConfig) -> None:
        self._config = config
        self._policy = POLICIES[config.policy]
        self._tenants = Tenants(config.default_tenant, config.tenants)
        self._registry = Registry(self._policy.rank, self._tenants)
        self._models: dict[str, Model] = {}
        self._schedulers: dict[str, Scheduler] = {}
        self._deadlines: RemovableHeap[SequenceGroup] = RemovableHeap()
        self._inspector = Inspector(self._schedulers)
        self._num_finished = 0
        self._traced: list[TracedRequest] = []
        self._totals: dict[str, Totals] = {}
        """By model, of all that worker groups have ever served."""

    # Worker groups.

    def add_group(self, group: GroupCapacity, now: float) -> None:
        """A worker group is ready; its plans count from step 1.

        Raises ValueError if a group of this id is there, or could not work with the
        configuration.
        """
        if group.group_id in self._schedulers:
            raise ValueError(f"group {group.group_id} is there already")
        check_capacity(self._config, group)
        model = self._model(group.model)
        totals = self._totals.setdefault(group.model, Totals())
        scheduler = Scheduler(self._config, group, model.policy, totals, to_us(now))
        self._schedulers[group.group_id] = scheduler
        model.add(scheduler)
        model.move_on(to_us(now))
        self._refuse_hopeless(model, now)

    def remove_group(self, group_id: str, now: float) -> None:
        """A worker group is gone: what it had goes to the head of the queue, with the tokens it
        has. What a worker was computing at its death, once too often, fails; one that drained was
        to go, and does not count. Unknown: no effect."""
        scheduler = self._schedulers.pop(group_id, None)
        if scheduler is None:
            return
        model = self._models[scheduler.capacity.model]
        model.remove(scheduler)
        groups, computing = scheduler.lose(to_us(now))
        # One without requests was drained, most likely: nobody is hurt.
        level = logging.WARNING if groups else logging.INFO
        logger.log(level, "group gone group_id=%s num_requests=%d", group_id, len(groups))
        model.queue_again(groups)
        self._totals[model.name].num_recovered += len(groups)
        if not scheduler.is_draining:
            for group in self._to_blame([group for group in groups if group in computing]):
                self._count_loss(group, now)

    def drain_group(self, group_id: str, now: float) -> None:
        """Give a group nothing new, and have what it has go on in other groups of its model, with
        the tokens it has, as soon as the results of its steps under way are in. What no other can
        hold goes on there until one joins that can. Unknown: no effect."""
        scheduler = self._schedulers.get(group_id)
        if scheduler is not None:
            scheduler.is_draining = True
            model = self._models[scheduler.capacity.model]
            model.reopen()
            model.move_on(to_us(now))

    def is_drained(self, group_id: str) -> bool:
        """Whether a group is draining and has nothing left, or is gone. One that has is not while
        there is a request that has begun, and that no group can go on with that does not drain."""
        scheduler = self._schedulers.get(group_id)
        if scheduler is None:
            return True
        if scheduler.groups or not scheduler.is_draining:
            return False
        return not self._models[scheduler.capacity.model].is_needed(scheduler)

    # Requests.

    def submit(self, request: Request, now: float) -> None:
        """Queue a request; it shows in its frontend's outbox as accepted. If it is a later try at
        a live one, that one ends.

        Raises InvalidArgument, DuplicateRequest, RequestTakenOver, UnknownModel, PromptTooLong,
        TenantLimit, QueueFull, DeadlineExceeded or DeadlineUnreachable; the request is then as if
        it had never been.
        """
        check_request(request, self._config)
        former = self._registry.find(request.tenant, request.request_id)
        if former is not None:
            check_takes_over(request, former.request)
            request = continuation(request, former, to_us(now))
        if self._registry.has_handles_of(request):
            raise DuplicateRequest(
                f"the frontend has a live request of handle {request.handle}",
                reason="DUPLICATE_HANDLE",
                details={"request_id": request.request_id},
            )
        self._check_model(request.model)
        group = self._registry.make_group(request, to_us(now))
        model = self._models.get(request.model)
        error = why_not(group, model.capacities()) if model is not None else None
        if error is not None:
            raise error
        drains = [model.drain for model in self._models.values()]
        check_tenant(group, drains, self._config)
        check_queue(request, self._queues(), drains, self._config)
        check_deadline(group, model, self._registry.groups, now)
        if former is not None:
            group.is_charged = former.is_charged
            error = taken_over(request.request_id, request.attempt)
            self._end(former, ABORTED, error, now)
        self._suspect(group)
        self._accept(group, now)

    def cancel(self, frontend_id: str, handle: int, now: float) -> None:
        """Its client no longer wants a request; nothing more is said of it. Unknown: no effect."""
        seq = self._registry.find_sequence(frontend_id, handle)
        if seq is not None:
            self._end(seq.group, ABORTED, None, now)

    def abort(self, tenant: str, request_id: str, now: float) -> None:
        """End a tenant's request on somebody's wish; its frontend hears. Raises UnknownRequest."""
        group = self._registry.find(tenant, request_id)
        if group is None:
            raise UnknownRequest(
                f"no live request {request_id}", details={"request_id": request_id}
            )
        self._end(group, ABORTED, RequestAborted("the request was aborted"), now)

    def stop_choice(self, frontend_id: str, handle: int, num_tokens: int, now: float) -> None:
        """A choice ended by a stop string, `num_tokens` of its tokens count. No effect if it has
        ended meanwhile, nor on a beam search, which has no stop strings."""
        seq = self._registry.find_sequence(frontend_id, handle)
        if seq is None or seq.status.is_finished or seq.group.is_lockstep:
            return
        del seq.output_token_ids[num_tokens:]
        self._end_sequence(seq, SequenceStatus.FINISHED_STOPPED, now)

    def remove_frontend(self, frontend_id: str, now: float) -> None:
        """A frontend is gone, and its requests end."""
        for group in self._registry.groups_of(frontend_id):
            self._end(group, ABORTED, None, now)
        self._registry.remove_frontend(frontend_id)

    def expire(self, now: float) -> None:
        """End the requests whose deadlines have come, and those that wait and can no longer meet
        theirs."""
        while (first := self._deadlines.peek()) is not None and first[0][0] <= now:
            group = first[1]
            deadline = group.request.deadline
            assert deadline is not None
            if now >= deadline:
                self._end(group, ABORTED, passed(), now)
            elif group.num_running or not self._end_if_late(group, now):
                self._deadlines.remove(group)
                self._watch(group, deadline, now)

    def next_deadline(self) -> float | None:
        """When `expire` is due, at the latest; None if no request has a deadline."""
        first = self._deadlines.peek()
        return first[0][0] if first is not None else None

    # Steps.

    def schedule(self, group_id: str, now: float) -> StepPlan | None:
        """A group's next step; None if there is nothing to do, or its pipeline is full."""
        scheduler = self._schedulers[group_id]
        model = self._models[scheduler.capacity.model]
        if scheduler.is_full(is_awaited=bool(model.waiting)):
            return None
        self.expire(now)
        plan = None
        has_left = True
        while plan is None and has_left:  # what has gone may be all that others waited for
            model.place(lambda group: self._end_if_late(group, now), to_us(now))
            plan = scheduler.schedule(to_us(now), is_awaited=bool(model.waiting))
            has_left = model.settle_outgrown(scheduler, to_us(now))
            has_left |= self._close_ended(model.schedulers, now)
        return plan

    def newest_work(self, group_id: str) -> StepWork:
        """What the step that was planned last for a group, and is open, takes its worker."""
        return self._schedulers[group_id].newest_work

    def add_plan_time(self, group_id: str, seconds: float) -> None:
        """Time the caller spent on planning for a group (schedule, serialise, update) and has not
        told yet. It shows in timings as far as the worker waited for it. Unknown: no effect."""
        scheduler = self._schedulers.get(group_id)
        if scheduler is not None:
            scheduler.clock.unassigned_plan_us += to_us(seconds)

    def update(self, group_id: str, result: StepResult, now: float) -> None:
        """Take in the result of a group's oldest open step.

        Raises ResultMismatch, with nothing changed, if it is not that: the group should be removed.
        """
        scheduler = self._schedulers[group_id]
        scheduler.update(result, to_us(now))
        self._close_ended([scheduler], now)
        self._models[scheduler.capacity.model].queue_again(scheduler.take_gone())

    # News.

    def take_stirred(self) -> set[str]:
        """Worker groups that a `schedule` of any has given requests to since the last call."""
        stirred: set[str] = set()
        for model in self._models.values():
            if model.stirred:
                stirred |= model.stirred
                model.stirred = set()
        return stirred

    def take_outboxes(self) -> dict[str, Outbox]:
        """News by frontend since the last call; frontends without news are absent."""
        return self._registry.take_outboxes()

    def take_traced(self) -> list[TracedRequest]:
        """Requests that have ended since the last call, of those whose trace is recorded."""
        traced, self._traced = self._traced, []
        return traced

    def _keep_trace(self, group: SequenceGroup) -> None:
        request, timeline = group.request, group.timeline
        if request.traceparent:
            self._traced.append(
                TracedRequest(
                    request.request_id, request.traceparent, timeline.entries, timeline.placements
                )
            )

    def snapshot(self) -> CoreSnapshot:
        """Counts of the present state. Linear in the live requests."""
        models = self._model_snapshots()
        totals = [model.totals for model in models.values()]
        return CoreSnapshot(
            num_waiting=sum(model.num_waiting for model in models.values()),
            num_running=sum(model.num_running for model in models.values()),
            num_swapped=sum(model.num_swapped for model in models.values()),
            num_finished=self._num_finished,
            num_generated_tokens=sum(each.num_generated_tokens for each in totals),
            num_prefill_tokens=sum(each.num_prefill_tokens for each in totals),
            num_preemptions=sum(each.num_preemptions for each in totals),
            num_swapped_out_blocks=sum(each.num_swapped_out_blocks for each in totals),
            num_swapped_in_blocks=sum(each.num_swapped_in_blocks for each in totals),
            first_token_counts=summed(each.first_token for each in totals),
            inter_token_counts=summed(each.inter_token for each in totals),
            models=[models[name] for name in self._totals],
            num_by_tenant=Counter(group.tenant.name for group in self._registry.groups()),
            groups=[scheduler.snapshot() for scheduler in self._schedulers.values()],
        )

    def inspect(self, detail: InspectionDetail) -> Inspection:
        """Requests one by one, and memory block by block; linear in what is asked for."""
        return self._inspector.look(self._registry.groups(), detail)

    def _model_snapshots(self) -> dict[str, ModelSnapshot]:
        """Those that were served, and those that somebody waits for."""
        known = {name: ModelSnapshot(name=name, totals=t) for name, t in self._totals.items()}
        for group in self._registry.groups():
            name = group.request.model
            model = known.setdefault(name, ModelSnapshot(name=name, totals=Totals()))
            model.num_running += group.num_running > 0
            model.num_waiting += group.num_running == 0
        for scheduler in self._schedulers.values():  # what is swapped out does not run
            model = known[scheduler.capacity.model]
            model.num_swapped += len(scheduler.swapping)
            model.num_waiting -= len(scheduler.swapping)
        return known

    def check(self) -> None:
        """Assert the invariants that hold between calls. Linear in all live state."""
        groups = self._registry.groups()
        for group in groups:
            group.check()
            model = self._models[group.request.model]
            places = [group in model.waiting, group in model.stranded]
            assert group.is_placed == (not any(places))
            places += [group in scheduler.groups for scheduler in model.schedulers]
            assert sum(places) == 1, "a live request is in one place"
        num_placed = sum(len(scheduler.groups) for scheduler in self._schedulers.values())
        num_unplaced = sum(len(m.waiting) + len(m.stranded) for m in self._models.values())
        assert num_placed + num_unplaced == len(groups), "a place holds a request that has ended"
        assert set(self._deadlines) <= set(groups)
        for model in self._models.values():
            model.check()
        for scheduler in self._schedulers.values():
            scheduler.check()
        self._check_tenants(groups)

    # Inside.

    def _check_tenants(self, groups: list[SequenceGroup]) -> None:
        self._tenants.check()
        queued = {group for queue in self._queues() for group in queue}
        for tenant in {group.tenant for group in groups}:
            own = [group for group in groups if group.tenant is tenant]
            assert tenant.num_requests == len(own)
            assert tenant.num_kv_blocks == sum(group.num_reserved_blocks for group in own)
            tokens = sum(group.num_prompt_tokens for group in own if group in queued)
            assert tenant.num_queued_tokens == tokens

    def _model(self, name: str) -> Model:
        """The model of this name, made if it is new."""
        model = self._models.get(name)
        if model is None:
            model = self._models[name] = Model(name, self._policy(self._tenants))
        return model

    def _check_model(self, name: str) -> None:
        """Raise UnknownModel if other models are served, and this one never was."""
        model = self._models.get(name)
        if self._schedulers and (model is None or not model.was_served):
            served = ", ".join(sorted({s.capacity.model for s in self._schedulers.values()}))
            raise UnknownModel(
                f"no model named {name!r} is served; there is: {served}",
                details={"model": name, "served": served},
            )

    def _queues(self) -> list[Queue]:
        """All places in which requests wait."""
        queues: list[Queue] = []
        for scheduler in self._schedulers.values():
            queues += (scheduler.waiting, scheduler.ahead)
        for model in self._models.values():
            queues += (model.waiting, model.stranded)
        return queues

    def _accept(self, group: SequenceGroup, now: float) -> None:
        request = group.request
        self._registry.add(group)
        group.frontend.outbox.accepted.append(request.handle)
        event = RequestEvent.RESUMED if request.is_continued else RequestEvent.QUEUED
        group.note(event, to_us(now))
        for seq in group.waiting():
            delivery.finish_resumed(seq)
        if group.num_unfinished == 0:
            self._close(group, now)
            return
        self._model(request.model).waiting.add(group)
        if request.deadline is not None:
            self._watch(group, request.deadline, now)

    def _watch(self, group: SequenceGroup, deadline: float, now: float) -> None:
        """Look at a live group when it may no longer meet its deadline."""
        due = next_look(group, self._models[group.request.model], deadline, now)
        self._deadlines.push((due, group.rank), group)

    def _end_if_late(self, group: SequenceGroup, now: float) -> bool:
        """End a group that is in no batch and can no longer meet its deadline; whether it is so."""
        model = self._models[group.request.model]
        error = why_too_late(group, model, self._registry.groups, now)
        if error is None:
            return False
        self._end(group, ABORTED, error, now)
        return True

    def _refuse_hopeless(self, model: Model, now: float) -> None:
        """End what was accepted before any worker group was known, and fits none."""
        for group in [*model.waiting, *model.stranded]:
            if group.has_begun:
                continue
            error = why_not(group, model.capacities())
            if error is not None:
                self._end(group, SequenceStatus.FINISHED_IGNORED, error, now)

    def _to_blame(self, computing: list[SequenceGroup]) -> list[SequenceGroup]:
        """Those that may be the cause of a worker's death. Where it was computing a suspect, one
        that was as near to its end, but has come past the point where it would have been the cause
        before, is not."""
        if not any(group.is_suspect for group in computing):
            return computing
        return [group for group in computing if group.is_suspect or not self._is_last_time(group)]

    def _is_last_time(self, group: SequenceGroup) -> bool:
        """Whether the next worker's death would fail a group."""
        return 0 < group.num_worker_losses == self._config.max_worker_losses - 1

    def _count_loss(self, group: SequenceGroup, now: float) -> None:
        """Note that a worker died that was computing a group; it may be the cause."""
        group.num_worker_losses += 1
        if group.num_worker_losses >= self._config.max_worker_losses:
            error = GenerationFailed(
                f"the request was on {group.num_worker_losses} workers when they were lost",
                reason="WORKERS_LOST",
                details={"num_worker_losses": group.num_worker_losses},
            )
            self._end(group, SequenceStatus.FINISHED_ERROR, error, now)
        else:
            group.frontend.outbox.worker_losses.append(group.request.handle)
            self._suspect(group)

    def _suspect(self, group: SequenceGroup) -> None:
        """Keep a group that the next worker's death would fail from others of its kind, until it
        is past the steps that were in flight."""
        if self._is_last_time(group) and group.num_unfinished:
            group.suspect_length = group.max_known_tokens + self._config.max_steps_ahead

    def _scheduler_of(self, group: SequenceGroup) -> Scheduler | None:
        """Where a live group is placed."""
        model = self._models[group.request.model]
        return next((s for s in model.schedulers if group in s.groups), None)

    def _end(
        self, group: SequenceGroup, status: SequenceStatus, error: PagewireError | None, now: float
    ) -> None:
        """End all that is left of a live group."""
        group.error = error
        for seq in list(group.unfinished()):
            self._end_sequence(seq, status, now)

    def _end_sequence(self, seq: Sequence, status: SequenceStatus, now: float) -> None:
        """End a sequence of a live group, and the group with the last of them."""
        scheduler = self._scheduler_of(seq.group)
        if scheduler is not None:
            scheduler.end_sequence(seq, status, to_us(now))
            self._close_ended([scheduler], now)
            return
        seq.group.end(seq, status)
        if seq.group.num_unfinished == 0:
            self._models[seq.group.request.model].discard(seq.group)
            self._close(seq.group, now)

    def _close_ended(self, schedulers: Iterable[Scheduler], now: float) -> bool:
        """Close the groups that have ended in schedulers; whether there are any."""
        ended = [group for scheduler in schedulers for group in scheduler.take_ended()]
        for group in ended:
            self._close(group, now)
        return bool(ended)

    def _close(self, group: SequenceGroup, now: float) -> None:
        """Say how a group ended, and forget it."""
        delivery.finish_request(group, group.clock.finish(to_us(now)))
        group.note(RequestEvent.ENDED, to_us(now))
        self._keep_trace(group)
        self._inspector.note_end(group, to_us(now))
        self._registry.remove(group, to_us(now))
        if group in self._deadlines:
            self._deadlines.remove(group)
        model = self._models.get(group.request.model)
        if model is not None:
            for seq in group.choices():
                model.placement.note_answer(len(seq.output_token_ids))
            model.release(group)
            if model.is_unused:
                del self._models[model.name]
        totals = self._totals.get(group.request.model)
        if totals is not None and group.has_begun and self._config.enable_prefix_caching:
            totals.num_prefix_queries += group.num_prompt_tokens
            totals.num_prefix_hits += group.num_cached_tokens
        self._num_finished += 1
