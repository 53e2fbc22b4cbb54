"""A request as a frontend submits it, and the outputs that its frontend gets: tokens, no text."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from scheduler_service.core.beam_search import BeamParams
from scheduler_service.core.config import (
    PoolingHead,
    PoolingType,
    WorkerGroupCapacity,
    WorkKind,
)
from scheduler_service.core.context import Context
from scheduler_service.core.step_plan import RowLogprobs, RowPromptLogprobs


@dataclass(slots=True, kw_only=True)
class GeneratedTokens:
    """The tokens of one choice that were generated before a core or frontend was lost."""

    token_ids: list[int]
    cumulative_logprob: float = 0.0
    finished: bool = False


@dataclass(slots=True, kw_only=True)
class Generation:
    """What a request wants: tokens."""

    kind: ClassVar = WorkKind.GENERATION
    pooling: ClassVar[Any] = None

    max_tokens: int
    sampling: Any
    """The worker's `SamplerParams`, which the core does not read."""
    num_choices: int = 1
    stop_token_ids: frozenset[int] = frozenset()
    min_tokens: int = 0
    wants_logprobs: bool = False
    wants_prompt_logprobs: bool = False
    beam_search: BeamParams | None = None
    """Beam search for the `num_choices` best; None: sampling."""
    generated: Mapping[int, GeneratedTokens] = field(default_factory=dict)
    """The tokens by choice index."""
    max_hold_us: int = 0
    """Longest time for which its tokens may be buffered, to be sent together with later ones."""
    num_speculative_tokens: int | None = None
    """Most drafts of one of its rows; None: as many as its worker makes."""

    @property
    def num_sequences(self) -> int:
        """Sequences that are computed for it."""
        return self.num_choices if self.beam_search is None else self.beam_search.width

    def max_output_tokens(self, capacity: WorkerGroupCapacity, num_prompt_tokens: int) -> int:
        """Maximum number of tokens after the prompt in a worker group; none if it is too long."""
        return min(self.max_tokens, capacity.max_model_len - num_prompt_tokens)


@dataclass(slots=True, kw_only=True)
class Pooling:
    """What a request wants: a vector, or one for each token. They count as one token of output,
    which is not computed and needs no position of the model."""

    kind: ClassVar = WorkKind.POOLING
    max_tokens: ClassVar[int] = 1
    min_tokens: ClassVar[int] = 0
    num_choices: ClassVar[int] = 1
    num_sequences: ClassVar[int] = 1
    stop_token_ids: ClassVar[frozenset[int]] = frozenset()
    wants_logprobs: ClassVar[bool] = False
    wants_prompt_logprobs: ClassVar[bool] = False
    generated: ClassVar[Mapping[int, GeneratedTokens]] = {}
    beam_search: ClassVar[None] = None
    sampling: ClassVar[Any] = None
    max_hold_us: ClassVar[int] = 0
    num_speculative_tokens: ClassVar[int] = 0

    type: PoolingType
    dimensions: int = 0
    """Numbers of the vector; 0: all."""
    head: PoolingHead = PoolingHead.VECTOR
    pooling: Any = None
    """The worker's `PoolingParams`, which the core does not read."""

    def vector_size(self, capacity: WorkerGroupCapacity) -> int:
        """Numbers of a vector of a worker group."""
        if self.head is PoolingHead.CLASSIFIER:
            return capacity.num_labels
        return self.dimensions or capacity.vector_size

    def refusal(self, capacity: WorkerGroupCapacity) -> tuple[str, str] | None:
        """The field with a value that a worker group does not compute, and what is allowed; None if
        there is none."""
        classifies = self.head is PoolingHead.CLASSIFIER
        types = {capacity.classifier_type} if classifies else capacity.pooling_types
        if not (capacity.num_labels if classifies else capacity.vector_size):
            lacks, other = ("labels", "vector") if classifies else ("vectors", "classifier")
            return "head", f"must be {other}, is {self.head}: the model has no {lacks}"
        if self.type not in types:
            return "type", f"must be {' or '.join(sorted(types))}, is {self.type}"
        if self.dimensions > (max_dimensions := 0 if classifies else capacity.vector_size):
            expected = f"must be 0 to the model's {max_dimensions} for the head {self.head}"
            return "dimensions", f"{expected}, is {self.dimensions}"
        return None

    def max_output_tokens(self, capacity: WorkerGroupCapacity, num_prompt_tokens: int) -> int:
        """One, for the vector; none if the prompt is too long for a worker group."""
        return int(num_prompt_tokens <= capacity.max_model_len)


@dataclass(slots=True, kw_only=True)
class Request:
    """One request, validated by its frontend."""

    frontend_id: str
    handle: int
    """The frontend's number for choice 0; choice i is `handle + i`."""
    request_id: str
    model: str
    prompt_token_ids: Sequence[int]
    work: Generation | Pooling
    """What it wants."""
    tenant: str = ""
    context: Context = ()
    """What KV depends on besides tokens and tenant."""
    priority: int = 0
    deadline: float | None = None
    """On the clock that the core's callers pass as `now`, in seconds."""
    attempt: int = 0
    """The client's number for this attempt."""
    fingerprint: bytes = b""
    """Identifies the request across attempts; empty if there is only one attempt."""
    was_accepted: bool = False
    """Whether a core has accepted it before."""
    waited_us: int = 0
    """Time since its frontend received it."""
    traceparent: str = ""
    """Parent of its spans; empty if its trace is not recorded."""
    num_worker_losses: int = 0
    """Workers that died while they were computing it, as counted by former cores."""
    num_lone_worker_losses: int = 0
    """Those of them that died in steps that it had to itself."""

    @property
    def is_continued(self) -> bool:
        """Whether it continues after a loss. It was admitted once, so it is not refused because of
        later requests."""
        return self.was_accepted or bool(self.work.generated)


@dataclass(slots=True, kw_only=True)
class ChoiceFinished:
    """A choice that ended by a token or by length."""

    handle: int
    reason: str
    """`stop` or `length`."""
    stop_token_id: int | None = None


@dataclass(slots=True, kw_only=True)
class RequestTimings:
    """A request's time in the core by activity, in microseconds; the parts add up to the total."""

    total_us: int = 0
    queue_us: int = 0
    plan_us: int = 0
    wire_us: int = 0
    forward_us: int = 0
    sample_us: int = 0
    preempted_us: int = 0
    recovery_us: int = 0
    transfer_us: int = 0
    num_inexact_recoveries: int = 0
    """Times it was resumed on a worker group of another arithmetic."""
    num_accepted_drafts: int = 0
    """Tokens that came as drafts, with another token of the same step."""
    num_drafts: int = 0
    """Drafts computed, as far as workers report them."""

    def add_drafts(self, num_drafts: int, num_accepted: int) -> None:
        """Count a row's drafts, and its tokens that came as drafts."""
        self.num_drafts += num_drafts
        self.num_accepted_drafts += num_accepted


@dataclass(slots=True, kw_only=True)
class RequestFinished:
    """A request whose choices have all ended."""

    handle: int
    cached_tokens: int
    timings: RequestTimings


@dataclass(slots=True)
class EngineOutputs:
    """Outputs for one frontend since the last ones were taken."""

    accepted: list[int] = field(default_factory=list)
    token_handles: list[int] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[tuple[int, RowLogprobs]] = field(default_factory=list)
    """(choice handle, log probabilities), in the order of the tokens."""
    prompt_logprobs: list[tuple[int, RowPromptLogprobs]] = field(default_factory=list)
    """(request handle, log probabilities)."""
    vectors: list[tuple[int, int, bytes]] = field(default_factory=list)
    """(request handle, index of the first token if each has a vector, float32 numbers as on the
    wire)."""
    choices_finished: list[ChoiceFinished] = field(default_factory=list)
    requests_finished: list[RequestFinished] = field(default_factory=list)
    requests_failed: list[tuple[int, Exception]] = field(default_factory=list)
    """(request handle, an error of `scheduler_service.errors`)."""
    worker_losses: list[int] = field(default_factory=list)
    """Handles of requests that lost a worker while it was computing them, and continue."""
    lone_worker_losses: list[int] = field(default_factory=list)
    """Those of them that had the worker's last steps to themselves."""

    def __bool__(self) -> bool:
        """Whether there are any outputs."""
        return bool(self.token_handles or self.accepted) or self.has_urgent

    @property
    def has_urgent(self) -> bool:
        """Whether there are outputs besides acceptances, tokens and their log probabilities."""
        return bool(
            self.prompt_logprobs
            or self.vectors
            or self.choices_finished
            or self.requests_finished
            or self.requests_failed
            or self.worker_losses
        )
