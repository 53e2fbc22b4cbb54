"""The open-loop load generator: sends each request to a target when it is due, however many are
unfinished, and records when its tokens arrive."""

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from typing import NamedTuple, Protocol

from pagewire_cli.load.workload import Arrival
from pagewire_client.async_client import AsyncClient
from pagewire_client.sampling_params import SamplingParams


class Received(NamedTuple):
    """A message of an answer."""

    num_tokens: int
    num_accepted_drafts: int = 0
    """Of the answer's tokens so far, those that came as drafts, if the server reports it."""
    num_drafts: int = 0
    """Drafts computed for them, if the server reports it."""
    num_cached_tokens: int = 0
    """Prompt tokens found in the prefix cache, if the server reports it."""


@dataclass(kw_only=True, slots=True)
class RequestRecord:
    """One request's times, in seconds from the run's start."""

    num_prompt_tokens: int
    num_output_tokens: int
    """Number of output tokens requested."""
    started_s: float
    """When it was due, or when it was sent if a limit on concurrency delayed it."""
    token_times_s: list[float] = field(default_factory=list)
    """Arrival time of each output token. Tokens of one message have the same time."""
    last: Received = field(default_factory=lambda: Received(0))
    """The last message, which has the counts of the whole answer."""
    ended_s: float | None = None
    """None: unfinished when the run was interrupted."""
    error: str | None = None
    """Why it failed."""

    @property
    def is_complete(self) -> bool:
        """Whether all its tokens arrived."""
        return self.ended_s is not None and self.error is None

    @property
    def first_token_s(self) -> float:
        """Time to the first token."""
        return self.token_times_s[0] - self.started_s

    @property
    def inter_token_s(self) -> list[float]:
        """Time from each token to the next."""
        return [after - before for before, after in pairwise(self.token_times_s)]

    @property
    def mean_inter_token_s(self) -> float:
        """Mean inter-token latency; 0 for a single token."""
        gaps = len(self.token_times_s) - 1
        return (self.token_times_s[-1] - self.token_times_s[0]) / gaps if gaps else 0.0

    @property
    def total_s(self) -> float:
        """Seconds from the start to the last token."""
        return self.token_times_s[-1] - self.started_s


class Target(Protocol):
    """A server that generates from prompts of token ids."""

    def stream(self, arrival: Arrival) -> AsyncGenerator[Received, None]:
        """Yield what each message holds until the answer is complete.

        Greedy, past end-of-sequence tokens. Raises when the request fails.
        """
        ...


class PagewireTarget:
    """A Pagewire frontend, through the public gRPC client."""

    def __init__(self, client: AsyncClient, model: str | None = None) -> None:
        self._client = client
        self._model = model

    async def stream(self, arrival: Arrival) -> AsyncGenerator[Received, None]:
        """See `Target`."""
        params = SamplingParams(
            temperature=0.0, ignore_eos=True, max_tokens=arrival.num_output_tokens
        )
        async with self._client.stream(arrival.prompt, params, model=self._model) as stream:
            async for delta in stream:
                yield Received(len(delta.token_ids))
            output = stream.output
            if (timings := output.timings) is not None:
                num_cached = 0 if output.usage is None else output.usage.cached_tokens
                yield Received(0, timings.num_accepted_drafts, timings.num_drafts, num_cached)


OnEnd = Callable[[RequestRecord], None]


class LoadRun:
    """One run of arrivals against a target; its records are valid at any time, even after `run` was
    cancelled."""

    def __init__(
        self,
        target: Target,
        arrivals: Sequence[Arrival],
        *,
        concurrency: int | None = None,
        on_end: OnEnd = lambda record: None,
    ) -> None:
        """`concurrency`: the most requests sent and unfinished; None for any number. `on_end` is
        called with every request that has ended."""
        self.records: list[RequestRecord] = []
        """Records of all requests started, in that order."""
        self.max_in_flight = 0
        self.client_cpu_s = 0.0
        """CPU time of this process during the run, which a local server did not get."""
        self._target = target
        self._arrivals = arrivals
        self._slots = None if concurrency is None else asyncio.Semaphore(concurrency)
        self._on_end = on_end
        self._began = 0.0
        self._ended_s: float | None = None
        self._num_in_flight = 0

    @property
    def duration_s(self) -> float:
        """Seconds from the start to the end of the last request, or to now."""
        return self._now() if self._ended_s is None else self._ended_s

    async def run(self) -> None:
        """Run until every request has ended. Failed requests are recorded."""
        cpu = time.process_time()
        self._began = time.perf_counter()
        try:
            async with asyncio.TaskGroup() as group:
                for arrival in self._arrivals:
                    if (delay := arrival.due_s - self._now()) > 0:
                        await asyncio.sleep(delay)
                    group.create_task(self._request(arrival))
        finally:
            self._ended_s = self._now()
            self.client_cpu_s = time.process_time() - cpu

    def _now(self) -> float:
        return time.perf_counter() - self._began

    async def _request(self, arrival: Arrival) -> None:
        async with self._slot(arrival) as started_s:
            record = RequestRecord(
                num_prompt_tokens=len(arrival.prompt),
                num_output_tokens=arrival.num_output_tokens,
                started_s=started_s,
            )
            self.records.append(record)
            try:
                await self._stream(arrival, record)
            except Exception as error:
                record.error = f"{type(error).__name__}: {error}"
            record.ended_s = self._now()
            self._on_end(record)

    async def _stream(self, arrival: Arrival, record: RequestRecord) -> None:
        async with aclosing(self._target.stream(arrival)) as pieces:
            async for received in pieces:
                now = self._now()
                record.token_times_s.extend([now] * received.num_tokens)
                record.last = received
        if len(record.token_times_s) != arrival.num_output_tokens:
            raise RuntimeError(
                f"expected {arrival.num_output_tokens} tokens, got {len(record.token_times_s)}"
            )

    @asynccontextmanager
    async def _slot(self, arrival: Arrival) -> AsyncIterator[float]:
        """Wait until one more request may be sent; returns the time from which it counts.

        A request that need not wait counts from when it was due, so that a generator that is
        itself late does not make the target look fast.
        """
        started_s = arrival.due_s
        if self._slots is not None:
            if self._slots.locked():
                await self._slots.acquire()
                started_s = self._now()
            else:
                await self._slots.acquire()
        self._num_in_flight += 1
        self.max_in_flight = max(self.max_in_flight, self._num_in_flight)
        try:
            yield started_s
        finally:
            self._num_in_flight -= 1
            if self._slots is not None:
                self._slots.release()
