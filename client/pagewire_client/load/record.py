"""What was seen of one request."""

from dataclasses import dataclass, field
from itertools import pairwise


@dataclass(kw_only=True, slots=True)
class Record:
    """One request's times, in seconds from the run's start."""

    num_prompt_tokens: int
    num_output_tokens: int
    """As many as were asked for."""
    started_s: float
    """When it was due, or, if a limit on concurrency held it back, when that let it go."""
    token_times_s: list[float] = field(default_factory=list)
    """When each output token came. Tokens of one message have the same time."""
    ended_s: float | None = None
    """None: it had not ended when the run was broken off."""
    error: str | None = None
    """Why it failed."""

    @property
    def is_complete(self) -> bool:
        """Whether all its tokens came."""
        return self.ended_s is not None and self.error is None

    @property
    def first_token_s(self) -> float:
        """Time to the first token."""
        return self.token_times_s[0] - self.started_s

    @property
    def inter_token_s(self) -> list[float]:
        """Time from each token to the next."""
        return [after - before for before, after in pairwise(self.token_times_s)]

    @property
    def mean_inter_token_s(self) -> float:
        """Its mean; 0 for a single token."""
        gaps = len(self.token_times_s) - 1
        return (self.token_times_s[-1] - self.token_times_s[0]) / gaps if gaps else 0.0

    @property
    def total_s(self) -> float:
        """From start to last token."""
        return self.token_times_s[-1] - self.started_s
