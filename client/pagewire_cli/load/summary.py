"""Latency percentiles, throughput and goodput of a load run."""

import math
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from statistics import mean, quantiles
from typing import Self

from pagewire_cli.load.load_generator import LoadRun, RequestRecord


@dataclass(frozen=True, slots=True)
class Percentiles:
    """Percentiles of many times, in milliseconds."""

    mean: float
    p50: float
    p90: float
    p99: float

    @classmethod
    def of(cls, seconds: Iterable[float]) -> Self | None:
        """Interpolated linearly; None if there are no times."""
        times = [1000 * value for value in seconds]
        if not times:
            return None
        bounds = quantiles(times if len(times) > 1 else 2 * times, n=100, method="inclusive")
        return cls(
            *(round(value, 3) for value in (mean(times), *(bounds[i] for i in (49, 89, 98))))
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Limits:
    """Latency limits for a request to count towards goodput."""

    first_token_s: float = math.inf
    inter_token_s: float = math.inf
    """Mean over the request."""

    def are_kept(self, record: RequestRecord) -> bool:
        """Whether a request is complete and within both limits."""
        return (
            record.is_complete
            and record.first_token_s <= self.first_token_s
            and record.mean_inter_token_s <= self.inter_token_s
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Summary:
    """Results of a run. Percentiles are over complete requests."""

    duration_s: float
    num_complete: int
    num_failed: int
    num_unfinished: int
    """Started, but neither complete nor failed when the run was interrupted."""
    errors: dict[str, int]
    """How often each failure occurred."""
    max_in_flight: int
    requests_per_s: float
    output_tokens_per_s: float
    total_tokens_per_s: float
    """Prompt and output tokens per second."""
    cached_prompt_percent: float
    """Share of the prompt tokens that were found in the prefix cache."""
    accepted_drafts_percent: float
    """Share of the output tokens that came as drafts of speculative decoding."""
    drafts_accepted_percent: float
    """Share of the computed drafts that became output."""
    first_token_ms: Percentiles | None
    inter_token_ms: Percentiles | None
    """Inter-token latency, over all tokens except each request's first."""
    total_ms: Percentiles | None
    num_good: int
    """Complete requests within the limits."""
    good_requests_per_s: float
    """Goodput: requests within the limits per second."""
    client_cores: float
    """Cores that the load generator itself kept busy, on average."""

    @classmethod
    def of(cls, run: LoadRun, limits: Limits) -> Self:
        """Summarize a run that has ended or was interrupted."""
        complete = [record for record in run.records if record.is_complete]
        failed = [record for record in run.records if record.error is not None]
        duration = max(run.duration_s, 1e-9)
        outputs = sum(len(record.token_times_s) for record in complete)
        prompts = sum(record.num_prompt_tokens for record in complete)
        num_accepted = sum(record.last.num_accepted_drafts for record in complete)
        num_cached = sum(record.last.num_cached_tokens for record in complete)
        num_drafts = sum(record.last.num_drafts for record in complete)
        num_good = sum(limits.are_kept(record) for record in complete)
        return cls(
            duration_s=round(duration, 3),
            num_complete=len(complete),
            num_failed=len(failed),
            num_unfinished=len(run.records) - len(complete) - len(failed),
            errors=dict(Counter(record.error for record in failed if record.error)),
            max_in_flight=run.max_in_flight,
            requests_per_s=round(len(complete) / duration, 3),
            output_tokens_per_s=round(outputs / duration, 1),
            total_tokens_per_s=round((outputs + prompts) / duration, 1),
            cached_prompt_percent=round(100 * num_cached / max(1, prompts), 1),
            accepted_drafts_percent=round(100 * num_accepted / max(1, outputs), 1),
            drafts_accepted_percent=round(100 * num_accepted / max(1, num_drafts), 1),
            first_token_ms=Percentiles.of(record.first_token_s for record in complete),
            inter_token_ms=Percentiles.of(gap for r in complete for gap in r.inter_token_s),
            total_ms=Percentiles.of(record.total_s for record in complete),
            num_good=num_good,
            good_requests_per_s=round(num_good / duration, 3),
            client_cores=round(run.client_cpu_s / duration, 3),
        )
