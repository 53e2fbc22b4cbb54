"""What a frontend has of its requests, in the core's tests."""

from dataclasses import dataclass, field, replace

from scheduler_service.core import GeneratedTokens, Request, RequestTimings
from scheduler_service.core.config import PoolingType
from scheduler_service.core.request import Generation, Pooling
from scheduler_service.errors import PagewireError
from tests.support.symbolic_worker import vector_bytes


@dataclass
class ChoiceRecord:
    """What a frontend has of one choice."""

    tokens: list[int] = field(default_factory=list)
    num_logprobs: int = 0
    finish_reason: str | None = None
    stopped_by_frontend: bool = False

    def received(self, most: int) -> "ChoiceRecord":
        """The same with the first tokens alone."""
        if len(self.tokens) <= most:
            return replace(self, tokens=list(self.tokens), num_logprobs=0)
        return ChoiceRecord(self.tokens[:most])


def generated_of(choices: list[ChoiceRecord]) -> dict[int, GeneratedTokens]:
    """What a frontend submits again."""
    return {
        index: GeneratedTokens(
            token_ids=list(choice.tokens),
            finished=choice.finish_reason is not None or choice.stopped_by_frontend,
        )
        for index, choice in enumerate(choices)
        if choice.tokens or choice.stopped_by_frontend
    }


def resumed(work: Generation | Pooling, choices: list[ChoiceRecord]) -> Generation | Pooling:
    """The work of a request that is submitted again."""
    return work if isinstance(work, Pooling) else replace(work, generated=generated_of(choices))


@dataclass
class RequestRecord:
    """What a frontend has of one request."""

    request: Request
    submitted: float
    choices: list[ChoiceRecord]
    accepted: bool = False
    cancelled: bool = False
    finished: RequestTimings | None = None
    cached_tokens: int = 0
    error: PagewireError | None = None
    vector: bytes | None = None
    """With one for each token, those of its first tokens."""
    num_prompt_logprobs: int = 0
    num_losses: int = 0
    """Workers that died while computing it, as reported to its frontend."""
    num_lone_losses: int = 0
    """Those of them that died in steps that it had to itself."""
    num_recent_lone_losses: int = 0
    """Those of the latter that followed its last output, which a new core gets."""

    def add_vectors(self, first_token: int, values: bytes) -> None:
        """Those of consecutive tokens may come again, and are then the same."""
        work, known = self.request.work, self.vector or b""
        assert isinstance(work, Pooling)
        assert self.vector is None or work.type is PoolingType.ALL, "two vectors"
        start = first_token * vector_bytes(work.pooling)
        again = known[start : start + len(values)]
        assert start <= len(known), "the vectors of a token are missing"
        assert again == values[: len(again)], "other numbers than before"
        self.vector = known[:start] + values + known[start + len(values) :]

    @property
    def is_live(self) -> bool:
        """Whether its end has not been seen."""
        return self.finished is None and self.error is None and not self.cancelled
