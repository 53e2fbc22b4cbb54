"""Mutated HTTP requests, some of which are not HTTP."""

import asyncio
import random
from collections.abc import Callable, Mapping
from typing import Any

import httpx

from tests.fuzz.mutation import as_json, mutated_bytes, mutated_json
from tests.fuzz.outcome import Outcome

TIMEOUT_S = 180.0
"""Longer than a request may wait on a busy machine."""

SEEDS: Mapping[str, Any] = {
    "/v1/completions": {"model": "simulated", "prompt": [5, 6, 7], "max_tokens": 4, "seed": 3},
    "/v1/completions?streamed": {
        "model": "simulated",
        "prompt": [5, 6, 7],
        "max_tokens": 4,
        "temperature": 0.5,
        "n": 2,
        "stream": True,
        "logit_bias": {"5": 1.0},
        "logprobs": 1,
        "seed": 3,
        "stream_options": {"include_usage": True},
    },
    "/v1/chat/completions": {
        "model": "simulated",
        "messages": [{"role": "user", "content": "Hi"}],
        "max_tokens": 4,
        "tools": [{"type": "function", "function": {"name": "f", "parameters": {}}}],
        "response_format": {"type": "json_object"},
    },
    "/v1/embeddings": {
        "model": "simulated",
        "input": ["Hi", "there"],
        "truncate_prompt_tokens": -1,
        "encoding_format": "base64",
    },
    "/pooling": {"model": "simulated", "input": [[5, 6], [7]], "task": "token_embed"},
    "/classify": {"model": "simulated", "messages": [{"role": "user", "content": "Hi"}]},
    "/score": {"model": "simulated", "text_1": "Hi", "text_2": ["there", {"text": "you"}]},
    "/rerank": {"model": "simulated", "query": "Hi", "documents": ["a", "b"], "top_n": 1},
    "/v2/embed": {"model": "simulated", "texts": ["Hi"], "embedding_types": ["int8", "float"]},
    "/tokenize": {"model": "simulated", "prompt": "Hi", "add_special_tokens": True},
    "/detokenize": {"model": "simulated", "tokens": [5, 6]},
}
GETS = ("/health", "/v1/models", "/v1/models/simulated", "/openapi.json", "/nowhere", "/")


class HttpCaller:
    """Makes mutated requests on one connection, and raw ones on others."""

    def __init__(
        self, address: str, client: httpx.AsyncClient, rng: random.Random, outcome: Outcome
    ) -> None:
        self._address = address
        self._client = client
        self._rng = rng
        self._outcome = outcome

    async def call(self) -> None:
        """Make one request, to its end."""
        await (self._raw() if self._rng.random() < 0.05 else self._request())

    async def _request(self) -> None:
        rng = self._rng
        if rng.random() < 0.1:
            method, path, body = rng.choice(("GET", "PUT", "OPTIONS")), rng.choice(GETS), b""
        else:
            method, path = "POST", rng.choice([*SEEDS, *["/v1/completions"] * 3])
            body = self._body(path)
        if rng.random() < 0.05:
            path += rng.choice(("?a=%00", "/%2e%2e/etc/passwd", "//", "%ff", "?" + "x" * 2000))
        try:
            async with self._client.stream(
                method, path, content=body, headers=self._headers()
            ) as response:
                async for _ in response.aiter_raw():
                    if rng.random() < 0.02:
                        break
        except httpx.TimeoutException:
            self._outcome.note("no answer")
            self._outcome.blame(f"{method} {path}: no answer: {body!r}")
        except httpx.HTTPError as error:
            self._outcome.note(type(error).__name__)
            self._outcome.blame(f"{method} {path}: {error!r}: {body!r}")
        else:
            self._outcome.note(str(response.status_code))
            if response.status_code == 500:
                self._outcome.blame(f"{method} {path}: 500: {body!r}")

    def _body(self, path: str) -> bytes:
        rng = self._rng
        value = SEEDS[path]
        for _ in range(rng.choice((0, 1, 1, 2, 4))):
            value = mutated_json(rng, value)
        data = as_json(value)
        return mutated_bytes(rng, data) if rng.random() < 0.25 else data

    def _headers(self) -> dict[str, str]:
        rng = self._rng
        kinds = ("application/json",) * 8 + ("text/plain", "application/x-www-form-urlencoded", "")
        headers = {"content-type": rng.choice(kinds)}
        if rng.random() < 0.05:
            headers["authorization"] = rng.choice(("Bearer", "Bearer x", "\x7f"))
        return headers

    async def _raw(self) -> None:
        """Bytes on a connection of their own; it may be answered or closed, but not forgotten."""
        rng = self._rng
        body = self._body("/v1/completions")
        head = (
            "POST /v1/completions HTTP/1.1\r\nhost: a\r\ncontent-type: application/json\r\n"
            f"content-length: {len(body)}\r\nconnection: close\r\n\r\n"
        )
        host, _, port = self._address.rpartition(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        try:
            writer.write(mutated_bytes(rng, head.encode()) + body)
            writer.write_eof()
            async with asyncio.timeout(TIMEOUT_S):
                answer = await reader.read()
        except TimeoutError:
            self._outcome.note("raw: no answer")
            self._outcome.blame(f"raw: no answer: {head!r} {body!r}")
        except OSError:
            self._outcome.note("raw: reset")
        else:
            status = answer.split(b" ", 2)[1].decode("latin-1") if b" " in answer else "closed"
            self._outcome.note(f"raw: {status}")
            if status == "500":
                self._outcome.blame(f"raw: 500: {head!r} {body!r}")
        finally:
            writer.close()


async def call_many(
    address: str,
    *,
    num_calls: int,
    seed: int,
    outcome: Outcome,
    num_at_once: int = 16,
    on_progress: Callable[[], None] = lambda: None,
) -> None:
    """Send `num_calls` requests, some at a time."""
    url = f"http://{address}"
    async with httpx.AsyncClient(base_url=url, timeout=TIMEOUT_S, trust_env=False) as client:

        async def work(number: int) -> None:
            caller = HttpCaller(address, client, random.Random(f"{seed} {number}"), outcome)
            for _ in range(num_calls // num_at_once):
                await caller.call()
                on_progress()

        await asyncio.gather(*(work(number) for number in range(num_at_once)))
