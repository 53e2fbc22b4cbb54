"""Whether a request can still meet its deadline.

No request is refused or dropped that might have succeeded: the estimate is a lower bound of the
time that a request takes, and unknown terms count as zero.

    own work    Prompt tokens that no worker group has cached, on device or host, then the tokens
                that it must generate (one, or `min_tokens` if there is room): on the worker group
                that is best for it, at the lowest average costs per token and step that were ever
                measured there. If some group has no such measurement: no time. If the request was
                started before, and so may be cached or swapped out: no time for the prompt. If an
                unfinished request shares a prefix, and may compute the same tokens first: no time
                for the prompt either.
    the queue   Prompt tokens that are served before its own in the policy's order, at three times
                the speed at which the queue has drained recently: outputs differ in length, so it
                may drain faster for a while. The speed is measured, so it accounts for cached
                tokens and for the time that decoding takes.

The check errs on the side of trying: an accepted request may still miss its deadline.
"""

from collections.abc import Callable, Iterable
from typing import TypeAlias

from scheduler_service.core import fitting
from scheduler_service.core.request_queue import RemovableHeap
from scheduler_service.core.request_timing import to_us
from scheduler_service.core.routing.fleet import ServedModel
from scheduler_service.core.scheduling.scheduler import Scheduler
from scheduler_service.core.sequence import SequenceGroup
from scheduler_service.core.throughput import bounded_delay_s
from scheduler_service.errors import DeadlineExceeded, DeadlineUnreachable

_QUEUE_SPEEDUP = 3.0

LiveSequenceGroups: TypeAlias = Callable[[], Iterable[SequenceGroup]]
"""Returns all live groups. Called only for a request that is about to be refused or dropped."""


def check_deadline(
    seq_group: SequenceGroup,
    model: ServedModel | None,
    live_seq_groups: LiveSequenceGroups,
    now: float,
) -> None:
    """Raise DeadlineExceeded if a new request cannot meet its deadline even without a
    queue, and DeadlineUnreachable if it cannot because of the queue.

    A request that continues after a loss was accepted before, and is not refused.
    """
    deadline = seq_group.request.deadline
    if deadline is None or model is None or seq_group.request.is_continued:
        return
    remaining_us = to_us(deadline - now)
    if remaining_us <= 0:
        raise deadline_exceeded()
    if _work_us(seq_group, model) + _wait_us(model, model.waiting.num_tokens) <= remaining_us:
        return  # even behind all others, whose tokens before it need not be counted
    if (error := late_error(seq_group, model, live_seq_groups, now)) is not None:
        raise error
    wait_us = _min_wait_us(seq_group, model)
    min_us = _min_us(seq_group, model, live_seq_groups, remaining_us, wait_us)
    if min_us > remaining_us:
        raise DeadlineUnreachable(
            f"with the requests queued before it, the request takes at least {_ms(min_us)} ms; "
            f"its deadline is in {_ms(remaining_us)} ms",
            details={"min_ms": _ms(min_us), "remaining_ms": _ms(remaining_us)},
            retry_delay_s=bounded_delay_s((min_us - remaining_us) / 1e6),
        )


def late_error(
    seq_group: SequenceGroup, model: ServedModel, live_seq_groups: LiveSequenceGroups, now: float
) -> DeadlineExceeded | None:
    """The error of a request that is in no batch and needs more time of a worker group than is
    left until its deadline; None if it may still meet it."""
    deadline = seq_group.request.deadline
    if deadline is None:
        return None
    remaining_us = to_us(deadline - now)
    min_us = _min_us(seq_group, model, live_seq_groups, remaining_us)
    if min_us <= remaining_us:
        return None
    return DeadlineExceeded(
        f"the request takes at least {_ms(min_us)} ms; its deadline is in {_ms(remaining_us)} ms",
        details={"min_ms": _ms(min_us), "remaining_ms": _ms(remaining_us)},
    )


def deadline_exceeded() -> DeadlineExceeded:
    """The error of a request whose deadline has passed."""
    return DeadlineExceeded("the request's deadline has passed")


def _min_us(
    seq_group: SequenceGroup,
    model: ServedModel,
    live_seq_groups: LiveSequenceGroups,
    remaining_us: float,
    wait_us: float = 0.0,
) -> float:
    """Lower bound of the time that a request takes. Looks for other requests that may compute its
    prompt only if it would otherwise take longer than `remaining_us`, as the search is linear in
    their number."""
    min_us = wait_us + _work_us(seq_group, model)
    if min_us <= remaining_us:
        return min_us
    lengths = {s.cache.prefixes.unit for s in model.schedulers if s.config.enable_prefix_caching}
    is_cached = any(
        _shares_prefix(seq_group, other, length)
        for other in live_seq_groups()
        for length in lengths
    )
    return wait_us + _work_us(seq_group, model, is_cached=is_cached)


def _work_us(seq_group: SequenceGroup, model: ServedModel, *, is_cached: bool = False) -> float:
    """The time that a request needs on the worker group that is fastest for it. The prompt of a
    request that has begun, or `is_cached`, is not counted."""
    is_cached = is_cached or seq_group.has_begun
    costs = (
        _work_us_on(s, seq_group, is_cached)
        for s in model.schedulers
        if fitting.fits(seq_group, s.capacity)
    )
    return min(costs, default=0.0)


def _work_us_on(scheduler: Scheduler, seq_group: SequenceGroup, is_cached: bool) -> float:
    room = fitting.max_length(seq_group, scheduler.capacity) - seq_group.num_prompt_tokens
    min_output = max(min(seq_group.request.work.min_tokens, room), 1)
    num_tokens = max(min_output - len(seq.output_token_ids) for seq in seq_group.active())
    decode_us = max(0, num_tokens - 1) * (scheduler.rates.min_us_per_decode_step or 0.0)
    if is_cached:
        return decode_us
    num_prompt_tokens = scheduler.probe.num_tokens_to_compute(seq_group)
    return num_prompt_tokens * (scheduler.rates.min_us_per_prefill_token or 0.0) + decode_us


def _min_wait_us(seq_group: SequenceGroup, model: ServedModel) -> float:
    return _wait_us(model, model.waiting.num_tokens_before(seq_group))


def _wait_us(model: ServedModel, num_tokens: int) -> float:
    """The least time in which as many tokens leave the queue."""
    return num_tokens * (model.throughput.us_per_token or 0.0) / _QUEUE_SPEEDUP


def _shares_prefix(seq_group: SequenceGroup, other: SequenceGroup, num_tokens: int) -> bool:
    """Whether another request may compute the first `num_tokens` tokens for the group."""
    if other is seq_group or other.request.model != seq_group.request.model:
        return False
    mine, others = seq_group.request.prompt_token_ids, other.request.prompt_token_ids
    return len(mine) > num_tokens and list(mine[:num_tokens]) == list(others[:num_tokens])


def _ms(microseconds: float) -> float:
    return round(microseconds / 1000, 1)


class DeadlineTimers:
    """Live requests with deadlines, by the time at which each is checked next."""

    def __init__(self) -> None:
        self._timers: RemovableHeap[SequenceGroup] = RemovableHeap()

    def watch(self, seq_group: SequenceGroup, model: ServedModel, now: float) -> None:
        """Set the timer of a request that has a deadline: to its deadline, or, unless it is
        running, to the last time at which it could start."""
        self.forget(seq_group)
        deadline = seq_group.request.deadline
        assert deadline is not None
        latest_start = deadline
        if not seq_group.num_running:
            latest_start -= _work_us(seq_group, model) / 1e6
        at = latest_start if latest_start > now else deadline
        self._timers.push((at, seq_group.rank), seq_group)

    def forget(self, seq_group: SequenceGroup) -> None:
        """Remove the timer of a request, if it has one."""
        if seq_group in self._timers:
            self._timers.remove(seq_group)

    def due(self, now: float) -> SequenceGroup | None:
        """A request whose timer has expired; it must be watched again, or forgotten."""
        first = self._timers.peek()
        return first[1] if first is not None and first[0][0] <= now else None

    @property
    def next_time(self) -> float | None:
        """When the first timer expires; None if no request has a deadline."""
        first = self._timers.peek()
        return first[0][0] if first is not None else None

    def check(self, live: set[SequenceGroup]) -> None:
        """Assert that no ended request has a timer."""
        assert set(self._timers) <= live
