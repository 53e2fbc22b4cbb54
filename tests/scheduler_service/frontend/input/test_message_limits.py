"""Messages that would take too long to parse are refused unparsed."""

from typing import Any

import grpc
import pytest

from pagewire.v1 import inference_service_pb2 as pb
from scheduler_service.errors import InvalidArgument
from scheduler_service.frontend.input.message_limits import (
    MAX_PACKED_NUMBERS,
    MAX_PARTS,
    check_message,
)
from tests.scheduler_service.frontend.conftest import Served
from tests.support.frontends import bad_field, error_of, generate_request

REQUEST = pb.GenerateRequest.DESCRIPTOR
TURN = {"role": "user"}


@pytest.mark.parametrize(
    ("fields", "path"),
    [
        ({"chat": {"messages": [TURN] * MAX_PARTS}}, "chat.messages"),
        ({"resume": [{}] * (MAX_PARTS + 1)}, "resume"),
        ({"sampling_params": {"stop": [""] * MAX_PARTS}}, "sampling_params.stop"),
        ({"token_ids": {"ids": [300] * (MAX_PACKED_NUMBERS + 1)}}, "token_ids.ids"),
    ],
    ids=["turns", "resumed choices", "stop strings", "token ids"],
)
def test_a_message_of_too_many_parts_is_refused(fields: dict[str, Any], path: str) -> None:
    data = pb.GenerateRequest(**fields).SerializeToString()
    with pytest.raises(InvalidArgument) as caught:
        check_message(data, REQUEST)
    assert caught.value.field.startswith(path)


@pytest.mark.parametrize(
    "fields",
    [
        {"text": "a" * (1 << 20)},
        {"token_ids": {"ids": [300] * MAX_PACKED_NUMBERS}},
        {"chat": {"messages": [TURN] * (MAX_PARTS // 2 - 1)}},
        {"text": "a" * 70_000, "sampling_params": {"logit_bias": [{"bias": 1}] * 1024, "seed": 3}},
    ],
    ids=["text", "token ids", "turns", "numbers of several kinds"],
)
def test_others_are_let_by(fields: dict[str, Any]) -> None:
    check_message(pb.GenerateRequest(**fields).SerializeToString(), REQUEST)


@pytest.mark.parametrize(
    "data",
    [b"\x0b" * 100_000, b"\x1a\xff\xff\x7f" + b"a" * 100_000, b"\xff" * 100_000],
    ids=["groups", "cut off", "no number"],
)
def test_what_is_no_message_is_refused(data: bytes) -> None:
    with pytest.raises(InvalidArgument, match="expected a message"):
        check_message(data, REQUEST)


@pytest.mark.parametrize("method", ["Generate", "GenerateMany"])
async def test_calls_end_with_the_field_that_is_too_large(served: Served, method: str) -> None:
    request = generate_request(None, request_id="r", chat={"messages": [{}] * (MAX_PARTS + 1)})
    if method == "Generate":
        call = served.client.Generate(request)
    else:
        call = served.client.GenerateMany(iter([pb.GenerateManyRequest(request=request)]))
    error = await error_of(call)
    assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert bad_field(error).endswith("chat.messages")
