"""SamplingParams become the message that the caller meant, or a ValueError."""

import copy
import dataclasses
import pickle
from typing import Any, get_type_hints

import pytest

from pagewire.v1 import sampling_pb2
from pagewire_client import SamplingOptions, SamplingParams

STRUCTURED = {"json_schema", "regex", "grammar", "choice"}
"""Of which there can be one."""


def test_every_field_arrives_in_the_message() -> None:
    params = SamplingParams(
        n=2,
        best_of=3,
        temperature=0.5,
        top_p=0.25,
        top_k=7,
        min_p=0.125,
        repetition_penalty=1.5,
        presence_penalty=-0.5,
        frequency_penalty=0.75,
        logit_bias={5: -1.5},
        seed=2**64 - 1,
        stop=["a", "b"],
        stop_token_ids=[1, 2],
        bad_words=["c"],
        allowed_token_ids=[5, 1],
        min_tokens=4,
        max_tokens=5,
        ignore_eos=True,
        logprobs=6,
        prompt_logprobs=0,
        skip_special_tokens=False,
        include_stop_str_in_output=True,
        truncate_prompt_tokens=100,
        beam_width=8,
        length_penalty=2.0,
        early_stopping="never",
    )
    proto = params.to_proto()
    carried = {
        field.name: value for field, value in proto.ListFields() if field.name != "beam_search"
    }
    renamed = {"include_stop_in_output": "include_stop_str_in_output"}
    others = {"beam_width", "length_penalty", "early_stopping", "logit_bias", "thought"}
    for name, value in carried.items():
        if name != "logit_bias":
            assert value == getattr(params, renamed.get(name, name)), name
    assert {renamed.get(name, name) for name in carried} | others | STRUCTURED == {
        field.name for field in dataclasses.fields(SamplingParams)
    }
    assert [(bias.token_id, bias.bias) for bias in proto.logit_bias] == [(5, -1.5)]
    assert proto.beam_search == sampling_pb2.BeamSearch(
        width=8, length_penalty=2.0, early_stopping=sampling_pb2.EARLY_STOPPING_NEVER
    )


def test_every_field_of_the_message_can_be_set() -> None:
    names = {field.name for field in sampling_pb2.SamplingParams.DESCRIPTOR.fields}
    ours = {field.name for field in dataclasses.fields(SamplingParams)}
    assert names - ours == {"beam_search", "include_stop_in_output"}


def test_what_is_not_given_is_absent_so_that_the_model_may_decide() -> None:
    assert [field.name for field, _ in SamplingParams().to_proto().ListFields()] == ["max_tokens"]
    assert SamplingParams(max_tokens=None).to_proto() == sampling_pb2.SamplingParams()


@pytest.mark.parametrize("field", ["top_k", "truncate_prompt_tokens"])
def test_minus_one_means_all_as_users_of_vllm_expect(field: Any) -> None:
    proto = SamplingParams(**{field: -1}).to_proto()
    assert proto.HasField(field)
    assert getattr(proto, field) == 0


@pytest.mark.parametrize(
    ("field", "value", "allowed"),
    [
        ("top_k", -5, "an integer from -1 to 4294967295"),
        ("truncate_prompt_tokens", -5, "-1 or an integer from 1 to 4294967295"),
        ("truncate_prompt_tokens", 0, "-1 or an integer from 1 to 4294967295"),
        ("max_tokens", -5, "an integer from 0 to 4294967295"),
        ("beam_width", -5, "an integer from 0 to 4294967295"),
    ],
)
def test_a_count_that_makes_no_sense_is_refused_by_name(
    field: Any, value: int, allowed: str
) -> None:
    with pytest.raises(ValueError, match=f"{field}: expected {allowed}, got {value}"):
        SamplingParams(**{field: value})


@pytest.mark.parametrize(
    ("field", "value", "carried"),
    [
        ("json_schema", '{"type":  "object"}', '{"type":  "object"}'),
        ("json_schema", {"const": "é"}, '{"const": "\\u00e9"}'),
        ("regex", "a+", "a+"),
        ("grammar", 'start: "a"', 'start: "a"'),
        ("choice", ("yes", "no"), sampling_pb2.ChoiceList(choices=["yes", "no"])),
        ("choice", [], sampling_pb2.ChoiceList()),
    ],
)
def test_what_the_answer_must_match_arrives(field: str, value: Any, carried: Any) -> None:
    proto = SamplingParams(**{field: value}).to_proto()
    assert proto.WhichOneof("structured_output") == field
    assert getattr(proto, field) == carried


def test_a_thought_arrives_as_its_start_and_its_ends() -> None:
    proto = SamplingParams(regex="a", thought=("<think>", ["</think>", "<end>"])).to_proto()
    assert proto.thought == sampling_pb2.Thought(start="<think>", ends=["</think>", "<end>"])
    with pytest.raises(ValueError, match=r"thought: expected .*\(expected a list of texts"):
        SamplingParams(regex="a", thought=("", "</think>"))


@pytest.mark.parametrize(
    ("field", "value", "expected"),
    [
        ("stop", 5, r"Sequence\[str\]"),
        ("bad_words", 5, r"Sequence\[str\]"),
        ("choice", 5, r"Sequence\[str\]"),
        ("stop_token_ids", 5, r"Sequence\[int\]"),
        ("stop_token_ids", "5", r"Sequence\[int\]"),
        ("allowed_token_ids", [], r"expected at least one"),
        ("logit_bias", [5], r"Mapping\[int, float\]"),
        ("thought", 5, "tuple"),
        ("skip_special_tokens", "no", "bool"),
        ("ignore_eos", 2, "bool"),
        ("seed", 2**64, "an integer from -9223372036854775808 to 18446744073709551615"),
        ("max_tokens", True, "an integer from 0"),
        ("temperature", False, "float"),
        ("include_stop_str_in_output", "no", "bool"),
    ],
)
def test_a_parameter_of_another_type_is_named_with_what_is_expected(
    field: str, value: Any, expected: str
) -> None:
    with pytest.raises(ValueError, match=f"{field}: expected .*{expected}.*, got "):
        SamplingParams(**{field: value})


def test_an_answer_matches_one_thing_only() -> None:
    with pytest.raises(ValueError, match="json_schema, regex: expected at most one of them"):
        SamplingParams(json_schema="{}", regex="a")


@pytest.mark.parametrize(("seed", "carried"), [(-2, 2**64 - 2), (-(2**63), 2**63), (0, 0)])
def test_a_seed_may_be_negative(seed: int, carried: int) -> None:
    assert SamplingParams(seed=seed).to_proto().seed == carried


def test_the_seed_minus_one_is_none() -> None:
    assert not SamplingParams(seed=-1).to_proto().HasField("seed")


def test_a_single_stop_string_needs_no_list() -> None:
    assert list(SamplingParams(stop="end").to_proto().stop) == ["end"]


@pytest.mark.parametrize(("value", "expected"), [(True, 1), (False, 2), ("never", 3)])
def test_early_stopping_is_spelled_as_in_transformers(value: Any, expected: int) -> None:
    params = SamplingParams(beam_width=2, early_stopping=value)
    assert params.to_proto().beam_search.early_stopping == expected


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("n", -1),
        ("n", 1.5),
        ("max_tokens", 2**32),
        ("top_k", -2),
        ("seed", -(2**63) - 1),
        ("seed", 2**64),
        ("temperature", "hot"),
        ("stop", [1]),
        ("bad_words", "not a list"),
        ("stop_token_ids", [-1]),
        ("logit_bias", {-1: 0.0}),
        ("logit_bias", {1: "much"}),
        ("length_penalty", 1.0),
        ("early_stopping", True),
        ("regex", 1),
        ("grammar", ["a"]),
        ("choice", "yes"),
        ("json_schema", {"minimum": float("nan")}),
        ("json_schema", {"const": object()}),
    ],
)
def test_a_value_the_message_cannot_carry_is_refused_by_name(field: str, value: Any) -> None:
    with pytest.raises(ValueError, match=field):
        SamplingParams(**{field: value})


def test_ranges_are_left_to_the_server() -> None:
    assert SamplingParams(temperature=-1.0, top_p=7.0).to_proto().top_p == 7.0


def test_keyword_arguments_have_the_names_and_types_of_the_fields() -> None:
    assert get_type_hints(SamplingOptions) == get_type_hints(SamplingParams)


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("guided_decoding", "use json_schema, regex, grammar or choice"),
        ("structured_outputs", "use json_schema, regex, grammar or choice"),
        ("logits_processors", "requests cannot contain code"),
        ("use_beam_search", "use beam_width"),
        ("temprature", "the nearest known one is 'temperature'"),
    ],
)
def test_an_unknown_parameter_is_refused_with_what_stands_for_it(name: str, hint: str) -> None:
    unknown: Any = {name: None}
    with pytest.raises(TypeError, match=f"unknown parameter '{name}': {hint}"):
        SamplingParams(**unknown)
    given = SamplingParams(n=2)
    assert copy.deepcopy(given) == pickle.loads(pickle.dumps(given)) == given
