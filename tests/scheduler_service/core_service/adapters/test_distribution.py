"""Contents that are sent from one worker to another, over real connections."""

from functools import partial
from typing import Any

import grpc
import pytest

from pagewire.v1 import scheduler_service_pb2 as pb
from pagewire.v1 import worker_service_pb2 as worker_pb
from pagewire.v1.adapter_pb2 import Adapter, AdapterSet
from pagewire.v1.worker_service_pb2_grpc import (
    WorkerServiceServicer,
    WorkerServiceStub,
    add_WorkerServiceServicer_to_server,
)
from scheduler_service.core_service.adapters.distribution import AdapterDistribution
from scheduler_service.core_service.workers.errors import SessionFailed
from service_common.cluster import NO_CLUSTER, Cluster
from tests.support.grpc_servers import grpc_server

DIGEST = b"d" * 32


class Worker(WorkerServiceServicer):
    """Sends a content of two pieces, and keeps one that it is sent, unless it fails."""

    def __init__(self, *, fails: bool = False) -> None:
        self.fails = fails
        self.content: bytes | None = None

    def GetAdapter(self, request: worker_pb.GetAdapterRequest, context: Any) -> Any:
        yield worker_pb.GetAdapterResponse(data=b"con")
        if self.fails:
            context.abort(grpc.StatusCode.NOT_FOUND, "no such content")
        yield worker_pb.GetAdapterResponse(data=b"tent")

    def PutAdapter(self, requests: Any, context: Any) -> worker_pb.PutAdapterResponse:
        content = b"".join(request.data for request in requests)
        if self.fails:  # only now, as a worker does: gRPC's error of a write hides the status
            context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, "no room")
        self.content = content
        return worker_pb.PutAdapterResponse()

    def SetAdapters(self, request: Any, context: Any) -> worker_pb.SetAdaptersResponse:
        return worker_pb.SetAdaptersResponse(missing=[DIGEST] if self.content is None else [])


async def supply(holder: Worker, receiver: Worker) -> None:
    """Make the receiver get the content from the holder."""
    add = add_WorkerServiceServicer_to_server
    with (
        grpc_server(partial(add, holder)) as first,  # type: ignore[no-untyped-call]
        grpc_server(partial(add, receiver)) as second,  # type: ignore[no-untyped-call]
    ):
        distribution = AdapterDistribution(partial(Cluster(NO_CLUSTER).dial, WorkerServiceStub))
        table = AdapterSet(version=1, adapters=[Adapter(name="a", digest=DIGEST)])
        workers = [
            pb.WorkerRegistration(worker_id="holder", address=first),
            pb.WorkerRegistration(worker_id="receiver", address=second),
        ]
        assert await distribution.supply(table, workers[1:], workers[:1]) == table


async def test_a_content_arrives_whole() -> None:
    receiver = Worker()
    await supply(Worker(), receiver)
    assert receiver.content == b"content"


async def test_a_worker_that_stops_sending_a_content_fails_the_session() -> None:
    with pytest.raises(SessionFailed, match=r"worker holder .*NOT_FOUND: no such content"):
        await supply(Worker(fails=True), Worker())


async def test_a_worker_that_refuses_a_content_fails_the_session() -> None:
    with pytest.raises(SessionFailed, match=r"worker receiver .*RESOURCE_EXHAUSTED: no room"):
        await supply(Worker(), Worker(fails=True))
