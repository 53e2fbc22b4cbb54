"""OpenAI's own client has any model call tools and write JSON, the embedded one too."""

import json
from typing import Any

import openai
import pytest

SCHEMA = {
    "type": "object",
    "properties": {"city": {"enum": ["Paris", "Rome"]}, "days": {"type": "integer"}},
    "required": ["city", "days"],
    "additionalProperties": False,
}
TOOL = {
    "type": "function",
    "function": {"name": "get_weather", "description": "Weather.", "parameters": SCHEMA},
}
OTHER = {"type": "function", "function": {"name": "ring"}}
WISH: dict[str, Any] = {
    "model": "embedded",
    "messages": [{"role": "user", "content": "What is the weather in Paris?"}],
    "max_tokens": 200,
    "temperature": 0,
}


def check_arguments(text: str) -> None:
    arguments = json.loads(text)
    assert arguments["city"] in ("Paris", "Rome")
    assert isinstance(arguments["days"], int)


@pytest.mark.parametrize("stream", [False, True])
def test_a_named_function_is_called(openai_client: openai.OpenAI, stream: bool) -> None:
    choice = {"type": "function", "function": {"name": "get_weather"}}
    wish = WISH | {"tools": [TOOL, OTHER], "tool_choice": choice}
    message = final_message(openai_client, wish, stream=stream)
    (call,) = message.tool_calls
    assert call.function.name == "get_weather"
    check_arguments(call.function.arguments)


@pytest.mark.parametrize("stream", [False, True])
def test_some_function_is_called(openai_client: openai.OpenAI, stream: bool) -> None:
    wish = WISH | {"tools": [TOOL], "tool_choice": "required", "parallel_tool_calls": False}
    message = final_message(openai_client, wish, stream=stream)
    (call,) = message.tool_calls
    assert call.function.name == "get_weather"
    check_arguments(call.function.arguments)
    assert not message.content


def final_message(client: openai.OpenAI, wish: dict[str, Any], *, stream: bool) -> Any:
    if not stream:
        return client.chat.completions.create(**wish).choices[0].message
    with client.chat.completions.stream(**wish) as events:
        return events.get_final_completion().choices[0].message


def test_a_model_is_told_the_result_of_its_call(openai_client: openai.OpenAI) -> None:
    wish = WISH | {"tools": [TOOL], "tool_choice": "required", "parallel_tool_calls": False}
    message = final_message(openai_client, wish, stream=False)
    result = {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "27 + 45 = ?"}
    messages = [*WISH["messages"], message.model_dump(exclude_none=True), result]
    answer = openai_client.chat.completions.create(**WISH | {"messages": messages})
    assert answer.choices[0].message.content
    assert answer.usage is not None
    assert answer.usage.prompt_tokens > 30
