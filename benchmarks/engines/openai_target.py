"""Any server of OpenAI's completions over HTTP, as a target of our load generator."""

import json
from collections.abc import AsyncGenerator, Sequence
from typing import Any, Self

import aiohttp

from pagewire_cli.load.load_generator import Received
from pagewire_cli.load.workload import Arrival

_DATA = b"data: "
_END = b"[DONE]"
_MAX_LINE_BYTES = 1 << 20


class OpenAITarget:
    """`POST /v1/completions`, streamed, with the prompt as token ids; an asynchronous context
    manager.

    Tokens are counted by the usage in each message (`continuous_usage_stats`), since its text may
    belong to no token or to several. The stream is read as lines, without the `openai` package's
    objects for each message, because the client's processor time is taken from the server.
    """

    def __init__(self, base_url: str, model: str) -> None:
        """`base_url`: such as `http://127.0.0.1:8000`."""
        self._base_url = base_url
        self._model = model

    async def __aenter__(self) -> Self:
        self._session = aiohttp.ClientSession(
            self._base_url,
            # As many connections as requests. Servers commonly close one that was idle for 5 s;
            # we must be first, or a request could meet it closed.
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=2.0),
            timeout=aiohttp.ClientTimeout(total=None),
            read_bufsize=_MAX_LINE_BYTES,
        )
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._session.close()

    async def stream(self, arrival: Arrival) -> AsyncGenerator[Received, None]:
        """See `pagewire_cli.load.Target`."""
        options = {"include_usage": True, "continuous_usage_stats": True}
        body = self._body(arrival.prompt, arrival.num_output_tokens, stream_options=options)
        num_seen = 0
        async for message in self._messages(body):
            num_tokens = _num_completion_tokens(message)
            if num_tokens > num_seen:
                yield Received(num_tokens - num_seen)
                num_seen = num_tokens

    async def complete(self, prompt: Sequence[int], num_output_tokens: int) -> list[int]:
        """The tokens of one streamed completion. Raises RuntimeError for an error message."""
        body = self._body(prompt, num_output_tokens, return_token_ids=True)
        token_ids: list[int] = []
        async for message in self._messages(body):
            for choice in message["choices"]:
                token_ids += choice.get("token_ids") or ()
        return token_ids

    async def version(self) -> str:
        """The server's."""
        async with self._session.get("/version") as response:
            return str((await response.json())["version"])

    async def _messages(self, body: dict[str, Any]) -> AsyncGenerator[dict[str, Any], None]:
        async with self._session.post("/v1/completions", json=body) as response:
            if response.status != 200:
                raise RuntimeError(f"status {response.status}: {await response.text()}")
            async for line in response.content:
                if line.startswith(_DATA) and (data := line[len(_DATA) :].strip()) != _END:
                    message = json.loads(data)
                    if "error" in message:
                        raise RuntimeError(f"the server failed: {message['error']}")
                    yield message

    def _body(self, prompt: Sequence[int], num_output_tokens: int, **more: Any) -> dict[str, Any]:
        return {
            "model": self._model,
            "prompt": prompt,
            "max_tokens": num_output_tokens,
            "temperature": 0.0,
            "ignore_eos": True,
            "stream": True,
            **more,
        }


def _num_completion_tokens(message: dict[str, Any]) -> int:
    """Tokens of the answer so far."""
    usage = message.get("usage")
    return 0 if usage is None else int(usage["completion_tokens"])
