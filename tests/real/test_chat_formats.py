"""The formats of real chat templates: found, and read back from the turns that templates write."""

import json
from pathlib import Path
from typing import Any

import pytest

from scheduler_service.errors import InvalidArgument
from tests.real.test_chat_templates import TEMPLATES, TOOLS, call, user
from tests.scheduler_service.frontend.chat_formats.test_parser import outcome, pieces
from tests.support.chat_templates import model_with, prompt_of

pytestmark = pytest.mark.real

EXPECTED: dict[tuple[str | None, str], str] = {
    ("cohere_command3", "cohere_command3"): "command_a command_a_rag command_a_tool_use",
    ("qwen3", "deepseek_v3"): "deepseek_v3 deepseek_r1_distill deepseekv3",
    ("qwen3", "hermes"): "exaone4 phi_4 qwen3",
    ("gemma4", "gemma4"): (
        "gemma4 gemma4_unified diffusion_gemma gemma4_v2 gemma4_v3 gemma4_v4 gemma4_v5"
    ),
    (None, "jamba"): "jamba",
    (None, "llama3_json"): "llama3_2_vision llama4 llama3_1 llama3_2",
    (None, "mistral"): "mistral_v2v3 mistral_v3_tekken",
    ("qwen3", "glm45"): "glm4moe",
    ("openai_gptoss", "openai"): "gptoss",
    (None, "lfm2"): "lfm2 lfm2_v2",
    ("muse_glimmer", "muse_glimmer"): "muse_glimmer",
    ("qwen3", "lfm2"): "lfm2_2_5 lfm2_2_5_v2 lfm2_2_5_vl",
    ("qwen3", "qwen3_xml"): (
        "nemotron_3_5_lightning nemotron_3_nano nemotron_3_super nemotron_3_ultra "
        "qwen3_5_nothink qwen3_5_think qwen3_6 qwen3_8"
    ),
}
"""Templates by the formats that they show. The others show none: no reasoning, Hermes' calls."""

FORMATS = {name: formats for formats, names in EXPECTED.items() for name in names.split()}
OTHERS = {"qwen3_5.jinja": ("qwen3", "hermes")}
"""By file, where one package's template of that name differs from the other's."""

COUNTS_CALLS = {"command_a"}
"""Reads a turn's calls in order to number results, and writes none."""

JOINS_TEXT = {"gptoss"}
"""Has a turn's text at the end of its reasoning if there are calls, too."""

FUNCTION = TOOLS["tools"][0]["function"]


def name_of(path: Path) -> str:
    return path.stem.removesuffix("_training")


@pytest.mark.parametrize("path", TEMPLATES, ids=lambda path: path.stem)
def test_a_real_template_shows_its_formats(path: Path) -> None:
    form = model_with(path.read_text()).chat_format
    expected = OTHERS.get(path.name, FORMATS.get(name_of(path), (None, "hermes")))
    assert form.calls is not None
    assert (form.reasoning and form.reasoning.names[0], form.calls.names[0]) == expected


@pytest.mark.parametrize("path", TEMPLATES, ids=lambda path: path.stem)
def test_calls_that_a_real_template_writes_are_read_back(path: Path) -> None:
    model = model_with(path.read_text())
    for number, content in ((2, "Let me look."), (1, "Let me look."), (1, None)):
        answered = {"role": "assistant", "content": content, "reasoning_content": "Asked."}
        answered |= {"tool_calls": [call(index + 1) for index in range(number)]}
        prompt, full = turns(model, answered)
        if f"Town{number}" in full:
            break
    else:
        names_calls = "tool_calls" in path.read_text()
        assert names_calls == (path.stem in COUNTS_CALLS), "it writes calls, which were not found"
        return
    while not full.startswith(prompt):
        prompt = prompt[:-1]
    functions = {FUNCTION["name"]: FUNCTION["parameters"]}
    for length in (1, 3, 7, len(full)):
        parser = model.chat_format.parser(functions, prompt=prompt)
        result = outcome(parser, pieces(full[len(prompt) :], length))
        assert [json.loads(arguments) for _, arguments in result.calls] == [
            {"city": f"Town{index + 1}", "days": index + 1} for index in range(number)
        ]
        thought = "Asked.\nLet me look." if name_of(path) in JOINS_TEXT else "Asked."
        assert result.reasoning in (thought, "")
        assert "Town" not in result.content


def turns(model: Any, answered: dict[str, Any]) -> tuple[str, str]:
    """The prompt of a question, and the same with its answer; empty if the template refuses it."""
    question = user("Weather?")
    try:
        prompt = prompt_of(model, [question], **TOOLS)
        return prompt, prompt_of(model, [question, answered], **TOOLS, add_generation_prompt=False)
    except InvalidArgument:
        return "", ""
