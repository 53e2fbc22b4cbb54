"""What a frontend tells Prometheus: latencies, tokens and ends of the requests that it had.

Tokens are counted as they come, everything else of a request when it ends. Most metrics have the
model as their only label, as vLLM's have; those by tenant and priority are apart, and bounded.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

from prometheus_client.metrics_core import Metric as Family

from pagewire.v1 import inference_service_pb2 as inference_pb
from scheduler_service.frontend import metric_list as metric
from scheduler_service.frontend.timings import PARTS, Stopwatch
from scheduler_service.metrics.counts import Histogram
from scheduler_service.metrics.labels import BoundedLabel
from scheduler_service.prometheus import LabelValues, Metric
from scheduler_service.status_codes import status_code

if TYPE_CHECKING:
    from scheduler_service.frontend.output.request_stream import RequestStream

MAX_TENANTS = 100
"""Of each frontend, by name; the others together are one."""
MAX_PRIORITIES = 16
OK, CANCELLED = "ok", "cancelled"
"""Outcomes of requests that had all their tokens, and of those whose clients went away; of others
it is their status code."""

FINISH_LABELS = {
    inference_pb.FINISH_REASON_STOP: "stop",
    inference_pb.FINISH_REASON_LENGTH: "length",
}


class ModelCounts:
    """Of one model's requests."""

    def __init__(self) -> None:
        self.num_prompt_tokens: int = 0
        self.num_cached_tokens: int = 0
        self.num_generated_tokens: int = 0
        self.num_worker_losses: int = 0
        self.finishes: Counter[str] = Counter()
        self.first_token = Histogram(metric.FIRST_TOKEN_BOUNDS)
        self.token_gap = Histogram(metric.TOKEN_BOUNDS)
        self.per_request = {each: Histogram(bounds) for each, bounds in metric.PER_REQUEST.items()}
        self.parts = {part: Histogram(metric.REQUEST_BOUNDS) for part in PARTS}

    def count_tokens(
        self, stopwatch: Stopwatch, num_tokens: int, num_choices: int, num_prompt_tokens: int
    ) -> None:
        """Tokens of a request have come, to so many of its choices."""
        self.num_generated_tokens += num_tokens
        gap_s = stopwatch.note_tokens()
        if gap_s is None:
            self.num_prompt_tokens += num_prompt_tokens
            self.first_token.observe(stopwatch.first_token_s)
        else:  # of several tokens of a choice at once, each took its share
            self.token_gap.observe(gap_s * num_choices / num_tokens, num_tokens)

    def count_finished(
        self,
        stopwatch: Stopwatch,
        timings: inference_pb.Timings,
        usage: inference_pb.Usage,
        finishes: Sequence[inference_pb.FinishReason.ValueType],
    ) -> None:
        """A request had all its tokens; `finishes` are the ends of its choices."""
        self.num_cached_tokens += usage.cached_tokens
        self.finishes.update(FINISH_LABELS[reason] for reason in finishes)
        for part, histogram in self.parts.items():
            histogram.observe(getattr(timings, f"{part}_us") / 1e6)
        self._observe_times(stopwatch, timings.queue_us / 1e6)
        seen = self.per_request
        seen[metric.PROMPT_TOKENS_OF_REQUEST].observe(usage.prompt_tokens)
        seen[metric.GENERATED_TOKENS_OF_REQUEST].observe(usage.completion_tokens)
        seen[metric.CHOICES_OF_REQUEST].observe(len(finishes))
        num_gaps = usage.completion_tokens / max(1, len(finishes)) - 1
        if num_gaps > 0:
            seen[metric.TIME_PER_OUTPUT_TOKEN].observe(stopwatch.decode_s / num_gaps)

    def _observe_times(self, stopwatch: Stopwatch, queue_s: float) -> None:
        seen = self.per_request
        seen[metric.END_TO_END].observe(stopwatch.first_token_s + stopwatch.decode_s)
        seen[metric.QUEUE].observe(queue_s)
        prefill_s = max(0.0, stopwatch.first_token_s - stopwatch.tokenize_s - queue_s)
        seen[metric.PREFILL].observe(prefill_s)
        seen[metric.DECODE].observe(stopwatch.decode_s)
        seen[metric.INFERENCE].observe(prefill_s + stopwatch.decode_s)


class FrontendMetrics:
    """All that one frontend has counted since it started."""

    def __init__(self) -> None:
        self._models: dict[str, ModelCounts] = {}
        self._tenant, self._priority = BoundedLabel(MAX_TENANTS), BoundedLabel(MAX_PRIORITIES)
        self._requests: Counter[LabelValues] = Counter()
        self._tokens: Counter[LabelValues] = Counter()
        self._tenant_first_token: dict[LabelValues, Histogram] = {}

    def model(self, name: str) -> ModelCounts:
        """Of a model that is or was served: there are as many as workers bring along."""
        counts = self._models.get(name)
        if counts is None:
            counts = self._models[name] = ModelCounts()
        return counts

    def count_refused(self, tenant: str, priority: int, error: Exception) -> None:
        """A request was not taken in."""
        outcome = status_code(error).name.lower()
        self._requests[*self._labels(tenant, priority), outcome] += 1

    def count_end(self, stream: "RequestStream") -> str:
        """A request that was taken in has ended, one way or another; how."""
        labels = self._labels(stream.tenant, stream.priority)
        outcome = _outcome(stream)
        self._requests[*labels, outcome] += 1
        if stream.usage is not None:
            self._count_usage(labels, stream.usage, stream.stopwatch.first_token_s)
        elif stream.counts is not None:
            stream.counts.finishes["abort" if outcome == CANCELLED else "error"] += 1
        if stream.counts is not None:
            stream.counts.num_worker_losses += stream.num_worker_losses
        return outcome

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
            known = self._tenant_first_token[labels] = Histogram(metric.FIRST_TOKEN_BOUNDS)
        known.observe(first_token_s)

    def collect(
        self, *, num_open: int, is_attached: bool, num_core_losses: int
    ) -> Iterator[Family]:
        """All samples as of now."""
        yield metric.OPEN_REQUESTS.family(num_open)
        yield metric.ATTACHED.family(is_attached)
        yield metric.CORE_LOSSES.family(num_core_losses)
        yield metric.REQUESTS.family(self._requests)
        yield metric.TENANT_TOKENS.family(self._tokens)
        yield metric.TENANT_FIRST_TOKEN.histograms(self._tenant_first_token.items())
        for each, count in metric.COUNTED.items():
            yield each.family({(name,): count(counts) for name, counts in self._models.items()})
        yield metric.FINISHED.family(
            {
                (name, reason): counts.finishes[reason]
                for name, counts in self._models.items()
                for reason in metric.FINISH_REASONS
            }
        )
        yield from self._latencies()

    def _latencies(self) -> Iterator[Family]:
        yield self._by_model(metric.FIRST_TOKEN, lambda counts: counts.first_token)
        yield self._by_model(metric.TOKEN_GAP, lambda counts: counts.token_gap)
        for each in metric.PER_REQUEST:
            yield each.histograms(
                ((name,), counts.per_request[each]) for name, counts in self._models.items()
            )
        yield metric.PARTS.histograms(
            ((name, part), histogram)
            for name, counts in self._models.items()
            for part, histogram in counts.parts.items()
        )

    def _by_model(self, each: Metric, find: Callable[[ModelCounts], Histogram]) -> Family:
        return each.histograms(((name,), find(counts)) for name, counts in self._models.items())


def _outcome(stream: "RequestStream") -> str:
    if stream.is_done:
        return OK
    return CANCELLED if stream.error is None else status_code(stream.error).name.lower()
