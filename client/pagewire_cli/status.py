"""`pagewire status`: queues, workers and memory of a deployment."""

import json
from collections.abc import Generator, Iterable, Iterator
from contextlib import closing, contextmanager
from itertools import islice
from typing import Annotated

import grpc
import typer
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table

from pagewire.v1 import scheduler_service_pb2 as pb
from pagewire.v1.scheduler_service_pb2_grpc import SchedulerServiceStub
from pagewire.v1.status_pb2 import StatusDetail
from pagewire_cli import terminal
from pagewire_cli.options import (
    CONNECTION,
    MEMBERSHIP,
    Connection,
    CoreToQuery,
    Membership,
    with_options,
)
from pagewire_client.connection import ConnectionOptions, sync_channel
from pagewire_client.deployment import (
    EngineStatus,
    WorkerGroupStatus,
    describe_cache_group,
    describe_load,
    lost_workers,
    plain,
    word,
)
from pagewire_client.errors import from_call
from pagewire_client.retry import Deadline

_ANY_WIDTH = 1_000
"""Columns: lines are neither folded for a narrow terminal nor for a pipe."""


@with_options(connection=CONNECTION, membership=MEMBERSHIP)
def status(
    connection: Connection,
    membership: Membership,
    core: CoreToQuery = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print each snapshot as one line of JSON.")
    ] = False,
    watch: Annotated[bool, typer.Option("--watch", help="Refresh every second.")] = False,
    timeout: Annotated[float, typer.Option(help="Seconds to wait for an answer.")] = 10.0,
) -> None:
    """Show the queues, workers and memory of a deployment."""
    with _snapshots(connection, membership, core, None if watch else timeout) as snapshots:
        if as_json:
            for snapshot in snapshots:
                terminal.write(json.dumps(plain(snapshot)) + "\n")
        elif watch:
            _show_live(snapshots)
        else:
            Console(width=_ANY_WIDTH).print(_render(next(snapshots)))


@contextmanager
def _snapshots(
    connection: Connection, membership: Membership, core: str | None, timeout_s: float | None
) -> Iterator[Iterator[EngineStatus]]:
    """Snapshots from a frontend or a core: one within `timeout_s`, or one every second."""
    if core is not None:
        options = membership.connection_to(core)
        with closing(watch_core(options, 1.0, Deadline(timeout_s))) as snapshots:
            yield snapshots if timeout_s is None else islice(snapshots, 1)
    else:
        with connection.client() as client:
            one = [client.get_status(timeout=timeout_s)] if timeout_s is not None else None
            yield client.watch_status() if one is None else iter(one)


def _show_live(snapshots: Iterator[EngineStatus]) -> None:
    """Replace each snapshot by the next one; where that is no terminal, one follows the other."""
    console = Console()
    if not console.is_terminal:
        for snapshot in snapshots:
            Console(width=_ANY_WIDTH).print(_render(snapshot), "")
        return
    with Live(console=console, auto_refresh=False) as live:
        for snapshot in snapshots:
            live.update(_render(snapshot), refresh=True)


def _render(snapshot: EngineStatus) -> RenderableType:
    waiting, running, swapped = snapshot.num_waiting, snapshot.num_running, snapshot.num_swapped
    swaps = snapshot.num_swapped_out_blocks, snapshot.num_swapped_in_blocks
    facts = Table.grid(padding=(0, 2))
    for name, value in (
        ("version", snapshot.version),
        ("models", ", ".join(snapshot.models) or "none"),
        ("frontends", str(snapshot.num_frontends)),
        ("requests", f"{waiting} waiting, {running} running, {swapped} swapped"),
        ("", f"since the core's start {snapshot.uptime_s:.0f} s ago:"),
        ("finished", f"{snapshot.num_finished} requests"),
        ("tokens", f"{snapshot.num_prefill_tokens} in, {snapshot.num_generated_tokens} out"),
        ("preemptions", str(snapshot.num_preemptions)),
        ("swapped blocks", f"{swaps[0]} out, {swaps[1]} in"),
        (
            "moved blocks",
            f"{snapshot.num_fetched_blocks}, {snapshot.num_failed_fetches} failures",
        ),
        ("lost workers", str(snapshot.num_worker_losses)),
    ):
        facts.add_row(name, value)
    rows = [*_workers(snapshot.groups), *_others(snapshot)]
    tables = [_table(rows)] if rows else []
    groups = list(_cache_groups(snapshot.groups))
    return Group(facts, *tables, *([_cache_group_table(groups)] if groups else []))


def _cache_groups(groups: Iterable[WorkerGroupStatus]) -> Iterator[tuple[str, str, str]]:
    for group in groups:
        for cache_group in group.cache_groups:
            yield group.group_id, *describe_cache_group(cache_group)


def _cache_group_table(rows: list[tuple[str, str, str]]) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for name in ("worker", "cache group", "use and prefix hits"):
        table.add_column(name, overflow="fold")
    for row in rows:
        table.add_row(*row)
    return table


def _table(rows: list[tuple[str, ...]]) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    # Never shortened or wrapped: `pagewire drain` takes the whole id.
    table.add_column("worker", no_wrap=True, min_width=max(len(row[0]) for row in rows))
    for name in (
        "state",
        "model",
        "sequences",
        "device blocks",
        "host blocks",
        "steps",
        "weights",
        "arithmetic",
        "cache",
        "KV moves",
    ):
        table.add_column(name, overflow="fold")
    for row in rows:
        table.add_row(*row)
    return table


def _workers(groups: Iterable[WorkerGroupStatus]) -> Iterator[tuple[str, ...]]:
    for group in groups:
        role = "" if group.role in ("", "both") else f", {group.role}"
        yield (
            group.group_id,
            word(group, "state") + role,
            group.model,
            str(group.num_running_sequences),
            _blocks(group.num_gpu_blocks, group.num_free_gpu_blocks),
            _blocks(group.num_cpu_blocks, group.num_free_cpu_blocks),
            str(group.num_steps),
            group.weights or "unknown",
            group.arithmetic or "unknown",
            group.cache_layout or "unknown",
            group.kv_moves or "unknown",
        )


def _others(snapshot: EngineStatus) -> Iterator[tuple[str, ...]]:
    """Workers that load their model, and those that were lost and have not returned."""
    for load in snapshot.loading:
        yield load.group_id, describe_load(load), load.model
    for loss in lost_workers(snapshot):
        age_s = snapshot.uptime_s - loss.lost_at_s
        yield loss.group_id, f"lost {age_s:.0f} s ago", loss.model


def _blocks(total: int, free: int) -> str:
    return f"{total - free} of {total}" if total else "none"


def watch_core(
    options: ConnectionOptions,
    interval_s: float,
    deadline: Deadline,
    *,
    in_detail: bool = False,
) -> Generator[EngineStatus, None, None]:
    """A scheduler core's snapshots, one every `interval_s` seconds; `in_detail`: with requests and
    blocks. Raises PagewireError."""
    request = pb.SchedulerServiceWatchStatusRequest(
        interval_ms=round(interval_s * 1000),
        detail=StatusDetail(include_requests=in_detail, include_blocks=in_detail),
    )
    with sync_channel(options, options.addresses[0]) as channel:
        watch = SchedulerServiceStub(channel).WatchStatus
        try:
            timeout_s = deadline.remaining_s()
            for response in watch(request, timeout=timeout_s, metadata=options.metadata):
                yield response.status
        except grpc.RpcError as error:
            raise from_call(error) from None
