"""Large bodies do not occupy the event loop, and bodies of too many parts are refused unparsed."""

import json
import threading
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from pydantic import BaseModel, TypeAdapter, field_validator
from starlette.requests import Request

from scheduler_service.frontend.http import request_body
from scheduler_service.frontend.http.errors import InvalidBody
from scheduler_service.frontend.http.request_body import check_counts, json_body
from tests.support.event_loops import unoccupied_loop
from tests.support.http_frontends import HttpServed, http_served

JSON = {"content-type": "application/json"}


def joined(head: str, part: str, tail: str, *, size: int = 16 << 20) -> bytes:
    """A body of nearly `size` bytes, most of it parts with commas between."""
    count = (size - len(head) - len(tail)) // (len(part) + 1) - 1
    return f"{head}{','.join([part] * count)}{tail}".encode()


MESSAGE = '{"role":"user","content":"a"}'
LARGE = {
    "token ids": ("/v1/completions", joined('{"max_tokens":0,"prompt":[', "7", "]}")),
    "allowed token ids": (
        "/v1/completions",
        joined('{"max_tokens":0,"prompt":[', "7", "]}", size=2 << 20),
    ),
    "prompts": ("/v1/completions", joined('{"max_tokens":0,"prompt":[', '"a"', "]}")),
    "prompts of ids": ("/v1/completions", joined('{"max_tokens":0,"prompt":[', "[7]", "]}")),
    "messages": ("/v1/chat/completions", joined('{"messages":[', MESSAGE, "]}")),
    "wrong messages": ("/v1/chat/completions", joined('{"messages":[', "{}", "]}")),
    "template's values": (
        "/v1/chat/completions",
        joined(f'{{"messages":[{MESSAGE}],"chat_template_kwargs":{{"a":[', "1.5", "]}}"),
    ),
    "unknown fields": ("/v1/chat/completions", joined('{"a":[', "[]", "]}")),
    "token ids to a text": ("/detokenize", joined('{"tokens":[', "-1", "]}")),
}


@pytest.mark.usefixtures("frozen_heap")
@pytest.mark.parametrize(("path", "body"), LARGE.values(), ids=LARGE)
async def test_a_large_body_does_not_occupy_the_loop(path: str, body: bytes) -> None:
    async with http_served() as served, unoccupied_loop():
        answer = await served.client.post(path, content=body, headers=JSON)
        assert answer.status_code == 400
        assert len(answer.content) < 4096


class Body(BaseModel):
    """A body that knows in which thread it was validated."""

    text: str
    thread: str = ""

    @field_validator("text")
    @classmethod
    def _check(cls, text: str) -> str:
        cls.thread = threading.current_thread().name
        return text


def request_of(body: bytes) -> Request:
    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": body, "more_body": False}

    headers = [(b"content-type", b"application/json; charset=utf-8")]
    return Request({"type": "http", "headers": headers}, receive)


async def test_only_small_bodies_are_parsed_on_the_loop() -> None:
    read = json_body(Body)
    await read(request_of(b'{"text": "a"}'))
    assert Body.thread == threading.current_thread().name
    await read(request_of(b'{"text": "%b"}' % (b"a" * request_body.INLINE_BYTES)))
    assert Body.thread.startswith("large-bodies")


STRINGS = st.lists(st.sampled_from(['"', "\\", ",", "[", "{", "a", "é", "\n"])).map("".join)


@given(st.lists(STRINGS), st.sampled_from([1, 2, 3, 1000]))
@example(["\\" * 6], 2)
def test_what_stands_in_strings_does_not_count(texts: list[str], slice_bytes: int) -> None:
    body = json.dumps(texts).encode()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(request_body, "SLICE_BYTES", slice_bytes)
        patch.setattr(request_body, "MAX_STRINGS", len(texts))
        patch.setattr(request_body, "MAX_VALUES", max(1, len(texts)))
        check_counts(body)
        patch.setattr(request_body, "MAX_STRINGS", len(texts) - 1)
        with pytest.raises(InvalidBody, match=f"holds {len(texts)} texts"):
            check_counts(body)


def test_a_long_text_is_taken_whatever_stands_in_it() -> None:
    text = '\\"[{,' * (3 << 20)
    body = json.dumps({"text": text}).encode()
    assert request_body.parse_large(body, TypeAdapter(Body)).text == text


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b"", "the body is not valid JSON: EOF while parsing a value at line 1 column 0"),
        (
            rb'{"prompt": "\ud83d"}',
            "the body is not valid JSON: unexpected end of hex escape at line 1 column 19, half of "
            "a character (an unpaired surrogate)",
        ),
        (b'{"prompt": x}', "the body is not valid JSON: expected value at line 1 column 12"),
        (b"[" * 300, "recursion limit exceeded"),
    ],
)
async def test_a_body_that_is_not_json_is_refused_with_the_position(
    served: HttpServed, body: bytes, message: str
) -> None:
    refused = await served.client.post("/v1/completions", content=body, headers=JSON)
    assert refused.status_code == 400
    assert message in refused.json()["error"]["message"]
    assert refused.json()["error"]["code"] == "invalid_body"


async def test_a_byte_order_mark_is_ignored(served: HttpServed) -> None:
    body = b'\xef\xbb\xbf{"prompt": "hello"}'
    answer = await served.client.post("/tokenize", content=body, headers=JSON)
    assert answer.status_code == 200
