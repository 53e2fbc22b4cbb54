"""The load of a recording: requests, interventions and step times, and the outcome of each request.

Independent of the recorded scheduler's decisions, so that another one can run it.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from statistics import median
from typing import Any

from scheduler_service.core import EngineOutputs, Request, StepPlan, StepResult
from scheduler_service.replay.recording import Entry
from tools.what_if.cost_model import StepSample, StepSize


@dataclass(slots=True, kw_only=True)
class ChoiceHistory:
    """One choice's tokens, without those that the request resumed with."""

    tokens: list[int] = field(default_factory=list)
    times: list[float] = field(default_factory=list)
    """When each token was reported, in seconds on the core's clock."""
    has_ended: bool = False
    """Whether it ended by a token or by length."""


@dataclass(slots=True, kw_only=True)
class RequestHistory:
    """One request."""

    number: int
    """Number of the arrival in the recording, including refused ones; the same in every run."""
    request: Request
    submitted: float
    """Requests of one message arrived together, and were planned together."""
    choices: list[ChoiceHistory]
    ended: float | None = None
    """When it ended, in whatever way."""
    is_finished: bool = False
    """Whether it ended well."""
    is_assumed: bool = False
    """Whether the end was not recorded, and its length is assumed."""

    @classmethod
    def begin(cls, number: int, request: Request, now: float) -> "RequestHistory":
        """A request that arrives now."""
        choices = [ChoiceHistory() for _ in range(request.work.num_choices)]
        return cls(number=number, request=request, submitted=now, choices=choices)

    @property
    def first_token(self) -> float | None:
        """When the first token of any choice was reported."""
        return min((choice.times[0] for choice in self.choices if choice.times), default=None)

    @property
    def num_tokens(self) -> int:
        """Tokens of all choices."""
        return sum(len(choice.tokens) for choice in self.choices)

    def assume_ends(self, usual_length: int) -> None:
        """Give choices whose end was not recorded the typical number of tokens, at least those that
        they already got."""
        for index, choice in enumerate(self.choices):
            generated = self.request.work.generated.get(index)
            if not choice.has_ended and not (generated is not None and generated.finished):
                max_tokens = self.request.work.max_tokens - num_resumed(self.request, index)
                num_missing = min(usual_length, max_tokens) - len(choice.tokens)
                choice.tokens += [0] * max(0, num_missing)
                self.is_assumed = True


class Histories:
    """All requests of a core; reads its outputs as frontends do."""

    def __init__(self) -> None:
        self.all: list[RequestHistory] = []
        """Histories in order of arrival."""
        self._live: dict[tuple[str, int], tuple[RequestHistory, ChoiceHistory]] = {}

    def add(self, history: RequestHistory) -> None:
        """Add a request that was accepted."""
        self.all.append(history)
        for key, choice in zip(_keys(history), history.choices, strict=True):
            self._live[key] = history, choice

    def find(self, frontend_id: str, handle: int) -> tuple[RequestHistory, ChoiceHistory] | None:
        """The live request and its choice with a frontend's handle."""
        return self._live.get((frontend_id, handle))

    def cancel(self, frontend_id: str, handle: int, now: float) -> None:
        """Note that its client disconnected. No effect if unknown."""
        found = self.find(frontend_id, handle)
        if found is not None:
            self._end(found[0], now)

    def remove_frontend(self, frontend_id: str, now: float) -> None:
        """Note that all of a frontend's clients disconnected."""
        for history in [
            history for (name, _), (history, _) in self._live.items() if name == frontend_id
        ]:
            self._end(history, now)

    def read(self, outputs: Mapping[str, EngineOutputs], now: float) -> None:
        """Read outputs."""
        for frontend_id, outbox in outputs.items():
            for handle, token in zip(outbox.token_handles, outbox.token_ids, strict=True):
                found = self.find(frontend_id, handle)
                if found is not None:
                    found[1].tokens.append(token)
                    found[1].times.append(now)
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

    def _end(self, history: RequestHistory, now: float) -> None:
        if history.ended is None:
            history.ended = now
            for key in _keys(history):
                self._live.pop(key, None)


def _keys(history: RequestHistory) -> Iterator[tuple[str, int]]:
    request = history.request
    for index in range(request.work.num_choices):
        yield request.frontend_id, request.handle + index


INTERVENTIONS = (
    "add_worker_group",
    "remove_worker_group",
    "fail_worker_group",
    "drain_worker_group",
    "cancel",
    "abort",
    "remove_frontend",
)
"""Inputs whose times do not depend on the core."""


@dataclass(kw_only=True, slots=True)
class Trace:
    """The load of a recording."""

    histories: list[RequestHistory]
    """All arrivals, those that were refused included, as recorded."""
    interventions: list[Entry]
    steps: list[StepSample]


class TraceReader:
    """Observes an exact replay; its results are complete at the end."""

    def __init__(self) -> None:
        self._now = 0.0
        self._histories = Histories()
        self._arrivals: list[RequestHistory] = []
        self._accepted_ids: set[tuple[str, str]] = set()
        """Tenants and request ids."""
        self._burst_at: float | None = None
        """Arrival of the first request since the last plan."""
        self._interventions: list[Entry] = []
        self._clock = _StepClock()

    def observe(self, entry: Entry, returned: Any) -> None:
        """Observe one input and what the core returned."""
        self._now = entry.now if entry.now is not None else self._now
        if entry.do in INTERVENTIONS:
            self._interventions.append(entry)
        watch = getattr(self, f"_on_{entry.do}", None)
        if watch is not None and entry.raised is None:
            watch(**entry.arguments | ({"returned": returned} if returned else {}))
        elif entry.do == "submit":
            self._on_refusal(entry.arguments["request"])

    def trace(self) -> Trace:
        """The observed load."""
        choices = [choice for history in self._arrivals for choice in history.choices]
        lengths = [len(choice.tokens) for choice in choices if choice.has_ended]
        usual = round(median(lengths)) if lengths else 1
        for history in self._arrivals:
            history.assume_ends(max(1, usual))
        return Trace(
            histories=self._arrivals,
            interventions=self._without_shutdown(),
            steps=self._clock.samples,
        )

    def _without_shutdown(self) -> list[Entry]:
        """Omit the shutdown of the deployment at the end, which is not part of the load."""
        ends = [history.ended for history in self._histories.all]
        last = max((end for end in ends if end is not None), default=None)
        if last is None or None in ends:
            return self._interventions
        return [entry for entry in self._interventions if entry.now is None or entry.now <= last]

    def _arrive(self, request: Request) -> RequestHistory:
        if self._burst_at is None:
            self._burst_at = self._now
        self._arrivals.append(RequestHistory.begin(len(self._arrivals), request, self._burst_at))
        return self._arrivals[-1]

    def _on_submit(self, request: Request, now: float) -> None:
        self._accepted_ids.add((request.tenant, request.request_id))
        self._histories.add(self._arrive(request))

    def _on_refusal(self, request: Request) -> None:
        """Another configuration might accept it, unless it was accepted here before."""
        if (request.tenant, request.request_id) not in self._accepted_ids:
            self._arrive(request)

    def _on_cancel(self, frontend_id: str, handle: int, now: float) -> None:
        self._histories.cancel(frontend_id, handle, now)

    def _on_remove_frontend(self, frontend_id: str, now: float) -> None:
        self._histories.remove_frontend(frontend_id, now)

    def _on_stop_choice(self, frontend_id: str, handle: int, num_tokens: int, now: float) -> None:
        found = self._histories.find(frontend_id, handle)
        if found is None or found[1].has_ended:
            return
        history, choice = found
        index = handle - history.request.handle
        num_new = max(0, num_tokens - num_resumed(history.request, index))
        del choice.tokens[num_new:], choice.times[num_new:]
        choice.has_ended = True

    def _on_schedule(
        self, worker_group_id: str, now: float, returned: StepPlan | None = None
    ) -> None:
        self._burst_at = None
        if returned is not None:
            self._clock.leave(worker_group_id, returned, now)

    def _on_update(self, worker_group_id: str, result: StepResult, now: float) -> None:
        self._clock.arrive(worker_group_id, now - result.held_us / 1e6)

    def _on_remove_worker_group(self, worker_group_id: str, now: float) -> None:
        self._clock.lose(worker_group_id)

    def _on_fail_worker_group(self, worker_group_id: str, reason: str, now: float) -> None:
        self._clock.lose(worker_group_id)

    def _on_pop_outboxes(self, returned: Any = ()) -> None:
        self._histories.read(returned or {}, self._now)


class _StepClock:
    """Durations of steps, from when their worker could begin to when their result arrived, even if
    it waited for other workers."""

    def __init__(self) -> None:
        self.samples: list[StepSample] = []
        self._in_flight: dict[str, list[tuple[StepSize, float]]] = {}
        self._last_result: dict[str, float] = {}

    def leave(self, group_id: str, plan: StepPlan, now: float) -> None:
        self._in_flight.setdefault(group_id, []).append((StepSize.of(plan), now))

    def arrive(self, group_id: str, now: float) -> None:
        size, sent = self._in_flight[group_id].pop(0)
        began = max(sent, self._last_result.get(group_id, sent))
        ended = self._last_result[group_id] = max(began, now)
        self.samples.append(StepSample(group_id=group_id, size=size, seconds=ended - began))

    def lose(self, group_id: str) -> None:
        self._in_flight.pop(group_id, None)
        self._last_result.pop(group_id, None)


def num_resumed(request: Request, index: int) -> int:
    """Tokens that a choice of the request resumed with."""
    generated = request.work.generated.get(index)
    return len(generated.token_ids) if generated is not None else 0
