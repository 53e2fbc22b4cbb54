"""What comes back: whole answers and their pieces, under the names vLLM's users know."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

FinishReason = Literal["stop", "length"]
"""`stop`: an end-of-sequence token, a stop token or a stop string; `length`: `max_tokens` or the
model's length."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Logprob:
    """One token's log probability under the model, before penalties and temperature."""

    logprob: float
    """Natural logarithm, at most 0."""
    rank: int
    """1 for the most probable token."""
    decoded_token: str
    """The token's text; bytes that are no whole character show as U+FFFD."""


PositionLogprobs = Mapping[int, Logprob]
"""Log probabilities at one position by token id: the token that stands there first, then the most
probable ones."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Usage:
    """Counts of tokens of a finished request."""

    prompt_tokens: int
    cached_tokens: int
    """Of the prompt's tokens, those found in the prefix cache."""
    completion_tokens: int
    """In all choices together."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Timings:
    """Where a request's wall time went, in microseconds; the parts add up to the total.

    After a reconnect they tell of the last connection only.
    """

    total_us: int
    queue_us: int
    plan_us: int
    wire_us: int
    forward_us: int
    sample_us: int
    detokenize_us: int
    preempted_us: int
    recovery_us: int
    unaccounted_us: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class OutputDelta:
    """What is new of one choice; appending all of them gives its `CompletionOutput`."""

    index: int
    """Which choice."""
    text: str
    """Text to append: whole characters, possibly empty."""
    token_ids: list[int]
    """Tokens to append. Their text may come later than they do."""
    logprobs: list[PositionLogprobs] | None = None
    """One entry per token, where they were asked for."""
    finish_reason: FinishReason | None = None
    """Why the choice ended; None while it goes on."""
    stop_reason: str | int | None = None
    """The stop string or stop token that ended it; None for end-of-sequence tokens."""


@dataclass(kw_only=True, slots=True)
class CompletionOutput:
    """One choice of an answer, as far as it has come."""

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    cumulative_logprob: float | None = None
    """Sum over the output tokens, where log probabilities were asked for."""
    logprobs: list[PositionLogprobs] | None = None
    """One entry per token, where they were asked for."""
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None

    @property
    def finished(self) -> bool:
        """Whether nothing more comes."""
        return self.finish_reason is not None


@dataclass(kw_only=True, slots=True)
class RequestOutput:
    """A request and its answer, as far as it has come."""

    request_id: str
    model: str = ""
    """The name of the model that answers; empty until the server has accepted the request."""
    seed: int | None = None
    """The seed in effect; None until the server has accepted the request."""
    prompt: str | None = None
    """The prompt, where it was given as text."""
    prompt_token_ids: list[int] = field(default_factory=list)
    prompt_logprobs: list[PositionLogprobs | None] | None = None
    """One entry per prompt token, where they were asked for; None for the first token."""
    outputs: list[CompletionOutput] = field(default_factory=list)
    """The choices, by index."""
    finished: bool = False
    usage: Usage | None = None
    """Known at the end."""
    timings: Timings | None = None
    """Known at the end."""

    @property
    def text(self) -> str:
        """The first choice's text: all there is when `n` is 1."""
        return self.outputs[0].text if self.outputs else ""
