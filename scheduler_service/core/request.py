"""A request as a frontend submits it, and the outputs that its frontend gets: tokens, no text."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from scheduler_service.core.beam_search import BeamParams
from scheduler_service.core.context import Context
from scheduler_service.core.step_plan import RowLogprobs, RowPromptLogprobs


@dataclass(slots=True, kw_only=True)
class GeneratedTokens:
    """The tokens of one choice that were generated before a core or frontend was lost."""

    token_ids: list[int]
    cumulative_logprob: float = 0.0
    finished: bool = False


@dataclass(slots=True, kw_only=True)
class Request:
    """One request, validated by its frontend."""

    frontend_id: str
    handle: int
    """The frontend's number for choice 0; choice i is `handle + i`."""
    request_id: str
    model: str
    prompt_token_ids: Sequence[int]
    max_tokens: int
    sampling: Any
    """The worker's `SamplerParams`, which the core does not read."""
    num_choices: int = 1
    tenant: str = ""
    context: Context = ()
    """What KV depends on besides tokens and tenant."""
    priority: int = 0
    stop_token_ids: frozenset[int] = frozenset()
    min_tokens: int = 0
    wants_logprobs: bool = False
    wants_prompt_logprobs: bool = False
    deadline: float | None = None
    """On the clock that the core's callers pass as `now`, in seconds."""
    beam_search: BeamParams | None = None
    """Beam search for the `num_choices` best; None: sampling."""
    generated: Mapping[int, GeneratedTokens] = field(default_factory=dict)
    """The tokens by choice index."""
    attempt: int = 0
    """The client's number for this attempt."""
    fingerprint: bytes = b""
    """Identifies the request across attempts; empty if there is only one attempt."""
    was_accepted: bool = False
    """Whether a core has accepted it before."""
    waited_us: int = 0
    """Time since its frontend received it."""
    max_hold_us: int = 0
    """Longest time for which its tokens may be buffered, to be sent together with later ones."""
    traceparent: str = ""
    """Parent of its spans; empty if its trace is not recorded."""
    num_speculative_tokens: int | None = None
    """Most drafts of one of its rows; None: as many as its worker makes."""
    num_worker_losses: int = 0
    """Workers that died while they were computing it, as counted by former cores."""
    num_lone_worker_losses: int = 0
    """Those of them that died in steps that it had to itself."""

    @property
    def num_sequences(self) -> int:
        """Sequences that are computed for it."""
        return self.num_choices if self.beam_search is None else self.beam_search.width

    @property
    def is_continued(self) -> bool:
        """Whether it continues after a loss. It was admitted once, so it is not refused because of
        later requests."""
        return self.was_accepted or bool(self.generated)


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
    num_inexact_recoveries: int = 0
    """Times it was resumed on a worker group of another arithmetic."""
    num_accepted_drafts: int = 0
    """Tokens that came as drafts, with another token of the same step."""
    num_drafts: int = 0
    """Drafts computed, as far as workers report them."""

    def note_drafts(self, num_drafts: int, num_accepted: int) -> None:
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
        return bool(self.token_handles) or self.has_more_than_tokens

    @property
    def has_more_than_tokens(self) -> bool:
        """Whether there are outputs besides tokens and their log probabilities."""
        return bool(
            self.accepted
            or self.prompt_logprobs
            or self.choices_finished
            or self.requests_finished
            or self.requests_failed
            or self.worker_losses
        )
