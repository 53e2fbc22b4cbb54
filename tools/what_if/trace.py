"""The load of a recording: requests, interventions and step times, and the outcome of each request.

Independent of the recorded scheduler's decisions, so that another one can run it.
"""

import math
from collections import defaultdict, deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from statistics import median
from typing import Any

from scheduler_service.core import EngineOutputs, Request
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
    ended: float = math.inf
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
        for index, choice in enumerate(() if self.is_finished else self.choices):
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
        """By frontend and handle."""

    def add(self, history: RequestHistory) -> None:
        """Add a request that was accepted."""
        self.all.append(history)
        for key, choice in zip(_keys(history.request), history.choices, strict=True):
            self._live[key] = history, choice

    def find(self, frontend_id: str, handle: int) -> tuple[RequestHistory, ChoiceHistory] | None:
        """The live request and its choice with a frontend's handle."""
        return self._live.get((frontend_id, handle))

    def disconnect(self, entry: Entry, now: float) -> None:
        """End the requests whose clients disconnect by an input."""
        if entry.do == "cancel":
            self._end([(entry.arguments["frontend_id"], entry.arguments["handle"])], now)
        elif entry.do == "remove_frontend":
            frontend_id = entry.arguments["frontend_id"]
            self._end([key for key in self._live if key[0] == frontend_id], now)

    def read(self, outputs: Mapping[str, EngineOutputs], now: float) -> None:
        """Read outputs."""
        for frontend_id, outbox in outputs.items():
            for handle, token in zip(outbox.token_handles, outbox.token_ids, strict=True):
                if found := self.find(frontend_id, handle):
                    found[1].tokens.append(token)
                    found[1].times.append(now)
            for finished in outbox.choices_finished:
                if found := self.find(frontend_id, finished.handle):
                    found[1].has_ended = True
            ended = [finished.handle for finished in outbox.requests_finished]
            for handle in ended:
                if found := self.find(frontend_id, handle):
                    found[0].is_finished = True
            ended += [handle for handle, _ in outbox.requests_failed]
            self._end([(frontend_id, handle) for handle in ended], now)

    def _end(self, keys: Iterable[tuple[str, int]], now: float) -> None:
        """End the live requests among those of these choices."""
        for key in keys:
            if found := self._live.get(key):
                found[0].ended = now
                for other in _keys(found[0].request):
                    del self._live[other]


def _keys(request: Request) -> list[tuple[str, int]]:
    """The frontend and the handle of each choice."""
    return [(request.frontend_id, request.handle + i) for i in range(request.work.num_choices)]


INTERVENTIONS = (
    "add_worker_group",
    "remove_worker_group",
    "fail_worker_group",
    "drain_worker_group",
    "set_adapters",
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
    steps: Mapping[str, list[StepSample]]
    """Executed steps by worker group."""


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
        self._in_flight = defaultdict[str, deque[tuple[StepSize, float]]](deque)
        """Steps by worker group, with the time at which each was sent."""
        self._last_result: dict[str, float] = {}
        self._steps = defaultdict[str, list[StepSample]](list)

    def observe(self, entry: Entry, returned: Any) -> None:
        """Observe one input and what the core returned."""
        self._now = entry.now if entry.now is not None else self._now
        if entry.do in INTERVENTIONS:
            self._interventions.append(entry)
        if entry.do == "submit":
            self._submit(entry.arguments["request"], is_accepted=entry.raised is None)
        elif entry.raised is None:
            self._histories.disconnect(entry, self._now)
            self._observe(entry, returned)

    def _observe(self, entry: Entry, returned: Any) -> None:
        match entry.do:
            case "stop_choice":
                self._stop_choice(**entry.arguments)
            case "schedule":
                self._burst_at = None
                if returned is not None:
                    step = StepSize.of(returned), self._now
                    self._in_flight[entry.arguments["worker_group_id"]].append(step)
            case "update":
                held_s = entry.arguments["result"].held_us / 1e6
                self._end_step(entry.arguments["worker_group_id"], self._now - held_s)
            case "remove_worker_group" | "fail_worker_group":
                for steps in (self._in_flight, self._last_result):
                    steps.pop(entry.arguments["worker_group_id"], None)
            case "pop_outboxes":
                self._histories.read(returned or {}, self._now)

    def trace(self) -> Trace:
        """The observed load."""
        choices = [choice for history in self._arrivals for choice in history.choices]
        lengths = [len(choice.tokens) for choice in choices if choice.has_ended]
        usual = round(median(lengths)) if lengths else 1
        for history in self._arrivals:
            history.assume_ends(max(1, usual))
        # The deployment's shutdown after the last request is not part of the load.
        last = max((history.ended for history in self._histories.all), default=math.inf)
        interventions = [entry for entry in self._interventions if (entry.now or 0.0) <= last]
        return Trace(histories=self._arrivals, interventions=interventions, steps=self._steps)

    def _submit(self, request: Request, *, is_accepted: bool) -> None:
        """Add an arrival. Another configuration might accept one that was refused, unless it was
        accepted here before."""
        key = request.tenant, request.request_id
        if not is_accepted and key in self._accepted_ids:
            return
        if self._burst_at is None:
            self._burst_at = self._now
        history = RequestHistory.begin(len(self._arrivals), request, self._burst_at)
        self._arrivals.append(history)
        if is_accepted:
            self._accepted_ids.add(key)
            self._histories.add(history)

    def _stop_choice(self, frontend_id: str, handle: int, num_tokens: int, now: float) -> None:
        found = self._histories.find(frontend_id, handle)
        if found is None or found[1].has_ended:
            return
        history, choice = found
        index = handle - history.request.handle
        num_new = max(0, num_tokens - num_resumed(history.request, index))
        del choice.tokens[num_new:], choice.times[num_new:]
        choice.has_ended = True

    def _end_step(self, group_id: str, now: float) -> None:
        """Record a step's duration, from when its worker could begin to when its result arrived,
        even if it waited for other workers."""
        size, sent = self._in_flight[group_id].popleft()
        began = max(sent, self._last_result.get(group_id, sent))
        ended = self._last_result[group_id] = max(began, now)
        self._steps[group_id].append(StepSample(size, ended - began))


def num_resumed(request: Request, index: int) -> int:
    """Tokens that a choice of the request resumed with."""
    generated = request.work.generated.get(index)
    return len(generated.token_ids) if generated is not None else 0
