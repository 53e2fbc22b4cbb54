"""Special tokens and chat templates in all places where `transformers` saves them."""

import json
import logging
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

from scheduler_service.errors import UnsupportedByModel
from scheduler_service.frontend.models.frontend_model import build_model
from scheduler_service.frontend.models.tokenizer import ModelTokenizer
from scheduler_service.frontend.models.tokenizer_files import build_tokenizer
from tests.support.fake_core import model_info
from tests.support.tokenizers import BOS, EOS, byte_level

TOKENIZER = {"tokenizer.json": byte_level().to_str().encode()}
CONFIG = "tokenizer_config.json"
MAP = "special_tokens_map.json"
CHAT = [{"role": "user", "content": "hello"}]
TOOLS = [{"type": "function", "function": {"name": "f"}}]


def built(**files: Any) -> ModelTokenizer:
    """A tokenizer; values other than texts are written as JSON, names end with their kind."""
    tokenizer = build_tokenizer(TOKENIZER | encoded(files), "tiny")
    assert tokenizer is not None
    return tokenizer


def encoded(files: dict[str, Any]) -> dict[str, bytes]:
    return {
        name: (content if isinstance(content, str) else json.dumps(content)).encode()
        for name, content in files.items()
    }


def prompt(tokenizer: ModelTokenizer, *, tools: Any = None) -> str:
    template = tokenizer.chat_template(with_tools=bool(tools))
    return template.render(CHAT, add_generation_prompt=True, tools=tools)


# Chat templates.

NAMED = [{"name": "default", "template": "D"}, {"name": "tool_use", "template": "T"}]
CONFIGURED = {"chat_template": NAMED}


@pytest.mark.parametrize(
    ("files", "without_tools", "with_tools"),
    [
        ({CONFIG: {"chat_template": "C"}}, "C", "C"),
        ({CONFIG: CONFIGURED}, "D", "T"),
        ({CONFIG: {"chat_template": {"default": "D", "tool_use": "T"}}}, "D", "T"),
        ({"chat_template.jinja": "J", CONFIG: {"chat_template": "C"}}, "J", "J"),
        ({"chat_template.jinja": "J", "tool_use.jinja": "T"}, "J", "T"),
        ({"tool_use.jinja": "T", "chat_template.jinja": "J", CONFIG: CONFIGURED}, "J", "T"),
        ({"chat_template.jinja": "J", CONFIG: CONFIGURED}, "J", "J"),
        ({"tool_use.jinja": "U", CONFIG: {"chat_template": "C"}}, "C", "U"),
        ({"default.jinja": "A", "chat_template.jinja": "J"}, "A", "A"),
        ({"chat_template.json": {"chat_template": "L"}}, "L", "L"),
        ({"chat_template.json": {"chat_template": "L"}, CONFIG: {"chat_template": "C"}}, "C", "C"),
    ],
)  # fmt: skip
def test_templates_are_found_wherever_they_are_saved(
    files: dict[str, Any], without_tools: str, with_tools: str
) -> None:
    tokenizer = built(**files)
    assert prompt(tokenizer) == without_tools
    assert prompt(tokenizer, tools=TOOLS) == with_tools
    assert tokenizer.tool_template_source == with_tools


@pytest.mark.parametrize(
    ("files", "warning"),
    [
        ({"chat_template.jinja": "J", "rag.jinja": "R"}, "file=*.jinja templates=rag"),
        ({CONFIG: {"chat_template": [*NAMED, {"name": "rag", "template": "R"}]}},
         "file=tokenizer_config.json templates=rag"),
        ({"chat_template.jinja": "J", CONFIG: {"chat_template": NAMED}},
         "file=tokenizer_config.json templates=default,tool_use"),
        ({CONFIG: {"chat_template": "C"}, "chat_template.json": {"chat_template": "L"}},
         "file=chat_template.json templates=default"),
    ],
)  # fmt: skip
def test_templates_that_are_not_used_are_named(
    files: dict[str, Any], warning: str, caplog: pytest.LogCaptureFixture
) -> None:
    built(**files)
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert record.getMessage() == f"chat templates not used {warning} model=tiny"


def test_variables_that_requests_do_not_set_are_the_models(
    caplog: pytest.LogCaptureFixture,
) -> None:
    variables = {"chat_template_kwargs.json": {"tone": "dry", "topp": 1}}
    tokenizer = built(**{"chat_template.jinja": "{{ tone }}"}, **variables)
    assert prompt(tokenizer) == "dry"
    template = tokenizer.chat_template(with_tools=False)
    given = {"variables": {"tone": "warm"}, "add_generation_prompt": True}
    assert template.render([{"role": "user", "content": "?"}], **given) == "warm"
    (record,) = caplog.records
    expected = "chat_template_kwargs: the chat template does not read topp"
    assert record.getMessage().startswith(expected)


def test_equal_templates_in_two_places_are_used(caplog: pytest.LogCaptureFixture) -> None:
    built(**{"chat_template.jinja": "J", CONFIG: {"chat_template": "J"}})
    assert not caplog.records


@pytest.mark.parametrize(
    ("files", "reason"),
    [
        ({"chat_template.jinja": "{% if %}"}, "line 1: Expected an expression"),
        ({"chat_template.jinja": "\n{{ 1 | nosuch }}"}, "line 2: No filter named 'nosuch'"),
        ({"chat_template.jinja": "{{ " + "(" * 5000 + ")" * 5000 + " }}"}, "recursion"),
        ({CONFIG: {"chat_template": 5}}, "chat_template: expected a text"),
        ({CONFIG: {"chat_template": ["x"]}}, "chat_template: expected entries"),
        ({CONFIG: {"chat_template": [{"name": "default"}]}}, "chat_template: expected entries"),
        ({"chat_template.json": "{"}, "chat_template.json: "),
    ],
)
def test_a_template_that_cannot_be_used_refuses_chats_only(
    files: dict[str, Any], reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    model = build_model(model_info(), TOKENIZER | encoded(files))
    tokenizer = model.require_tokenizer("text prompt")
    assert tokenizer.encode("hello") == byte_level().encode("hello").ids
    with pytest.raises(
        UnsupportedByModel, match=r"cannot be used: .*; texts and token ids work"
    ) as refused:
        tokenizer.chat_template(with_tools=False)
    assert reason in str(refused.value)
    (record,) = (r for r in caplog.records if r.levelno == logging.ERROR)
    assert record.getMessage().startswith("chat template unusable model=tiny template=default")
    assert reason in record.getMessage()


def test_a_tool_template_that_cannot_be_used_refuses_chats_with_tools() -> None:
    tokenizer = built(**{"chat_template.jinja": "J", "tool_use.jinja": "{{ 1 | nosuch }}"})
    assert prompt(tokenizer) == "J"
    with pytest.raises(UnsupportedByModel, match="No filter named 'nosuch'"):
        tokenizer.chat_template(with_tools=True)


def test_without_a_default_template_the_others_are_named() -> None:
    tokenizer = built(**{"tool_use.jinja": "T", "rag.jinja": "R"})
    assert prompt(tokenizer, tools=TOOLS) == "T"
    with pytest.raises(UnsupportedByModel, match="no chat template"):
        tokenizer.chat_template(with_tools=False)


# Special tokens.

AS_OBJECT = {"content": BOS, "lstrip": False, "rstrip": False, "normalized": False}
ADDED = {**AS_OBJECT, "__type": "AddedToken"}
SPECIAL = {**AS_OBJECT, "special": True}
DECODER = {"added_tokens_decoder": {"0": SPECIAL}}


@pytest.mark.parametrize(
    "files",
    [
        {CONFIG: {"bos_token": BOS, "eos_token": ADDED | {"content": EOS}}},
        {MAP: {"bos_token": BOS}},
        {MAP: {"bos_token": AS_OBJECT}, CONFIG: {"eos_token": EOS}},
        {MAP: {"bos_token": EOS}, CONFIG: {"bos_token": BOS}},
        {MAP: {"bos_token": BOS}, CONFIG: DECODER},
        {MAP: {"bos_token": EOS}, CONFIG: DECODER | {"bos_token": BOS}},
        {CONFIG: {"image_token": "<tool call>", "eot_token": ADDED}},
        {CONFIG: {"extra_special_tokens": {"audio_token": "<tool call>", "bos_token": BOS}}},
        {CONFIG: {"extra_special_tokens": ["<tool call>"]}},
        {CONFIG: {"additional_special_tokens": ["<tool call>", ADDED]}},
        {MAP: {"additional_special_tokens": ["<tool call>"], "eot_token": EOS}},
        {CONFIG: {"add_bos_token": True, "bos_token": None, "unk_token": "hello"}},
        {"added_tokens.json": {"hello": 324}, MAP: {"eos_token": "hello"}},
        {"added_tokens.json": {"<new>": 330}},
        {CONFIG: {"added_tokens_decoder": {"327": SPECIAL | {"content": "<tool call>"}}}},
    ],
)  # fmt: skip
def test_special_tokens_are_those_of_transformers(tmp_path: Path, files: dict[str, Any]) -> None:
    for name, content in (TOKENIZER | encoded(files)).items():
        (tmp_path / name).write_bytes(content)
    reference = PreTrainedTokenizerFast.from_pretrained(tmp_path)
    tokenizer = built(**files)
    names = {**reference.special_tokens_map, "bos_token": "", "image_token": "", "unk_token": ""}
    template = "".join(f"{name}={{{{ {name} }}}} " for name in names)
    expected = reference.apply_chat_template(CHAT, chat_template=template, tokenize=False)
    assert prompt(built(**files, **{"chat_template.jinja": template})) == expected
    text = f"{BOS}hello <tool call>hello<new>{EOS}"
    ids = reference.encode(text, add_special_tokens=False)
    assert tokenizer.encode(text, add_special_tokens=False) == ids
    assert tokenizer.decode(ids, skip_special_tokens=True) == reference.decode(
        ids, skip_special_tokens=True
    )


@pytest.mark.parametrize(
    ("files", "warning"),
    [
        ({MAP: {"bos_token": BOS}, CONFIG: DECODER},
         "special_tokens_map.json: bos_token is not used"),
        ({CONFIG: {"pad_token": "<nowhere>"}}, "token '<nowhere>' is not in the vocabulary"),
        ({"added_tokens.json": {"<nowhere>": 999}}, "token '<nowhere>' is not in the vocabulary"),
        ({"chat_template.jinja": "{{ bos_token }}"},
         "the chat template writes bos_token, which no file names"),
    ],
)  # fmt: skip
def test_special_tokens_without_effect_are_named(
    files: dict[str, Any], warning: str, caplog: pytest.LogCaptureFixture
) -> None:
    built(**files)
    assert [(r.levelno, r.getMessage()) for r in caplog.records] == [
        (logging.WARNING, f"{warning} model=tiny")
    ]


# Tokens that end an answer.

HELLO, WORLD, END = (
    byte_level().token_to_id(text) for text in ("hello", "wor", "<\uff5cend\uff5c>")
)
ANSWERS = (
    "{% for m in messages %}[{{ m.role }}]{{ m.reasoning_content }}BETWEEN{{ m.content }}END"
    "{% endfor %}"
)


def chatml(end: str, between: str = "") -> str:
    return ANSWERS.replace("BETWEEN", between).replace("END", end)


@pytest.mark.parametrize(
    ("files", "ends"),
    [
        ({}, set()),
        ({CONFIG: {"eos_token": EOS}}, {1}),
        ({MAP: {"eos_token": EOS}}, {1}),
        ({CONFIG: {"eos_token": EOS, "eot_token": "<\uff5cend\uff5c>"}}, {1, END}),
        ({CONFIG: {"eos_token": "<nowhere>"}}, set()),
        ({"chat_template.jinja": chatml("<\uff5cend\uff5c>\n")}, {END}),
        ({"chat_template.jinja": chatml(f"{EOS}<\uff5cend\uff5c>")}, {1}),
        ({"chat_template.jinja": chatml("<tool call>")}, set()),
        ({"chat_template.jinja": chatml("<\uff5cend\uff5c>", "<\uff5cend\uff5c>")}, set()),
        ({"chat_template.jinja": "{{ messages[0].content }}</s>"}, set()),
    ],
    ids=["nothing", "eos", "eos in the map", "eot", "unknown", "template", "first", "not special",
         "also inside a turn", "no answers"],
)  # fmt: skip
def test_an_answer_ends_with_the_tokens_that_the_files_name_or_the_template_writes(
    files: dict[str, Any], ends: set[int]
) -> None:
    assert built(**files).end_token_ids == ends


def test_the_tokenizers_end_tokens_join_those_of_the_configurations() -> None:
    files = TOKENIZER | encoded(
        {CONFIG: {"eos_token": "hello"}, "generation_config.json": {"eos_token_id": 5}}
    )
    assert build_model(model_info(), files).eos_token_ids == {1, 5, HELLO}
    assert build_model(model_info(vocab_size=HELLO), files).eos_token_ids == {1, 5}
