"""Whatever is asked for, answers match it; whatever happens, they are the same."""

import json
import re
from typing import Any

import jsonschema
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pagewire.v1 import inference_service_pb2 as pb
from pagewire.v1.inference_service_pb2_grpc import InferenceServiceStub
from tests.end_to_end.conftest import Reference
from tests.support.requests import Answer, generate, request_for

STOP, LENGTH = pb.FINISH_REASON_STOP, pb.FINISH_REASON_LENGTH
PROMPT = "Once upon a time"

scalars = st.one_of(
    st.builds(
        lambda low, more: {"type": "integer", "minimum": low, "maximum": low + more},
        st.integers(-1000, 1000),
        st.integers(0, 5000),
    ),
    st.builds(
        lambda low, more: {"type": "string", "minLength": low, "maxLength": low + more},
        st.integers(0, 5),
        st.integers(0, 8),
    ),
    st.sampled_from(
        [
            {"type": "boolean"},
            {"type": "null"},
            {"type": "string", "pattern": "^[a-f]{1,4}$"},
            {"type": "string", "format": "date"},
            {"const": {"a": [1, None]}},
        ]
    ),
    st.lists(st.text('aé"\\/\n ', max_size=5), min_size=1, max_size=3, unique=True).map(
        lambda texts: {"enum": texts}
    ),
)
schemas = st.recursive(
    scalars,
    lambda inner: st.one_of(
        st.builds(
            lambda items, most: {"type": "array", "items": items, "maxItems": most},
            inner,
            st.integers(0, 2),
        ),
        st.dictionaries(st.text('xyé" ', min_size=1, max_size=3), inner, max_size=3).map(
            lambda properties: {
                "type": "object",
                "properties": properties,
                "required": list(properties)[1:],
                "additionalProperties": False,
            }
        ),
        st.lists(inner, min_size=1, max_size=2).map(lambda options: {"anyOf": options}),
    ),
    max_leaves=4,
)
ways = st.sampled_from(
    [
        {"temperature": 0.0},
        {"temperature": 1.0, "n": 3},
        {"temperature": 1.5, "top_p": 0.9, "top_k": 20, "logprobs": 2},
        {"temperature": 0.8, "frequency_penalty": 0.5, "repetition_penalty": 1.2},
        {"temperature": 1.0, "min_tokens": 20, "presence_penalty": 0.4},
        {"temperature": 1.0, "ignore_eos": True},
        {"temperature": 0.0, "bad_words": ["the"], "logit_bias": [{"token_id": 9, "bias": -5.0}]},
        {"beam_search": {"width": 2}, "n": 2},
    ]
)
modest = settings(
    deadline=None, max_examples=12, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


def answer_to(stub: InferenceServiceStub, **sampling: Any) -> Answer:
    return generate(stub, request_for(PROMPT, **{"max_tokens": 400, **sampling}))


def matches(answer: Answer, n: int = 1) -> list[str]:
    """The texts of an answer's choices, which all have ended by themselves."""
    assert sorted(answer.choices) == list(range(n))
    assert {choice.finish_reason for choice in answer.choices.values()} == {STOP}
    return [answer.choices[index].text for index in range(n)]


@modest
@given(schemas, ways, st.integers(0, 2**32))
def test_every_answer_is_json_that_its_schema_allows(
    stub: InferenceServiceStub, schema: Any, way: dict[str, Any], seed: int
) -> None:
    answer = answer_to(stub, json_schema=json.dumps(schema), seed=seed, **way)
    for text in matches(answer, way.get("n", 1)):
        jsonschema.validate(json.loads(text), schema)


@modest
@given(
    st.sampled_from(
        [
            r"[a-z]{3,9} (?:cat|dog)s?",
            r"\d{1,3}(?:\.\d{1,3}){3}",
            r"(?:yes|no|maybe)/[^\s]{0,4}",
            r"[^a-z\n]{5}\n?",
            r"é{1,3}(?:\\|\")",
        ]
    ),
    ways,
)
def test_every_answer_matches_its_regex(
    stub: InferenceServiceStub, pattern: str, way: dict[str, Any]
) -> None:
    answer = answer_to(stub, regex=pattern, seed=7, **way)
    for text in matches(answer, way.get("n", 1)):
        assert re.fullmatch(pattern, text)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_every_answer_is_one_of_the_choices(stub: InferenceServiceStub, temperature: float) -> None:
    choices = ["yes", "yes, of course", "a (b) [c] *", "/\\"]
    n = 4 if temperature else 1
    answer = answer_to(stub, choice={"choices": choices}, temperature=temperature, seed=3, n=n)
    assert set(matches(answer, len(answer.choices))) <= set(choices)


def test_every_answer_follows_its_grammar(stub: InferenceServiceStub) -> None:
    grammar = 'start: "(" start ")" | NUMBER ("+" NUMBER)?\nNUMBER: /[1-9][0-9]{0,2}/'
    answer = answer_to(stub, grammar=grammar, temperature=1.0, seed=1, n=4)
    for text in matches(answer, 4):
        inner = text.strip("()")
        depth = len(text) - len(text.lstrip("("))
        assert text == "(" * depth + inner + ")" * depth
        assert re.fullmatch(r"[1-9]\d{0,2}(?:\+[1-9]\d{0,2})?", inner)


@pytest.mark.parametrize(
    ("kind", "pattern"),
    [
        ({"json_schema": '{"enum": ["red", 7]}'}, '"red"|7'),
        ({"regex": "[0-9]{3,5}"}, "[0-9]{3,5}"),
        ({"choice": {"choices": ["yes", "no"]}}, "yes|no"),
        ({"grammar": 'start: "(" start ")" | "z"'}, r"\(*z\)*"),
    ],
    ids=lambda value: str(value)[:12],
)
def test_a_constraint_applies_after_the_thought_which_is_what_the_model_would_write(
    stub: InferenceServiceStub, kind: dict[str, Any], pattern: str
) -> None:
    free = answer_to(stub, temperature=0.0).choices[0].text
    thought = free[: free.index(",") + 1]
    assert len(thought) > 8
    wish = {"temperature": 0.0, **kind}
    (text,) = matches(answer_to(stub, thought={"ends": ["</never>", ","]}, **wish))
    assert text.startswith(thought)
    assert re.fullmatch(pattern, text.removeprefix(thought))
    (text,) = matches(answer_to(stub, thought={"start": thought[:3], "ends": [","]}, **wish))
    assert text.startswith(thought)
    (text,) = matches(answer_to(stub, thought={"start": "<zq>", "ends": [","]}, **wish))
    assert re.fullmatch(pattern, text), "without a thought"


def test_a_thought_without_an_end_leaves_an_output_that_is_never_constrained(
    stub: InferenceServiceStub,
) -> None:
    wish = {"temperature": 0.0, "ignore_eos": True, "max_tokens": 30}
    free = answer_to(stub, **wish).choices[0]
    bound = answer_to(stub, regex="[0-9]", thought={"ends": ["</never>"]}, **wish).choices[0]
    assert (bound.text, bound.finish_reason) == (free.text, LENGTH)


def test_a_schema_may_allow_any_json_object(
    stub: InferenceServiceStub, reference: Reference
) -> None:
    closing = [{"token_id": reference.encode("}")[-1], "bias": 60.0}]
    wish = {"json_schema": '{"type": "object"}', "logit_bias": closing}
    assert matches(answer_to(stub, temperature=0.0, **wish)) == ["{}"]
    closing[0]["bias"] = 8.0
    for text in matches(answer_to(stub, temperature=1.2, seed=2, n=8, **wish), 8):
        assert isinstance(json.loads(text), dict)


def test_an_answer_that_cannot_go_on_ends_whatever_else_is_asked(
    stub: InferenceServiceStub,
) -> None:
    for wish in ({"min_tokens": 50}, {"ignore_eos": True}, {"min_tokens": 50, "ignore_eos": True}):
        assert matches(answer_to(stub, regex="abc", temperature=0.0, **wish)) == ["abc"]


def test_min_tokens_and_ignored_ends_make_an_answer_go_on_as_long_as_it_can(
    stub: InferenceServiceStub,
) -> None:
    ends = [{"token_id": 2, "bias": 50.0}]
    wish = {"regex": "(?:ab){1,30}", "temperature": 0.0, "logit_bias": ends}
    assert matches(answer_to(stub, **wish)) == ["ab"]
    longer = answer_to(stub, min_tokens=9, **wish)
    assert len(longer.token_ids) >= 10
    assert matches(longer)[0] == "ab" * (len(longer.text) // 2)
    assert matches(answer_to(stub, ignore_eos=True, **wish)) == ["ab" * 30]


def test_stop_strings_and_max_tokens_cut_an_answer_short(stub: InferenceServiceStub) -> None:
    cut = answer_to(stub, regex="a{50}xb{50}", temperature=0.0, stop=["x"])
    assert matches(cut) == ["a" * 50]
    short = answer_to(stub, regex="a{50}", temperature=0.0, max_tokens=3)
    assert short.choices[0].finish_reason == LENGTH


def test_log_probabilities_are_the_models_own(stub: InferenceServiceStub) -> None:
    free = answer_to(stub, temperature=0.0, logprobs=3, max_tokens=1)
    bound = answer_to(stub, temperature=0.0, logprobs=3, regex="[xyz]+", max_tokens=1)
    tops = [
        [(entry.token_id, entry.logprob) for entry in answer.choices[0].logprobs[0].top]
        for answer in (free, bound)
    ]
    assert tops[0] == tops[1]
    assert bound.choices[0].logprobs[0].token.logprob < free.choices[0].logprobs[0].token.logprob
