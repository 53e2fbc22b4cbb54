"""Which worker group takes a request: the one that is expected to have answered it first.

A worker group's work is counted in tokens, each as long as the group takes for one:

    its own prompt    what no block of the group holds; blocks in host memory cost their transfer
    what waits there  prompts of others that are not computed yet
    what runs there   a token in every step for each sequence, as long as the answer takes
    want of memory    what finds no free block: it will be computed a second time

So a conversation's next turn goes where its blocks are, unless what runs or waits there costs more
than to compute them again; and of groups that differ in speed the faster ones get more.

A group without room now costs a wait on top: the time in which the share of its sequences ends
that is in the way. A request may wait for such a group although another would take it at once, at
most as long as it would gain there without a wait: so whatever the estimate is worth, it takes at
most twice as long as it could have. (The rule of ski rental; Karlin et al., "Competitive snoopy
caching", Algorithmica 1988.)

Nothing is drawn, and no clock is read: the same calls place alike.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import fmean

from scheduler_service.core.scheduling.scheduler import Scheduler
from scheduler_service.core.sequence import SequenceGroup
from scheduler_service.core.stats.throughput import MovingAverage

OUTPUT_TOKENS_UNMEASURED = 128
"""Length of an answer as long as none has ended."""

_OUTPUT_WEIGHT = 0.02
"""Of the newest answer in their average length: about the last 50 count."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Offer:
    """What it would be to go to a worker group."""

    scheduler: Scheduler
    has_room: bool
    cost_us: float
    """Time to the end of the answer from when the group takes the request."""
    wait_us: float
    """Time until it can; infinite if it cannot be told."""
    num_sequences: int
    """That are there."""
    waits_by_choice: bool = False
    """Whether another has room, and this is worth the wait."""

    @property
    def order(self) -> tuple[float, float, int, int]:
        """The least is the best. Among equals the group with the fewest sequences, then with the
        most free blocks."""
        num_free = self.scheduler.blocks.num_free_blocks
        return self.cost_us + self.wait_us, self.cost_us, self.num_sequences, -num_free


class Placement:
    """Chooses among one model's worker groups."""

    def __init__(self) -> None:
        self._output_tokens = MovingAverage(_OUTPUT_WEIGHT)

    def note_answer(self, num_tokens: int) -> None:
        """An answer of so many tokens has ended."""
        self._output_tokens.add(num_tokens)

    def choose(self, group: SequenceGroup, schedulers: Sequence[Scheduler], now_us: int) -> Offer:
        """Of the worker groups that a request fits, the one that is best for it, be it that it
        must wait for room there. What it waits for it goes on waiting for as long as none has
        room."""
        offers = self._offers(group, schedulers)
        best = min(offers, key=lambda offer: offer.order)
        if best.has_room:
            return best
        at_once = [offer for offer in offers if offer.has_room]
        if not at_once:
            awaited = (o for o in offers if o.scheduler.capacity.group_id == group.wait.awaits)
            return next(awaited, best)
        second_best = min(at_once, key=lambda offer: offer.order)
        may_wait = _may_wait(group, best, second_best, now_us)
        return replace(best, waits_by_choice=True) if may_wait else second_best

    def _offers(self, group: SequenceGroup, schedulers: Sequence[Scheduler]) -> list[Offer]:
        """Of all, but for those that are full and could not be the best whatever they have."""
        token_us = [us_per_token(scheduler) for scheduler in schedulers]
        known = [us for us in token_us if us is not None]
        # Where nothing was measured it is only tokens that are compared.
        typical_us = fmean(known) if known else 1.0
        num_output_tokens = self._num_output_tokens(group)
        loads = [
            _Load.of(group, scheduler, num_output_tokens, us or typical_us)
            for scheduler, us in zip(schedulers, token_us, strict=True)
        ]
        offers = [load.offer(group) for load in loads if load.has_room]
        least_us = min((offer.cost_us for offer in offers if offer.has_room), default=float("inf"))
        rest = [load for load in loads if not load.has_room and load.least_cost_us < least_us]
        return offers + [load.offer(group) for load in rest]

    def _num_output_tokens(self, group: SequenceGroup) -> float:
        """Tokens still to be expected of the longest answer."""
        usual = self._output_tokens.mean or OUTPUT_TOKENS_UNMEASURED
        num_known = group.max_known_tokens - group.num_prompt_tokens
        return max(1.0, min(usual, group.request.max_tokens) - num_known)


def us_per_token(scheduler: Scheduler) -> float | None:
    """The time that a token more adds to a worker group's work; None if nothing was measured.

    At least its share of a step that is as large as can be, which takes no less than one that only
    decodes: where steps take equally long whatever is in them, it is these that are compared.
    """
    rates = scheduler.rates
    step_us, token_us = rates.us_per_decode_step, rates.us_per_further_token
    if step_us is None:
        return token_us
    return max(token_us or 0.0, step_us / scheduler.room.max_step_tokens)


@dataclass(frozen=True, slots=True)
class _Load:
    """What a worker group has to do, the answer to a request included, but not its prompt."""

    scheduler: Scheduler
    has_room: bool
    num_sequences: int
    num_output_tokens: float
    token_us: float
    num_tokens: float

    @classmethod
    def of(
        cls, group: SequenceGroup, scheduler: Scheduler, num_output_tokens: float, token_us: float
    ) -> "_Load":
        num_sequences = scheduler.room.num_sequences
        num_rows = num_sequences + group.num_unfinished
        num_tokens = scheduler.room.num_tokens_to_prefill + num_output_tokens * num_rows
        has_room = scheduler.room.has_room
        return cls(scheduler, has_room, num_sequences, num_output_tokens, token_us, num_tokens)

    @property
    def least_cost_us(self) -> float:
        """If it had all of the prompt."""
        return self.num_tokens * self.token_us

    def offer(self, group: SequenceGroup) -> Offer:
        """With what it has."""
        scheduler = self.scheduler
        prospect = scheduler.room.prospect(group)
        num_tokens = self.num_tokens + prospect.num_tokens_to_compute
        num_free = scheduler.blocks.num_free_blocks * scheduler.blocks.block_size
        num_again = max(0.0, num_tokens - num_free)
        block_us = scheduler.rates.us_per_moved_block or 0.0
        cost_us = (num_tokens + num_again) * self.token_us
        return Offer(
            scheduler=scheduler,
            has_room=self.has_room and prospect.shortage == 0,
            cost_us=cost_us + prospect.num_blocks_to_fetch * block_us,
            wait_us=_wait_us(scheduler, prospect.shortage, self.num_output_tokens),
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


def _may_wait(group: SequenceGroup, best: Offer, at_once: Offer, now_us: int) -> bool:
    """Whether it may wait for the best still; its patience begins when it is first asked."""
    if group.wait.until_us is None:
        group.wait.until_us = now_us + round(at_once.cost_us - best.cost_us)
    return now_us < group.wait.until_us
