"""The lines of a recording: lossless, and strict about what comes back."""

import json
from collections.abc import Mapping
from typing import Any

import pytest
from pydantic_core import PydanticSerializationError

from pagewire.v1.sampling_pb2 import SamplerParams
from scheduler_service.core import (
    ContextKind,
    ContextPart,
    GeneratedTokens,
    PolicyName,
    Request,
    RowCandidates,
    RowError,
    RowLogprobs,
    RowPromptLogprobs,
    SchedulerConfig,
    StepResult,
    TenantConfig,
)
from scheduler_service.core.request import Generation
from scheduler_service.replay.recording import (
    LINES,
    Header,
    Unreadable,
    decode_entry,
    decode_header,
    to_json,
)

REQUEST = Request(
    frontend_id="f",
    handle=3,
    request_id="r",
    model="m",
    prompt_token_ids=[1, 2, 3],
    tenant="t",
    context=(ContextPart(ContextKind.MEDIA, bytes(range(32)), start=3, length=4),),
    priority=-3,
    deadline=1234.000000001,
    work=Generation(
        max_tokens=9,
        sampling=SamplerParams(temperature=0.1, seed=2**63, logit_bias=[]),
        num_choices=2,
        stop_token_ids=frozenset({9, 2}),
        wants_logprobs=True,
        generated={1: GeneratedTokens(token_ids=[5], cumulative_logprob=-0.1, finished=True)},
        num_speculative_tokens=0,
    ),
)

RESULT = StepResult(
    step_id=7,
    token_ids=[1, -1],
    logprobs={0: RowLogprobs(token_ids=b"\0\1", logprobs=b"\xff", sampled_rank=1)},
    prompt_logprobs={
        1: RowPromptLogprobs(start=1, width=2, token_ids=b"a", logprobs=b"b", ranks=b"c")
    },
    candidates={2: RowCandidates(token_ids=[4, 6], logprobs=[-0.1, float("-inf")])},
    errors={1: RowError(reason="NON_FINITE_LOGITS", message="row")},
    busy_us=12,
)

HEADER = Header(
    software_version="1",
    recorded_at="now",
    config=SchedulerConfig(
        max_num_seqs=3,
        policy=PolicyName.FAIR,
        tenants={"gold": TenantConfig(weight=2.0, max_requests=3)},
    ),
)


def written(do: str, **arguments: Any) -> dict[str, Any]:
    """A line as it is in the file."""
    line: dict[str, Any] = json.loads(to_json(LINES[do](do=do, **arguments)))
    return line


def there_and_back(do: str, **arguments: Any) -> Mapping[str, Any]:
    return decode_entry(2, json.dumps(written(do, **arguments))).arguments


def test_what_is_written_comes_back() -> None:
    for do, arguments in (
        ("submit", {"request": REQUEST, "now": 0.1 + 0.2}),
        ("update", {"worker_group_id": "g0", "result": RESULT, "now": 4.0}),
    ):
        assert there_and_back(do, **arguments) == arguments


def test_fields_with_their_default_are_left_out() -> None:
    line = written("update", worker_group_id="g", result=StepResult(step_id=1, token_ids=[]), now=4)
    assert line == {
        "do": "update",
        "worker_group_id": "g",
        "result": {"step_id": 1, "token_ids": []},
        "now": 4,
    }


def test_fields_that_this_version_does_not_know_survive_in_sampling_parameters() -> None:
    data = SamplerParams(temperature=0.5).SerializeToString() + b"\xfa\x3e\x01x"
    REQUEST.work.sampling.ParseFromString(data)
    request = there_and_back("submit", request=REQUEST, now=1.0)["request"]
    assert request.work.sampling.SerializeToString() == data


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"wieght": 1.0}, "update.result.wieght: Unexpected keyword argument, got 1.0"),
        ({"step_id": "1"}, "update.result.step_id: Input should be a valid integer, got '1'"),
        ({"step_id": True}, "update.result.step_id: Input should be a valid integer, got True"),
        ({"step_id": 1.5}, "update.result.step_id: Input should be a valid integer"),
        ({"token_ids": [1, "2"]}, "update.result.token_ids.1: Input should be a valid integer"),
        ({"token_ids": {}}, "update.result.token_ids: Input should be a valid "),
        ({"logprobs": {"0": {"token_ids": "?"}}}, "result.logprobs.0.token_ids: "),
        ({"errors": {"0": {"reason": "x"}}}, "result.errors.0.message: Field required"),
    ],
)
def test_what_does_not_fit_is_named(change: dict[str, Any], message: str) -> None:
    line = written("update", worker_group_id="g0", result=RESULT, now=4.0)
    line["result"] |= change
    with pytest.raises(Unreadable) as caught:
        decode_entry(2, json.dumps(line))
    assert message in str(caught.value)


def test_sampling_parameters_that_are_no_message_are_named() -> None:
    line = written("submit", request=REQUEST, now=4.0)
    for sampling in ("/w==", "a", 3):
        line["request"]["work"]["sampling"] = sampling
        with pytest.raises(Unreadable, match="expected SamplerParams in base64"):
            decode_entry(2, json.dumps(line))


@pytest.mark.parametrize("now", [object(), "1", [1.0]])
def test_an_argument_of_another_type_cannot_be_recorded(now: object) -> None:
    with pytest.raises(PydanticSerializationError):
        written("expire", now=now)


def test_a_header_has_the_whole_configuration() -> None:
    data = json.loads(HEADER.model_dump_json())
    assert data["config"].keys() == SchedulerConfig.__dataclass_fields__.keys()
    assert decode_header(json.dumps(data)) == HEADER
    with pytest.raises(Unreadable, match=r"config: Value error, max_num_seqs: expected 1 to"):
        decode_header(json.dumps(data | {"config": data["config"] | {"max_num_seqs": 0}}))
