"""Limits of fields are read from the protos, and messages are checked by them."""

import math
from typing import Any

import pytest

from pagewire.v1 import inference_service_pb2 as pb
from pagewire.v1.sampling_pb2 import SamplingParams
from pagewire.validation import find_violation, generation_defaults, limits_of, sampling_only


def test_limits_are_those_of_the_proto() -> None:
    limits = limits_of(SamplingParams.DESCRIPTOR)
    assert (limits["top_p"].low, limits["top_p"].low_is_open, limits["top_p"].high) == (0, True, 1)
    assert (limits["n"].low, limits["n"].high) == (1, 128)
    assert limits["stop"].max_items == 16
    assert "seed" not in limits


def test_defaults_are_of_the_fields_types() -> None:
    defaults = generation_defaults(SamplingParams.DESCRIPTOR)
    assert (defaults["top_p"], defaults["top_k"]) == (1.0, 0)
    assert isinstance(defaults["top_k"], int)
    assert "n" not in defaults
    assert set(sampling_only(SamplingParams.DESCRIPTOR)) <= set(defaults)


@pytest.mark.parametrize(
    ("params", "path", "expected"),
    [
        ({"n": 129}, "n", "expected at least 1 and at most 128, got 129"),
        ({"top_p": 0}, "top_p", "expected above 0 and at most 1, got 0"),
        (
            {"temperature": 0.005},
            "temperature",
            "expected at least 0.01 and at most 100, or 0, got 0.005",
        ),
        ({"max_tokens": 0}, "max_tokens", "expected at least 1, got 0"),
        ({"min_p": math.nan}, "min_p", "expected at least 0 and at most 1, got nan"),
        ({"stop": ["a"] * 17}, "stop", "expected at most 16 entries, got 17"),
        ({"stop": ["a", ""]}, "stop[1]", "expected a text that is not empty"),
        ({"bad_words": ["a" * 1025]}, "bad_words[0]", "expected at most 1024 characters, got 1025"),
        (
            {"logit_bias": [{}, {"bias": -101}]},
            "logit_bias[1].bias",
            "expected at least -100 and at most 100, got -101",
        ),
        (
            {"beam_search": {"width": 0}},
            "beam_search.width",
            "expected at least 1 and at most 64, got 0",
        ),
        ({"choice": {}}, "choice.choices", "expected 1 to 1024 entries, got 0"),
    ],
)
def test_a_violation_names_field_limit_and_value(
    params: dict[str, Any], path: str, expected: str
) -> None:
    assert find_violation(SamplingParams(**params)) == (path, expected)
    request = pb.GenerateRequest(sampling_params=params)
    assert find_violation(request) == (f"sampling_params.{path}", expected)


@pytest.mark.parametrize(
    "params", [{}, {"temperature": 0}, {"temperature": 0.01}, {"n": 1, "logprobs": 0}]
)
def test_absent_fields_and_values_at_a_limit_are_allowed(params: dict[str, Any]) -> None:
    assert find_violation(SamplingParams(**params)) is None
