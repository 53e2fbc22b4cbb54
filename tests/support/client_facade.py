"""Both clients under one blocking interface, so that one test proves the same of both."""

import asyncio
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

from pagewire_client import AsyncClient, Client
from pagewire_client.calls import AsyncOutputStream


class BlockingAsyncClient:
    """An `AsyncClient` whose methods run an event loop until they are done."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._runner = asyncio.Runner()
        self._client = AsyncClient(*args, **kwargs)

    def stream(self, *args: Any, **kwargs: Any) -> "BlockingStream":
        return BlockingStream(self._runner, self._client.stream(*args, **kwargs))

    def watch_status(self, interval_s: float) -> Iterator[Any]:
        statuses = self._client.watch_status(interval_s)
        while True:
            yield self._runner.run(_next(statuses))

    def close(self) -> None:
        self._runner.run(self._client.close())
        self._runner.close()

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._client, name)
        return lambda *args, **kwargs: self._runner.run(method(*args, **kwargs))


class BlockingStream:
    """An `AsyncOutputStream`, likewise."""

    def __init__(self, runner: asyncio.Runner, stream: AsyncOutputStream) -> None:
        self._runner = runner
        self._stream = stream

    @property
    def output(self) -> Any:
        return self._stream.output

    def text_deltas(self) -> Iterator[str]:
        texts = self._stream.text_deltas()
        with suppress(StopAsyncIteration):
            while True:
                yield self._runner.run(_next(texts))

    def final(self) -> Any:
        return self._runner.run(self._stream.final())

    def __iter__(self) -> "BlockingStream":
        return self

    def __next__(self) -> Any:
        try:
            return self._runner.run(_next(self._stream))
        except StopAsyncIteration:
            raise StopIteration from None

    def close(self) -> None:
        self._runner.run(self._stream.aclose())


CLIENTS = {"blocking": Client, "asyncio": BlockingAsyncClient}


async def _next(iterator: Any) -> Any:
    return await anext(iterator)
