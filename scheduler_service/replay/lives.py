"""What became of requests, as their frontends saw it: which tokens came when, and the end."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from scheduler_service.core import EngineOutputs, Request


@dataclass(slots=True, kw_only=True)
class ChoiceLife:
    """One choice's tokens, without those that a request brought along."""

    tokens: list[int] = field(default_factory=list)
    times: list[float] = field(default_factory=list)
    """When each token was told, in seconds on the core's clock."""
    has_ended: bool = False
    """By a token or by length."""


@dataclass(slots=True, kw_only=True)
class Life:
    """One request."""

    number: int
    """Of the arrival in the recording, refused ones included; the same in every simulation."""
    request: Request
    submitted: float
    choices: list[ChoiceLife]
    ended: float | None = None
    """When it ended, in whatever way."""
    is_finished: bool = False
    """Whether it ended well."""

    @property
    def first_token(self) -> float | None:
        """When the first token of any choice was told."""
        return min((choice.times[0] for choice in self.choices if choice.times), default=None)

    @property
    def num_tokens(self) -> int:
        """Tokens of all choices."""
        return sum(len(choice.tokens) for choice in self.choices)


class Lives:
    """All requests of a core; reads its news as frontends do."""

    def __init__(self) -> None:
        self.all: list[Life] = []
        """In order of arrival."""
        self._live: dict[tuple[str, int], tuple[Life, ChoiceLife]] = {}

    def begin(self, number: int, request: Request, now: float) -> Life:
        """A request was accepted."""
        choices = [ChoiceLife() for _ in range(request.num_choices)]
        life = Life(number=number, request=request, submitted=now, choices=choices)
        self.all.append(life)
        for key, choice in zip(_keys(life), choices, strict=True):
            self._live[key] = life, choice
        return life

    def find(self, frontend_id: str, handle: int) -> tuple[Life, ChoiceLife] | None:
        """The live request, and its choice, that a frontend calls so."""
        return self._live.get((frontend_id, handle))

    def cancel(self, frontend_id: str, handle: int, now: float) -> None:
        """Its client went away. Unknown: no effect."""
        found = self.find(frontend_id, handle)
        if found is not None:
            self._end(found[0], now)

    def remove_frontend(self, frontend_id: str, now: float) -> None:
        """All of a frontend's clients went away."""
        for life in [life for (name, _), (life, _) in self._live.items() if name == frontend_id]:
            self._end(life, now)

    def read(self, news: Mapping[str, EngineOutputs], now: float) -> Iterator[tuple[Life, int]]:
        """Take in news; yields each life and the index of the choice that got a token."""
        for frontend_id, outbox in news.items():
            for handle, token in zip(outbox.token_handles, outbox.token_ids, strict=True):
                found = self.find(frontend_id, handle)
                if found is not None:
                    life, choice = found
                    choice.tokens.append(token)
                    choice.times.append(now)
                    yield life, handle - life.request.handle
            for finished in outbox.choices_finished:
                found = self.find(frontend_id, finished.handle)
                if found is not None:
                    found[1].has_ended = True
            for request_finished in outbox.requests_finished:
                found = self.find(frontend_id, request_finished.handle)
                if found is not None:
                    found[0].is_finished = True
                    self._end(found[0], now)
            for handle, _ in outbox.requests_failed:
                self.cancel(frontend_id, handle, now)

    def _end(self, life: Life, now: float) -> None:
        if life.ended is None:
            life.ended = now
            for key in _keys(life):
                self._live.pop(key, None)


def _keys(life: Life) -> Iterator[tuple[str, int]]:
    request = life.request
    for index in range(request.num_choices):
        yield request.frontend_id, request.handle + index
