"""Statuses for `WatchStatus`: snapshots that all watchers share, within a share of the loop's time.

A status with the blocks of many worker groups takes milliseconds to make and is megabytes long. So
watchers that want the same detail share one, and all watchers together may use `LOOP_SHARE` of the
loop's time: the processor time of each snapshot and each write is measured, and the next snapshot
waits until the share covers what has been spent. Every watcher receives each snapshot at
most once; its interval is the shortest time between two.
"""

import asyncio
import time
import types
from collections.abc import Awaitable, Callable, Generator
from functools import partial
from typing import Any, Protocol
from weakref import WeakValueDictionary

import grpc

from pagewire.v1 import scheduler_service_pb2 as pb
from pagewire.v1 import status_pb2
from scheduler_service.core.inspection import InspectionDetail

LOOP_SHARE = 0.01
"""Share of the loop's time that all watchers may cost together."""

MIN_INTERVAL_S = 0.1
"""A snapshot that is younger is shared even when the share would allow a new one."""


class Board(Protocol):
    """Source of statuses."""

    def snapshot(self, detail: InspectionDetail) -> status_pb2.EngineStatus:
        """The current status."""


class _Snapshot:
    """A status as the response to all watchers of its detail."""

    def __init__(self, status: status_pb2.EngineStatus, at: float) -> None:
        self.response = pb.SchedulerServiceWatchStatusResponse(status=status)
        self.at = at


class StatusWatchers:
    """All `WatchStatus` calls of a core; constructed and used on one running event loop."""

    def __init__(self, board: Board) -> None:
        self._board = board
        self._loop = asyncio.get_running_loop()
        self._snapshots: WeakValueDictionary[InspectionDetail, _Snapshot] = WeakValueDictionary()
        """The latest snapshot of each detail that has watchers."""
        self._turn = asyncio.Lock()
        """Held by the watcher that makes the next snapshot; the others wait in order."""
        self._paid_at = 0.0
        """Time at which the share of the loop covers the processor time spent so far."""

    async def serve(
        self,
        context: grpc.aio.ServicerContext[Any, Any],
        detail: InspectionDetail,
        interval_s: float,
    ) -> None:
        """Write snapshots, at least `interval_s` apart, until cancelled."""
        last: _Snapshot | None = None
        while True:
            last = await self._next(detail, last)
            await _measured(context.write(last.response), self._spend)
            await asyncio.sleep(interval_s)

    async def _next(self, detail: InspectionDetail, last: _Snapshot | None) -> _Snapshot:
        """The latest snapshot, which must be newer than `last`."""
        if (snapshot := self._current(detail, last)) is not None:
            return snapshot
        async with self._turn:
            if (snapshot := self._current(detail, last)) is not None:
                return snapshot
            await asyncio.sleep(self._due_at(last) - self._loop.time())
            began = time.thread_time()
            snapshot = _Snapshot(self._board.snapshot(detail), self._loop.time())
            self._spend(time.thread_time() - began)
            self._snapshots[detail] = snapshot
            return snapshot

    def _current(self, detail: InspectionDetail, last: _Snapshot | None) -> _Snapshot | None:
        """The latest snapshot, if it may still be shared and is not `last`."""
        snapshot = self._snapshots.get(detail)
        if snapshot is last or snapshot is None:
            return None
        return snapshot if self._loop.time() < self._due_at(snapshot) else None

    def _due_at(self, snapshot: _Snapshot | None) -> float:
        """When the next snapshot after this one may be made."""
        if snapshot is None:
            return self._paid_at
        return max(self._paid_at, snapshot.at + MIN_INTERVAL_S)

    def _spend(self, cpu_s: float) -> None:
        self._paid_at = max(self._paid_at, self._loop.time()) + cpu_s / LOOP_SHARE


@types.coroutine
def _measured(
    work: Awaitable[object], spend: Callable[[float], None]
) -> Generator[Any, Any, object]:
    """Await `work`, and report the processor time of each of its steps on this thread."""
    steps = work.__await__()
    step: Callable[[], Any] = partial(next, steps)
    while True:
        began = time.thread_time()
        try:
            waits_for = step()
        except StopIteration as end:
            return end.value
        finally:
            spend(time.thread_time() - began)
        try:
            yield waits_for
            step = partial(next, steps)
        except BaseException as error:
            step = partial(steps.throw, error)
