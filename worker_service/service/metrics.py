"""Every Prometheus metric of a worker: its name and meaning, and the sample's source.

`service_common/prometheus.py` describes how metrics are named.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from prometheus_client.metrics_core import Metric as Family
from prometheus_client.registry import Collector

from service_common.prometheus import counter, families, gauge, histogram
from worker_service.engine.step_stats import StepMeter

COUNTERS = {
    "num_steps": counter("pagewire_worker_steps_total", "Steps executed, of all step streams."),
    "num_tokens": counter(
        "pagewire_worker_tokens_total", "Tokens computed, of prefills and decodes."
    ),
    "num_sampled": counter("pagewire_worker_sampled_tokens_total", "Tokens sampled."),
    "num_row_errors": counter(
        "pagewire_worker_row_errors_total",
        "Rows that could not be computed or sampled; each ended its request.",
    ),
    "num_swapped_out_blocks": counter(
        "pagewire_worker_swapped_out_blocks_total", "KV blocks copied from device to host."
    ),
    "num_swapped_in_blocks": counter(
        "pagewire_worker_swapped_in_blocks_total", "KV blocks copied from host to device."
    ),
    "num_copied_blocks": counter(
        "pagewire_worker_copied_blocks_total", "KV blocks copied on the device."
    ),
}
"""Counters by the `StepMeter`'s attribute."""

DRAFT_COUNTERS = {
    "num_drafts": counter(
        "pagewire_worker_draft_tokens_total",
        "Drafts computed with rows (speculation), by their source.",
        ("drafter",),
    ),
    "num_kept_drafts": counter(
        "pagewire_worker_accepted_tokens_total",
        "Drafts that agreed with the sampled tokens, by their source.",
        ("drafter",),
    ),
}
"""Counters by the `StepMeter`'s attribute; without samples unless the worker speculates."""

STEP_TIME = counter(
    "pagewire_worker_step_time_seconds_total",
    "Time of steps, by what it was spent on: `cache_ops`, `forward`, `sample` and `other`. Cache "
    "operations that overlap with the forward pass count in both.",
    ("part",),
)
IDLE = counter(
    "pagewire_worker_idle_seconds_total",
    "Time between the steps of a stream: `no_plan` until the next plan arrived, `plan_ready` from "
    "then on. While there are no requests it is the former.",
    ("reason",),
)
STEP_DURATION = histogram(
    "pagewire_worker_step_seconds",
    "Time from the start of work on a step until its result was ready.",
)

TOKENS_PER_ROW = histogram(
    "pagewire_worker_speculative_row_tokens",
    "Tokens that a row with drafts brought: those accepted, and one more.",
    ("drafter",),
)

GAUGES = {
    "is_registered": gauge(
        "pagewire_worker_registered", "Whether the worker is registered with a core."
    ),
    "is_streaming": gauge("pagewire_worker_streaming", "Whether a step stream is open."),
    "is_draining": gauge(
        "pagewire_worker_draining", "Whether the worker takes no new step streams."
    ),
    "last_epoch": gauge("pagewire_worker_epoch", "The greatest epoch that the worker has seen."),
    "busy_s": gauge(
        "pagewire_worker_busy_seconds",
        "Time that the model's present operation, such as one step, has taken so far; 0 when idle.",
    ),
    "num_weight_loads": gauge(
        "pagewire_worker_weight_loads", "Times that the process has loaded its weights."
    ),
    "uses_cuda_graphs": gauge(
        "pagewire_worker_cuda_graphs",
        "Whether decode steps are replayed as CUDA graphs (1) or launched kernel by kernel (0).",
    ),
}
"""Gauges by the attribute of `WorkerFacts`."""

INFO = gauge(
    "pagewire_worker_info",
    "1; its labels identify the worker, its group, and what it runs.",
    ("worker_id", "group", "rank", "model_name", "device", "dtype", "attention_backend", "version"),
)

ALL = (
    *(INFO, *GAUGES.values(), *COUNTERS.values(), *DRAFT_COUNTERS.values()),
    *(STEP_TIME, IDLE, STEP_DURATION, TOKENS_PER_ROW),
)
"""All metrics, in the order in which they are reported."""


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkerFacts:
    """The worker's state at one moment."""

    is_registered: bool
    is_streaming: bool
    is_draining: bool
    last_epoch: int
    busy_s: float
    num_weight_loads: int
    uses_cuda_graphs: bool
    drafter: str | None
    """Its name as the value of `--speculative`."""
    labels: tuple[str, ...]
    """Labels of `pagewire_worker_info`."""


class WorkerCollector(Collector):
    """Reads meter and state at each scrape, on the scrape's thread."""

    def __init__(self, meter: StepMeter, facts: Callable[[], WorkerFacts]) -> None:
        self._meter = meter
        self._facts = facts

    def describe(self) -> list[Family]:
        """Nothing, so that its registration reads no numbers."""
        return []

    def collect(self) -> Iterator[Family]:
        """All samples as of now."""
        facts, meter = self._facts(), self._meter
        yield INFO.family({facts.labels: 1})
        yield from families(GAUGES, {(): facts})
        yield from families(COUNTERS, {(): meter})
        drafters = [] if facts.drafter is None else [(facts.drafter,)]
        yield from families(DRAFT_COUNTERS, dict.fromkeys(drafters, meter))
        parts = ("cache_ops", "forward", "sample", "other")
        yield STEP_TIME.family({(part,): getattr(meter, f"{part}_us") / 1e6 for part in parts})
        idle = {"no_plan": meter.idle_without_plan_us, "plan_ready": meter.idle_with_plan_us}
        yield IDLE.family({(reason,): us / 1e6 for reason, us in idle.items()})
        yield STEP_DURATION.histograms([((), meter.durations)])
        yield TOKENS_PER_ROW.histograms([(drafter, meter.tokens_per_row) for drafter in drafters])
