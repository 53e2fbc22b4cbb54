"""A model that thinks, answers and calls a tool, through every API and its own client."""

import json
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import openai
import pytest

from pagewire_client import LLM, Client, RequestOutput
from tests.support.cluster import Cluster
from tests.support.scripted_checkpoint import make_scripted_checkpoint
from tests.support.worker_flags import FLOAT32

if TYPE_CHECKING:
    import anthropic

THOUGHT_PIECES = ["I", " wonder", ",", " thinking", " of", " Paris"]
THOUGHT, TEXT, ARGUMENTS = "".join(THOUGHT_PIECES), "It is sunny.", '{"city": "Paris"}'
PIECES = [
    *("<think>", *THOUGHT_PIECES, "</think>", "It is", " sunny.", "<tool_call>"),
    *('{"name": "get_weather", ', '"arguments": ', '{"city": ', '"Paris"}', "}", "</tool_call>"),
]
ASK: list[Any] = [{"role": "user", "content": "What is the weather in Paris?"}]
CITY = {
    "type": "object",
    "properties": {"city": {"type": "string"}},
    "required": ["city"],
}
TOOLS: list[Any] = [{"type": "function", "function": {"name": "get_weather", "parameters": CITY}}]
WISH: dict[str, Any] = {"model": "m", "messages": ASK, "temperature": 0}
NUM_REASONING_TOKENS = 1 + len(THOUGHT_PIECES)


@pytest.fixture(scope="module")
def thinker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    folder = tmp_path_factory.mktemp("thinker")
    model = make_scripted_checkpoint(folder / "model", PIECES, special=["<think>", "</think>"])
    worker_flags = [*FLOAT32, "--served-model-name", "m"]
    with Cluster(
        folder,
        model=str(model),
        worker_flags=worker_flags,
        frontend_flags=["--http", "127.0.0.1:0"],
    ) as cluster:
        yield cluster.start()


@pytest.fixture(scope="module")
def client(thinker: Cluster) -> Iterator[openai.OpenAI]:
    url = f"{thinker.http_url()}/v1"
    with openai.OpenAI(base_url=url, api_key="none", max_retries=0, timeout=60) as client:
        yield client


@pytest.fixture(scope="module")
def claude(thinker: Cluster) -> "Iterator[anthropic.Anthropic]":
    import anthropic

    url = thinker.http_url()
    with anthropic.Anthropic(base_url=url, api_key="none", max_retries=0, timeout=60) as client:
        yield client


@pytest.fixture(scope="module")
def grpc_client(thinker: Cluster) -> Iterator[Client]:
    with Client(thinker.frontend_address()) as client:
        yield client


def test_the_formats_are_logged_when_the_model_is_ready(thinker: Cluster) -> None:
    assert "reasoning=qwen3 tool_calls=hermes" in thinker.frontends[0].log


# Chat completions.


def test_a_chat_completion_has_reasoning_under_both_names(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(**WISH, tools=TOOLS)
    (choice,) = answer.choices
    message: Any = choice.message
    assert (message.reasoning, message.reasoning_content) == (THOUGHT, THOUGHT)
    assert message.content == TEXT
    assert [call.function.arguments for call in message.tool_calls] == [ARGUMENTS]
    assert choice.finish_reason == "tool_calls"
    assert answer.usage is not None
    assert answer.usage.completion_tokens_details is not None
    assert answer.usage.completion_tokens_details.reasoning_tokens == NUM_REASONING_TOKENS


def test_a_streamed_chat_completion_adds_up_to_the_whole_one(client: openai.OpenAI) -> None:
    parts = {"reasoning": "", "reasoning_content": "", "content": ""}
    arguments, finish, order = "", None, []
    for chunk in client.chat.completions.create(**WISH, tools=TOOLS, stream=True):
        (choice,) = chunk.choices
        for name in parts:
            if text := getattr(choice.delta, name, None):
                parts[name] += text
                order.append(name)
        for call in choice.delta.tool_calls or ():
            assert call.function is not None
            arguments += call.function.arguments or ""
        finish = choice.finish_reason or finish
    assert parts == {"reasoning": THOUGHT, "reasoning_content": THOUGHT, "content": TEXT}
    assert order.index("content") > max(n for n, name in enumerate(order) if name == "reasoning")
    assert (arguments, finish) == (ARGUMENTS, "tool_calls")


@pytest.mark.parametrize("stream", [False, True])
def test_include_reasoning_false_leaves_it_out_and_counts_it(
    client: openai.OpenAI, stream: bool
) -> None:
    wish = WISH | {"tools": TOOLS, "extra_body": {"include_reasoning": False}}
    if stream:
        wish |= {"stream": True, "stream_options": {"include_usage": True}}
        *chunks, last = client.chat.completions.create(**wish)
        text, usage = "".join(map(str, chunks)), last.usage
    else:
        answer = client.chat.completions.create(**wish)
        text, usage = str(answer.choices), answer.usage
    assert "wonder" not in text
    assert "sunny" in text
    assert usage.completion_tokens_details.reasoning_tokens == NUM_REASONING_TOKENS


def test_thinking_that_the_template_switches_off_is_absent(client: openai.OpenAI) -> None:
    kwargs = {"chat_template_kwargs": {"enable_thinking": False}}
    answer = client.chat.completions.create(**WISH, tools=TOOLS, extra_body=kwargs)
    message: Any = answer.choices[0].message
    assert message.content == TEXT
    assert not hasattr(message, "reasoning")


# Structured output.


# Responses.

RESPONSES: dict[str, Any] = {
    "model": "m",
    "input": "What is the weather?",
    "temperature": 0,
    "tools": [{"type": "function", "name": "get_weather", "parameters": CITY, "strict": False}],
}


def test_a_response_has_a_reasoning_item_before_its_message(client: openai.OpenAI) -> None:
    answer = client.responses.create(**RESPONSES)
    thought, message, call = answer.output
    assert thought.type == "reasoning"
    assert thought.content is not None
    assert [(part.type, part.text) for part in thought.content] == [("reasoning_text", THOUGHT)]
    assert (message.type, answer.output_text) == ("message", TEXT)
    assert (call.type, call.arguments) == ("function_call", ARGUMENTS)  # type: ignore[union-attr]
    assert answer.usage is not None
    assert answer.usage.output_tokens_details.reasoning_tokens == NUM_REASONING_TOKENS


def test_a_streamed_response_adds_up_to_the_whole_one(client: openai.OpenAI) -> None:
    with client.responses.stream(**RESPONSES) as stream:
        events = list(stream)
        final = stream.get_final_response()
    deltas = [event.delta for event in events if event.type == "response.reasoning_text.delta"]
    assert "".join(deltas) == THOUGHT
    (done,) = [event for event in events if event.type == "response.reasoning_text.done"]
    assert done.text == THOUGHT
    kinds = [item.type for item in final.output]
    assert kinds == ["reasoning", "message", "function_call"]
    assert [event.sequence_number for event in events] == list(range(len(events)))


# Anthropic's messages.

MESSAGES: dict[str, Any] = {
    "model": "m",
    "messages": ASK,
    "max_tokens": 100,
    "extra_body": {"temperature": 0},
    "tools": [{"name": "get_weather", "input_schema": CITY}],
}


@pytest.mark.parametrize("stream", [False, True])
def test_a_message_has_a_thinking_block_before_its_text(
    claude: "anthropic.Anthropic", stream: bool
) -> None:
    if stream:
        with claude.messages.stream(**MESSAGES) as events:
            kinds = [event.type for event in events]
            answer = events.get_final_message()
        assert {"thinking", "signature", "text", "input_json"} <= set(kinds)
    else:
        answer = claude.messages.create(**MESSAGES)
    thought, text, call = answer.content
    assert thought.type == "thinking"
    assert thought.thinking == THOUGHT
    assert thought.signature
    assert (text.type, call.type) == ("text", "tool_use")
    assert text.text == TEXT  # type: ignore[union-attr]
    assert call.input == json.loads(ARGUMENTS)  # type: ignore[union-attr]
    assert answer.stop_reason == "tool_use"


@pytest.mark.parametrize(
    ("thinking", "has_thought"),
    [
        ({"type": "disabled"}, False),
        ({"type": "enabled", "budget_tokens": 1024}, True),
        ({"type": "adaptive"}, True),
        ({"type": "adaptive", "display": "omitted"}, False),
    ],
)
def test_thinking_is_switched_by_the_messages_field(
    claude: "anthropic.Anthropic", thinking: Any, has_thought: bool
) -> None:
    answer = claude.messages.create(**MESSAGES, thinking=thinking)
    assert any(block.type == "thinking" for block in answer.content) is has_thought
    is_generated = answer.usage.output_tokens > NUM_REASONING_TOKENS + 9
    assert is_generated is (thinking["type"] != "disabled")


# gRPC, by the Python client.


def check(output: RequestOutput) -> None:
    (choice,) = output.outputs
    assert (choice.reasoning, choice.text) == (THOUGHT, TEXT)
    assert [(call.name, call.arguments) for call in choice.tool_calls] == [
        ("get_weather", ARGUMENTS)
    ]
    assert output.usage is not None
    assert output.usage.reasoning_tokens == NUM_REASONING_TOKENS
    assert len(choice.token_ids) == len(PIECES) + 1


def test_the_python_clients_outputs_have_the_parts(grpc_client: Client) -> None:
    check(grpc_client.chat(ASK, tools=TOOLS, temperature=0))
    with grpc_client.stream({"messages": ASK, "tools": TOOLS}, temperature=0) as stream:
        deltas = list(stream)
    check(stream.output)
    assert "".join(delta.reasoning for delta in deltas) == THOUGHT
    calls = [call for delta in deltas for call in delta.tool_calls]
    assert "".join(call.arguments for call in calls) == ARGUMENTS
    assert calls[0].name == "get_weather"


def test_parsers_that_are_switched_off_leave_the_text_as_it_is(thinker: Cluster) -> None:
    flags: dict[str, Any] = {"reasoning_parser": "none", "tool_call_parser": "none"}
    with LLM(model=thinker.model, dtype="float32", **flags) as llm:
        (output,) = llm.chat(
            ASK, tools=TOOLS, temperature=0, skip_special_tokens=False, use_tqdm=False
        )
    assert output.text == "".join(PIECES)
    assert not output.outputs[0].tool_calls
