import json

import pytest

from pagewire.v1 import inference_service_pb2 as pb
from scheduler_service.errors import InvalidArgument, PromptTooLong
from scheduler_service.frontend.input.chat import (
    MAX_JSON_CHARS,
    MAX_JSON_CONTAINERS,
    check_chat,
)
from scheduler_service.frontend.input.processor import resolve_prompt
from scheduler_service.frontend.input.validation import check_request
from scheduler_service.frontend.models.frontend_model import build_model
from tests.support.fake_core import model_info
from tests.support.frontends import generate_request
from tests.support.tokenizers import BOS, byte_level, model_files

MODEL = build_model(model_info(), model_files(byte_level()))
LONG = [3 + k % 90 for k in range(300)]


def test_prompts_of_every_kind_become_tokens() -> None:
    bos, hello = byte_level().token_to_id(BOS), byte_level().encode("hello").ids
    assert resolve_prompt(generate_request("hello"), MODEL)[1] == hello
    assert hello[0] == bos
    assert resolve_prompt(generate_request([5, 6]), MODEL)[1] == [5, 6]
    chat = pb.GenerateRequest(chat=pb.Chat(messages=[pb.ChatMessage(role="user", content="hi")]))
    expected = f"{BOS}[user]hi[assistant]"
    assert (
        byte_level().decode(resolve_prompt(chat, MODEL)[1], skip_special_tokens=False) == expected
    )
    chat.chat.add_generation_prompt = False
    expected = f"{BOS}[user]hi"
    assert (
        byte_level().decode(resolve_prompt(chat, MODEL)[1], skip_special_tokens=False) == expected
    )


def test_a_text_may_have_its_special_tokens_already() -> None:
    request = generate_request(f"{BOS}hello")
    assert resolve_prompt(request, MODEL)[1][:2] == [byte_level().token_to_id(BOS)] * 2
    request.add_special_tokens = False
    assert resolve_prompt(request, MODEL)[1] == byte_level().encode("hello").ids


def test_a_text_that_makes_no_token_is_refused() -> None:
    template = model_files(byte_level()) | {"chat_template.jinja": b"{% if false %}{% endif %}"}
    chat = pb.GenerateRequest(chat=pb.Chat(messages=[pb.ChatMessage(role="user", content="hi")]))
    with pytest.raises(InvalidArgument, match=r"chat\.messages"):
        resolve_prompt(chat, build_model(model_info(), template))


def test_a_text_with_a_token_that_only_the_tokenizer_has_is_refused() -> None:
    small = build_model(
        model_info(vocab_size=byte_level().token_to_id("<tool call>")), model_files(byte_level())
    )
    assert resolve_prompt(generate_request("hello"), small)
    with pytest.raises(InvalidArgument, match="the token '<tool call>', which the model does not"):
        resolve_prompt(generate_request("hello <tool call>"), small)


@pytest.mark.parametrize(
    ("asked", "max_tokens", "taken"),
    [
        (10, None, 10),
        (299, None, 299),
        (300, None, 300),
        (301, None, 300),
        (0, None, 255),
        (0, 1, 255),
        (0, 56, 200),
        (0, 255, 1),
    ],
)
def test_of_a_longer_prompt_the_end_is_taken(
    asked: int, max_tokens: int | None, taken: int
) -> None:
    """0 takes what leaves room for the output within the model's 256 tokens."""
    fields = {} if max_tokens is None else {"max_tokens": max_tokens}
    request = generate_request(LONG, truncate_prompt_tokens=asked, **fields)
    assert resolve_prompt(request, MODEL)[1] == LONG[300 - taken :]


def test_a_shorter_prompt_is_taken_whole() -> None:
    assert resolve_prompt(generate_request([5, 6], truncate_prompt_tokens=0), MODEL)[1] == [5, 6]
    assert resolve_prompt(generate_request([5, 6], truncate_prompt_tokens=3), MODEL)[1] == [5, 6]


def test_an_output_that_leaves_no_room_for_a_prompt_is_refused() -> None:
    request = generate_request(LONG, truncate_prompt_tokens=0, max_tokens=256)
    with pytest.raises(InvalidArgument, match="max_tokens"):
        resolve_prompt(request, MODEL)[1]


CHATML = (
    b"{% for m in messages %}"
    b"<|im_start|>{{ m.role }}\n{{ m.content | trim }}<|im_end|>\n"
    b"{% endfor %}"
)


@pytest.mark.parametrize("begun", ["hello", "e", "<", "|", " <|im_end|> \n", "a\uffffb"])
def test_a_turn_is_continued_where_its_text_ends(begun: str) -> None:
    """Though the template's own words behind it have the same text."""
    model = build_model(model_info(), model_files(byte_level()) | {"chat_template.jinja": CHATML})
    request = pb.GenerateRequest()
    request.chat.messages.add(role="user", content="hi")
    request.chat.messages.add(role="assistant", content=begun)
    request.chat.continue_final_message = True
    text = byte_level().decode(resolve_prompt(request, model)[1], skip_special_tokens=False)
    assert text == f"<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n{begun.strip()}"


@pytest.mark.parametrize("change", [b"upper", b"truncate(6)", b"length"])
def test_a_turn_that_the_template_changes_cannot_be_continued(change: bytes) -> None:
    template = CHATML.replace(b"trim", change)
    model = build_model(model_info(), model_files(byte_level()) | {"chat_template.jinja": template})
    request = pb.GenerateRequest()
    request.chat.messages.add(role="assistant", content="hello world")
    request.chat.continue_final_message = True
    with pytest.raises(InvalidArgument, match=r"chat\.continue_final_message"):
        resolve_prompt(request, model)


HALF = '{"a": "\\ud83d"}'


@pytest.mark.parametrize("field", ["template_arguments_json", "tools"])
def test_json_with_half_a_character_is_refused_by_its_field(field: str) -> None:
    """It would be no text that could be tokenized."""
    chat = pb.Chat(messages=[pb.ChatMessage(role="assistant", content="hi")])
    if field == "tools":
        chat.tools.add(name="f", parameters_json=HALF)
    else:
        chat.template_arguments_json = HALF
    with pytest.raises(InvalidArgument, match="surrogate") as refused:
        check_chat(chat)
    assert refused.value.field.startswith(f"chat.{field}")


@pytest.mark.parametrize("is_object", [True, False], ids=["object", "text"])
@pytest.mark.parametrize(
    ("written", "read"),
    [
        ("", {}),
        (" \n", {}),
        ('{"a": 1}', {"a": 1}),
        ('{"a": "b", "c": 12, "d": [1, {"e": "f', {"a": "b", "c": 12, "d": [1, {"e": "f"}]}),
        ('{"a": "say "hi" now", "b": 1}', {"a": "say "}),
        ('{"a": 1, "b"', {"a": 1}),
        ('{"a": 1} and more', {"a": 1}),
        (HALF, {"a": "\ufffd"}),
        ('"Paris"', {}),
        ("[1]", {}),
        ("null", {}),
        ("[" * 100_000, {}),
        ("Paris", {}),
    ],
)
def test_calls_of_a_model_may_be_sent_back_whatever_they_are(
    written: str, read: object, is_object: bool
) -> None:
    """A conversation in which one call was malformed, or cut off, could never go on otherwise."""
    wanted = "arguments | tojson" if is_object else "arguments"
    template = (
        "{% for message in messages %}{% for call in message.tool_calls or [] %}"
        f"{{{{ call.function.{wanted} }}}}{{% endfor %}}{{% endfor %}}"
    )
    model = build_model(
        model_info(), model_files(byte_level()) | {"chat_template.jinja": template.encode()}
    )
    request = pb.GenerateRequest()
    request.chat.messages.add(role="assistant").tool_calls.add(name="f", arguments_json=written)
    check_request(request)
    text = byte_level().decode(resolve_prompt(request, model)[1])
    assert json.loads(text) == read


def test_a_turn_has_a_text_or_parts() -> None:
    turn = pb.ChatMessage(role="user", content="hi", content_parts=[pb.ContentPart(text="hi")])
    with pytest.raises(InvalidArgument, match="none beside content") as refused:
        check_chat(pb.Chat(messages=[turn]))
    assert refused.value.field == "chat.messages[0].content_parts"


def test_json_with_both_halves_of_a_character_is_taken() -> None:
    chat = pb.Chat(messages=[pb.ChatMessage(role="user", content="hi")])
    chat.template_arguments_json = '{"a": "\\ud83d\\ude00"}'
    check_chat(chat)


@pytest.mark.parametrize(
    ("chat", "path"),
    [
        (pb.Chat(messages=[pb.ChatMessage(role="user")] * 8193), "messages"),
        (pb.Chat(template_arguments_json='"' * (MAX_JSON_CHARS + 1)), "template_arguments_json"),
        (pb.Chat(template_arguments_json="[" * (MAX_JSON_CONTAINERS + 1)), ""),
    ],
    ids=["turns", "characters of JSON", "arrays"],
)
def test_a_conversation_is_bounded(chat: pb.Chat, path: str) -> None:
    if not chat.messages:
        chat.messages.add(role="user")
    with pytest.raises(InvalidArgument, match=r"expected .*(at most|1 to)") as refused:
        check_request(pb.GenerateRequest(chat=chat))
    assert refused.value.field == f"chat.{path}".rstrip(".")


@pytest.mark.parametrize("prompt", ["hello " * 100_000, [5] * 256], ids=["text", "token ids"])
def test_a_prompt_too_long_for_the_model_is_refused(prompt: object) -> None:
    with pytest.raises(PromptTooLong) as refused:
        resolve_prompt(generate_request(prompt), MODEL)[1]
    assert refused.value.details["max_model_len"] == "256"
