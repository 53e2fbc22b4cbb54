"""`pagewire drain`: take a worker group out of service; its requests continue in other groups."""

from collections.abc import Iterable
from typing import Annotated

import grpc
import typer

from pagewire.v1 import scheduler_service_pb2 as pb
from pagewire.v1.scheduler_service_pb2_grpc import SchedulerServiceStub
from pagewire_cli import terminal
from pagewire_cli.options import CORE_CONNECTION, CoreConnection, with_options
from pagewire_cli.status import watch_core
from pagewire_client.connection import sync_channel
from pagewire_client.deployment import EngineStatus, WorkerGroupStatus, word
from pagewire_client.errors import DeadlineExceeded, from_call
from pagewire_client.retry import Deadline

_CALL_TIMEOUT_S = 10.0
_STATUS_INTERVAL_S = 0.1


@with_options(core=CORE_CONNECTION)
def drain(
    core: CoreConnection,
    group: Annotated[str, typer.Argument(help="Id of the worker group, as in `pagewire status`.")],
    wait: Annotated[bool, typer.Option("--wait", help="Return when the group is gone.")] = False,
    timeout: Annotated[
        float | None, typer.Option(help="With --wait, seconds to wait; no limit by default.")
    ] = None,
) -> None:
    """Take a worker group out of service: its requests move to other groups, then its workers stop.

    The exit code is 1 if there is no such group, or with --wait if the group is not gone in time;
    it then continues to drain.
    """
    if timeout is not None and not wait:
        raise typer.BadParameter("--timeout: expected with --wait, which it ends")
    deadline = Deadline(timeout)
    options = core.options()
    with sync_channel(options, options.addresses[0]) as channel:
        try:
            SchedulerServiceStub(channel).DrainWorker(
                pb.DrainWorkerRequest(group_id=group),
                timeout=_CALL_TIMEOUT_S,
                metadata=options.metadata,
            )
        except grpc.RpcError as error:
            failure = from_call(error)
            failure.add_note("--core names the core: `pagewire serve` prints its address at start")
            raise failure from None
    if wait:
        try:
            _wait_gone(group, watch_core(options, _STATUS_INTERVAL_S, deadline))
        except DeadlineExceeded:
            raise DeadlineExceeded(f"{group} is still draining") from None


def _wait_gone(group_id: str, snapshots: Iterable[EngineStatus]) -> None:
    """Print how many sequences still run in the group, until it is gone."""
    num_printed: int | None = None
    for snapshot in snapshots:
        group = _find(snapshot, group_id)
        if group is None:
            terminal.note(f"{group_id} is drained")
            return
        if group.num_running_sequences != num_printed:
            num_printed = group.num_running_sequences
            terminal.note(f"{group_id} is draining, {num_printed} sequences run")


def _find(snapshot: EngineStatus, group_id: str) -> WorkerGroupStatus | None:
    """The group while it drains; a group of the same id that does not drain is its successor."""
    for group in snapshot.groups:
        if group.group_id == group_id and word(group, "state") == "draining":
            return group
    return None
