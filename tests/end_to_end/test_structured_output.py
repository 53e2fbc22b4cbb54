"""Whatever is asked for, answers match it; whatever happens, they are the same."""

import json
import re
from typing import Any

import jsonschema
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
modest = settings(max_examples=12, suppress_health_check=[HealthCheck.function_scoped_fixture])


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


def test_a_schema_may_allow_any_json_object(
    stub: InferenceServiceStub, reference: Reference
) -> None:
    closing = [{"token_id": reference.encode("}")[-1], "bias": 60.0}]
    wish = {"json_schema": '{"type": "object"}', "logit_bias": closing}
    assert matches(answer_to(stub, temperature=0.0, **wish)) == ["{}"]
    closing[0]["bias"] = 8.0
    for text in matches(answer_to(stub, temperature=1.2, seed=2, n=8, **wish), 8):
        assert isinstance(json.loads(text), dict)


def test_an_output_has_allowed_tokens_only_and_ends_by_one_of_them(
    stub: InferenceServiceStub, reference: Reference
) -> None:
    end = reference.tokenizer.eos_token_id
    bias = [{"token_id": end, "bias": 60.0}]
    free = answer_to(stub, temperature=0.0, max_tokens=9, ignore_eos=True).choices[0].token_ids
    allowed = sorted({*free[1:], end} - {free[0]})
    got = answer_to(stub, temperature=1.5, n=3, seed=5, max_tokens=30, allowed_token_ids=allowed)
    for choice in got.choices.values():
        assert set(choice.token_ids) <= set(allowed)
    ended = answer_to(stub, temperature=0.0, logit_bias=bias, allowed_token_ids=allowed)
    assert ended.choices[0].finish_reason == STOP
    assert ended.choices[0].token_ids == [end]
    without = answer_to(
        stub, temperature=0.0, max_tokens=9, logit_bias=bias, allowed_token_ids=list(set(free))
    )
    assert without.choices[0].token_ids == free, "those that it would choose anyway"
    ignored = answer_to(
        stub, max_tokens=4, logit_bias=bias, allowed_token_ids=allowed, ignore_eos=True
    )
    assert ignored.choices[0].token_ids == [end] * 4


def test_stop_strings_and_max_tokens_cut_an_answer_short(stub: InferenceServiceStub) -> None:
    cut = answer_to(stub, regex="a{50}xb{50}", temperature=0.0, stop=["x"])
    assert matches(cut) == ["a" * 50]
    short = answer_to(stub, regex="a{50}", temperature=0.0, max_tokens=3)
    assert short.choices[0].finish_reason == LENGTH
