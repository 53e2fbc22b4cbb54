"""What the core reports to one frontend: columns for tokens, records for the rest."""

from dataclasses import dataclass, field

from scheduler_service.core.step_plan import RowLogprobs, RowPromptLogprobs


@dataclass(slots=True, kw_only=True)
class ChoiceFinished:
    """A choice that ended by a token or by length."""

    handle: int
    reason: str
    """`stop` or `length`."""
    stop_token_id: int | None = None


@dataclass(slots=True, kw_only=True)
class RequestTimings:
    """Where a request's time in the core went, in microseconds; the parts add up to the total."""

    total_us: int = 0
    queue_us: int = 0
    plan_us: int = 0
    wire_us: int = 0
    forward_us: int = 0
    sample_us: int = 0
    preempted_us: int = 0
    recovery_us: int = 0
    num_inexact_recoveries: int = 0
    """How often it was resumed on a worker group of another arithmetic."""


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
    """Handles of requests that lost a worker that was computing them, and go on."""

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
