"""`/v1/messages` between a client and a core that a test controls."""

import asyncio
import json
from typing import Any

import grpc
import httpx
import pytest

from pagewire.v1 import inference_service_pb2 as pb
from scheduler_service.frontend.http.anthropic import (
    MessagesBuilder,
    MessagesRequest,
    chat_request,
)
from scheduler_service.frontend.http.openai.serving_chat import chat_of
from tests.support.http_frontends import HttpServed, http_served
from tests.support.tokenizers import byte_level

WISH: dict[str, Any] = {"max_tokens": 50, "messages": [{"role": "user", "content": "hello"}]}


def post(served: HttpServed, wish: dict[str, Any]) -> "asyncio.Task[httpx.Response]":
    return asyncio.create_task(served.client.post("/v1/messages", json=wish))


async def test_an_interrupted_stream_ends_with_an_error(served: HttpServed) -> None:
    answer = post(served, WISH | {"stream": True})
    request = await served.core.next_request()
    await request.accept()
    await request.fail(grpc.StatusCode.INTERNAL, "GENERATION_FAILED")
    text = (await answer).text
    assert "message_stop" not in text
    *_, last = [line for line in text.split("\n\n") if line]
    name, data = last.split("\n")
    assert name == "event: error"
    told = json.loads(data.removeprefix("data: "))
    assert (told["type"], told["error"]["type"]) == ("error", "api_error")


@pytest.mark.parametrize(
    ("code", "reason", "status", "kind"),
    [
        (grpc.StatusCode.RESOURCE_EXHAUSTED, "QUEUE_FULL", 429, "rate_limit_error"),
        (grpc.StatusCode.INTERNAL, "GENERATION_FAILED", 500, "api_error"),
        (grpc.StatusCode.DEADLINE_EXCEEDED, "DEADLINE_EXCEEDED", 504, "timeout_error"),
    ],
)
async def test_errors_have_anthropics_names(
    served: HttpServed, code: grpc.StatusCode, reason: str, status: int, kind: str
) -> None:
    answer = post(served, WISH)
    await (await served.core.next_request()).fail(code, reason)
    refused = await answer
    assert (refused.status_code, refused.json()["error"]["type"]) == (status, kind)
    assert refused.headers["x-request-id"]


@pytest.mark.parametrize("path", ["/v1/messages", "/v1/messages/count_tokens"])
async def test_errors_before_the_endpoint_have_its_shape_too(path: str) -> None:
    async with http_served(api_key=["pw-" + "k" * 40]) as served:
        refused = await served.client.post(path, json=WISH)
        assert refused.status_code == 401
        assert refused.json()["type"] == "error"
        assert refused.json()["error"]["type"] == "authentication_error"
        key = {"x-api-key": "pw-" + "k" * 40}
        wrong = await served.client.post(path, content=b"{", headers=key)
        assert (wrong.status_code, wrong.json()["error"]["type"]) == (400, "invalid_request_error")


def test_thoughts_and_parts_of_earlier_turns_are_passed_on() -> None:
    cached = {"cache_control": {"type": "ephemeral"}}
    texts = [{"type": "text", "text": "a", **cached}, {"type": "text", "text": "b"}]
    thought = {"type": "thinking", "thinking": "why", "signature": "s"}
    call = {"type": "tool_use", "id": "c1", "name": "look", "input": {}}
    result = {"type": "tool_result", "tool_use_id": "c1", "content": texts, **cached}
    turns = [
        {"role": "user", "content": texts},
        {"role": "assistant", "content": [thought, *texts, call]},
        {"role": "user", "content": [result]},
        {"role": "assistant", "content": [thought, call]},
    ]
    wish = WISH | {"messages": turns, "system": texts}
    chat = chat_of(chat_request(MessagesRequest.model_validate(wish)))
    found = [
        (turn.role, [part.text for part in turn.content_parts], turn.reasoning_content)
        for turn in chat.messages
    ]
    assert found == [
        ("system", ["a", "b"], ""),
        ("user", ["a", "b"], ""),
        ("assistant", ["a", "b"], "why"),
        ("tool", ["a", "b"], ""),
        ("assistant", [], "why"),
    ]


@pytest.mark.parametrize("endless", ["1" * 5000, "[" * 300])
def test_a_call_that_never_came_to_an_end_has_the_arguments_that_can_be_read(endless: str) -> None:
    """As models write them that repeat themselves, and are held to JSON."""
    builder = MessagesBuilder(chat_request(MessagesRequest.model_validate(WISH)), "r")
    call = pb.ToolCallDelta(id="c", name="look", arguments=f'{{"a": 5, "b": {endless}')
    cut = pb.ChoiceDelta(tool_calls=[call], finish_reason=pb.FINISH_REASON_LENGTH)
    builder.add(0, pb.GenerateResponse(choices=[cut]))
    (block,) = builder.answer()["content"]
    assert block["input"]["a"] == 5


@pytest.mark.parametrize("blank", ["", [], [{"type": "text", "text": ""}]])
def test_an_empty_last_turn_of_the_assistant_begins_an_answer(blank: Any) -> None:
    wish = WISH | {"messages": [*WISH["messages"], {"role": "assistant", "content": blank}]}
    assert chat_request(MessagesRequest.model_validate(wish)) == chat_request(
        MessagesRequest.model_validate(WISH)
    )
    wish["messages"][-1]["content"] = "The"
    assert chat_request(MessagesRequest.model_validate(wish)).continue_final_message


def test_system_turns_and_what_other_servers_write_are_taken() -> None:
    """Claude Code sends all of these."""
    hidden = [{"type": "redacted_thinking", "data": "x"}, {"type": "text", "text": "yes"}]
    turns = [
        {"role": "user", "content": "hello"},
        {"role": "system", "content": "Be brief."},
        {"role": "assistant", "content": hidden},
        {"role": "user", "content": "and?"},
        {"role": "system", "content": [{"type": "text", "text": "Be kind."}]},
    ]
    tool = {"name": "look", "input_schema": {}, "eager_input_streaming": True}
    edits = {"edits": [{"type": "clear_tool_uses_20250919"}]}
    wish = WISH | {"messages": turns, "tools": [tool], "context_management": edits}
    chat = chat_of(chat_request(MessagesRequest.model_validate(wish)))
    found = [(t.role, t.content or [part.text for part in t.content_parts]) for t in chat.messages]
    assert found == [
        ("user", "hello"),
        ("system", "Be brief."),
        ("assistant", ["yes"]),
        ("user", "and?"),
        ("system", ["Be kind."]),
    ]


def test_the_input_of_a_call_is_passed_on_as_it_is_written() -> None:
    """Templates may write the JSON text as it is."""
    call = {"type": "tool_use", "id": "c1", "name": "look", "input": {"at": "\u6771\u4eac"}}
    wish = WISH | {"messages": [{"role": "assistant", "content": [call]}]}
    chat = chat_of(chat_request(MessagesRequest.model_validate(wish)))
    assert chat.messages[0].tool_calls[0].arguments_json == '{"at": "\u6771\u4eac"}'


@pytest.mark.parametrize("stream", [False, True])
async def test_a_call_that_no_json_can_hold_is_answered_all_the_same(stream: bool) -> None:
    arguments = r'{"half": "\ud83d!", "big": 1e999, "list": [-1e999]}'
    text = f'<tool_call>{{"name": "look", "arguments": {arguments}}}</tool_call>'
    tool = {"name": "look", "input_schema": {"type": "object"}}
    async with http_served() as served:
        answer = post(served, WISH | {"tools": [tool], "max_tokens": 200, "stream": stream})
        request = await served.core.next_request()
        await request.complete(byte_level().encode(text, add_special_tokens=False).ids)
        whole = await answer
    assert whole.status_code == 200
    if stream:
        events = [json.loads(line[5:]) for line in whole.text.splitlines() if line[:5] == "data:"]
        assert events[-1] == {"type": "message_stop"}
        deltas = [event["delta"] for event in events if event["type"] == "content_block_delta"]
        told = json.loads("".join(delta["partial_json"] for delta in deltas))
        assert told["half"] == "\ufffd!"
    else:
        [block] = json.loads(whole.text, parse_constant=pytest.fail)["content"]
        assert block["input"] == {"half": "\ufffd!", "big": None, "list": [None]}


def test_blocks_become_the_turns_of_a_chat() -> None:
    calls = [{"type": "tool_use", "id": "c1", "name": "look", "input": {"at": 1}}]
    result = {"type": "tool_result", "tool_use_id": "c1", "content": "seen"}
    turns = [
        {"role": "user", "content": "hello"},
        {"role": "assistant", "content": [{"type": "text", "text": "one"}, *calls]},
        {"role": "user", "content": [result, {"type": "text", "text": "two"}]},
    ]
    wish = WISH | {"messages": turns, "system": [{"type": "text", "text": "three"}]}
    chat = chat_of(chat_request(MessagesRequest.model_validate(wish)))
    told = [
        (turn.role, turn.content, [part.text for part in turn.content_parts], turn.tool_call_id)
        for turn in chat.messages
    ]
    assert told == [
        ("system", "", ["three"], ""),
        ("user", "hello", [], ""),
        ("assistant", "", ["one"], ""),
        ("tool", "seen", [], "c1"),
        ("user", "", ["two"], ""),
    ]
    (call,) = chat.messages[2].tool_calls
    assert (call.id, call.name, json.loads(call.arguments_json)) == ("c1", "look", {"at": 1})
    assert not chat.continue_final_message
