"""A request as a frontend submits it: tokens and settled parameters, no text."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from scheduler_service.core.beam_search import BeamParams


@dataclass(slots=True, kw_only=True)
class GeneratedTokens:
    """What was generated of one choice before a core or frontend was lost."""

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
    """The worker's `SamplerParams`, passed through without a look."""
    num_choices: int = 1
    tenant: str = ""
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
    """By choice index."""
    attempt: int = 0
    """Its client's number of this try at it."""
    fingerprint: bytes = b""
    """What all tries at it have in common, and no other request has; empty if there is no other
    try."""
    was_accepted: bool = False
    """Whether a core has accepted it before."""
    waited_us: int = 0
    """How long its frontend has had it."""
    max_hold_us: int = 0
    """Longest time its tokens may be held back in order to be sent together with later ones."""
    traceparent: str = ""
    """The span that its spans go under; empty where no trace of it is recorded."""
    num_worker_losses: int = 0
    """Times it was being computed by a worker that died, as former cores know."""

    @property
    def is_continued(self) -> bool:
        """Whether it goes on after a loss: having been let in once, it is not refused for what
        has come since."""
        return self.was_accepted or bool(self.generated)
