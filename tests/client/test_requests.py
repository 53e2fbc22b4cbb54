"""Whatever way a prompt is given, the request carries it; what is none is refused."""

import re
from typing import Any

import pytest

from pagewire.v1 import inference_service_pb2 as pb
from pagewire_client.chat import chat_proto
from pagewire_client.requests import (
    generate_request,
    generate_requests,
    prompt_list,
    tokenize_request,
)
from pagewire_client.sampling_params import SamplingParams

CHAT = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]


@pytest.mark.parametrize("prompt", ["text", {"prompt": "text"}])
def test_a_text_is_a_prompt(prompt: Any) -> None:
    request = generate_request(prompt)
    assert request.WhichOneof("prompt") == "text"
    assert request.text == "text"


@pytest.mark.parametrize("prompt", [[1, 2], (1, 2), {"prompt_token_ids": [1, 2]}])
def test_token_ids_are_a_prompt(prompt: Any) -> None:
    assert list(generate_request(prompt).token_ids.ids) == [1, 2]


@pytest.mark.parametrize("prompt", [[], {"prompt_token_ids": []}])
def test_no_token_ids_arrive_as_an_empty_prompt_for_the_server_to_refuse(prompt: Any) -> None:
    assert generate_request(prompt).WhichOneof("prompt") == "token_ids"


@pytest.mark.parametrize(
    "prompt",
    [None, 5, [1, "a"], [-1], [1.5], {"text": "x"}, {"prompt": 1}, [{"role": "user"}], [CHAT]],
)
def test_anything_else_is_refused(prompt: Any) -> None:
    with pytest.raises(ValueError, match=r"prompt|messages\[0\]"):
        generate_request(prompt)


@pytest.mark.parametrize(
    "prompt", ["a\ud800", {"prompt": "a\ud800"}, [{"role": "user", "content": "a\ud800"}]]
)
def test_text_that_cannot_be_encoded_is_refused_with_its_place(prompt: Any) -> None:
    with pytest.raises(ValueError, match="expected Unicode text; position 1"):
        generate_request(prompt)


@pytest.mark.parametrize("prompt", [b"abc", bytearray(b"abc"), {"prompt_token_ids": b"abc"}])
def test_bytes_are_not_token_ids(prompt: Any) -> None:
    with pytest.raises(ValueError, match=r"prompt must be .*; got byte"):
        generate_request(prompt)


@pytest.mark.parametrize("prompts", [["a", "b"], ("a", "b"), [[1], [2]], [CHAT, CHAT]])
def test_the_error_for_several_prompts_names_the_method_for_them(prompts: Any) -> None:
    with pytest.raises(ValueError, match="generate_many takes several prompts"):
        generate_request(prompts)


@pytest.mark.parametrize("messages", ["hello", b"hello", CHAT[0]])
def test_a_conversation_that_is_not_a_list_is_refused(messages: Any) -> None:
    with pytest.raises(ValueError, match=r"messages must be a list of .*, not (str|bytes|dict)"):
        chat_proto(messages)


CALL: dict[str, Any] = {
    "id": "call_1",
    "type": "function",
    "function": {"name": "add", "arguments": '{"a": 1}'},
}
TOOL: dict[str, Any] = {
    "type": "function",
    "function": {"name": "add", "description": "Adds.", "parameters": {"type": "object"}},
}


def test_content_may_have_parts_and_reasoning_another_name() -> None:
    messages: list[dict[str, object]] = [
        {"role": "user", "content": [{"type": "text", "text": text} for text in ("a", "b")]},
        {"role": "assistant", "content": "c", "reasoning": "Hm."},
    ]
    expected = [
        pb.ChatMessage(role="user", content_parts=[pb.ContentPart(text=text) for text in "ab"]),
        pb.ChatMessage(role="assistant", content="c", reasoning_content="Hm."),
    ]
    assert list(generate_request({"messages": messages}).chat.messages) == expected
    image = [{"type": "image_url", "image_url": "x"}]
    with pytest.raises(ValueError, match=r"messages\[0\]\.content\[0\] must be"):
        generate_request({"messages": [{"role": "user", "content": image}]})


def test_a_call_may_have_no_id() -> None:
    call = {"function": {"name": "add", "arguments": "{}"}}
    (turn,) = chat_proto([{"role": "assistant", "tool_calls": [call]}]).messages
    assert list(turn.tool_calls) == [pb.ToolCall(name="add", arguments_json="{}")]


def test_a_chat_with_tools_and_variables_is_a_prompt() -> None:
    as_object = CALL | {"function": {"name": "add", "arguments": {"a": 1}}}
    prompt: Any = {
        "messages": [
            {"role": "user", "content": "1 + 2?", "name": "Ada"},
            {"role": "assistant", "content": None, "tool_calls": [CALL], "refusal": None},
            {"role": "assistant", "tool_calls": [as_object], "reasoning_content": "Hm."},
            {"role": "tool", "content": "3", "tool_call_id": "call_1"},
        ],
        "tools": [TOOL, {"function": {"name": "stop", "strict": False}}],
        "chat_template_kwargs": {"enable_thinking": False},
        "add_generation_prompt": False,
    }
    call = pb.ToolCall(id="call_1", name="add", arguments_json='{"a": 1}')
    expected = pb.Chat(
        messages=[
            pb.ChatMessage(role="user", content="1 + 2?", name="Ada"),
            pb.ChatMessage(role="assistant", tool_calls=[call]),
            pb.ChatMessage(role="assistant", tool_calls=[call], reasoning_content="Hm."),
            pb.ChatMessage(role="tool", content="3", tool_call_id="call_1"),
        ],
        tools=[
            pb.Tool(name="add", description="Adds.", parameters_json='{"type": "object"}'),
            pb.Tool(name="stop", strict=False),
        ],
        template_arguments_json='{"enable_thinking": false}',
        add_generation_prompt=False,
    )
    assert generate_request(prompt).chat == expected
    assert generate_requests([prompt])[0].chat == expected
    assert tokenize_request(prompt, None, True).chat == expected


def test_a_chat_leaves_the_generation_prompt_to_the_server_unless_it_is_given() -> None:
    continued: Any = {"messages": CHAT, "continue_final_message": True}
    chat = generate_request(continued).chat
    assert chat.continue_final_message
    assert not chat.HasField("add_generation_prompt")


@pytest.mark.parametrize(
    ("chat", "words"),
    [
        ({"messages": [{"role": "user", "content": "x", "nme": "y"}]}, r"messages\[0\] must be"),
        ({"messages": [{"role": "user", "content": None}]}, r"messages\[0\] must be"),
        ({"messages": [{"role": "a", "tool_calls": [{}]}]}, r"messages\[0\].tool_calls\[0\] must"),
        ({"messages": CHAT, "tools": [TOOL, {"name": "x"}]}, r"tools\[1\] must be .*function"),
        ({"messages": CHAT, "tools": [{"function": {"name": "x", "strict": 1}}]}, "tools.0. must"),
        (
            {"messages": CHAT, "tools": [{"function": {"name": "x", "parameters": "{}"}}]},
            r"tools\[0\].function.parameters must be a JSON object: got str",
        ),
        ({"messages": CHAT, "chat_template_kwargs": {"x": {1}}}, "chat_template_kwargs must be a"),
        ({"messages": CHAT, "tool": []}, "prompt must be .* not a mapping of"),
    ],
)
def test_a_wrong_part_of_a_chat_is_named(chat: Any, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        generate_request(chat)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("num_speculative_tokens", -1),
        ("num_speculative_tokens", "two"),
        ("priority", 2**31),
        ("lora", 5),
        ("cache_salt", ["a"]),
    ],
)
def test_an_option_that_no_message_can_hold_is_named(name: str, value: Any) -> None:
    options: Any = {name: value}
    with pytest.raises(ValueError, match=re.escape(f"{name} cannot be {value!r}: ")):
        generate_request("Hi", **options)
    with pytest.raises(ValueError, match=re.escape(f"prompts[0]: {name} cannot be {value!r}: ")):
        generate_requests(["Hi"], **options)


def test_a_list_for_a_text_is_refused_in_words() -> None:
    wrong: Any = ["x", "y"]
    with pytest.raises(ValueError, match=r"lora cannot be \['x', 'y'\]: expected a text$"):
        generate_requests(["a", "b"], lora=wrong)


def test_priority_is_that_of_all_prompts_or_one_for_each() -> None:
    def sent(priority: Any) -> list[int]:
        return [request.priority for request in generate_requests(["a", "b"], priority=priority)]

    assert sent(3) == [3, 3]
    assert sent([2, 0]) == sent((2, 0)) == [2, 0]
    with pytest.raises(ValueError, match="2 prompts need as many priorities, not 1"):
        sent([2])
    with pytest.raises(ValueError, match=re.escape("prompts[1]: priority cannot be 'high': ")):
        sent([2, "high"])


def test_one_prompt_has_no_list_of_sampling_params() -> None:
    with pytest.raises(TypeError, match="sampling_params must be SamplingParams, not list"):
        generate_request("Hello", [SamplingParams()])  # type: ignore[arg-type]


def test_every_request_has_an_id_of_its_own() -> None:
    assert generate_request("a").request_id != generate_request("a").request_id
    assert generate_request("a", request_id="mine").request_id == "mine"


@pytest.mark.parametrize(
    ("prompts", "count"),
    [
        *[
            ("one", 1),
            ([1, 2], 1),
            (CHAT, 1),
            ({"prompt": "x"}, 1),
            ({"messages": CHAT}, 1),
            ([], 0),
        ],
        *[(["a", "b"], 2), ([[1], [2]], 2), ([CHAT, CHAT], 2), ([{"prompt": "x"}, "y"], 2)],
    ],
)
def test_one_prompt_is_told_from_a_list_of_them(prompts: Any, count: int) -> None:
    assert len(prompt_list(prompts)) == count


@pytest.mark.parametrize("prompt", ["hello", [1, 2], CHAT, {"prompt": "x"}])
def test_a_single_prompt_is_one_request_of_a_batch(prompt: Any) -> None:
    (request,), (same,) = generate_requests(prompt), generate_requests([prompt])
    same.request_id = request.request_id
    assert request == same


def test_a_wrong_prompt_of_a_batch_is_named_by_its_position() -> None:
    with pytest.raises(ValueError, match=r"prompts\[2\]: prompt must be "):
        generate_requests(["a", "b", None])  # type: ignore[list-item]
    with pytest.raises(ValueError, match=r"prompts\[0\]: prompt must be .* got bytes"):
        generate_requests(b"abc")  # type: ignore[arg-type]


def test_sampling_params_hold_for_all_or_one_by_one() -> None:
    one, two = SamplingParams(n=1), SamplingParams(n=2)
    assert [r.sampling_params.n for r in generate_requests(["a", "b"], two)] == [2, 2]
    assert [r.sampling_params.n for r in generate_requests(["a", "b"], [one, two])] == [1, 2]
    with pytest.raises(ValueError, match="2 prompts"):
        generate_requests(["a", "b"], [one])


def test_an_unknown_part_of_a_conversation_is_refused_by_name() -> None:
    with pytest.raises(TypeError, match="unknown parts of a conversation: tool_choise"):
        chat_proto([{"role": "user", "content": "Hi"}], tool_choise="none")  # type: ignore[call-arg]
