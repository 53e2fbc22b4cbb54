"""`pagewire drain`: take a worker group out of service; what it runs goes on elsewhere."""

from collections.abc import Iterator
from typing import Annotated

import grpc
import typer

from pagewire.v1 import scheduler_service_pb2 as pb
from pagewire.v1.scheduler_service_pb2_grpc import SchedulerServiceStub
from pagewire.v1.status_pb2 import WORKER_STATE_DRAINING, EngineStatus, WorkerGroupStatus
from pagewire_client.cli import terminal
from pagewire_client.cli.options import CORE_CONNECTION, CoreConnection, with_options
from pagewire_client.connection import Metadata, sync_channel
from pagewire_client.errors import DeadlineExceeded, from_call

_CALL_TIMEOUT_S = 10.0
_LOOK_INTERVAL_MS = 100


@with_options(core=CORE_CONNECTION)
def drain(
    core: CoreConnection,
    group: Annotated[str, typer.Argument(help="The worker group, as `pagewire status` calls it.")],
    wait: Annotated[bool, typer.Option("--wait", help="Return when the group is gone.")] = False,
    timeout: Annotated[
        float | None,
        typer.Option(help="With --wait, seconds after which to give up.", show_default="none"),
    ] = None,
) -> None:
    """Take a worker group out of service: its requests go on in others, then its workers end.

    Exit code 1 if there is no such group, or with --wait if it is not gone in time; it goes on
    draining then.
    """
    options = core.options()
    with sync_channel(options, options.addresses[0]) as channel:
        stub = SchedulerServiceStub(channel)
        try:
            stub.DrainWorker(
                pb.DrainWorkerRequest(group_id=group),
                timeout=_CALL_TIMEOUT_S,
                metadata=options.metadata,
            )
            if wait:
                _wait_gone(stub, group, timeout, options.metadata)
        except grpc.RpcError as error:
            if wait and error.code() is grpc.StatusCode.DEADLINE_EXCEEDED:
                raise DeadlineExceeded(f"{group} still drains") from None
            raise from_call(error) from None


def _wait_gone(
    stub: SchedulerServiceStub, group_id: str, timeout_s: float | None, metadata: Metadata
) -> None:
    """Tell how many sequences still run there, until the group is gone."""
    num_told: int | None = None
    for snapshot in _watch(stub, timeout_s, metadata):
        group = _find(snapshot, group_id)
        if group is None:
            terminal.note(f"{group_id} is drained")
            return
        if group.num_running_sequences != num_told:
            num_told = group.num_running_sequences
            terminal.note(f"{group_id} is draining, {num_told} sequences run")


def _watch(
    stub: SchedulerServiceStub, timeout_s: float | None, metadata: Metadata
) -> Iterator[EngineStatus]:
    request = pb.SchedulerServiceWatchStatusRequest(interval_ms=_LOOK_INTERVAL_MS)
    for response in stub.WatchStatus(request, timeout=timeout_s, metadata=metadata):
        yield response.status


def _find(snapshot: EngineStatus, group_id: str) -> WorkerGroupStatus | None:
    """The group while it drains; one of the same name that does not is its successor."""
    for group in snapshot.groups:
        if group.group_id == group_id and group.state == WORKER_STATE_DRAINING:
            return group
    return None
