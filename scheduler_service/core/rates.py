"""How fast a worker group is, measured by the results of its steps."""

from dataclasses import dataclass

from scheduler_service.core.plan import StepResult

_WEIGHT = 0.1
"""Of the newest step in a moving average: about the last ten count."""


class MovingAverage:
    """Exponentially weighted mean; unknown until the first value."""

    def __init__(self) -> None:
        self.mean: float | None = None

    def add(self, value: float) -> None:
        """Take in one more value."""
        self.mean = value if self.mean is None else self.mean + _WEIGHT * (value - self.mean)


@dataclass(frozen=True, kw_only=True, slots=True)
class StepWork:
    """What a step's result took the worker."""

    num_prefill_tokens: int
    num_moved_blocks: int
    """Blocks swapped out and in."""
    swaps_in: bool
    """Whether any of them were swapped in, which the worker may do beside the rest."""


class StepRates:
    """Moving averages of what things cost a worker group, in microseconds of its own time.

    A step without prefills tells what a decode step costs; what a step with prefills takes beyond
    that is shared out over their tokens. A step that swaps in tells only what moving blocks costs:
    it may have run beside the rest. None: nothing of the kind has been measured.
    """

    def __init__(self) -> None:
        self._decode_step = MovingAverage()
        self._prefill_token = MovingAverage()
        self._moved_block = MovingAverage()

    @property
    def us_per_decode_step(self) -> float | None:
        """A step in which every running sequence computes one token."""
        return self._decode_step.mean

    @property
    def us_per_prefill_token(self) -> float | None:
        """One token more of a prompt, or of a recomputation."""
        return self._prefill_token.mean

    @property
    def us_per_moved_block(self) -> float | None:
        """One block between device and host, in either direction."""
        return self._moved_block.mean

    def note(self, work: StepWork, result: StepResult) -> None:
        """Take in a step's result."""
        if work.num_moved_blocks:
            self._moved_block.add(result.cache_ops_us / work.num_moved_blocks)
        if work.swaps_in:
            return
        compute_us = max(0, result.busy_us - result.cache_ops_us)
        if work.num_prefill_tokens:
            beyond_us = max(0.0, compute_us - (self._decode_step.mean or 0.0))
            self._prefill_token.add(beyond_us / work.num_prefill_tokens)
        elif result.token_ids:
            self._decode_step.add(compute_us)
