"""What is counted for the metrics of `metrics.toml`, and how they are collected."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from prometheus_client.metrics_core import Metric as Family

from pagewire.v1 import inference_service_pb2 as inference_pb
from scheduler_service.errors import PagewireError
from scheduler_service.frontend.timings import PARTS, Stopwatch
from scheduler_service.status_codes import status_code
from service_common.prometheus import (
    BoundedLabel,
    Histogram,
    LabelValues,
    families,
    read_metrics,
)

# Seconds. Narrower than a factor of two in the range of latency goals, since percentiles are
# estimated from these.
FIRST_TOKEN_BOUNDS = (
    *(0.002, 0.005, 0.01, 0.02, 0.03, 0.04, 0.06, 0.08, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75),
    *(1.0, 1.5, 2.0, 3.0, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0, 640.0),
)
TOKEN_BOUNDS = (
    *(0.001, 0.002, 0.003, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.025, 0.03, 0.04, 0.05, 0.075),
    *(0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 10.0, 40.0),
)
REQUEST_BOUNDS = (
    *(0.0001, 0.001, 0.01, 0.05, 0.1, 0.2, 0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0),
    *(20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0, 480.0, 960.0, 1920.0),
)
LENGTH_BOUNDS = tuple(float(digit * 10**power) for power in range(6) for digit in (1, 2, 5))
CHOICES_BOUNDS = (1.0, 2.0, 5.0, 10.0, 20.0)

FINISH_REASONS = ("stop", "length", "abort", "error")

METRICS = read_metrics(Path(__file__).with_suffix(".toml"))
ALL = tuple(metric for section in METRICS.values() for metric in section.values())
_COMPUTED = METRICS["computed"]
_BOUNDS = {
    "first_token": FIRST_TOKEN_BOUNDS,
    "token": TOKEN_BOUNDS,
    "request": REQUEST_BOUNDS,
    "length": LENGTH_BOUNDS,
    "choices": CHOICES_BOUNDS,
}
OF_MODELS = {
    name: (metric, bounds)
    for section, bounds in _BOUNDS.items()
    for name, metric in METRICS[section].items()
}
"""Histograms by model and their buckets, by their names in `metrics.toml`."""
FIRST_TOKEN, TOKEN_GAP = "time_to_first_token_seconds", "inter_token_latency_seconds"

MAX_TENANTS = 100
"""Label values per frontend; further tenants share one."""
MAX_PRIORITIES = 16
OK, CANCELLED = "ok", "cancelled"
"""Outcomes of requests that got all their tokens, and of those whose clients disconnected; the
outcome of any other is its status code."""

FINISH_LABELS: Mapping[int, Literal["stop", "length"]] = {
    inference_pb.FINISH_REASON_STOP: "stop",
    inference_pb.FINISH_REASON_LENGTH: "length",
}
"""Finish reasons as metrics and HTTP name them; a choice that continues has none."""


class ModelCounts:
    """Counts of one model's requests."""

    def __init__(self) -> None:
        self.num_prompt_tokens: int = 0
        self.num_cached_tokens: int = 0
        self.num_generated_tokens: int = 0
        self.num_worker_losses: int = 0
        self.finishes: Counter[str] = Counter()
        self.histograms = {name: Histogram(bounds) for name, (_, bounds) in OF_MODELS.items()}
        self.first_token, self.token_gap = self.histograms[FIRST_TOKEN], self.histograms[TOKEN_GAP]
        self.parts = {part: Histogram(REQUEST_BOUNDS) for part in PARTS}
        self.pooled: Counter[LabelValues] = Counter()
        """Inputs by call and outcome."""
        self.pooling_seconds: dict[str, Histogram] = {}
        """Durations by call."""

    def count_finished(
        self,
        stopwatch: Stopwatch,
        timings: inference_pb.Timings,
        usage: inference_pb.Usage,
        finishes: Sequence[inference_pb.FinishReason.ValueType],
        *,
        longest: int,
        max_tokens: int,
    ) -> None:
        """Count a request that got all its tokens; finishes: finish reasons of its choices;
        longest: output tokens of the longest of them; max_tokens: their limit."""
        self.num_cached_tokens += usage.cached_tokens
        self.finishes.update(FINISH_LABELS[reason] for reason in finishes)
        for part, durations in self.parts.items():
            durations.observe(getattr(timings, f"{part}_us") / 1e6)
        queue_s = timings.queue_us / 1e6
        prefill_s = max(0.0, stopwatch.first_token_s - stopwatch.tokenize_s - queue_s)
        values = {
            "e2e_request_latency_seconds": stopwatch.first_token_s + stopwatch.decode_s,
            "request_queue_time_seconds": queue_s,
            "request_prefill_time_seconds": prefill_s,
            "request_decode_time_seconds": stopwatch.decode_s,
            "request_inference_time_seconds": prefill_s + stopwatch.decode_s,
            "request_prompt_tokens": usage.prompt_tokens,
            "request_prefill_kv_computed_tokens": usage.prompt_tokens - usage.cached_tokens,
            "request_generation_tokens": usage.completion_tokens,
            "request_max_num_generation_tokens": longest,
            "request_params_max_tokens": max_tokens,
            "request_params_n": len(finishes),
        }
        num_gaps = usage.completion_tokens / max(1, len(finishes)) - 1
        if num_gaps > 0:
            values["request_time_per_output_token_seconds"] = stopwatch.decode_s / num_gaps
        for name, value in values.items():
            self.histograms[name].observe(value)


@dataclass(frozen=True, kw_only=True, slots=True)
class RequestSummary:
    """A request at its end, for metrics, its span and the log."""

    request_id: str
    tenant: str
    priority: int
    stopwatch: Stopwatch
    model_name: str | None
    """None if it ended before it was resolved."""
    counts: ModelCounts | None
    """The counts of its model, if it is known."""
    lora: str
    """Name of its adapter; empty without one."""
    usage: inference_pb.Usage | None
    """None, like `timings`, unless all responses were taken."""
    timings: inference_pb.Timings | None
    error: PagewireError | None
    num_tokens: int
    num_worker_losses: int

    @property
    def outcome(self) -> str:
        """`OK`, `CANCELLED`, or the name of its status code."""
        if self.usage is not None:
            return OK
        return CANCELLED if self.error is None else status_code(self.error).name.lower()


class FrontendMetrics:
    """Everything that one frontend has counted since it started."""

    def __init__(self) -> None:
        self._models: dict[str, ModelCounts] = {}
        self._tenant, self._priority = BoundedLabel(MAX_TENANTS), BoundedLabel(MAX_PRIORITIES)
        self._requests: Counter[LabelValues] = Counter()
        self._tokens: Counter[LabelValues] = Counter()
        self._tenant_first_token: dict[LabelValues, Histogram] = {}

    def model(self, name: str) -> ModelCounts:
        """Counts of a model that is or was served."""
        counts = self._models.get(name)
        if counts is None:
            counts = self._models[name] = ModelCounts()
        return counts

    def count_refused(self, tenant: str, priority: int, error: Exception) -> None:
        """Count a request that was refused."""
        outcome = status_code(error).name.lower()
        self._requests[*self._labels(tenant, priority), outcome] += 1

    def count_end(self, request: RequestSummary) -> None:
        """Count the end of an accepted request."""
        labels = self._labels(request.tenant, request.priority)
        self._requests[*labels, request.outcome] += 1
        if request.usage is not None:
            self._count_usage(labels, request.usage, request.stopwatch.first_token_s)
        elif request.counts is not None:
            request.counts.finishes["abort" if request.outcome == CANCELLED else "error"] += 1
        if request.counts is not None:
            request.counts.num_worker_losses += request.num_worker_losses

    def count_call(
        self,
        name: str,
        model_name: str,
        options: inference_pb.PoolingOptions,
        usage: inference_pb.PoolingUsage,
        inputs: Mapping[str, int],
        *,
        tenant: str,
        outcome: str,
        seconds: float,
    ) -> None:
        """Count the end of a call that pools; inputs: their numbers by outcome."""
        labels = self._labels(tenant, options.priority)
        self._requests[*labels, outcome] += 1
        self._tokens[*labels, "prompt"] += usage.prompt_tokens - usage.cached_tokens
        self._tokens[*labels, "cached_prompt"] += usage.cached_tokens
        counts = self.model(model_name)
        counts.num_prompt_tokens += usage.prompt_tokens
        counts.num_cached_tokens += usage.cached_tokens
        counts.pooled.update({(name, of_input): number for of_input, number in inputs.items()})
        counts.pooling_seconds.setdefault(name, Histogram(REQUEST_BOUNDS)).observe(seconds)

    def _labels(self, tenant: str, priority: int) -> LabelValues:
        return self._tenant.value(tenant), self._priority.value(str(priority))

    def _count_usage(
        self, labels: LabelValues, usage: inference_pb.Usage, first_token_s: float
    ) -> None:
        self._tokens[*labels, "prompt"] += usage.prompt_tokens - usage.cached_tokens
        self._tokens[*labels, "cached_prompt"] += usage.cached_tokens
        self._tokens[*labels, "generated"] += usage.completion_tokens
        known = self._tenant_first_token.get(labels)
        if known is None:
            known = self._tenant_first_token[labels] = Histogram(FIRST_TOKEN_BOUNDS)
        known.observe(first_token_s)

    def collect(
        self, *, num_open: int, is_attached: bool, num_core_losses: int
    ) -> Iterator[Family]:
        """All samples as of now."""
        yield _COMPUTED["open_requests"].family(num_open)
        yield _COMPUTED["attached"].family(is_attached)
        yield _COMPUTED["core_losses"].family(num_core_losses)
        yield _COMPUTED["requests"].family(self._requests)
        yield _COMPUTED["tenant_tokens"].family(self._tokens)
        yield _COMPUTED["tenant_first_token"].histograms(self._tenant_first_token.items())
        yield from families(
            METRICS["counts"], {(name,): counts for name, counts in self._models.items()}
        )
        yield _COMPUTED["finished"].family(
            {
                (name, reason): counts.finishes[reason]
                for name, counts in self._models.items()
                for reason in FINISH_REASONS
            }
        )
        for name, (metric, _) in OF_MODELS.items():
            yield metric.histograms(
                ((model,), counts.histograms[name]) for model, counts in self._models.items()
            )
        yield _COMPUTED["request_parts"].histograms(
            ((name, part), durations)
            for name, counts in self._models.items()
            for part, durations in counts.parts.items()
        )
        yield _COMPUTED["pooled"].family(
            {
                (model, *labels): number
                for model, counts in self._models.items()
                for labels, number in counts.pooled.items()
            }
        )
        yield _COMPUTED["pooling_seconds"].histograms(
            ((model, name), durations)
            for model, counts in self._models.items()
            for name, durations in counts.pooling_seconds.items()
        )
