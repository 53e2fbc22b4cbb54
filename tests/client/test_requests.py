"""Whatever way a prompt is given, the request carries it; what is none is refused."""

from typing import Any

import pytest

from pagewire.v1 import inference_service_pb2 as pb
from pagewire_client.requests import chat_proto, generate_request, generate_requests, prompt_list
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


def test_messages_are_a_prompt() -> None:
    chat = generate_request(CHAT).chat
    assert [(message.role, message.content) for message in chat.messages] == [
        ("user", "Hi"),
        ("assistant", "Hello"),
    ]


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
    with pytest.raises(ValueError, match="prompt must be Unicode text; position 1"):
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


def test_every_request_has_an_id_of_its_own() -> None:
    assert generate_request("a").request_id != generate_request("a").request_id
    assert generate_request("a", request_id="mine").request_id == "mine"


@pytest.mark.parametrize(
    ("prompts", "count"),
    [
        *[("one", 1), ([1, 2], 1), (CHAT, 1), ({"prompt": "x"}, 1), (pb.Chat(), 1), ([], 0)],
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
