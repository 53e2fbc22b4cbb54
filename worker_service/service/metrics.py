"""Every metric of a worker: names and meanings."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from worker_service.engine.step_stats import StepMeter
    from worker_service.metrics.collector import WorkerFacts


@dataclass(frozen=True, slots=True)
class Metric:
    """What operators see."""

    name: str
    """As it is queried."""
    kind: str
    """`counter`, `gauge` or `histogram`."""
    help: str
    labels: tuple[str, ...] = ()


def _counter(name: str, meaning: str) -> Metric:
    return Metric(name, "counter", meaning)


COUNTERS: Mapping[Metric, Callable[["StepMeter"], float]] = {
    _counter("pagewire_worker_steps_total", "Steps executed, of all step streams."): lambda meter: (
        meter.num_steps
    ),
    _counter(
        "pagewire_worker_tokens_total", "Tokens computed, of prefills and decodes."
    ): lambda meter: meter.num_tokens,
    _counter("pagewire_worker_sampled_tokens_total", "Tokens sampled."): lambda meter: (
        meter.num_sampled
    ),
    _counter(
        "pagewire_worker_row_errors_total",
        "Rows that could not be computed or sampled; each ended its request.",
    ): lambda meter: meter.num_row_errors,
    _counter(
        "pagewire_worker_swapped_out_blocks_total", "KV blocks copied from device to host."
    ): lambda meter: meter.num_swapped_out_blocks,
    _counter(
        "pagewire_worker_swapped_in_blocks_total", "KV blocks copied from host to device."
    ): lambda meter: meter.num_swapped_in_blocks,
    _counter(
        "pagewire_worker_copied_blocks_total", "KV blocks copied on the device."
    ): lambda meter: meter.num_copied_blocks,
}

STEP_TIME = Metric(
    "pagewire_worker_step_time_seconds_total",
    "counter",
    "Time of steps, by what it was spent on: `cache_ops`, `forward`, `sample` and `other`. Cache "
    "operations that ran beside the forward pass are in that, too.",
    ("part",),
)
IDLE = Metric(
    "pagewire_worker_idle_seconds_total",
    "counter",
    "Time between the steps of a stream: `no_plan` until the next plan had come, `plan_ready` from "
    "then on. While nobody asks for anything it is the former.",
    ("reason",),
)
STEP_DURATION = Metric(
    "pagewire_worker_step_seconds",
    "histogram",
    "From when work on a step began to when its result was ready.",
)

GAUGES: Mapping[Metric, Callable[["WorkerFacts"], float]] = {
    Metric(
        "pagewire_worker_registered", "gauge", "Whether a core has the worker registered."
    ): lambda facts: facts.is_registered,
    Metric("pagewire_worker_streaming", "gauge", "Whether a step stream is open."): lambda facts: (
        facts.is_streaming
    ),
    Metric(
        "pagewire_worker_draining", "gauge", "Whether the worker takes no new step streams."
    ): lambda facts: facts.is_draining,
    Metric(
        "pagewire_worker_epoch", "gauge", "The greatest epoch that the worker has seen."
    ): lambda facts: facts.last_epoch,
    Metric(
        "pagewire_worker_busy_seconds",
        "gauge",
        "How long the model has been at what it does now, such as one step; 0 when idle.",
    ): lambda facts: facts.busy_s,
    Metric(
        "pagewire_worker_weight_loads", "gauge", "Times that the process has loaded its weights."
    ): lambda facts: facts.num_weight_loads,
}

INFO = Metric(
    "pagewire_worker_info",
    "gauge",
    "1; its labels tell which worker of which group this is, and what it runs.",
    ("worker_id", "group", "rank", "model_name", "device", "dtype", "attention_backend", "version"),
)

ALL = (INFO, *GAUGES, *COUNTERS, STEP_TIME, IDLE, STEP_DURATION)
"""In the order in which they are told."""
