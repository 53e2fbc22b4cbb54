"""Streams that run all the while, as a client sees them."""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, field
from itertools import count

from pagewire_client import AsyncClient, RetryPolicy
from pagewire_client.errors import PagewireError
from tests.chaos.comparison import Answer, answer_of, differences
from tests.chaos.ticks import ticks
from tests.chaos.timeline import Timeline
from tests.chaos.workload import Ask

PATIENCE = RetryPolicy(max_retries=1_000_000, recovery_timeout_s=600.0)
"""A client that does not give up while a frontend is started again on a busy machine."""


@dataclass(slots=True)
class Progress:
    """How far an open stream is."""

    ask: Ask
    num_tokens: int
    at_s: float
    """When it last got something."""


@dataclass
class Tally:
    """What has become of all streams so far."""

    num_ended: int = 0
    num_tokens: int = 0
    kinds: Counter[str] = field(default_factory=Counter)
    """Of streams that ended well, what they asked for."""
    lost: list[str] = field(default_factory=list)
    """Streams that ended with an error."""
    different: list[str] = field(default_factory=list)
    """Streams whose answer was another than that of an undisturbed run."""
    hung: list[str] = field(default_factory=list)
    """Streams to which nothing came for too long."""


class Streams:
    """Keeps so many streams open, of one request after another, until it is told to finish."""

    def __init__(
        self,
        asks: Sequence[Ask],
        expected: Sequence[Answer],
        timeline: Timeline,
        *,
        max_open: int,
    ) -> None:
        self.tally = Tally()
        self.open: dict[str, Progress] = {}
        """By name."""
        self._asks = asks
        self._expected = expected
        self._timeline = timeline
        self._max_open = max_open
        self._numbers = count()
        self._is_finishing = False

    @property
    def num_begun(self) -> int:
        """Streams that are open or have ended."""
        return self.tally.num_ended + len(self.open)

    def finish(self) -> None:
        """Begin no further streams; `run` returns when those that are open have ended."""
        self._is_finishing = True

    async def run(self, frontends: Sequence[str]) -> None:
        """Open streams on clients that know all frontends, each client another one first."""
        async with clients(frontends) as each, asyncio.TaskGroup() as readers:
            for reader in range(self._max_open):
                readers.create_task(self._read_all(each[reader % len(each)]))

    async def _read_all(self, client: AsyncClient) -> None:
        while not self._is_finishing:
            number = next(self._numbers)
            await self._read(client, number, number % len(self._asks))

    async def _read(self, client: AsyncClient, number: int, at: int) -> None:
        ask, name = self._asks[at], f"stream-{number}"
        progress = self.open[name] = Progress(ask, 0, self._timeline.now_s)
        try:
            async with aclosing(client.stream(ask.prompt, ask.params, request_id=name)) as stream:
                async for delta in stream:
                    progress.num_tokens += len(delta.token_ids)
                    progress.at_s = self._timeline.now_s
                self._compare(name, ask, answer_of(stream.output), self._expected[at])
        except PagewireError as error:
            self.tally.lost.append(f"{name} {ask}: {type(error).__name__} {error.reason} {error}")
            self._timeline.note(name, f"lost: {error}")
        finally:
            del self.open[name]
        self.tally.num_ended += 1
        self.tally.num_tokens += progress.num_tokens

    def _compare(self, name: str, ask: Ask, got: Answer, expected: Answer) -> None:
        found = differences(got, expected)
        if found:
            self.tally.different.append("\n    ".join([f"{name} {ask}:", *found]))
            self._timeline.note(name, f"different: {found[0]}")
        self.tally.kinds.update(ask.kinds)


@asynccontextmanager
async def clients(frontends: Sequence[str]) -> AsyncIterator[list[AsyncClient]]:
    """One for each frontend, which falls back to the others."""
    each = [
        AsyncClient([*frontends[first:], *frontends[:first]], retry=PATIENCE)
        for first in range(len(frontends))
    ]
    try:
        yield each
    finally:
        for client in each:
            await client.close()


async def run_undisturbed(frontend: str, asks: Sequence[Ask], *, max_open: int) -> list[Answer]:
    """The answers, in order, of a deployment to which nothing happens."""
    places = asyncio.Semaphore(max_open)
    async with clients([frontend]) as [client]:

        async def answer(ask: Ask) -> Answer:
            async with places:
                return answer_of(await client.generate(ask.prompt, ask.params))

        return list(await asyncio.gather(*map(answer, asks)))


async def watch(streams: Streams, timeline: Timeline, patience_s: float) -> None:
    """Return once a stream is found to which nothing has come for so long; it is in the tally."""
    async for _ in ticks(1.0):
        for name, progress in streams.open.items():
            silent_s = timeline.now_s - progress.at_s
            if silent_s > patience_s:
                where = f"{name} {progress.ask}: nothing for {silent_s:.0f} s after"
                streams.tally.hung.append(f"{where} {progress.num_tokens} tokens")
                timeline.note(name, "hangs")
        if streams.tally.hung:
            return
