"""Every metric of a frontend: names, meanings, buckets."""

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from scheduler_service.prometheus import Kind, Metric

if TYPE_CHECKING:
    from scheduler_service.frontend.metrics import ModelCounts

MODEL = ("model_name",)
TENANT = ("tenant", "priority")

# Seconds. Finer than a factor of two where goals are set: percentiles are read off these.
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

OPEN_REQUESTS = Metric(
    "pagewire_frontend_open_requests", Kind.GAUGE, "Requests that clients wait for."
)
ATTACHED = Metric(
    "pagewire_frontend_attached", Kind.GAUGE, "Whether the frontend's stream to the core is there."
)
CORE_LOSSES = Metric(
    "pagewire_frontend_core_losses_total",
    Kind.COUNTER,
    "Times that the stream to the core broke; open requests went on with the next one.",
)
REQUESTS = Metric(
    "pagewire_requests_total",
    Kind.COUNTER,
    "Requests ended: `ok`, or the status code they ended or were refused with, such as "
    "`deadline_exceeded`; `cancelled`: by their client.",
    (*TENANT, "outcome"),
)
TENANT_TOKENS = Metric(
    "pagewire_tenant_tokens_total",
    Kind.COUNTER,
    "Tokens of requests that ended well: `prompt`, of it `cached_prompt` apart, and `generated`.",
    (*TENANT, "kind"),
)
TENANT_FIRST_TOKEN = Metric(
    "pagewire_tenant_time_to_first_token_seconds",
    Kind.HISTOGRAM,
    "As vllm:time_to_first_token_seconds, of requests that ended well.",
    TENANT,
)

COUNTED: Mapping[Metric, Callable[["ModelCounts"], float]] = {
    Metric(
        "vllm:prompt_tokens_total",
        Kind.COUNTER,
        "Prompt tokens of requests that have a first token, cached ones included.",
        MODEL,
    ): lambda counts: counts.num_prompt_tokens,
    Metric(
        "pagewire_cached_prompt_tokens_total",
        Kind.COUNTER,
        "Prompt tokens that were found in the prefix cache, of requests that ended well.",
        MODEL,
    ): lambda counts: counts.num_cached_tokens,
    Metric(
        "vllm:generation_tokens_total", Kind.COUNTER, "Output tokens, as they come.", MODEL
    ): lambda counts: counts.num_generated_tokens,
    Metric(
        "pagewire_request_worker_losses_total",
        Kind.COUNTER,
        "Times that a request's worker was lost while it was computing the request, which went on.",
        MODEL,
    ): lambda counts: counts.num_worker_losses,
}
"""Counters that have the model as their only label."""

FINISHED = Metric(
    "vllm:request_success_total",
    Kind.COUNTER,
    "Choices that ended, by `stop` or `length`; requests that ended before, as `abort` by their "
    "client's wish and as `error` otherwise.",
    (*MODEL, "finished_reason"),
)
FIRST_TOKEN = Metric(
    "vllm:time_to_first_token_seconds",
    Kind.HISTOGRAM,
    "From a request's arrival to its first token.",
    MODEL,
)
TOKEN_GAP = Metric(
    "vllm:inter_token_latency_seconds",
    Kind.HISTOGRAM,
    "Between two tokens of a choice; of several that came at once, each took an equal share.",
    MODEL,
)

# Each is observed once per request, when it has ended well.
TIME_PER_OUTPUT_TOKEN = Metric(
    "vllm:request_time_per_output_token_seconds",
    Kind.HISTOGRAM,
    "From a request's first token to its last, by token.",
    MODEL,
)
END_TO_END = Metric(
    "vllm:e2e_request_latency_seconds",
    Kind.HISTOGRAM,
    "From a request's arrival to its last token.",
    MODEL,
)
QUEUE = Metric(
    "vllm:request_queue_time_seconds",
    Kind.HISTOGRAM,
    "Waiting for a first place in a batch.",
    MODEL,
)
PREFILL = Metric(
    "vllm:request_prefill_time_seconds",
    Kind.HISTOGRAM,
    "From a request's first place in a batch to its first token.",
    MODEL,
)
DECODE = Metric(
    "vllm:request_decode_time_seconds",
    Kind.HISTOGRAM,
    "From a request's first token to its last.",
    MODEL,
)
INFERENCE = Metric(
    "vllm:request_inference_time_seconds",
    Kind.HISTOGRAM,
    "From a request's first place in a batch to its last token.",
    MODEL,
)
PROMPT_TOKENS_OF_REQUEST = Metric(
    "vllm:request_prompt_tokens", Kind.HISTOGRAM, "Prompt tokens of a request.", MODEL
)
GENERATED_TOKENS_OF_REQUEST = Metric(
    "vllm:request_generation_tokens",
    Kind.HISTOGRAM,
    "Output tokens of a request, of all its choices together.",
    MODEL,
)
CHOICES_OF_REQUEST = Metric(
    "vllm:request_params_n", Kind.HISTOGRAM, "Choices that a request asked for.", MODEL
)

PER_REQUEST: Mapping[Metric, tuple[float, ...]] = {
    END_TO_END: REQUEST_BOUNDS,
    QUEUE: REQUEST_BOUNDS,
    PREFILL: REQUEST_BOUNDS,
    DECODE: REQUEST_BOUNDS,
    INFERENCE: REQUEST_BOUNDS,
    TIME_PER_OUTPUT_TOKEN: TOKEN_BOUNDS,
    PROMPT_TOKENS_OF_REQUEST: LENGTH_BOUNDS,
    GENERATED_TOKENS_OF_REQUEST: LENGTH_BOUNDS,
    CHOICES_OF_REQUEST: CHOICES_BOUNDS,
}
"""Their buckets."""

PARTS = Metric(
    "pagewire_request_part_seconds",
    Kind.HISTOGRAM,
    "Where a request's time went, part by part, as in its `timings`; the parts add up to "
    "the time that its client waited.",
    (*MODEL, "part"),
)

ALL = (
    OPEN_REQUESTS,
    ATTACHED,
    CORE_LOSSES,
    REQUESTS,
    TENANT_TOKENS,
    TENANT_FIRST_TOKEN,
    *COUNTED,
    FINISHED,
    FIRST_TOKEN,
    TOKEN_GAP,
    *PER_REQUEST,
    PARTS,
)
"""In the order in which they are told."""
