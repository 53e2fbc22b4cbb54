"""How long a simulated step takes."""

from dataclasses import dataclass

from worker_service.errors import InvalidOption


@dataclass(frozen=True, kw_only=True, slots=True)
class CostModel:
    """A step's time: so much for itself, for each row, for each token beyond a row's first, and for
    each block that is swapped, which comes before the rest.

    All in microseconds. All zero: as fast as this machine checks plans.
    """

    step_us: float = 0.0
    """Per step, whatever is in it: launching kernels, reading weights."""

    token_us: float = 0.0
    """Per token of a row beyond its first, which are a prefill's."""

    sequence_us: float = 0.0
    """Per row: a decode's own share of the step."""

    block_us: float = 0.0
    """Per block that is swapped out or in."""

    def __post_init__(self) -> None:
        for name in ("step_us", "token_us", "sequence_us", "block_us"):
            got = getattr(self, name)
            if not 0.0 <= got < float("inf"):
                raise InvalidOption(f"simulate_{name}: expected 0 or more, got {got}")

    def swap_us(self, num_blocks: int) -> float:
        """Time to swap so many blocks, out and in together."""
        return num_blocks * self.block_us

    def compute_us(self, num_rows: int, num_tokens: int) -> float:
        """Time of `num_rows` rows that compute `num_tokens` tokens together."""
        num_more_tokens = max(num_tokens - num_rows, 0)
        return self.step_us + num_rows * self.sequence_us + num_more_tokens * self.token_us
