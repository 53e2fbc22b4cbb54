"""OpenAI's completions over HTTP: what is asked, and how many tokens are seen to come."""

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from aiohttp import web

from benchmarks.openai_target import OpenAITarget
from pagewire_cli.load import Arrival, Limits, LoadRun, Summary

ARRIVAL = Arrival(0.0, [11, 12, 13], 4)


class FakeServer:
    """Answers each request with scripted server-sent events."""

    def __init__(self, events: list[Any], status: int = 200) -> None:
        self.bodies: list[dict[str, Any]] = []
        self._events = events
        self._status = status

    @asynccontextmanager
    async def target(self) -> AsyncIterator[OpenAITarget]:
        """A target that is this server."""
        application = web.Application()
        application.router.add_post("/v1/completions", self._answer)
        runner = web.AppRunner(application)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        host, port = runner.addresses[0]
        async with OpenAITarget(f"http://{host}:{port}", "the-model") as target:
            yield target
        await runner.cleanup()

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        self.bodies.append(await request.json())
        if self._status != 200:
            return web.Response(status=self._status, text="queue full")
        response = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await response.prepare(request)
        for event in self._events:
            data = event if isinstance(event, str) else json.dumps(event)
            await response.write(f"data: {data}\n\n".encode())
        return response


def event(num_tokens: int, text: str = "x") -> dict[str, Any]:
    """As vLLM sends them with `continuous_usage_stats`."""
    return {"choices": [{"text": text}], "usage": {"completion_tokens": num_tokens}}


async def test_tokens_are_counted_by_usage_whatever_the_text() -> None:
    last = {"choices": [], "usage": {"completion_tokens": 4}}
    server = FakeServer([event(1, ""), event(2), event(2), event(4, "a b"), last, "[DONE]"])
    async with server.target() as target:
        assert [each.num_tokens async for each in target.stream(ARRIVAL)] == [1, 1, 2]


async def test_it_asks_for_so_many_greedy_tokens_past_any_end() -> None:
    server = FakeServer([event(4), "[DONE]"])
    async with server.target() as target:
        assert [each.num_tokens async for each in target.stream(ARRIVAL)] == [4]
    [body] = server.bodies
    assert (body["model"], body["prompt"], body["max_tokens"]) == ("the-model", [11, 12, 13], 4)
    assert (body["temperature"], body["ignore_eos"], body["stream"]) == (0.0, True, True)
    assert body["stream_options"]["continuous_usage_stats"] is True


@pytest.mark.parametrize(
    ("server", "words"),
    [
        (FakeServer([], status=503), "status 503: queue full"),
        (FakeServer([event(1), {"error": {"message": "it broke"}}]), "it broke"),
        (FakeServer([event(1), "[DONE]"]), "expected 4 tokens, got 1"),
    ],
)
async def test_what_fails_is_recorded_as_failed(server: FakeServer, words: str) -> None:
    async with server.target() as target:
        run = LoadRun(target, [ARRIVAL])
        await run.run()
    summary = Summary.of(run, Limits())
    assert (summary.num_complete, summary.num_failed) == (0, 1)
    assert words in next(iter(summary.errors))
