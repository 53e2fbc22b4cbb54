"""Continuous streams, as clients see them."""

import asyncio
from collections import Counter
from collections.abc import Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from itertools import count

from pagewire_client import AsyncClient, RequestOutput
from pagewire_client.batch import BatchProgress
from pagewire_client.errors import PagewireError
from tests.chaos.clients import clients
from tests.chaos.comparison import Answer, answer_of, differences, is_beginning
from tests.chaos.ticks import ticks
from tests.chaos.timeline import Timeline
from tests.chaos.undisturbed import vectors_of
from tests.chaos.workload import Ask


@dataclass(slots=True)
class Progress:
    """Progress of an open stream."""

    ask: Ask
    num_tokens: int
    at_s: int
    """When it last received something, on the clock that `Streams.now_s` returns for it."""
    arrives_whole: bool = False
    """Whether nothing is received before the answer is complete."""

    def add(self, num_tokens: int, now_s: int) -> None:
        """Note that something was received."""
        self.num_tokens += num_tokens
        self.at_s = now_s


@dataclass
class Tally:
    """Outcomes of all streams so far."""

    num_ended: int = 0
    """Streams that were read to their end."""
    num_left: int = 0
    """Streams whose clients disconnected early."""
    num_tokens: int = 0
    num_vectors: int = 0
    kinds: Counter[str] = field(default_factory=Counter)
    """The requests of streams that ended well."""
    lost: list[str] = field(default_factory=list)
    """Streams that ended with an error."""
    different: list[str] = field(default_factory=list)
    """Streams whose answers differ from those of an undisturbed run."""
    hung: list[str] = field(default_factory=list)
    """Streams that received nothing for too long."""


class Streams:
    """Keeps a number of streams open, one request after another, until `finish`."""

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
        self.awake_s = 0
        """Seconds during which the harness was running: on an overloaded machine all processes
        starve, which is not a fault."""
        self.calm_s = 0
        """Of these, seconds in which nothing was disturbed any more."""
        self._asks = asks
        self._expected = expected
        self._timeline = timeline
        self._max_open = max_open
        self._texts: Sequence[str] = ()
        self._vectors: Sequence[bytes] = ()
        self._numbers = count()
        self.is_disturbed = True
        """Whether processes may still be killed."""
        self._is_finishing = False

    def embed(self, texts: Sequence[str], expected: Sequence[bytes]) -> None:
        """Request the vectors of texts too, all in one call, by turns with the streams."""
        self._texts, self._vectors = texts, expected

    @property
    def num_begun(self) -> int:
        """Streams that are open or have ended."""
        return self.tally.num_ended + len(self.open)

    def now_s(self, progress: Progress) -> int:
        """The time by which a stream's silence is measured.

        A beam search or best_of whose worker or frontend is lost starts again from its prompt.
        While losses follow each other faster than it can be computed it gets nowhere, and that is
        no hang; so its time begins when they are over.
        """
        return self.calm_s if progress.arrives_whole else self.awake_s

    def finish(self) -> None:
        """Begin no further streams, since nothing is disturbed any more; `run` returns when those
        that are open have ended."""
        self._is_finishing = True
        self.is_disturbed = False

    async def run(self, frontends: Sequence[str]) -> None:
        """Open streams on clients that know all frontends, each client another one first."""
        async with clients(frontends) as each, asyncio.TaskGroup() as readers:
            for reader in range(self._max_open):
                readers.create_task(self._read_all(each[reader % len(each)]))

    async def _read_all(self, client: AsyncClient) -> None:
        while not self._is_finishing:
            number = next(self._numbers)
            read = WAYS.get(number % NUM_TURNS, Streams._read_to_end)
            at = number % len(self._asks)
            progress = Progress(self._asks[at], 0, 0, arrives_whole=self._arrives_whole(number))
            progress.at_s = self.now_s(progress)
            self.open[f"stream-{number}"] = progress
            try:
                await read(self, client, f"stream-{number}", at, progress)
            finally:
                del self.open[f"stream-{number}"]
            self.tally.num_tokens += progress.num_tokens

    def _arrives_whole(self, number: int) -> bool:
        way = WAYS.get(number % NUM_TURNS)
        if way is Streams._embed and self._texts:
            return True
        at = number % len(self._asks)
        numbers = self._batch(at) if way is Streams._read_batch else [at]
        kinds = {kind for number in numbers for kind in self._asks[number].kinds}
        return not kinds.isdisjoint(("beam search", "best_of"))

    def _batch(self, at: int) -> list[int]:
        """The requests of a batch that begins with one: those that follow with its adapter."""
        adapter = self._asks[at].adapter
        same = [number for number, ask in enumerate(self._asks) if ask.adapter == adapter]
        first = same.index(at)
        return [same[(first + place) % len(same)] for place in range(BATCH_SIZE)]

    async def _read_to_end(
        self, client: AsyncClient, name: str, at: int, progress: Progress
    ) -> None:
        """One request, as a stream."""
        ask = self._asks[at]
        outcome: RequestOutput | PagewireError
        try:
            async with aclosing(
                client.stream(ask.prompt, ask.params, lora=ask.adapter, request_id=name)
            ) as stream:
                async for delta in stream:
                    progress.add(len(delta.token_ids), self.now_s(progress))
                outcome = stream.output
        except PagewireError as error:
            outcome = error
        self._judge(name, at, outcome)

    async def _read_and_leave(
        self, client: AsyncClient, name: str, at: int, progress: Progress
    ) -> None:
        """One request whose client disconnects early."""
        ask, stays_for = self._asks[at], 10 + at % 50
        try:
            async with aclosing(
                client.stream(ask.prompt, ask.params, lora=ask.adapter, request_id=name)
            ) as stream:
                async for delta in stream:
                    progress.add(len(delta.token_ids), self.now_s(progress))
                    if progress.num_tokens > stays_for:
                        break
        except PagewireError as error:
            self._judge(name, at, error)
            return
        self.tally.num_left += 1
        choices = self._expected[at].choices
        for got in stream.output.outputs:
            if not is_beginning(got, choices[got.index]):
                self._note_different(name, at, [f"choice {got.index} does not begin so: {got}"])

    async def _read_batch(
        self, client: AsyncClient, name: str, at: int, progress: Progress
    ) -> None:
        """Some requests on one stream of many."""

        def on_progress(batch: BatchProgress) -> None:
            progress.add(0, self.now_s(progress))

        numbers = self._batch(at)
        asks = [self._asks[number] for number in numbers]
        outcomes = await client.try_generate_many(
            [ask.prompt for ask in asks],
            [ask.params for ask in asks],
            lora=asks[0].adapter,
            on_progress=on_progress,
        )
        for number, outcome in zip(numbers, outcomes, strict=True):
            if isinstance(outcome, RequestOutput):
                progress.num_tokens += sum(len(c.token_ids) for c in outcome.outputs)
            self._judge(f"{name} of many", number, outcome)

    async def _embed(self, client: AsyncClient, name: str, at: int, progress: Progress) -> None:
        """The vectors of all texts, in one call; a stream instead if there are none."""
        if not self._texts:
            await self._read_to_end(client, name, at, progress)
            return
        self.tally.num_ended += 1
        try:
            got = await vectors_of(client, self._texts)
        except PagewireError as error:
            self._note_lost(name, "vectors", error)
            return
        self.tally.num_vectors += len(got)
        pairs = enumerate(zip(got, self._vectors, strict=True))
        if wrong := [index for index, (ours, expected) in pairs if ours != expected]:
            self.tally.different.append(f"{name}, vectors of texts {wrong}")
            self._timeline.note(name, f"different: vectors of {len(wrong)} texts")

    def _note_lost(self, name: str, what: object, error: PagewireError) -> None:
        reason = f"{type(error).__name__} {error.reason}: {error}"
        self.tally.lost.append(f"{name}, {what}: {reason}")
        self._timeline.note(name, f"lost: {reason}")

    def _judge(self, name: str, at: int, outcome: RequestOutput | PagewireError) -> None:
        ask = self._asks[at]
        self.tally.num_ended += 1
        if isinstance(outcome, PagewireError):
            self._note_lost(name, ask, outcome)
            return
        self.tally.kinds.update(ask.kinds)
        if found := differences(answer_of(outcome), self._expected[at]):
            self._note_different(name, at, found)

    def _note_different(self, name: str, at: int, found: list[str]) -> None:
        self.tally.different.append("\n    ".join([f"{name}, {self._asks[at]}:", *found]))
        self._timeline.note(name, f"different: {found[0]}")


NUM_TURNS, BATCH_SIZE = 10, 3
WAYS = {3: Streams._read_batch, 5: Streams._embed, 7: Streams._read_and_leave}
"""By index modulo `NUM_TURNS`: requests that are not simply read to their end."""


async def watch(streams: Streams, timeline: Timeline, patience_s: float) -> None:
    """Return once a stream has received nothing for `patience_s`; it is added to the tally."""
    async for _ in ticks(1.0):
        streams.awake_s += 1
        streams.calm_s += not streams.is_disturbed
        for name, progress in streams.open.items():
            silent_s = streams.now_s(progress) - progress.at_s
            if silent_s > patience_s:
                where = f"{name} {progress.ask}: nothing for {silent_s} s after"
                streams.tally.hung.append(f"{where} {progress.num_tokens} tokens")
                timeline.note(name, "hangs")
        if streams.tally.hung:
            return
