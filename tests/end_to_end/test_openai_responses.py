"""OpenAI's own client on `/v1/responses` of real services with the embedded model."""

import json
from typing import Any

import httpx
import openai
import pytest

from tests.support.cluster import Cluster

ASK = "What is 27 + 45?"
WISH: dict[str, Any] = {"model": "embedded", "temperature": 0, "max_output_tokens": 200}
SCHEMA = {
    "type": "object",
    "properties": {"city": {"enum": ["Paris", "Rome"]}, "days": {"type": "integer"}},
    "required": ["city", "days"],
    "additionalProperties": False,
}
TOOL: Any = {"type": "function", "name": "get_weather", "parameters": SCHEMA, "strict": True}
WEATHER = "What is the weather in Paris?"
CALL: Any = {"type": "function", "name": "get_weather"}


def test_a_text_is_answered(openai_client: openai.OpenAI) -> None:
    response = openai_client.responses.create(
        **WISH, input=ASK, instructions="Be brief.", metadata={"run": "7"}
    )
    assert response.output_text == "27 + 45 = 72."
    (item,) = response.output
    assert (item.type, item.status) == ("message", "completed")
    assert (response.status, response.model, response.metadata) == (
        "completed",
        "embedded",
        {"run": "7"},
    )
    assert response.usage is not None
    assert response.usage.total_tokens == response.usage.input_tokens + response.usage.output_tokens
    assert response.usage.output_tokens > 0


@pytest.mark.parametrize(
    "turns",
    [
        [{"role": "user", "content": ASK}],
        [{"type": "message", "role": "user", "content": [{"type": "input_text", "text": ASK}]}],
        [
            {"role": "developer", "content": "Be brief."},
            {"role": "user", "content": ASK},
            {
                "id": "msg_1",
                "type": "message",
                "role": "assistant",
                "status": "completed",
                "content": [{"type": "output_text", "text": "27 + 45 = 72.", "annotations": []}],
            },
            {"role": "user", "content": ASK},
        ],
    ],
)
def test_an_answer_is_that_of_a_chat_completion(
    openai_client: openai.OpenAI, turns: list[Any]
) -> None:
    response = openai_client.responses.create(**WISH, input=turns)
    plain = [
        {
            "role": turn["role"],
            "content": turn["content"]
            if isinstance(turn["content"], str)
            else turn["content"][0]["text"],
        }
        for turn in turns
    ]
    chat = openai_client.chat.completions.create(
        model="embedded",
        temperature=0,
        max_tokens=200,
        messages=plain,  # type: ignore[arg-type]
    )
    assert response.output_text == chat.choices[0].message.content
    assert chat.usage is not None
    assert response.usage is not None
    assert response.usage.input_tokens == chat.usage.prompt_tokens
    assert response.usage.output_tokens == chat.usage.completion_tokens


def test_a_stream_adds_up_to_the_whole(openai_client: openai.OpenAI) -> None:
    whole = openai_client.responses.create(**WISH, input=ASK)
    with openai_client.responses.stream(**WISH, input=ASK) as stream:
        events = list(stream)
        final = stream.get_final_response()
    kinds = [event.type for event in events]
    assert kinds[:4] == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
    ]
    assert kinds[-4:] == [
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.completed",
    ]
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert final.output_text == whole.output_text
    assert final.usage == whole.usage
    deltas = [event.delta for event in events if event.type == "response.output_text.delta"]
    assert "".join(deltas) == whole.output_text


LOGPROBS: Any = ["message.output_text.logprobs", "reasoning.encrypted_content"]


def test_log_probabilities_are_those_of_a_chat(openai_client: openai.OpenAI) -> None:
    wish = WISH | {"input": ASK, "include": LOGPROBS, "top_logprobs": 2}
    response = openai_client.responses.create(**wish)
    (item,) = response.output
    assert item.type == "message"
    (part,) = item.content
    assert part.type == "output_text"
    assert part.logprobs
    chat = openai_client.chat.completions.create(
        model="embedded",
        temperature=0,
        messages=[{"role": "user", "content": ASK}],
        logprobs=True,
        top_logprobs=2,
    )
    logprobs = chat.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.content is not None
    found = [entry.model_dump() for entry in part.logprobs]
    assert found == [entry.model_dump() for entry in logprobs.content]
    assert "".join(entry["token"] for entry in found[:-1]) == part.text, "then the end"
    assert response.top_logprobs == 2
    streamed: list[Any] = []
    for event in openai_client.responses.create(**wish, stream=True):
        if event.type == "response.output_text.delta":
            streamed += event.logprobs
        elif event.type == "response.output_text.done":
            assert [entry.logprob for entry in event.logprobs] == [
                entry.logprob for entry in streamed
            ]
    assert [entry.logprob for entry in streamed] == [entry["logprob"] for entry in found]
    plain = openai_client.responses.create(**WISH, input=ASK).model_dump()
    assert plain["output"][0]["content"][0]["logprobs"] == [], "of this answer, too"


def test_tokens_are_chosen_as_in_a_chat(openai_client: openai.OpenAI) -> None:
    more = {"seed": 7, "top_k": 40, "repetition_penalty": 1.1, "stop": ["9"], "min_tokens": 3}
    hot = WISH | {"temperature": 1.3}
    response = openai_client.responses.create(**hot, input=ASK, extra_body=more)
    chat = openai_client.chat.completions.create(
        model="embedded",
        temperature=1.3,
        max_tokens=200,
        messages=[{"role": "user", "content": ASK}],
        extra_body=more,
    )
    assert response.output_text == chat.choices[0].message.content
    only = {"structured_outputs": {"choice": ["maybe"]}}
    assert openai_client.responses.create(**WISH, input=ASK, extra_body=only).output_text == "maybe"


def test_a_response_that_is_cut_is_incomplete(openai_client: openai.OpenAI) -> None:
    short = WISH | {"max_output_tokens": 3}
    response = openai_client.responses.create(**short, input=ASK)
    assert response.status == "incomplete"
    assert response.incomplete_details is not None
    assert response.incomplete_details.reason == "max_output_tokens"
    (item,) = response.output
    assert item.status == "incomplete"
    stream = openai_client.responses.create(**short, input=ASK, stream=True)
    assert [event.type for event in stream][-1] == "response.incomplete"


@pytest.mark.parametrize("choice", ["required", CALL])
def test_a_call_and_its_result(openai_client: openai.OpenAI, choice: Any) -> None:
    response = openai_client.responses.create(
        **WISH, input=WEATHER, tools=[TOOL], tool_choice=choice, parallel_tool_calls=False
    )
    (call,) = response.output
    assert call.type == "function_call"
    arguments = json.loads(call.arguments)
    assert call.name == "get_weather"
    assert arguments["city"] in ("Paris", "Rome")
    assert set(arguments) == {"city", "days"}
    history: list[Any] = [
        {"role": "user", "content": WEATHER},
        call,
        {"type": "function_call_output", "call_id": call.call_id, "output": "sunny"},
    ]
    after = openai_client.responses.create(**WISH, input=history, tools=[TOOL], tool_choice="none")
    assert after.output_text
    with openai_client.responses.stream(
        **WISH, input=WEATHER, tools=[TOOL], tool_choice=choice, parallel_tool_calls=False
    ) as stream:
        kinds = [event.type for event in stream]
        (streamed,) = stream.get_final_response().output
    assert streamed.type == "function_call"
    assert (streamed.name, streamed.arguments) == (call.name, call.arguments)
    assert "response.function_call_arguments.done" in kinds


def test_json_follows_its_schema(openai_client: openai.OpenAI) -> None:
    form: Any = {"format": {"type": "json_schema", "name": "trip", "schema": SCHEMA}}
    response = openai_client.responses.create(**WISH, input=WEATHER, text=form)
    assert set(json.loads(response.output_text)) == {"city", "days"}
    assert response.text is not None
    assert response.text.format is not None
    assert response.text.format.type == "json_schema"


@pytest.mark.parametrize(
    ("field", "value", "words"),
    [
        ("previous_response_id", "resp_1", "not supported: send the whole conversation as input"),
        ("store", True, "expected false"),
        ("input", [], "at least 1"),
        ("input", [{"type": "function_call", "name": "f"}], "required with the type"),
        ("input", [{"type": "computer_call"}], "expected 'message'"),
        ("tools", [{"type": "web_search"}], "expected 'function'"),
        ("tool_choice", CALL, "expected one of [], got 'get_weather'"),
        ("tool_choice", {"type": "web_search", "name": "x"}, "expected 'function'"),
        ("text", {"format": {"type": "json_schema", "name": "x"}}, "required with the type"),
        ("max_output_tokens", 0, "at least 1"),
        ("temperature", -1, "at least 0"),
        ("flavour", 1, "unknown field"),
    ],
)
def test_wrong_input_is_refused_by_field(
    cluster: Cluster, field: str, value: Any, words: str
) -> None:
    body = {"model": "embedded", "input": ASK, field: value}
    answer = httpx.post(f"{cluster.http_url()}/v1/responses", json=body)
    error = answer.json()["error"]
    assert (answer.status_code, words in error["message"]) == (400, True), error
    assert error["param"].startswith(field)
    assert "Named" not in error["message"]


def test_null_is_absent_and_stored_responses_are_not_there(cluster: Cluster) -> None:
    url = f"{cluster.http_url()}/v1/responses"
    body = {"model": "embedded", "input": ASK, "tools": None, "conversation": None, "store": None}
    assert httpx.post(url, json=body).status_code == 200
    for path in ("resp_1", "resp_1/input_items"):
        stored = httpx.get(f"{url}/{path}")
        assert stored.status_code == 501
        assert "not stored" in stored.json()["error"]["message"]
