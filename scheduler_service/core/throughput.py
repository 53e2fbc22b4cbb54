"""Measured throughput: what a worker group's steps cost, and how fast queues are served."""

from collections.abc import Iterable
from dataclasses import dataclass
from math import inf, sqrt

from scheduler_service.core.step_plan import StepResult

_WEIGHT = 0.1
"""Weight of the newest value in a moving average: about the last ten count."""


class MovingAverage:
    """Exponentially weighted mean; unknown until the first value."""

    def __init__(self, weight: float = _WEIGHT) -> None:
        self.mean: float | None = None
        self._weight = weight

    def add(self, value: float) -> float:
        """Take in one more value; return the mean."""
        self.mean = value if self.mean is None else self.mean + self._weight * (value - self.mean)
        return self.mean


class MovingRatio:
    """Cost per item, as the ratio of moving averages of costs and of item counts, so that large
    batches have more weight. Unknown until the first value."""

    def __init__(self, weight: float = _WEIGHT) -> None:
        self.min: float | None = None
        """The lowest mean so far."""
        self.num_values = 0
        self._cost = MovingAverage(weight)
        self._number = MovingAverage(weight)

    @property
    def mean(self) -> float | None:
        """The present cost of one item."""
        if self._cost.mean is None or not self._number.mean:
            return None
        return self._cost.mean / self._number.mean

    @property
    def mean_number(self) -> float:
        """The present number of items of a value; 0 before the first one."""
        return self._number.mean or 0.0

    def add(self, cost: float, number: float) -> None:
        """Add the cost of `number` items."""
        self.num_values += 1
        self._cost.add(cost)
        self._number.add(number)
        if (mean := self.mean) is not None:
            self.min = mean if self.min is None else min(self.min, mean)


@dataclass(frozen=True, kw_only=True, slots=True)
class StepWork:
    """The work of one step."""

    num_tokens: int
    """Tokens computed, of prefills and decodes."""
    num_prefill_tokens: int
    num_moves: int
    """Moves between device and host, in both directions; all move equally much."""
    swaps_in: bool
    """Whether any of them are swapped in, which may overlap with the computation."""
    num_attended_pairs: int
    """Pairs of a computed token and a token that it attends to, rounded up: every token of a chunk
    counts as many as the last one."""
    num_prefill_pairs: int
    """Exact number of these pairs of prefills."""


class PrefillCost:
    """Cost in microseconds of a step's prompt tokens beyond a decode step, for tokens and for pairs
    of one and a token that it attends to: with a long context, attention costs more than the rest.

    Both rates are those that fit recent steps best (least squares, weighted by tokens) and are not
    negative. A step counts `_KEPT` times as much with every further one.
    """

    _KEPT = 0.9

    def __init__(self) -> None:
        self.max_tokens = 0.0
        """The most tokens of a step recently; 0 before the first one."""
        self._sums = [0.0] * 5

    def add(self, num_tokens: int, num_pairs: int, cost_us: float) -> None:
        """Record a step with at least one token."""
        self.max_tokens = max(num_tokens, self._KEPT * self.max_tokens)
        context = num_pairs / num_tokens
        terms = (num_tokens, num_pairs, num_pairs * context, cost_us, cost_us * context)
        self._sums = [self._KEPT * kept + new for kept, new in zip(self._sums, terms, strict=True)]

    def cost_us(self, num_tokens: int, num_pairs: int) -> float:
        """Expected cost, once a step has been recorded."""
        us_per_token, us_per_pair = self._rates()
        return num_tokens * us_per_token + num_pairs * us_per_pair

    def tokens_within(self, cost_us: float, num_computed: int) -> float:
        """Number of tokens of this cost that follow `num_computed` tokens of their prompt."""
        us_per_token, us_per_pair = self._rates()
        # The root of us_per_pair * n * n / 2 + first_us * n = cost_us.
        first_us = us_per_token + us_per_pair * num_computed
        divisor = first_us + sqrt(first_us * first_us + 2 * us_per_pair * cost_us)
        return 2 * cost_us / divisor if divisor else inf

    def _rates(self) -> tuple[float, float]:
        tokens, pairs, pairs_contexts, costs, costs_contexts = self._sums
        determinant = tokens * pairs_contexts - pairs * pairs
        if determinant <= 1e-6 * pairs * pairs:  # all contexts were of one length
            return costs / tokens, 0.0
        us_per_token = (costs * pairs_contexts - costs_contexts * pairs) / determinant
        us_per_pair = (costs_contexts * tokens - costs * pairs) / determinant
        if us_per_pair < 0:
            return costs / tokens, 0.0
        if us_per_token < 0:
            return 0.0, costs_contexts / pairs_contexts
        return us_per_token, us_per_pair


MIN_PROMPT_TOKENS = 32
"""Average tokens of a step that measure the cost of a prompt's token: the last token of a prompt
whose others were found says nothing about it. A group that only continues requests has computed
none, so that others stand for it."""
US_PER_ENTRY_UNMEASURED = 1_000.0
FETCH_UNMEASURED = 64
"""Entries of the fetch that a worker group has as its first measurement: that of a few entries
measures messages."""
COPY_ROUND_TRIP_US = 5_000.0
"""Time of the messages by which entries of another worker group's cache are copied, besides the
steps that they wait for."""


class StepRates:
    """Moving averages of a worker group's costs, in microseconds of its own time.

    A step without prefills measures the cost of a decode step; the extra time of a step with
    prefills is divided among their tokens. Moving KV does not count, whether it precedes the
    computation or overlaps it. A step that swaps in measures only the cost of moves. None:
    not measured yet.
    """

    def __init__(self) -> None:
        self.us_per_decode_step: float | None = None
        """Cost of a step in which every running sequence computes one token."""
        self.min_us_per_decode_step: float | None = None
        """Lowest average cost of decode steps ever measured."""
        self.us_per_prefill_token: float | None = None
        """Cost of one more token of a prompt, or of a recomputation."""
        self.min_us_per_prefill_token: float | None = None
        """The lowest of these averages ever measured."""
        self.us_per_move: float | None = None
        """Cost of one move between device and host, in either direction."""
        self.prefill_cost = PrefillCost()
        self._prompts = MovingRatio()
        self._fetched_entry = MovingRatio()
        self._fetched_entry.add(FETCH_UNMEASURED * US_PER_ENTRY_UNMEASURED, FETCH_UNMEASURED)
        self._decode_step = MovingRatio()
        self._prefill_token = MovingAverage()
        self._prefill = MovingRatio()
        self._move = MovingAverage()

    def observe(self, work: StepWork, result: StepResult) -> None:
        """Take in a step's result."""
        if work.num_moves:
            self.us_per_move = self._move.add(result.cache_ops_us / work.num_moves)
        if work.swaps_in:
            return
        compute_us = max(0, result.busy_us - result.cache_ops_us)
        if work.num_moves:  # before the forward pass, or in parallel with it
            without_moves_us = result.forward_us + result.sample_us
            compute_us = min(result.busy_us, max(compute_us, without_moves_us))
        if work.num_prefill_tokens:
            beyond_us = max(0.0, compute_us - (self.us_per_decode_step or 0.0))
            self._prompts.add(beyond_us, work.num_prefill_tokens)
            us_per_token = beyond_us / work.num_prefill_tokens
            self.us_per_prefill_token = self._prefill_token.add(us_per_token)
            if self.us_per_decode_step is not None:
                self._prefill.add(beyond_us, work.num_prefill_tokens)
                self.min_us_per_prefill_token = self._prefill.min
                self.prefill_cost.add(work.num_prefill_tokens, work.num_prefill_pairs, beyond_us)
        elif result.token_ids:
            self._decode_step.add(compute_us, 1)
            self.us_per_decode_step = self._decode_step.mean
            self.min_us_per_decode_step = self._decode_step.min

    def copy_us(self, num_entries: float) -> float:
        """Estimated time to copy entries of another worker group's cache."""
        entry_us = self._fetched_entry.mean or US_PER_ENTRY_UNMEASURED
        return COPY_ROUND_TRIP_US + num_entries * entry_us

    def us_per_prompt_token(self, min_tokens: int = MIN_PROMPT_TOKENS) -> float | None:
        """Cost of a prompt's token, with or without measured decode steps; None unless recent steps
        with prefills had as many of them on average. Tokens of large steps, which are computed
        faster, have more weight."""
        return self._prompts.mean if self._prompts.mean_number >= min_tokens else None

    def observe_fetch(self, num_entries: int, duration_us: int) -> None:
        """Take in how long it took to copy entries of another worker group's cache."""
        self._fetched_entry.add(duration_us, num_entries)


MIN_DELAY_S, MAX_DELAY_S = 0.1, 60.0
_DEPARTURE_WEIGHT = 0.04
"""Weight of the newest departure: about the last 25 count, because answers differ in length."""
_MIN_SAMPLES = 8


class QueueThroughput:
    """Moving averages of the rate at which requests leave a queue while it is not empty.

    Requests that leave at once, without a wait, say nothing about how long a wait would be.
    """

    def __init__(self) -> None:
        self._requests = MovingRatio(_DEPARTURE_WEIGHT)
        self._tokens = MovingRatio(_DEPARTURE_WEIGHT)
        self._since_us: int | None = None

    @property
    def us_per_request(self) -> float | None:
        """Time in which one request leaves; None if too little has been measured."""
        return _settled(self._requests)

    @property
    def us_per_token(self) -> float | None:
        """Time per prompt token of the requests that leave; None if too little was measured."""
        return _settled(self._tokens)

    def observe(self, now_us: int, *, num_requests: int, num_tokens: int, is_empty: bool) -> None:
        """Record how many requests and tokens left since the last call, and whether the queue is
        empty now."""
        if num_requests and self._since_us is not None:
            self._requests.add(now_us - self._since_us, num_requests)
            self._tokens.add(now_us - self._since_us, num_tokens)
        if is_empty:
            self._since_us = None
        elif num_requests or self._since_us is None:
            self._since_us = now_us

    def interrupt(self) -> None:
        """Ignore the time since the last note: no request could have left."""
        self._since_us = None


def _settled(ratio: MovingRatio) -> float | None:
    return ratio.mean if ratio.num_values >= _MIN_SAMPLES else None


def retry_delay_s(
    rates: Iterable[QueueThroughput],
    *,
    num_requests: int = 0,
    num_tokens: int = 0,
    unmeasured_s: float,
) -> float:
    """Seconds until `num_requests` requests with `num_tokens` prompt tokens have left queues that
    drain in parallel; `unmeasured_s` if none of them has been measured."""
    measured = [
        (1 / rate.us_per_request, 1 / rate.us_per_token)
        for rate in rates
        if rate.us_per_request and rate.us_per_token
    ]
    if not measured:
        return unmeasured_s
    requests_per_us = sum(requests for requests, _ in measured)
    tokens_per_us = sum(tokens for _, tokens in measured)
    return bounded_delay_s(max(num_requests / requests_per_us, num_tokens / tokens_per_us) / 1e6)


def bounded_delay_s(seconds: float) -> float:
    """A delay within MIN_DELAY_S and MAX_DELAY_S."""
    return min(max(seconds, MIN_DELAY_S), MAX_DELAY_S)
