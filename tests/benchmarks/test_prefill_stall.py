"""Pauses of a stream beside a prompt, by the times at which messages arrive."""

import asyncio
from collections.abc import AsyncGenerator

import pytest

from benchmarks.prefill_stall import MESSAGES_BEFORE, gaps_of, row
from pagewire_cli.load import Arrival, Received

STREAM, PROMPT = Arrival(0.0, [1], 1000), Arrival(0.0, [2, 3], 1)


class Interleaved:
    """A target whose prompt has its first token after `num_between` messages of the stream,
    unless the stream ends instead."""

    def __init__(self, num_between: int, ends: bool) -> None:
        self._is_sent, self._is_due = asyncio.Event(), asyncio.Event()
        self._num_between, self._ends = num_between, ends

    async def stream(self, arrival: Arrival) -> AsyncGenerator[Received, None]:
        if arrival is PROMPT:
            self._is_sent.set()
            await self._is_due.wait()
            yield Received(1)
            return
        for _ in range(MESSAGES_BEFORE):
            yield Received(1)
        await self._is_sent.wait()
        for _ in range(self._num_between):
            yield Received(1)
        if not self._ends:
            self._is_due.set()
            await asyncio.Event().wait()


async def test_gaps_lie_between_the_messages_while_the_prompt_is_computed() -> None:
    gaps = await gaps_of(Interleaved(num_between=3, ends=False), STREAM, PROMPT)
    assert len(gaps) == 4, "from the prompt's sending over three messages to its first token"
    assert min(gaps) >= 0


async def test_a_stream_that_ends_before_the_prefill_is_an_error() -> None:
    with pytest.raises(ExceptionGroup) as caught:
        await gaps_of(Interleaved(num_between=3, ends=True), STREAM, PROMPT)
    assert caught.group_contains(RuntimeError, match="ended after 11 messages")


def test_figures_are_those_of_all_runs() -> None:
    assert row(100, [[0.1, 0.4], [0.2, 0.2, 0.6], [0.5, 0.5]]) == {
        "largest gap, s": 0.6,
        "p99, s": 0.594,
        "prompt tokens/s": 100.0,
    }
