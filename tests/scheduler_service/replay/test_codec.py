"""Dataclasses as JSON: lossless, and strict about what comes back."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

import pytest

from pagewire.v1.sampling_pb2 import SamplerParams
from scheduler_service.core import (
    GeneratedTokens,
    Request,
    RowError,
    RowLogprobs,
    RowPromptLogprobs,
    SchedulerConfig,
    StepResult,
)
from scheduler_service.replay.codec import Unreadable
from scheduler_service.replay.recording import (
    CODEC,
    INPUTS,
    PARAMETERS,
    Header,
    decode_header,
    encode_header,
)


class Color(Enum):
    RED = "red"


@dataclass(frozen=True, kw_only=True)
class Nested:
    weight: float = 1.0
    limit: int | None = None

    def __post_init__(self) -> None:
        if self.weight < 0:
            raise ValueError("weight must be at least 0")


@dataclass(frozen=True, kw_only=True)
class Several:
    color: Color = Color.RED
    nested: Nested = Nested()
    by_name: Mapping[str, Nested] = field(default_factory=dict)
    pair: tuple[int, str] = (0, "")
    flags: list[bool] | None = None


def there_and_back(kind: Any, value: Any) -> Any:
    return CODEC.decode(kind, json.loads(json.dumps(CODEC.encode(kind, value))))


REQUEST = Request(
    frontend_id="f",
    handle=3,
    request_id="r",
    model="m",
    prompt_token_ids=[1, 2, 3],
    max_tokens=9,
    sampling=SamplerParams(temperature=0.1, seed=2**63, logit_bias=[]),
    num_choices=2,
    tenant="t",
    priority=-3,
    stop_token_ids=frozenset({9, 2}),
    wants_logprobs=True,
    deadline=1234.000000001,
    generated={1: GeneratedTokens(token_ids=[5], cumulative_logprob=-0.1, finished=True)},
    num_speculative_tokens=0,
)

RESULT = StepResult(
    step_id=7,
    token_ids=[1, -1],
    logprobs={0: RowLogprobs(token_ids=b"\0\1", logprobs=b"\xff", sampled_rank=1)},
    prompt_logprobs={
        1: RowPromptLogprobs(start=1, width=2, token_ids=b"a", logprobs=b"b", ranks=b"c")
    },
    errors={1: RowError(reason="NON_FINITE_LOGITS", message="row")},
    busy_us=12,
)


@pytest.mark.parametrize(
    ("kind", "value"),
    [
        (Request, REQUEST),
        (StepResult, RESULT),
        (Several, Several()),
        (
            Several,
            Several(by_name={"a": Nested(weight=2.0, limit=3)}, pair=(1, "x"), flags=[True]),
        ),
        (float, 0.1 + 0.2),
    ],
)
def test_what_is_written_comes_back(kind: Any, value: Any) -> None:
    assert there_and_back(kind, value) == value


def test_fields_with_their_default_are_left_out() -> None:
    assert CODEC.encode(StepResult, StepResult(step_id=1, token_ids=[])) == {
        "step_id": 1,
        "token_ids": [],
    }


def test_fields_that_this_version_does_not_know_survive_in_sampling_parameters() -> None:
    data = SamplerParams(temperature=0.5).SerializeToString() + b"\xfa\x3e\x01x"
    sampling = there_and_back(Any, SamplerParams.FromString(data))
    assert sampling.SerializeToString() == data


@pytest.mark.parametrize(
    ("kind", "data", "message"),
    [
        (Nested, {"wieght": 1.0}, "Nested has no field wieght in this version"),
        (Nested, {"weight": "1"}, "Nested.weight: expected float, got str"),
        (Nested, {"weight": -1.0}, "Nested: weight must be at least 0"),
        (Several, {"color": "blue"}, "Several.color: 'blue' is not a valid Color"),
        (Several, {"by_name": {"a": {"limit": 1.5}}}, "Nested.limit: expected int, got float"),
        (Several, {"pair": [1]}, "Several.pair: expected a list of 2"),
        (StepResult, {"step_id": 1}, "StepResult.token_ids is missing"),
        (StepResult, {"step_id": True, "token_ids": []}, "expected int, got bool"),
        (StepResult, {"step_id": 1, "token_ids": [1, "2"]}, "expected a list of int, got str"),
        (RowError, [], "RowError: expected an object, got list"),
        (bytes, "a", "expected base64"),
        (Any, "/w==", "expected SamplerParams in base64"),
    ],
)
def test_what_does_not_fit_is_named(kind: Any, data: Any, message: str) -> None:
    with pytest.raises(Unreadable) as caught:
        CODEC.decode(kind, data)
    assert message in str(caught.value)


def test_a_header_has_the_whole_configuration() -> None:
    header = Header(software_version="1", recorded_at="now", config=SchedulerConfig(max_num_seqs=3))
    data = encode_header(CODEC, header)
    assert data["config"].keys() == SchedulerConfig.__dataclass_fields__.keys()
    assert decode_header(CODEC, json.loads(json.dumps(data))) == header


def test_a_recording_can_hold_the_arguments_of_all_inputs() -> None:
    for method in INPUTS:
        for kind in PARAMETERS[method].values():
            CODEC.converter(kind)
