"""Served models, and the state of a deployment: what `get_model` and `get_status` return.

`protos/pagewire/v1/model.proto` and `status.proto` describe each field. Names end with their unit.
What was not requested, or is not known, is empty or 0.
"""

from dataclasses import dataclass, fields
from typing import Any, Literal, TypeVar

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message

from pagewire.loading import describe_load

LOSSES_SHOWN_S = 300.0
"""How long a lost worker is listed, as on the dashboard."""

WorkerState = Literal["unspecified", "starting", "ready", "draining", "lost", "hung"]
RequestState = Literal[
    "unspecified",
    "queued",
    "prefilling",
    "decoding",
    "preempted",
    "swapped",
    "recovering",
    "finished",
    "aborted",
    "failed",
]
RequestEvent = Literal[
    "unspecified",
    "queued",
    "resumed",
    "placed",
    "started",
    "prefilled",
    "first_token",
    "preempted",
    "swapped_out",
    "swapped_in",
    "worker_lost",
    "moved",
    "ended",
]

WorkKind = Literal["unspecified", "generation", "pooling"]
CacheLifetime = Literal["unspecified", "growing", "window", "chunk", "state", "fixed"]


@dataclass(frozen=True, kw_only=True, slots=True)
class CacheGroup:
    """Layers that keep what their tokens add to the cache for the same time."""

    lifetime: CacheLifetime
    block_tokens: int
    """Tokens per block; 0 in a group of states."""
    span: int
    """Tokens of a window or a chunk; 0 elsewhere."""
    num_blocks: int
    """Blocks of a sequence in a group of states; 0 elsewhere."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelInfo:
    """A served model."""

    name: str
    aliases: list[str]
    """Other names by which requests may ask for it."""
    fingerprint: str
    architecture: str
    max_model_len: int
    """Most tokens of prompt and output together."""
    vocab_size: int
    eos_token_ids: list[int]
    bos_token_id: int | None
    dtype: str
    cache_groups: list[CacheGroup]
    block_bytes: int
    num_parameters: int
    batch_invariant: bool
    """Whether answers do not depend on other requests."""
    structured_output: bool
    arithmetic: str
    uses_cuda_graphs: bool
    reasoning_parser: str
    """How reasoning is found in answers: a format, `none`, or `auto` (also if empty)."""
    tool_call_parser: str
    """The same for tool calls."""
    weights: str
    """The format in which most weights are stored, such as `BF16` or `Q4_1`."""
    cache_layout: str
    """For people: the cache groups, their attention backends, and what is unused of blocks."""
    max_cached_tokens: int
    """Most tokens that one sequence can have in a KV cache; 0 if unknown."""
    generation_defaults: list[str]
    """Fields of `SamplingParams` for which the model has a default of its own."""
    work_kinds: list[WorkKind]
    """What the worker does; empty: generation."""
    vector_size: int
    """Numbers in a pooled vector; 0 if the worker pools none."""
    whole_prompt: bool
    """Whether a prompt is computed in one step, as a whole."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LatencyHistogram:
    """Latencies; bucket i counts those up to `first_bound_s * growth ** i`."""

    first_bound_s: float
    growth: float
    counts: list[int]


@dataclass(frozen=True, kw_only=True, slots=True)
class BlockMap:
    """The owners of the KV blocks of one memory, by block."""

    owners: list[int]
    """The `number` of a request; 0 for an empty block, -1 for a free one with cached contents."""
    num_references: list[int]
    """Block tables that contain the block; 255 stands for 255 or more."""


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkerGroupStatus:
    """The ranks that together hold one copy of a model."""

    group_id: str
    state: WorkerState
    model: str
    address: str
    num_gpu_blocks: int
    num_free_gpu_blocks: int
    num_cpu_blocks: int
    num_free_cpu_blocks: int
    num_running_sequences: int
    max_num_seqs: int
    num_steps: int
    epoch: int
    heartbeat_age_s: float
    block_size: int
    world_size: int
    decode_step_us: float
    prefill_token_us: float
    arithmetic: str
    uses_cuda_graphs: bool
    weights: str
    """The format in which most of its weights are stored."""
    cache_layout: str
    """As in `ModelInfo`."""
    gpu_blocks: BlockMap
    cpu_blocks: BlockMap


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkerLoss:
    """A worker whose stream broke or whose lease expired."""

    group_id: str
    rank: int
    age_s: float
    model: str


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkerLoading:
    """How far a worker has loaded its model."""

    group_id: str
    rank: int
    model: str
    phase: str
    """What it does at present."""
    done_bytes: int
    total_bytes: int
    """0 while it is not known."""
    remaining_s: float | None
    """None without an estimate."""

    @property
    def summary(self) -> str:
        """The phase, with its share and the time left as far as they are known."""
        return describe_load(self.phase, self.done_bytes, self.total_bytes, self.remaining_s)


@dataclass(frozen=True, kw_only=True, slots=True)
class RequestStatus:
    """One request, without its contents."""

    request_id: str
    number: int
    tenant: str
    model: str
    group_id: str
    state: RequestState
    priority: int
    num_prompt_tokens: int
    num_cached_tokens: int
    num_computed_tokens: int
    num_output_tokens: int
    num_accepted_drafts: int
    """Of these, the ones that came as drafts of speculative decoding."""
    num_drafts: int
    """Drafts that were computed, whether or not they were right."""
    max_tokens: int
    num_sequences: int
    age_s: float
    ended_age_s: float
    error_reason: str
    placements: list[str]
    events: list[RequestEvent]
    event_times_us: list[int]
    event_values: list[int]
    block_tables: list[list[int]]
    host_block_tables: list[list[int]]


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineStatus:
    """A snapshot of the scheduler core and its workers; counts of what happened are since the
    core's start."""

    uptime_s: float
    version: str
    models: list[str]
    num_waiting: int
    num_running: int
    num_swapped: int
    num_frontends: int
    num_finished: int
    num_generated_tokens: int
    num_prefill_tokens: int
    num_preemptions: int
    num_swapped_out_blocks: int
    num_swapped_in_blocks: int
    num_worker_losses: int
    groups: list[WorkerGroupStatus]
    requests: list[RequestStatus]
    num_unlisted_requests: int
    ended_requests: list[RequestStatus]
    time_to_first_token: LatencyHistogram
    inter_token_latency: LatencyHistogram
    worker_losses: list[WorkerLoss]
    loading: list[WorkerLoading]

    @property
    def lost_workers(self) -> list[WorkerLoss]:
        """The last loss of each group that was lost within five minutes and has not returned."""
        present = {group.group_id for group in self.groups}
        present |= {load.group_id for load in self.loading}
        recent = [loss for loss in self.worker_losses if loss.age_s < LOSSES_SHOWN_S]
        last = {loss.group_id: loss for loss in recent if loss.group_id not in present}
        return list(last.values())


T = TypeVar("T")


def from_proto(kind: type[T], message: Message) -> T:
    """The dataclass for a message, which has the same fields."""
    values: dict[str, Any] = {}
    for name in [field.name for field in fields(kind)]:  # type: ignore[arg-type]
        field = message.DESCRIPTOR.fields_by_name[name]
        value = getattr(message, name)
        if field.is_repeated:
            values[name] = [_value(field, item) for item in value]
        elif field.has_presence and field.message_type is None and not message.HasField(name):
            values[name] = None
        else:
            values[name] = _value(field, value)
    return kind(**values)


def _value(field: Any, value: Any) -> Any:
    if field.message_type is not None:
        return from_proto(globals()[field.message_type.name], value)  # of the message's name
    if field.enum_type is not None:
        names = field.enum_type.values_by_number
        prefix = names[0].name.removesuffix("UNSPECIFIED")
        # A newer server may know more values.
        return names[value if value in names else 0].name.removeprefix(prefix).lower()
    if field.type == FieldDescriptor.TYPE_BYTES:
        is_one_byte = field.name == "num_references"
        return list(value) if is_one_byte else memoryview(value).cast("i").tolist()
    return value
