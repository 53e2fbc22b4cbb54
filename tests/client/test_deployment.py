"""Models and statuses are the protos' messages."""

from typing import Any

from pagewire.v1 import status_pb2
from pagewire_client.deployment import EngineStatus, ModelInfo, lost_workers
from tests.support.fake_frontend import FakeFrontend


def test_clients_return_the_messages(client: Any, frontend: FakeFrontend) -> None:
    assert type(client.get_model()) is ModelInfo
    assert type(client.get_status(include_requests=True, max_requests=7)) is EngineStatus
    assert type(next(client.watch_status(0.1))) is EngineStatus
    assert frontend.details == [
        status_pb2.StatusDetail(include_requests=True, max_requests=7),
        status_pb2.StatusDetail(),
    ]


def test_lost_workers_are_those_of_the_last_minutes_that_have_not_returned() -> None:
    status = EngineStatus(uptime_s=1000)
    for group_id, lost_at_s in (("old", 699), ("gone", 910), ("gone", 988), ("back", 997)):
        status.worker_losses.add(group_id=group_id, lost_at_s=lost_at_s)
    status.loading.add(group_id="back")
    assert [(loss.group_id, loss.lost_at_s) for loss in lost_workers(status)] == [("gone", 988)]
