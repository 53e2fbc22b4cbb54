"""Streams in which nothing happens for some time."""

from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest

from scheduler_service.frontend.config import FrontendConfig
from tests.support.http_frontends import http_post, http_served, raw_connection
from tests.support.tokenizers import letters

MESSAGES = [{"role": "user", "content": "hello"}]
COMMENT = b": keep-alive\n\n"
PING = b'event: ping\ndata: {"type": "ping"}\n\n'
STREAMS: dict[str, tuple[dict[str, Any], bytes]] = {
    "/v1/completions": ({"prompt": "hello"}, COMMENT),
    "/v1/chat/completions": ({"messages": MESSAGES}, COMMENT),
    "/v1/responses": ({"input": "hello"}, COMMENT),
    "/v1/messages": ({"messages": MESSAGES, "max_tokens": 9}, PING),
}


async def read_until(pieces: AsyncIterator[bytes], *ends: bytes) -> bytes:
    """What comes until all of these have come, in this order."""
    read, rest = b"", b""
    for end in ends:
        while end not in rest:
            piece = await anext(pieces)
            read, rest = read + piece, rest + piece
        rest = rest.partition(end)[2]
    return read


async def silent_stream(path: str) -> bytes:
    """The body of a stream that is silent at first, and again after its text."""
    wish, comment = STREAMS[path]
    async with http_served(sse_keep_alive_s=0.02) as served:
        wish = wish | {"model": "tiny", "stream": True}
        async with served.client.stream("POST", path, json=wish) as response:
            assert response.status_code == 200
            pieces = response.aiter_bytes()
            request = await served.core.next_request()
            read = await read_until(pieces, comment, comment)
            await request.accept()
            await request.send_tokens(letters("ok"))
            read += await read_until(pieces, b'ok"', b"\n\n", comment, comment)
            await request.finish_choice()
            await request.finish()
            return read + b"".join([piece async for piece in pieces])


@pytest.mark.parametrize("path", STREAMS)
async def test_a_silent_stream_gets_comments_before_and_between_its_events(path: str) -> None:
    _, comment = STREAMS[path]
    *events, end = (await silent_stream(path)).split(b"\n\n")
    assert end == b""
    for event in events:
        fields = {line.partition(b":")[0] for line in event.split(b"\n")}
        assert fields in ({b"data"}, {b"event", b"data"}) or event + b"\n\n" == comment


async def test_a_request_that_fails_after_a_comment_ends_its_stream_with_the_error() -> None:
    async with (
        http_served(sse_keep_alive_s=0.02) as served,
        raw_connection(served.frontend) as (reader, writer),
    ):
        writer.write(http_post("/v1/completions", b'{"prompt": "hello", "stream": true}'))
        request = await served.core.next_request()
        await reader.readuntil(COMMENT)
        await request.fail(grpc.StatusCode.RESOURCE_EXHAUSTED, "QUEUE_FULL")
        told = await reader.readuntil(b"\r\n0\r\n\r\n")
    assert b'data: {"error":{' in told
    assert b"[DONE]" not in told


@pytest.mark.parametrize("period_s", [-1.0, float("inf"), float("nan")])
def test_a_period_that_makes_no_sense_is_refused(period_s: float) -> None:
    with pytest.raises(ValueError, match="sse_keep_alive: expected 0 to 1000000000 seconds"):
        FrontendConfig(sse_keep_alive_s=period_s)
