"""Latencies of a set of requests, and their percentiles."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from scheduler_service.replay.lives import Life

PERCENTILES = (50, 90, 99)


@dataclass(frozen=True, kw_only=True, slots=True)
class Latencies:
    """Of requests that ended well; times in seconds."""

    num_requests: int
    first_token: list[float]
    """From submission, per request."""
    between_tokens: list[float]
    """Per token of a choice beyond its first."""
    end_to_end: list[float]
    """From submission, per request."""
    tokens_per_s: float
    """Of these requests, from the first submission to the last end."""

    @classmethod
    def of(cls, lives: Iterable[Life]) -> "Latencies":
        """Those of finished lives; others are left out."""
        finished = [life for life in lives if life.is_finished]
        ends = [life.ended for life in finished if life.ended is not None]
        span = max(ends) - min(life.submitted for life in finished) if finished else 0.0
        return cls(
            num_requests=len(finished),
            first_token=[
                life.first_token - life.submitted
                for life in finished
                if life.first_token is not None
            ],
            between_tokens=[
                later - earlier
                for life in finished
                for choice in life.choices
                for earlier, later in pairwise(choice.times)
            ],
            end_to_end=[end - life.submitted for life, end in zip(finished, ends, strict=True)],
            tokens_per_s=sum(life.num_tokens for life in finished) / span if span else 0.0,
        )


def percentiles(values: Sequence[float]) -> list[float] | None:
    """The values at PERCENTILES; None of nothing."""
    return np.percentile(values, PERCENTILES).tolist() if values else None
