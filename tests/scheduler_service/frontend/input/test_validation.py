import math
from typing import Any

import pytest

from pagewire.v1 import inference_service_pb2 as pb
from scheduler_service.errors import InvalidArgument, UnsupportedByModel
from scheduler_service.frontend.input import validation
from scheduler_service.frontend.input.processor import check_against_model
from tests.support.fake_core import model_info
from tests.support.frontends import generate_request

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


BAD = [
    ({}, "prompt"),
    ({"text": ""}, "text"),
    ({"token_ids": {}}, "token_ids.ids"),
    ({"token_ids": {"ids": [1, 2, 3, 405]}}, "token_ids.ids[3]"),
    ({"chat": {}}, "chat.messages"),
    ({"chat": {"messages": [{"role": "user"}, {"content": "x"}]}}, "chat.messages[1].role"),
    ({"text": "a", "request_id": ""}, "request_id"),
    ({"text": "a", "request_id": "a b"}, "request_id"),
    ({"text": "a", "request_id": "x" * 129}, "request_id"),
    ({"text": "a", "request_id": "é"}, "request_id"),
    ({"text": "a", "request_id": "a\n"}, "request_id"),
    ({"text": "a", "max_hold_ms": 60_001}, "max_hold_ms"),
    ({"text": "a", "num_speculative_tokens": 256}, "num_speculative_tokens"),
    ({"text": "a", "cache_salt": ""}, "cache_salt"),
    ({"text": "a", "cache_salt": "s" * 1025}, "cache_salt"),
]
BAD_SAMPLING = [
    ({"n": 0}, "n"),
    ({"n": 129}, "n"),
    ({"n": 3, "best_of": 2}, "best_of"),
    ({"best_of": 129}, "best_of"),
    ({"best_of": 0}, "best_of"),
    ({"temperature": -1}, "temperature"),
    ({"temperature": 0.001}, "temperature"),
    ({"temperature": 101}, "temperature"),
    ({"temperature": math.nan}, "temperature"),
    ({"temperature": math.inf}, "temperature"),
    ({"top_p": 0}, "top_p"),
    ({"top_p": 1.5}, "top_p"),
    ({"top_p": math.nan}, "top_p"),
    ({"min_p": -0.1}, "min_p"),
    ({"min_p": 1.1}, "min_p"),
    ({"min_p": math.nan}, "min_p"),
    ({"repetition_penalty": 0}, "repetition_penalty"),
    ({"repetition_penalty": 101}, "repetition_penalty"),
    ({"repetition_penalty": math.nan}, "repetition_penalty"),
    ({"presence_penalty": 2.1}, "presence_penalty"),
    ({"presence_penalty": math.nan}, "presence_penalty"),
    ({"frequency_penalty": -2.1}, "frequency_penalty"),
    ({"frequency_penalty": math.inf}, "frequency_penalty"),
    ({"logit_bias": [{"token_id": i} for i in range(1025)]}, "logit_bias"),
    ({"logit_bias": [{"token_id": 1}, {"token_id": 1}]}, "logit_bias[1].token_id"),
    ({"logit_bias": [{"token_id": 405}]}, "logit_bias[0].token_id"),
    ({"logit_bias": [{"token_id": 1, "bias": 101}]}, "logit_bias[0].bias"),
    ({"logit_bias": [{"token_id": 1, "bias": math.nan}]}, "logit_bias[0].bias"),
    ({"stop": ["x"] * 17}, "stop"),
    ({"stop": ["x", ""]}, "stop[1]"),
    ({"stop": ["x" * 1025]}, "stop[0]"),
    ({"stop_token_ids": [1] * 129}, "stop_token_ids"),
    ({"stop_token_ids": [1, 405]}, "stop_token_ids[1]"),
    ({"bad_words": ["x"] * 129}, "bad_words"),
    ({"bad_words": [""]}, "bad_words[0]"),
    ({"min_tokens": 6, "max_tokens": 5}, "min_tokens"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"logprobs": 21}, "logprobs"),
    ({"prompt_logprobs": 21}, "prompt_logprobs"),
    ({"beam_search": {"width": 0}}, "beam_search.width"),
    ({"beam_search": {"width": 65}}, "beam_search.width"),
    ({"beam_search": {"width": 2, "length_penalty": math.nan}}, "beam_search.length_penalty"),
    ({"beam_search": {"width": 2, "early_stopping": 99}}, "beam_search.early_stopping"),
    ({"beam_search": {"width": 2, "length_penalty": 5.5}}, "beam_search.length_penalty"),
    ({"beam_search": {"width": 2}, "n": 3}, "beam_search.width"),
    ({"beam_search": {"width": 2}, "best_of": 2}, "best_of"),
    ({"beam_search": {"width": 2}, "temperature": 0.5}, "temperature"),
    ({"beam_search": {"width": 2}, "top_p": 0.9}, "top_p"),
    ({"beam_search": {"width": 2}, "top_k": 5}, "top_k"),
    ({"beam_search": {"width": 2}, "min_p": 0.1}, "min_p"),
    ({"beam_search": {"width": 2}, "stop": ["a"]}, "stop"),
    ({"json_schema": ""}, "json_schema"),
    ({"regex": ""}, "regex"),
    ({"grammar": ""}, "grammar"),
    ({"choice": {}}, "choice.choices"),
    ({"choice": {"choices": ["a", ""]}}, "choice.choices[1]"),
    ({"choice": {"choices": ["a"] * 1025}}, "choice.choices"),
    ({"choice": {"choices": ["é" * 70_000, "a" * 130_000]}}, "choice"),
    ({"regex": "a" * 262_145}, "regex"),
    ({"thought": {"ends": ["</think>"]}}, "thought"),
    ({"regex": "a", "thought": {}}, "thought.ends"),
    ({"regex": "a", "thought": {"ends": [""]}}, "thought.ends[0]"),
    ({"regex": "a", "thought": {"ends": ["x"] * 17}}, "thought.ends"),
    ({"regex": "a", "thought": {"ends": ["x" * 257]}}, "thought.ends[0]"),
    ({"regex": "a", "thought": {"start": "x" * 257, "ends": ["y"]}}, "thought.start"),
    ({"regex": "a", "thought": {"start": "<think>", "ends": ["k>"]}}, "thought.ends"),
    (
        {"regex": "a", "thought": {"start": "a", "other_starts": ["k>"], "ends": ["k>"]}},
        "thought.ends",
    ),
    ({"regex": "a", "thought": {"other_starts": ["a"], "ends": ["b"]}}, "thought.other_starts"),
]


def complaint(request: pb.GenerateRequest) -> InvalidArgument:
    with pytest.raises(InvalidArgument) as caught:
        check(request)
    return caught.value


@pytest.mark.parametrize(("fields", "path"), BAD, ids=[str(case)[:70] for case in BAD])
def test_a_bad_field_of_the_request_is_named(fields: dict[str, Any], path: str) -> None:
    assert complaint(request_of(fields)).field == path


@pytest.mark.parametrize(
    ("sampling", "path"), BAD_SAMPLING, ids=[str(case)[:70] for case in BAD_SAMPLING]
)
def test_a_bad_sampling_parameter_is_named(sampling: dict[str, Any], path: str) -> None:
    error = complaint(request_of({"text": "a", "sampling_params": sampling}))
    assert error.field == f"sampling_params.{path}"


def test_the_table_has_a_bad_case_for_every_sampling_parameter_that_can_be_bad() -> None:
    cannot_be_bad = {
        "seed",
        "ignore_eos",
        "skip_special_tokens",
        "include_stop_in_output",
        "truncate_prompt_tokens",
    }
    covered = {path.split(".")[0].split("[")[0] for _, path in BAD_SAMPLING}
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


def test_a_complaint_tells_what_was_expected_and_what_was_found() -> None:
    error = complaint(request_of({"text": "a", "sampling_params": {"top_p": 1.5}}))
    assert str(error) == "sampling_params.top_p: expected above 0 and at most 1, got 1.5"


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
