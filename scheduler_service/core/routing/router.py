"""Routes a model's waiting requests to its worker groups: to which one, and when.

Of the worker groups that a request fits, the router chooses the one with the lowest estimated time
to the end of the answer. A worker group's work is counted in tokens, at the group's measured time
per token:

    own prompt          tokens that the group does not have; those in host memory cost their
                        transfer instead
    waiting prompts     prompt tokens of other requests that are not computed yet
    running sequences   one token per step for each sequence, for the expected length of the answer
    memory shortage     tokens for which there is no free memory: they will be computed twice

So the next turn of a conversation goes to the group that has its KV, unless the requests there
cost more time than computing it again; and faster groups get more requests.

For a group without capacity, the estimate adds a wait: the time until enough of its sequences have
ended. A request may wait for such a group although another has capacity now, but no longer than the
wait is estimated to save. So even if the estimate is wrong, the request takes at most twice as long
as it could have: the break-even rule of the ski rental problem (Karlin et al., "Competitive snoopy
caching", Algorithmica 1988).

A request is handed over when a worker group has capacity for it, not before, so that no queue
builds up at one group while another is idle. If no group has capacity, the request waits for one
group, and that group's free capacity is reserved for it: no later request is routed there, so that
large requests are served in their turn. The other groups continue to take later requests, as does
every group that the request does not fit.

A group that had no capacity for a request is asked again only after its state has changed, which
is true of one or two groups between two rounds. So a round asks about one group per reserved
group, not one per waiting request.

A suspect, which may have killed workers, goes to no group that tries another suspect. It waits for
the few steps until the other one has ended or is no longer a suspect, and holds up no other request
meanwhile. It does not preempt others. See `poison.py`.

A request with an adapter goes only to groups with a slot for it. If there is none, requests with
other adapters may pass it, so that those with an adapter that has a slot are computed together; but
only for `MAX_SLOT_WAIT_US`. From then on no later request with another adapter is handed over, so
that a slot becomes free. Requests without adapters always pass. One whose adapter the workers do
not have waits until they have it, and holds up nothing.

Routing reads no clock and uses no randomness: the same calls give the same routes.
"""

from collections.abc import Callable, Container, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from statistics import fmean
from typing import Any, TypeAlias

from scheduler_service.core import fitting
from scheduler_service.core.config import Role
from scheduler_service.core.policies import Policy
from scheduler_service.core.request_queue import ModelQueue
from scheduler_service.core.scheduling.scheduler import Scheduler
from scheduler_service.core.sequence import SequenceGroup
from scheduler_service.core.throughput import MovingAverage
from scheduler_service.errors import PagewireError

OUTPUT_TOKENS_UNMEASURED = 128
"""Output length assumed until the first request has ended."""

_OUTPUT_WEIGHT = 0.02
"""Weight of the newest output in the average length: about the last 50 outputs count."""

ADAPTER_TOKENS = 256
"""Tokens whose time it counts for a worker group to make an adapter resident."""

MAX_SLOT_WAIT_US = 2_000_000
"""Time for which requests with other adapters may pass one that waits for a slot."""

EquivalentWorkerGroups: TypeAlias = tuple[Scheduler, ...]
"""Worker groups of equal capacity and arithmetic, all draining or none: the same requests may go
to each of them."""

TooLate: TypeAlias = tuple[SequenceGroup, PagewireError]
"""A request that can no longer meet its deadline, and the error to end it with."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RouteEstimate:
    """Estimated cost and wait if the request were routed to this worker group."""

    scheduler: Scheduler
    has_room: bool
    cost_us: float
    """Time from when the group takes the request to the end of its output."""
    wait_us: float
    """Time until the group has capacity for it; infinite if unknown."""
    num_missing: int
    """Tokens of the request that the group does not have."""
    token_us: float
    """Its time to compute one of them."""
    is_worth_wait: bool = False
    """Whether to wait for this group although another one has capacity."""

    @property
    def order(self) -> tuple[float, float, int, int]:
        """The lowest is the best. Among equals: the group with the fewest sequences, then the one
        with the most free memory."""
        scheduler = self.scheduler
        num_sequences = scheduler.probe.num_sequences
        num_free = scheduler.cache.tables.num_free_tokens
        return self.cost_us + self.wait_us, self.cost_us, num_sequences, -num_free


class Router:
    """Chooses among one model's worker groups."""

    def __init__(self) -> None:
        self._output_tokens = MovingAverage(_OUTPUT_WEIGHT)

    def record_answer(self, num_tokens: int) -> None:
        """Add the length of an answer that has ended."""
        self._output_tokens.add(num_tokens)

    def choose(
        self, seq_group: SequenceGroup, schedulers: Sequence[Scheduler], now_us: int
    ) -> RouteEstimate:
        """The best worker group for a request among those that can hold it, even if it must wait
        for room there. A request keeps waiting for the same group as long as none has room."""
        estimates = self._estimates(seq_group, schedulers)
        best = min(estimates, key=lambda estimate: estimate.order)
        if best.has_room:
            return best
        placement = seq_group.placement
        with_room = [estimate for estimate in estimates if estimate.has_room]
        if not with_room:
            return next(
                (
                    candidate
                    for candidate in estimates
                    if _id(candidate.scheduler) == placement.awaits
                ),
                best,
            )
        second_best = min(with_room, key=lambda estimate: estimate.order)
        if placement.until_us is None:  # the wait begins when it is first considered
            placement.until_us = now_us + round(second_best.cost_us - best.cost_us)
        return replace(best, is_worth_wait=True) if now_us < placement.until_us else second_best

    def _estimates(
        self, seq_group: SequenceGroup, schedulers: Sequence[Scheduler]
    ) -> list[RouteEstimate]:
        """Estimates of all worker groups, except full ones that could not be the best even if they
        had the whole prompt: looking up the prompt is the expensive part."""
        num_output = self._num_output_tokens(seq_group)
        estimates: list[RouteEstimate] = []
        full: list[tuple[Scheduler, float, float]] = []
        min_us = float("inf")
        for scheduler, us in zip(schedulers, us_per_token(schedulers), strict=True):
            probe = scheduler.probe
            num_rows = probe.num_sequences + seq_group.num_unfinished
            num_tokens = probe.num_tokens_to_prefill + num_output * num_rows
            load = scheduler, num_tokens, us
            if not probe.has_room:
                full.append(load)
                continue
            estimates.append(_estimate(seq_group, *load, num_output, has_room=True))
            if estimates[-1].has_room:
                min_us = min(min_us, estimates[-1].cost_us)
        estimates += [
            _estimate(seq_group, scheduler, num_tokens, us, num_output, has_room=False)
            for scheduler, num_tokens, us in full
            if num_tokens * us < min_us
        ]
        return [_with_copies(estimate, estimates) for estimate in estimates]

    def _num_output_tokens(self, seq_group: SequenceGroup) -> float:
        """Expected number of tokens that the longest answer still needs."""
        usual = self._output_tokens.mean or OUTPUT_TOKENS_UNMEASURED
        num_generated = seq_group.max_known_tokens - seq_group.num_prompt_tokens
        return max(1.0, min(usual, seq_group.request.work.max_tokens) - num_generated)


def us_per_token(schedulers: Sequence[Scheduler]) -> list[float]:
    """The time that one more token adds to each worker group's work.

    It is at least a token's share of the largest possible step, which takes no less time than a
    decode step: where a step takes the same time whatever it computes, these shares are compared.
    A group that has computed no prompts recently counts like those that have, so that it does not
    seem to compute them at no cost.
    """
    rates = [scheduler.rates for scheduler in schedulers]
    of_prompts = [rate.us_per_prompt_token() for rate in rates]
    if all(us is None for us in of_prompts):  # all prompts are short
        of_prompts = [rate.us_per_prompt_token(1) for rate in rates]
    usual_us = _mean(of_prompts)
    times: list[float | None] = []
    for scheduler, prompt_us in zip(schedulers, of_prompts, strict=True):
        step_us = scheduler.rates.us_per_decode_step
        share_us = step_us and step_us / scheduler.config.max_num_batched_tokens
        token_us = usual_us if prompt_us is None else prompt_us
        measured = [us for us in (token_us, share_us) if us is not None]
        times.append(max(measured, default=None))
    typical_us = _mean(times) or 1.0  # if nothing is measured: compare tokens
    return [us or typical_us for us in times]


def _mean(values: Iterable[float | None]) -> float | None:
    measured = [value for value in values if value is not None]
    return fmean(measured) if measured else None


def _estimate(
    seq_group: SequenceGroup,
    scheduler: Scheduler,
    num_tokens: float,
    token_us: float,
    num_output_tokens: float,
    *,
    has_room: bool,
) -> RouteEstimate:
    """The estimate of a worker group that has `num_tokens` to compute, including the answer but not
    the request's own prompt; has_room: whether it may have room for any request."""
    found = scheduler.probe.estimate(seq_group)
    num_tokens += found.num_tokens_to_compute
    if seq_group.adapter and not scheduler.placed.adapters.is_resident(seq_group.adapter):
        num_tokens += ADAPTER_TOKENS
    num_twice = max(0.0, num_tokens - scheduler.cache.tables.num_free_tokens)
    fetch_us = found.num_moves * (scheduler.rates.us_per_move or 0.0)
    return RouteEstimate(
        scheduler=scheduler,
        has_room=has_room and found.shortage == 0,
        cost_us=(num_tokens + num_twice) * token_us + fetch_us,
        num_missing=found.num_tokens_to_compute,
        token_us=token_us,
        wait_us=_wait_us(scheduler, found.shortage, num_output_tokens),
    )


def _with_copies(estimate: RouteEstimate, others: Sequence[RouteEstimate]) -> RouteEstimate:
    """The estimate of a group that copies what another one has of the request, if that is faster
    than to compute it."""
    here = estimate.scheduler
    sources = (other for other in others if other.scheduler.capacity.stores_like(here.capacity))
    num_missing = min((other.num_missing for other in sources), default=estimate.num_missing)
    num_copied = estimate.num_missing - num_missing
    if num_copied <= 0:
        return estimate
    copy_us = here.rates.copy_us(here.cache.exchange.num_entries(num_copied))
    saved_us = num_copied * estimate.token_us - copy_us
    return replace(estimate, cost_us=estimate.cost_us - max(0.0, saved_us))


def _wait_us(scheduler: Scheduler, shortage: float, num_output_tokens: float) -> float:
    """The time until a share of a worker group's sequences has ended. Waiting prompts are not
    included: they are part of the cost."""
    if scheduler.is_short_of_memory:
        return float("inf")
    if shortage == 0:
        return 0.0
    step_us = scheduler.rates.us_per_decode_step
    return float("inf") if step_us is None else shortage * num_output_tokens * step_us


def eligible(
    seq_group: SequenceGroup, equivalent: Iterable[EquivalentWorkerGroups]
) -> tuple[EquivalentWorkerGroups, ...]:
    """The worker groups, full or not, that may serve a request.

    These are the groups in which it can get the most of the tokens that it requests, so that its
    answer does not depend on where it goes; for a started request the cache size counts, too.
    Draining groups take only started requests that no other group can hold. A request with output
    goes to groups of the arithmetic that computed it, if there are any. Groups for prefills, or for
    what follows, take the rest where there are no others.
    """
    able = [groups for groups in equivalent if fitting.fits(seq_group, groups[0].capacity)]
    suitable = [groups for groups in able if not groups[0].is_draining]
    reach = fitting.max_length
    if seq_group.has_begun or seq_group.request.work.generated:
        suitable = suitable or able
        exact = [
            candidate
            for candidate in suitable
            if not fitting.is_inexact(seq_group, candidate[0].capacity)
        ]
        suitable = exact or suitable
        reach = fitting.reach
    other = Role.PREFILL if seq_group.has_output else Role.DECODE
    suitable = [groups for groups in suitable if groups[0].capacity.role is not other] or suitable
    farthest = max((reach(seq_group, groups[0].capacity) for groups in suitable), default=0)
    return tuple(
        [candidate for candidate in suitable if reach(seq_group, candidate[0].capacity) == farthest]
    )


@dataclass(eq=False)
class RoutingRound:
    """One pass over a model's waiting requests, which hands them over to worker groups with room.

    A worker group is open until a request reserves its capacity. Requests that are skipped
    meanwhile return to their places at the end of the round.
    """

    waiting: ModelQueue[Any]
    schedulers: list[Scheduler]
    equivalent: list[EquivalentWorkerGroups]
    """The same schedulers, in sets to which the same requests may go."""
    policy: Policy
    router: Router
    adapters: Container[bytes]
    """Digests of those that all worker groups have."""

    def __post_init__(self) -> None:
        # Room in groups that no waiting request may go to is no reason to look at the queue.
        useful = set(chain.from_iterable(chain.from_iterable(self.waiting.kinds)))
        self._open = {s: None for s in self.schedulers if len(self.equivalent) == 1 or s in useful}
        self._with_room = {scheduler for scheduler in self._open if scheduler.probe.has_room}
        """The open groups that may have room for some request."""
        self.routed: dict[SequenceGroup, Scheduler] = {}
        """The requests that were handed over, and to which worker groups."""
        self.unfit: list[SequenceGroup] = []
        """The requests that fit no worker group, taken out of the queue."""
        self._overdue_adapter: bytes | None = None
        """The first adapter that has waited too long for a slot."""

    def run(
        self, late_error: Callable[[SequenceGroup], PagewireError | None], now_us: int
    ) -> list[TooLate]:
        """Hand over requests in order, as long as any group has room. Returns those for which
        `late_error` has an error when their turn comes: out of the queue, but not ended."""
        too_late = []
        self.waiting.retry_tenant_limited()
        while self._may_place_more() and (seq_group := self.waiting.head()) is not None:
            scheduler = self._route(seq_group, now_us)
            if scheduler is None:
                continue
            self.waiting.discard(seq_group)
            error = late_error(seq_group)
            if error is not None:
                too_late.append((seq_group, error))
            else:
                self._place(seq_group, scheduler, now_us)
        self.waiting.end_round()
        return too_late

    def _may_place_more(self) -> bool:
        return bool(self._with_room) or (self.policy.preempts and bool(self._open))

    def _place(self, seq_group: SequenceGroup, scheduler: Scheduler, now_us: int) -> None:
        self.policy.record_placed(seq_group)
        kv_quota = fitting.max_kv_quota(seq_group, scheduler.capacity)
        num_cache_tokens = fitting.num_cache_tokens(seq_group, scheduler.capacity)
        seq_group.placement.place(seq_group.tenant, kv_quota, num_cache_tokens)
        scheduler.accept(seq_group, now_us)
        self.routed[seq_group] = scheduler
        if not scheduler.probe.has_room:
            self._with_room.discard(scheduler)

    def _route(self, seq_group: SequenceGroup, now_us: int) -> Scheduler | None:
        """The worker group for the head of the queue; None if the request is skipped, because it
        must wait."""
        suitable = set(chain.from_iterable(self.waiting.kind_of(seq_group)))
        if not suitable:
            self.waiting.discard(seq_group)
            self.unfit.append(seq_group)
            return None
        if seq_group.adapter is not None and seq_group.adapter not in self.adapters:
            self.waiting.skip_queue(seq_group)
            return None
        allowed = [
            scheduler
            for scheduler in self.schedulers
            if scheduler in suitable
            and seq_group.tenant.may_hold(fitting.max_kv_quota(seq_group, scheduler.capacity))
        ]
        if not allowed or self.waiting.is_behind_tenant_limited(seq_group):
            self.waiting.skip_tenant_limited(seq_group)
            return None
        if seq_group.adapter is not None:
            allowed = self._with_slot(seq_group, seq_group.adapter, allowed, now_us)
        open_ = [scheduler for scheduler in allowed if scheduler in self._open]
        if avoids := seq_group.placement.avoids:
            open_ = [scheduler for scheduler in open_ if _id(scheduler) != avoids] or open_
        if not open_:
            self.waiting.skip_queue(seq_group)
            return None
        if seq_group.is_suspect:
            open_ = [scheduler for scheduler in open_ if scheduler.placed.suspect is None]
            if not open_ or self._is_tried_later(seq_group):
                self.waiting.skip(seq_group)
                return None
        return self._choose(seq_group, open_, now_us)

    def _with_slot(
        self, seq_group: SequenceGroup, adapter: bytes, schedulers: list[Scheduler], now_us: int
    ) -> list[Scheduler]:
        """The worker groups that have a slot for a request's adapter; none while an adapter waits
        for too long before it."""
        if self._overdue_adapter not in (None, adapter):
            return []
        found = [s for s in schedulers if s.placed.adapters.has_room_for(adapter)]
        placement = seq_group.placement
        if not found:
            if placement.slot_wait_us is None:
                placement.slot_wait_us = now_us
            if now_us - placement.slot_wait_us >= MAX_SLOT_WAIT_US:
                self._overdue_adapter = adapter
        return found

    def _is_tried_later(self, suspect: SequenceGroup) -> bool:
        """Whether another suspect, with fewer deaths in steps of its own, is waiting."""
        num_losses = suspect.losses.num_lone
        return num_losses > 0 and any(
            other.losses.num_lone < num_losses and other.is_suspect for other in self.waiting
        )

    def _choose(
        self, seq_group: SequenceGroup, schedulers: list[Scheduler], now_us: int
    ) -> Scheduler | None:
        seq_group.placement.is_preempting = False
        best: RouteEstimate | None = None
        only = schedulers[0] if len(schedulers) == 1 else None
        if only is not None and not only.capacity.cache_groups and only in self._with_room:
            return only  # it has room, as no memory is needed, and nothing to be compared with
        if self._with_room:
            awaited = self._still_awaited(seq_group, schedulers)
            if awaited is not None:
                self._reserve(awaited, seq_group)
                return None
            best = self.router.choose(seq_group, schedulers, now_us)
            if best.has_room:
                return best.scheduler
            if best.is_worth_wait:
                self._reserve(best.scheduler, seq_group)
                return None
        preemptable = [s for s in schedulers if s.probe.can_preempt_for(seq_group)]
        if preemptable:
            seq_group.placement.is_preempting = True
            return self.router.choose(seq_group, preemptable, now_us).scheduler
        if best is not None:
            _record_refusals(seq_group, schedulers)
            self._reserve(best.scheduler, seq_group)
            return None
        for scheduler in schedulers:  # lower-ranked requests cannot preempt anyone there either
            del self._open[scheduler]
        return None

    def _still_awaited(
        self, seq_group: SequenceGroup, schedulers: list[Scheduler]
    ) -> Scheduler | None:
        """The group that a request continues to wait for, because no group that refused it has
        changed and has room now; None if a group must be chosen."""
        placement = seq_group.placement
        awaited = next((s for s in schedulers if _id(s) == placement.awaits), None)
        if awaited is None:
            return None
        changed = [s for s in schedulers if placement.refusals.get(_id(s)) != s.num_changes]
        if any(scheduler.probe.has_room_for(seq_group) for scheduler in changed):
            return None
        _record_refusals(seq_group, changed)
        return awaited

    def _reserve(self, scheduler: Scheduler, seq_group: SequenceGroup) -> None:
        """Reserve a worker group's capacity for a request, and skip the request in this round."""
        seq_group.placement.awaits, seq_group.placement.avoids = _id(scheduler), ""
        del self._open[scheduler]
        self._with_room.discard(scheduler)
        self.waiting.skip(seq_group)


def _record_refusals(seq_group: SequenceGroup, schedulers: Iterable[Scheduler]) -> None:
    """Remember that these worker groups have no room for a request."""
    seq_group.placement.refusals.update((_id(s), s.num_changes) for s in schedulers)


def _id(scheduler: Scheduler) -> str:
    return scheduler.capacity.worker_group_id
