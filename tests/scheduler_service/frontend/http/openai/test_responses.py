"""`/v1/responses`: its translation to a chat, and its answer."""

import asyncio
import json
from typing import Any

import pytest

from pagewire.columns import pack, pack_floats
from pagewire.v1 import scheduler_service_pb2 as scheduler_pb
from scheduler_service.frontend.http.openai.serving_chat import chat_of
from scheduler_service.frontend.http.openai.serving_responses import ResponsesRequest, chat_request
from tests.support.fake_core import FakeCore
from tests.support.http_frontends import HttpServed, http_served
from tests.support.tokenizers import byte_level, letters, model_files

ASKED = {"role": "user", "content": "q"}
CALL = {"type": "function_call", "call_id": "c1", "name": "look", "arguments": "{}"}
RESULT = {"type": "function_call_output", "call_id": "c1", "output": "r"}


def thought(text: str) -> dict[str, Any]:
    return {"type": "reasoning", "content": [{"type": "reasoning_text", "text": text}]}


HIDDEN = {"type": "reasoning", "id": "rs_1", "summary": [], "encrypted_content": "x"}


def answer(text: str) -> dict[str, Any]:
    part = {"type": "output_text", "text": text, "annotations": []}
    return {"type": "message", "role": "assistant", "content": [part]}


def translated(*items: dict[str, Any]) -> list[tuple[str, list[str], str, int]]:
    """Role, content, reasoning and number of calls of each turn."""
    body = ResponsesRequest.model_validate({"input": [ASKED, *items]})
    return [
        (
            turn.role,
            [part.text for part in turn.content_parts] or [turn.content],
            turn.reasoning_content,
            len(turn.tool_calls),
        )
        for turn in chat_of(chat_request(body)).messages[1:]
    ]


@pytest.mark.parametrize(
    ("items", "turns"),
    [
        ([thought("w"), answer("a")], [("assistant", ["a"], "w", 0)]),
        (
            [thought("w"), CALL, RESULT, thought("x"), answer("a")],
            [
                ("assistant", [""], "w", 1),
                ("tool", ["r"], "", 0),
                ("assistant", ["a"], "x", 0),
            ],
        ),
        (
            [answer("a"), thought("w"), answer("b")],
            [("assistant", ["a"], "", 0), ("assistant", ["b"], "w", 0)],
        ),
        (
            [CALL, answer("a"), RESULT, answer("b")],
            [("assistant", ["a"], "", 1), ("tool", ["r"], "", 0), ("assistant", ["b"], "", 0)],
        ),
        (
            [answer("a"), CALL, thought("w"), answer("b"), CALL, RESULT],
            [("assistant", ["a", "b"], "w", 2), ("tool", ["r"], "", 0)],
        ),
        ([HIDDEN, ASKED], [("user", ["q"], "", 0)]),
        ([HIDDEN, CALL, HIDDEN, CALL], [("assistant", [""], "", 2)]),
        ([thought("w"), thought("x"), answer("a")], [("assistant", ["a"], "w\nx", 0)]),
        ([thought("w"), CALL, thought("x"), CALL], [("assistant", [""], "w\nx", 2)]),
        (
            [
                {"type": "reasoning", "summary": [{"type": "summary_text", "text": "s"}]},
                answer("a"),
            ],
            [("assistant", ["a"], "s", 0)],
        ),
        ([{"type": "reasoning", "summary": []}, answer("a")], [("assistant", ["a"], "", 0)]),
    ],
)
def test_thoughts_belong_to_the_turn_that_follows_them(
    items: list[dict[str, Any]], turns: list[tuple[str, list[str], str, int]]
) -> None:
    assert translated(*items) == turns


def test_parts_stay_parts() -> None:
    parts = [{"type": "input_text", "text": text} for text in ("a", "b")]
    refused = {"role": "assistant", "content": [{"type": "refusal", "refusal": "no"}]}
    turns = translated({"role": "user", "content": parts}, {**RESULT, "output": parts}, refused)
    assert turns == [
        ("user", ["a", "b"], "", 0),
        ("tool", ["a", "b"], "", 0),
        ("assistant", ["no"], "", 0),
    ]


async def _answer(
    served: HttpServed, text: str, pieces: list[int], *, is_streamed: bool
) -> dict[str, Any]:
    """The response of a model that writes a text, whose tokens come in pieces of these sizes."""
    wish: dict[str, Any] = {"input": "q", "include": ["message.output_text.logprobs"]}
    tool = {"type": "function", "name": "f", "parameters": {}}
    call = asyncio.create_task(
        served.client.post("/v1/responses", json=wish | {"stream": is_streamed, "tools": [tool]})
    )
    request = await served.core.next_request()
    await request.accept()
    token_ids = letters(text)
    for number, size in enumerate(pieces):
        piece = token_ids[sum(pieces[:number]) :][:size]
        entries = [
            scheduler_pb.ChoiceLogprobs(
                handle=request.handle, token_ids=pack([token_id]), logprobs=pack_floats([-1.0])
            )
            for token_id in piece
        ]
        await request.send_tokens(piece, logprobs=entries)
        if is_streamed:
            await asyncio.sleep(0)
    await request.finish_choice()
    await request.finish()
    body = (await call).text
    answer = json.loads(body.rpartition("data: ")[2] if is_streamed else body)
    found: dict[str, Any] = answer["response"] if is_streamed else answer
    return found


def _texts(answer: dict[str, Any]) -> list[tuple[str, str]]:
    """The texts of an answer, each with the tokens of its log probabilities."""
    return [
        (part["text"], "".join(entry["token"] for entry in part["logprobs"]))
        for item in answer["output"]
        if item["type"] == "message"
        for part in item["content"]
    ]


CALLED = '<tool_call>{"name":"f","arguments":{"a":1}}</tool_call>'
ANSWERS = {
    f"yes{CALLED}": [("yes", "yes")],
    f"<think>hm</think>a<b{CALLED}{CALLED}c": [
        ("a<b", ">a<b"),  # with the tokens of marks that come before it
        ("c", "}</tool_call>c"),
    ],
    "a<tool_call>b": [("a<tool_call>b", "a<tool_call>b")],
    f"a<tool_call>b{CALLED}": [("a<tool_call>b", "a<tool_call>b")],
    f"{CALLED}": [],
}


@pytest.mark.parametrize(("text", "expected"), ANSWERS.items())
async def test_texts_have_the_same_log_probabilities_streamed_and_whole(
    text: str, expected: list[tuple[str, str]]
) -> None:
    files = model_files(byte_level())
    files["chat_template.jinja"] += b"{# <think></think> <tool_call> #}"
    size = len(letters(text))
    cuts = [[size], [1] * size, [3] * (size // 3) + [size % 3], [size // 2, size - size // 2]]
    async with http_served(FakeCore(files={"tiny": files})) as served:
        found = [
            _texts(await _answer(served, text, pieces, is_streamed=is_streamed))
            for pieces in cuts
            for is_streamed in (False, True)
        ]
    assert found == [expected] * len(found)


@pytest.mark.parametrize("is_streamed", [False, True])
async def test_a_text_has_the_log_probabilities_of_what_follows_the_thought(
    is_streamed: bool,
) -> None:
    files = model_files(byte_level())
    files["chat_template.jinja"] += b"{# <think></think> #}"
    wish = {"input": "q", "include": ["message.output_text.logprobs"], "stream": is_streamed}
    token_ids = letters("<think>hm</think>yes")
    async with http_served(FakeCore(files={"tiny": files})) as served:
        call = asyncio.create_task(served.client.post("/v1/responses", json=wish))
        request = await served.core.next_request()
        await request.accept()
        for piece in [[token_id] for token_id in token_ids] if is_streamed else [token_ids]:
            entries = [
                scheduler_pb.ChoiceLogprobs(
                    handle=request.handle, token_ids=pack([token_id]), logprobs=pack_floats([-1.0])
                )
                for token_id in piece
            ]
            await request.send_tokens(piece, logprobs=entries)
        await request.finish_choice()
        await request.finish()
        body = (await call).text
    last = body.rpartition("data: ")[2] if is_streamed else body
    answer = json.loads(last)
    thought, message = (answer["response"] if is_streamed else answer)["output"]
    assert thought["content"][0]["text"] == "hm"
    [part] = message["content"]
    assert part["text"] == "yes"
    # The thought ends with its mark, whose last token is the first that is not of the thought.
    assert "".join(entry["token"] for entry in part["logprobs"]) == ">yes"
