import json
import math
import re
import sys
from pathlib import Path
from typing import Any

import pytest

from pagewire.v1 import inference_service_pb2 as pb
from scheduler_service.errors import InvalidArgument, UnsupportedByModel
from scheduler_service.frontend.input import validation
from scheduler_service.frontend.input.processor import check_against_model
from tests.support.fake_core import model_info
from tests.support.frontends import generate_request
from tests.support.transcripts import commands, transcript

GOOD: list[dict[str, Any]] = [
    {"text": "hello"},
    {"token_ids": {"ids": [0, 404]}},
    {"chat": {"messages": [{"role": "user", "content": ""}]}},
    {"request_id": "A.b_c:9-" + "x" * 120, "text": "a"},
    {"text": "a", "priority": -5},
    {"text": "a", "num_speculative_tokens": 0},
    {"text": "a", "num_speculative_tokens": 255},
    {"text": "a", "cache_salt": "s"},
    {"text": "a", "cache_salt": "é" * 1024},
]
GOOD_SAMPLING: list[dict[str, Any]] = [
    {"n": 128},
    {"n": 2, "best_of": 2},
    {"n": 2, "best_of": 128},
    {"beam_search": {"width": 4}},
    {"beam_search": {"width": 64, "length_penalty": -5, "early_stopping": 3}, "n": 64},
    {"beam_search": {"width": 2}, "temperature": 0, "top_p": 1, "top_k": 0, "min_p": 0},
    {"beam_search": {"width": 2}, "temperature": 1, "stop_token_ids": [5], "logprobs": 3},
    {"temperature": 0},
    {"temperature": 0.01},
    {"temperature": 100},
    {"temperature": 0, "n": 4},
    {"top_p": 1, "top_k": 0, "min_p": 1},
    {"top_k": 2**32 - 1},
    {"repetition_penalty": 0.01},
    {"repetition_penalty": 100, "presence_penalty": -2, "frequency_penalty": 2},
    {"logit_bias": [{"token_id": 1, "bias": -100}, {"token_id": 2, "bias": 100}]},
    {"seed": 2**64 - 1},
    {"stop": ["x" * 1024] * 16, "stop_token_ids": [404] * 128, "bad_words": ["x"] * 128},
    {"min_tokens": 5, "max_tokens": 5},
    {"min_tokens": 5},
    {"logprobs": 0, "prompt_logprobs": 20},
]


def request_of(fields: dict[str, Any]) -> pb.GenerateRequest:
    return pb.GenerateRequest(**fields)


def check(request: pb.GenerateRequest) -> None:
    validation.check_request(request)
    check_against_model(request, model_info())


@pytest.mark.parametrize("fields", GOOD, ids=str)
def test_a_good_request_passes(fields: dict[str, Any]) -> None:
    check(request_of(fields))


@pytest.mark.parametrize("sampling", GOOD_SAMPLING, ids=lambda fields: str(fields)[:60])
def test_good_sampling_parameters_pass(sampling: dict[str, Any]) -> None:
    check(request_of({"text": "a", "sampling_params": sampling}))


def test_a_constraint_may_apply_after_a_thought() -> None:
    for thought in ({"start": "<think>", "ends": ["</think>"]}, {"ends": ["x" * 256] * 16}):
        sampling = {"regex": "a", "thought": thought}
        validation.check_request(request_of({"text": "a", "sampling_params": sampling}))


LONG: list[tuple[dict[str, Any], dict[str, Any], str]] = [
    ({"request_id": "x" * 129}, {}, "request_id"),
    ({"cache_salt": "s" * 1025}, {}, "cache_salt"),
    ({}, {"logit_bias": [{"token_id": i} for i in range(1025)]}, "logit_bias"),
    ({}, {"stop": ["x" * 1025]}, "stop[0]"),
    ({}, {"stop_token_ids": [1] * 129}, "stop_token_ids"),
    ({}, {"bad_words": ["x"] * 129}, "bad_words"),
    ({}, {"allowed_token_ids": [1] * 131_073}, "allowed_token_ids"),
    ({}, {"choice": {"choices": ["a"] * 1025}}, "choice.choices"),
    ({}, {"choice": {"choices": ["é" * 70_000, "a" * 130_000]}}, "choice"),
    ({}, {"regex": "a" * 262_145}, "regex"),
    ({}, {"regex": "a", "thought": {"ends": ["x" * 257]}}, "thought.ends[0]"),
    ({}, {"regex": "a", "thought": {"start": "x" * 257, "ends": ["y"]}}, "thought.start"),
]
WRONG = Path(__file__).parent / "wrong_requests.txt"
"""Rewritten by `python -m tests.scheduler_service.frontend.input.test_validation --rewrite`."""


def complaint(request: pb.GenerateRequest) -> InvalidArgument:
    with pytest.raises(InvalidArgument) as caught:
        check(request)
    return caught.value


@pytest.mark.parametrize(("fields", "sampling", "path"), LONG, ids=lambda case: str(case)[:40])
def test_a_field_that_is_too_long_is_named(
    fields: dict[str, Any], sampling: dict[str, Any], path: str
) -> None:
    error = complaint(request_of({"text": "a"} | fields | {"sampling_params": sampling}))
    assert (error.field or "").removeprefix("sampling_params.") == path


def complaint_about(line: str) -> str:
    """The error of the request, or of the sampling parameters, that a line of the file has."""
    kind, _, written = line.partition(" ")
    fields = json.loads(written)
    request = {"request": fields, "sampling": {"text": "a", "sampling_params": fields}}[kind]
    error = complaint(request_of(request))
    assert str(error).startswith(f"{error.field}: ")
    return str(error)


def replay(text: str) -> str:
    """The file with the errors that its requests get now."""
    return transcript(text, [[complaint_about(line)] for line in commands(text)])


def test_a_wrong_request_gets_the_error_in_the_file() -> None:
    assert replay(WRONG.read_text()) == WRONG.read_text()


def test_every_sampling_parameter_that_can_be_bad_is_among_the_wrong_requests() -> None:
    cannot_be_bad = {
        "seed",
        "ignore_eos",
        "skip_special_tokens",
        "include_stop_in_output",
        "truncate_prompt_tokens",
    }
    covered = set(re.findall(r"^  sampling_params\.(\w+)", WRONG.read_text(), re.MULTILINE))
    covered |= {re.split(r"[.\[]", path)[0] for _, sampling, path in LONG if sampling}
    fields = set(pb.GenerateRequest().sampling_params.DESCRIPTOR.fields_by_name)
    assert fields - cannot_be_bad == covered


def resume(*choices: dict[str, Any], **sampling: Any) -> pb.GenerateRequest:
    sampling = {"seed": 1, "n": 2} | sampling
    return request_of(
        {"text": "a", "request_id": "r", "sampling_params": sampling, "resume": list(choices)}
    )


def test_a_good_resumption_passes() -> None:
    check(resume({"index": 0, "token_ids": [1, 2]}, {"index": 1}))
    check(resume({"index": 1, "token_ids": [3], "cumulative_logprob": -1.5}, logprobs=0))


@pytest.mark.parametrize(
    ("choices", "sampling", "path"),
    [
        ([{"index": 2}], {}, "resume[0].index"),
        ([{"index": 1}, {"index": 1}], {}, "resume[1].index"),
        ([{"index": 0, "token_ids": [1, 405]}], {}, "resume[0].token_ids[1]"),
        ([{"index": 0, "token_ids": [1]}], {"logprobs": 1}, "resume[0].cumulative_logprob"),
        (
            [{"index": 0, "token_ids": [1], "cumulative_logprob": math.nan}],
            {"logprobs": 1},
            "resume[0].cumulative_logprob",
        ),
    ],
)
def test_a_bad_resumption_is_named(choices: list[Any], sampling: Any, path: str) -> None:
    assert complaint(resume(*choices, **sampling)).field == path


def test_a_resumption_needs_its_request_id_and_seed() -> None:
    request = resume({"index": 0})
    request.ClearField("request_id")
    assert complaint(request).field == "request_id"
    request = resume({"index": 0})
    request.sampling_params.ClearField("seed")
    assert complaint(request).field == "sampling_params.seed"


@pytest.mark.parametrize(
    "sampling",
    [
        {"json_schema": "{}"},
        {"regex": "a+"},
        {"grammar": "root ::= 'a'"},
        {"choice": {"choices": ["a"]}},
    ],
    ids=str,
)
def test_structured_output_is_for_workers_that_say_they_keep_to_it(
    sampling: dict[str, Any],
) -> None:
    request = request_of({"text": "a", "sampling_params": sampling})
    validation.check_request(request)
    check_against_model(request, model_info(structured_output=True))
    with pytest.raises(UnsupportedByModel, match="do not support structured output") as caught:
        check_against_model(request, model_info())
    assert caught.value.reason == "NO_STRUCTURED_OUTPUT"


TOOLS = [pb.Tool(name="f"), pb.Tool(name="g")]


@pytest.mark.parametrize(
    ("choice", "tools", "params", "field"),
    [
        (pb.ToolChoice(required=True), [], {}, "chat.tool_choice"),
        (pb.ToolChoice(name="h"), TOOLS, {}, "chat.tool_choice.name"),
        (pb.ToolChoice(required=True), TOOLS, {"regex": "a"}, "chat.tool_choice"),
    ],
)
def test_a_call_that_cannot_be_required_is_refused(
    choice: pb.ToolChoice, tools: list[pb.Tool], params: dict[str, Any], field: str
) -> None:
    messages = [pb.ChatMessage(role="user", content="hello")]
    chat = pb.Chat(messages=messages, tools=tools, tool_choice=choice)
    with pytest.raises(InvalidArgument) as caught:
        validation.check_request(generate_request(None, chat=chat, **params))
    assert caught.value.field == field


if __name__ == "__main__":
    assert sys.argv[1:] == ["--rewrite"], WRONG
    WRONG.write_text(replay(WRONG.read_text()))
