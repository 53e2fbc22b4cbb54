"""However many watch the status, they share its snapshots and a small share of the core's loop."""

import asyncio
import time
from typing import Any

from pagewire.v1 import scheduler_service_pb2 as pb
from pagewire.v1 import status_pb2
from pagewire.v1.scheduler_service_pb2_grpc import SchedulerServiceStub
from scheduler_service.core.inspection import Inspection, InspectionDetail
from scheduler_service.core_service.service import CoreService
from scheduler_service.core_service.status_watchers import LOOP_SHARE, StatusWatchers
from tests.scheduler_service.core_service.conftest import Fleet
from tests.support.fake_worker import FakeWorker
from tests.support.waiting import until

NO_DETAIL = InspectionDetail()


class Board:
    """Counts the statuses that it makes; each takes so much of the loop's processor time."""

    def __init__(self, cpu_s: float = 0.0) -> None:
        self.num_made = 0
        self._cpu_s = cpu_s

    def snapshot(self, _: InspectionDetail) -> status_pb2.EngineStatus:
        self.num_made += 1
        until = time.thread_time() + self._cpu_s
        while time.thread_time() < until:
            pass
        return status_pb2.EngineStatus(num_finished=self.num_made)


class Watcher:
    """A call's context that keeps what is written to it."""

    def __init__(self, cpu_s: float = 0.0) -> None:
        self.seen: list[int] = []
        self._board = Board(cpu_s)

    async def write(self, response: Any) -> None:
        self._board.snapshot(NO_DETAIL)
        self.seen.append(response.status.num_finished)


async def watch_for(
    seconds: float, watchers: StatusWatchers, contexts: list[Watcher], num_updates: int = 1
) -> tuple[list[list[int]], float]:
    """What each sees that asks ten times a second, and in how many seconds: longer than wanted
    until each has seen `num_updates`."""
    began = time.monotonic()
    tasks = [asyncio.create_task(watchers.serve(context, NO_DETAIL, 0.1)) for context in contexts]
    await asyncio.sleep(seconds)
    await until(lambda: all(len(c.seen) >= num_updates for c in contexts), "they saw updates")
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    return [context.seen for context in contexts], time.monotonic() - began


async def test_watchers_share_each_snapshot_and_none_sees_one_twice() -> None:
    board = Board()
    watchers = [Watcher() for _ in range(16)]
    seen, seconds = await watch_for(1.0, StatusWatchers(board), watchers, num_updates=2)
    assert 2 <= board.num_made <= 1 + seconds / 0.1
    for updates in seen:
        assert updates == sorted(set(updates))


async def test_watchers_of_costly_snapshots_see_fewer_of_them() -> None:
    board = Board(cpu_s=0.005)
    [seen], seconds = await watch_for(1.2, StatusWatchers(board), [Watcher()], num_updates=2)
    assert len(seen) <= 1 + seconds * LOOP_SHARE / 0.005


async def test_writing_to_watchers_counts_as_well() -> None:
    watchers = [Watcher(cpu_s=0.001) for _ in range(32)]
    seen, seconds = await watch_for(1.0, StatusWatchers(Board()), watchers)
    assert max(map(len, seen)) <= 1 + seconds * LOOP_SHARE / 0.032, "due every 3.2 s"


async def test_a_watcher_that_leaves_while_it_is_written_to_stops_no_other() -> None:
    class Stuck(Watcher):
        async def write(self, response: Any) -> None:
            await asyncio.Event().wait()

    board = Board()
    watchers = StatusWatchers(board)
    stuck = asyncio.create_task(watchers.serve(Stuck(), NO_DETAIL, 0.1))
    await until(lambda: board.num_made, "it is written to")
    stuck.cancel()
    await asyncio.gather(stuck, return_exceptions=True)
    assert stuck.cancelled()
    await watch_for(0.5, watchers, [Watcher()])


async def test_watchers_over_the_wire_see_blocks_of_one_snapshot(
    service: CoreService, fleet: Fleet, core: SchedulerServiceStub
) -> None:
    worker = await fleet.start(FakeWorker("w", group_id="g"))
    await until(lambda: [g for g in service.registry if g.is_ready], "the group is ready")
    made: list[InspectionDetail] = []
    inspect = service.driver.core.inspect

    def counting(detail: InspectionDetail) -> Inspection:
        made.append(detail)
        return inspect(detail)

    service.driver.core.inspect = counting  # type: ignore[method-assign]
    detail = status_pb2.StatusDetail(include_blocks=True)
    request = pb.SchedulerServiceWatchStatusRequest(detail=detail, interval_ms=60_000)
    calls = [core.WatchStatus(request) for _ in range(8)]
    for response in await asyncio.gather(*(call.read() for call in calls)):
        assert len(response.status.groups[0].gpu_blocks.num_references) == worker.num_gpu_blocks
    for call in calls:
        call.cancel()
    assert len(made) < len(calls)
