"""The dataclasses of models and statuses have what the messages have, as Python's own types."""

from dataclasses import fields
from typing import Any, get_args

import pytest

from pagewire.v1 import model_pb2, status_pb2
from pagewire_client import deployment
from pagewire_client.deployment import BlockMap, EngineStatus, ModelInfo, from_proto
from tests.support.fake_frontend import FakeFrontend

MESSAGES = [
    model_pb2.ModelInfo,
    *(status_pb2.LatencyHistogram, status_pb2.BlockMap, status_pb2.WorkerGroupStatus),
    *(status_pb2.WorkerLoss, status_pb2.WorkerLoading),
    *(status_pb2.RequestStatus, status_pb2.EngineStatus),
]


@pytest.mark.parametrize("message", MESSAGES, ids=lambda message: message.DESCRIPTOR.name)
def test_a_dataclass_has_the_fields_of_its_message(message: Any) -> None:
    kind = getattr(deployment, message.DESCRIPTOR.name)
    assert {field.name for field in fields(kind)} == set(message.DESCRIPTOR.fields_by_name)
    assert from_proto(kind, message())


@pytest.mark.parametrize("name", ["WorkerState", "RequestState", "RequestEvent"])
def test_states_are_the_words_of_the_enum(name: str) -> None:
    values = status_pb2.DESCRIPTOR.enum_types_by_name[name].values_by_number
    prefix = values[0].name.removesuffix("UNSPECIFIED")
    words = [value.name.removeprefix(prefix).lower() for value in values.values()]
    assert list(get_args(getattr(deployment, name))) == words


def column(*values: int) -> bytes:
    return b"".join(value.to_bytes(4, "little", signed=True) for value in values)


def test_columns_are_lists_of_integers_and_states_are_words() -> None:
    message = status_pb2.EngineStatus(num_finished=2**40)
    group = message.groups.add(group_id="g", state=status_pb2.WORKER_STATE_DRAINING)
    group.gpu_blocks.owners = column(7, -1)
    group.gpu_blocks.num_references = bytes([255, 0])
    message.requests.add(
        state=status_pb2.REQUEST_STATE_SWAPPED,
        events=[status_pb2.REQUEST_EVENT_QUEUED, 99],
        block_tables=[column(1, 2), column()],
    )
    status = from_proto(EngineStatus, message)
    assert status.num_finished == 2**40
    assert status.groups[0].state == "draining"
    assert status.groups[0].gpu_blocks == BlockMap(owners=[7, -1], num_references=[255, 0])
    assert status.groups[0].cpu_blocks == BlockMap(owners=[], num_references=[])
    (request,) = status.requests
    assert request.state == "swapped"
    assert request.events == ["queued", "unspecified"], "a newer server's event"
    assert request.block_tables == [[1, 2], []]


@pytest.mark.parametrize("token_id", [None, 0])
def test_a_token_that_a_model_lacks_is_none(token_id: int | None) -> None:
    info = from_proto(
        ModelInfo, model_pb2.ModelInfo(bos_token_id=token_id, eos_token_ids=column(2, 3))
    )
    assert (info.bos_token_id, info.eos_token_ids) == (token_id, [2, 3])


def test_clients_return_dataclasses(client: Any, frontend: FakeFrontend) -> None:
    assert type(client.get_model()) is ModelInfo
    assert type(client.get_status(include_requests=True, max_requests=7)) is EngineStatus
    assert type(next(client.watch_status(0.1))) is EngineStatus
    assert frontend.details == [
        status_pb2.StatusDetail(include_requests=True, max_requests=7),
        status_pb2.StatusDetail(),
    ]
