"""Routes a model's waiting requests to its worker groups: which one, and when.

Of the worker groups that a request fits, the router chooses the one that is expected to have
answered it first. A worker group's work is counted in tokens, each as long as the group takes for
one:

    its own prompt    tokens that no block of the group holds; host blocks cost their transfer
    waiting there     prompts of others that are not computed yet
    running there     a token in every step for each sequence, as long as the answer takes
    memory shortage   tokens that find no free block: they will be computed a second time

So a conversation's next turn goes where its blocks are, unless the work that runs or waits there
costs more than computing them again; and of groups that differ in speed the faster ones get more.

A group without capacity now costs a wait on top: the time in which the share of its sequences ends
that is in the way. A request may wait for such a group although another would take it at once, at
most as long as it would gain there without a wait: so however wrong the estimate is, it takes at
most twice as long as it could have. (The rule of ski rental; Karlin et al., "Competitive snoopy
caching", Algorithmica 1988.)

A request is routed when a worker group has capacity for it, not before, so that a queue never waits
behind one group while another is idle. One that finds none waits for one of those that it fits.
That group keeps its free capacity for it: nothing that comes later is routed there, so that large
requests are served in their turn. The other groups continue to take what follows, and so does each
group that the request does not fit.

A group that had no capacity for a request is looked at again only once it has changed, and between
two rounds one or two worker groups have. So a round takes about as many looks as there are groups
that keep their capacity for a request, not as many for each waiting request.

A suspect, which may have killed workers, goes to no group that has another: if the worker died,
both would fail. It waits until the other has ended or is none any more, which is a matter of
a few steps, and holds up no other request meanwhile.

Nothing is drawn at random, and no clock is read: the same calls give the same routes.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from statistics import fmean
from typing import Any

from scheduler_service.core.policies import Policy
from scheduler_service.core.request_queue import ModelQueue
from scheduler_service.core.scheduling.scheduler import Scheduler
from scheduler_service.core.sequence import SequenceGroup
from scheduler_service.core.stats.throughput import MovingAverage

OUTPUT_TOKENS_UNMEASURED = 128
"""Assumed output length until the first request has ended."""

_OUTPUT_WEIGHT = 0.02
"""Of the newest answer in their average length: about the last 50 count."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RouteEstimate:
    """Estimated cost and wait if the request were routed to this worker group."""

    scheduler: Scheduler
    has_room: bool
    cost_us: float
    """Time to the end of the answer from when the group takes the request."""
    wait_us: float
    """Time until the group has room for it; infinite if unknown."""
    num_sequences: int
    """Sequences that the group holds."""
    waits_by_choice: bool = False
    """Whether another has room, and this is worth the wait."""

    @property
    def order(self) -> tuple[float, float, int, int]:
        """The least is the best. Among equals the group with the fewest sequences, then with the
        most free blocks."""
        num_free = self.scheduler.blocks.num_free_blocks
        return self.cost_us + self.wait_us, self.cost_us, self.num_sequences, -num_free


class Router:
    """Chooses among one model's worker groups."""

    def __init__(self) -> None:
        self._output_tokens = MovingAverage(_OUTPUT_WEIGHT)

    def note_answer(self, num_tokens: int) -> None:
        """Count an answer that has ended, by its length."""
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
        at_once = [estimate for estimate in estimates if estimate.has_room]
        if not at_once:
            awaited = (
                o
                for o in estimates
                if o.scheduler.capacity.worker_group_id == seq_group.routing.awaits
            )
            return next(awaited, best)
        second_best = min(at_once, key=lambda estimate: estimate.order)
        may_wait = _may_wait(seq_group, best, second_best, now_us)
        return replace(best, waits_by_choice=True) if may_wait else second_best

    def _estimates(
        self, seq_group: SequenceGroup, schedulers: Sequence[Scheduler]
    ) -> list[RouteEstimate]:
        """Of all, but for those that are full and could not be the best whatever they have."""
        token_us = [us_per_token(scheduler) for scheduler in schedulers]
        known = [us for us in token_us if us is not None]
        # Where nothing was measured it is only tokens that are compared.
        typical_us = fmean(known) if known else 1.0
        num_output_tokens = self._num_output_tokens(seq_group)
        loads = [
            _WorkerLoad.of(seq_group, scheduler, num_output_tokens, us or typical_us)
            for scheduler, us in zip(schedulers, token_us, strict=True)
        ]
        estimates = [load.estimate(seq_group) for load in loads if load.has_room]
        least_us = min(
            (estimate.cost_us for estimate in estimates if estimate.has_room), default=float("inf")
        )
        rest = [load for load in loads if not load.has_room and load.least_cost_us < least_us]
        return estimates + [load.estimate(seq_group) for load in rest]

    def _num_output_tokens(self, seq_group: SequenceGroup) -> float:
        """Tokens still to be expected of the longest answer."""
        usual = self._output_tokens.mean or OUTPUT_TOKENS_UNMEASURED
        num_known = seq_group.max_known_tokens - seq_group.num_prompt_tokens
        return max(1.0, min(usual, seq_group.request.max_tokens) - num_known)


def us_per_token(scheduler: Scheduler) -> float | None:
    """The time that a token more adds to a worker group's work; None if nothing was measured.

    At least its share of a step that is as large as can be, which takes no less than one that only
    decodes: where steps take equally long whatever is in them, it is these that are compared.
    """
    rates = scheduler.rates
    step_us, token_us = rates.us_per_decode_step, rates.us_per_further_token
    if step_us is None:
        return token_us
    return max(token_us or 0.0, step_us / scheduler.probe.max_step_tokens)


@dataclass(frozen=True, slots=True)
class _WorkerLoad:
    """What a worker group has to do, the answer to a request included, but not its prompt."""

    scheduler: Scheduler
    has_room: bool
    num_sequences: int
    num_output_tokens: float
    token_us: float
    num_tokens: float

    @classmethod
    def of(
        cls,
        seq_group: SequenceGroup,
        scheduler: Scheduler,
        num_output_tokens: float,
        token_us: float,
    ) -> "_WorkerLoad":
        num_sequences = scheduler.probe.num_sequences
        num_rows = num_sequences + seq_group.num_unfinished
        num_tokens = scheduler.probe.num_tokens_to_prefill + num_output_tokens * num_rows
        has_room = scheduler.probe.has_room
        return cls(scheduler, has_room, num_sequences, num_output_tokens, token_us, num_tokens)

    @property
    def least_cost_us(self) -> float:
        """If it had all of the prompt."""
        return self.num_tokens * self.token_us

    def estimate(self, seq_group: SequenceGroup) -> RouteEstimate:
        """With what it has."""
        scheduler = self.scheduler
        estimate = scheduler.probe.estimate(seq_group)
        num_tokens = self.num_tokens + estimate.num_tokens_to_compute
        num_free = scheduler.blocks.num_free_blocks * scheduler.blocks.block_size
        num_again = max(0.0, num_tokens - num_free)
        block_us = scheduler.rates.us_per_moved_block or 0.0
        cost_us = (num_tokens + num_again) * self.token_us
        return RouteEstimate(
            scheduler=scheduler,
            has_room=self.has_room and estimate.shortage == 0,
            cost_us=cost_us + estimate.num_blocks_to_fetch * block_us,
            wait_us=_wait_us(scheduler, estimate.shortage, self.num_output_tokens),
            num_sequences=self.num_sequences,
        )


def _wait_us(scheduler: Scheduler, shortage: float, num_output_tokens: float) -> float:
    """The time until such a share of a worker group's sequences has ended. Prompts that wait are no
    part of it: they are in the cost."""
    if scheduler.ahead or scheduler.swapping:
        return float("inf")
    if shortage == 0:
        return 0.0
    step_us = scheduler.rates.us_per_decode_step
    return float("inf") if step_us is None else shortage * num_output_tokens * step_us


def _may_wait(
    seq_group: SequenceGroup, best: RouteEstimate, at_once: RouteEstimate, now_us: int
) -> bool:
    """Whether it may wait for the best still; its patience begins when it is first asked."""
    if seq_group.routing.until_us is None:
        seq_group.routing.until_us = now_us + round(at_once.cost_us - best.cost_us)
    return now_us < seq_group.routing.until_us


class RoutingRound:
    """The worker groups that nobody waits for so far, and what is placed in them.

    Whatever is left out of the queue's order meanwhile is to come back when the round is over.
    """

    def __init__(
        self,
        waiting: ModelQueue[Any],
        schedulers: list[Scheduler],
        policy: Policy,
        router: Router,
        suitable: Callable[[SequenceGroup], list[Scheduler]],
    ) -> None:
        """`suitable`: the worker groups that a request may go to, full or not."""
        self._waiting = waiting
        self._open = dict.fromkeys(schedulers)
        self._with_room = {s for s in schedulers if s.probe.has_room}
        """Those of the open ones that may have room for something."""
        self._policy = policy
        self._router = router
        self._suitable = suitable
        self.unsuitable: list[SequenceGroup] = []
        """Requests that fit no worker group; they are no longer in the queue."""

    def next(self, now_us: int) -> tuple[SequenceGroup, Scheduler] | None:
        """The next request that goes to a worker group, and which; it is in the queue still. None
        if no more finds room."""
        while self._may_go_on() and (seq_group := self._waiting.head()) is not None:
            scheduler = self._place(seq_group, now_us)
            if scheduler is not None:
                return seq_group, scheduler
        return None

    def note_taken(self, scheduler: Scheduler) -> None:
        """The worker group has taken what `next` gave it."""
        if not scheduler.probe.has_room:
            self._with_room.discard(scheduler)

    def _may_go_on(self) -> bool:
        """Whether anything at all may be placed."""
        return bool(self._with_room) or (self._policy.goes_ahead and bool(self._open))

    def _place(self, seq_group: SequenceGroup, now_us: int) -> Scheduler | None:
        """Route the head of the queue; skip it if no worker group takes it."""
        suitable = self._suitable(seq_group)
        if not suitable:
            self._waiting.discard(seq_group)
            self.unsuitable.append(seq_group)
            return None
        tenant = seq_group.tenant
        allowed = [s for s in suitable if tenant.may_hold(seq_group.most_blocks(s.capacity))]
        if not allowed:
            self._waiting.skip_tenant_limited(seq_group)
            return None
        free = [scheduler for scheduler in allowed if scheduler in self._open]
        if not free:
            self._waiting.skip_queue(seq_group)
            return None
        if seq_group.is_suspect:
            free = [scheduler for scheduler in free if not scheduler.probe.has_suspect]
            if not free:
                self._waiting.skip(seq_group)
                return None
        return self._choose(seq_group, free, now_us)

    def _choose(
        self, seq_group: SequenceGroup, schedulers: list[Scheduler], now_us: int
    ) -> Scheduler | None:
        seq_group.is_ahead = False
        awaited = self._still_awaited(seq_group, schedulers)
        if awaited is not None:
            self._wait_for(awaited, seq_group)
            return None
        if self._with_room:
            best = self._router.choose(seq_group, schedulers, now_us)
            if best.has_room:
                return best.scheduler
            if best.waits_by_choice:
                self._wait_for(best.scheduler, seq_group)
                return None
        ahead = [scheduler for scheduler in schedulers if scheduler.probe.can_take_ahead(seq_group)]
        if ahead:
            seq_group.is_ahead = True
            return self._router.choose(seq_group, ahead, now_us).scheduler
        if self._with_room:
            _note_refusals(seq_group, schedulers)
            self._wait_for(best.scheduler, seq_group)
        else:
            for scheduler in schedulers:  # lower-ranked ones cannot preempt anyone there either
                del self._open[scheduler]
        return None

    def _still_awaited(
        self, seq_group: SequenceGroup, schedulers: list[Scheduler]
    ) -> Scheduler | None:
        """What a request goes on waiting for, since all that had no room have none still; None if
        it must be chosen."""
        routing = seq_group.routing
        awaited = next(
            (s for s in schedulers if s.capacity.worker_group_id == routing.awaits), None
        )
        if awaited is None or not self._with_room:
            return None
        changed = [
            s
            for s in schedulers
            if routing.refusals.get(s.capacity.worker_group_id) != s.num_changes
        ]
        if any(scheduler.probe.has_room_for(seq_group) for scheduler in changed):
            return None
        _note_refusals(seq_group, changed)
        return awaited

    def _wait_for(self, scheduler: Scheduler, seq_group: SequenceGroup) -> None:
        seq_group.routing.awaits = scheduler.capacity.worker_group_id
        del self._open[scheduler]
        self._with_room.discard(scheduler)
        self._waiting.skip(seq_group)


def _note_refusals(seq_group: SequenceGroup, schedulers: Iterable[Scheduler]) -> None:
    """These have no room for a request."""
    seq_group.routing.refusals.update(
        (s.capacity.worker_group_id, s.num_changes) for s in schedulers
    )
