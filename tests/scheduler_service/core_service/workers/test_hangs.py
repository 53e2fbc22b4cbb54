"""Workers whose heartbeats go on while their steps do not come back."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

from pagewire.v1 import scheduler_service_pb2 as pb
from pagewire.v1 import status_pb2
from pagewire.v1.scheduler_service_pb2_grpc import SchedulerServiceStub
from scheduler_service.core.config import SchedulerConfig
from scheduler_service.core_service.config import CoreServiceConfig
from scheduler_service.core_service.service import CoreService, make_core_service
from scheduler_service.core_service.workers.step_watchdog import (
    MAX_HANGS,
    NUM_SOUND_STEPS,
    StepTimeout,
)
from tests.scheduler_service.core_service.conftest import Fleet
from tests.support.attached_frontend import AttachedFrontend
from tests.support.fake_worker import FakeWorker, counted
from tests.support.one_way import one_way_proxy
from tests.support.waiting import until

READY, HUNG = status_pb2.WORKER_STATE_READY, status_pb2.WORKER_STATE_HUNG
LIMIT_S = 1.0
"""Long enough for any step that is answered at once, on a machine that is busy, too."""


@pytest.fixture
async def service() -> AsyncIterator[CoreService]:
    """A core that waits a second for a step, and a minute for a heartbeat."""
    config = CoreServiceConfig(
        listen="127.0.0.1:0",
        lease_ms=60_000,
        step_timeout=StepTimeout(floor_s=LIMIT_S, first_floor_s=LIMIT_S),
        scheduler=SchedulerConfig(max_num_seqs=8, max_num_batched_tokens=16),
    )
    async with make_core_service(config) as service:
        yield service


def states(service: CoreService) -> dict[str, int]:
    return {group.group_id: group.state for group in service.registry}


async def test_a_step_that_does_not_come_back_goes_on_elsewhere_and_its_worker_begins_anew(
    service: CoreService, fleet: Fleet
) -> None:
    hanging = await fleet.start(FakeWorker("hanging"))
    async with AttachedFrontend(service.address) as frontend:
        await frontend.submit(1, [1, 2, 3], max_tokens=200)
        await frontend.wait_tokens(1, 5)
        hanging.hold_results()
        await fleet.start(FakeWorker("sound"))
        await frontend.wait_finished(1)
        assert frontend.tokens[1] == counted(3, 200)
    hanging.may_answer.set()
    await until(lambda: states(service)["hanging"] == READY, "it is used again")
    assert hanging.epochs == [1, 2]
    assert hanging.directives == ["serve"], "its registration went on"


async def test_a_worker_that_hangs_in_a_row_is_put_aside_until_it_registers_anew(
    service: CoreService, fleet: Fleet, core: SchedulerServiceStub
) -> None:
    worker = await fleet.start(FakeWorker("w"))
    worker.hold_results()
    async with AttachedFrontend(service.address) as frontend:
        await frontend.submit(1, [1, 2, 3], max_tokens=5)
        failed = await frontend.wait_failed(1)
        assert failed.reason == "WORKERS_LOST", "it may be the cause"
        await until(lambda: worker.stop_reason, "it was asked to stop")
        assert f"hung {MAX_HANGS} times in a row" in (worker.stop_reason or "")
        assert len(worker.epochs) == MAX_HANGS
        response = await core.GetStatus(pb.SchedulerServiceGetStatusRequest())
        assert [group.state for group in response.status.groups] == [HUNG]
        assert list(response.status.models) == []
        await frontend.submit(2, [7], max_tokens=3)
        await until(lambda: 2 in frontend.accepted, "a request was accepted")
        worker.may_answer.set()
        worker.register(service.address, last_epoch=worker.epochs[-1])
        await frontend.wait_finished(2)
        assert frontend.tokens[2] == counted(7, 3)
    assert len(worker.epochs) == MAX_HANGS + 1


async def test_a_hang_is_forgotten_after_a_hundred_steps_whatever_ends_them(
    service: CoreService, fleet: Fleet
) -> None:
    worker = await fleet.start(FakeWorker("w"))
    async with AttachedFrontend(service.address) as frontend:
        worker.hold_results()
        await frontend.submit(1, [1, 2, 3], max_tokens=NUM_SOUND_STEPS + 9)
        await until(lambda: worker.epochs == [1, 2], "its step was given up")
        worker.may_answer.set()
        await frontend.wait_finished(1)
    worker.busy_us = int(MAX_HANGS * LIMIT_S * 1e6)
    worker.break_stream()
    await until(lambda: worker.epochs == [1, 2, 3], "another stream begins")
    assert worker.directives == ["serve"]


async def test_a_worker_that_is_busy_with_a_lost_step_is_given_nothing_until_it_is_done(
    service: CoreService, fleet: Fleet, caplog: pytest.LogCaptureFixture
) -> None:
    worker = await fleet.start(FakeWorker("w"))
    worker.hold_results()
    async with AttachedFrontend(service.address) as frontend:
        await frontend.submit(1, [1, 2, 3], max_tokens=5)
        await until(lambda: worker.plans, "it has a plan")
        worker.busy_us = 1_000
        await until(lambda: caplog.text.count("rank 0 is busy for") > 1, "it was asked again")
        assert worker.epochs == [1]
        worker.busy_us = 0
        worker.may_answer.set()
        await frontend.wait_finished(1)
        assert frontend.tokens[1] == counted(3, 5)
    assert worker.epochs == [1, 2]


async def test_of_several_ranks_the_one_that_stays_busy_is_asked_to_stop(
    service: CoreService, fleet: Fleet
) -> None:
    ranks = [
        await fleet.start(FakeWorker(f"rank-{rank}", group_id="g", rank=rank, world_size=2))
        for rank in (0, 1)
    ]
    ranks[1].hold_results()
    async with AttachedFrontend(service.address) as frontend:
        await frontend.submit(1, [1, 2, 3], max_tokens=5)
        await until(lambda: ranks[1].plans, "it has a plan")
        ranks[1].busy_us = int(MAX_HANGS * LIMIT_S * 1e6)
        await until(lambda: ranks[1].stop_reason, "it was asked to stop")
        assert states(service) == {"g": HUNG}
        await ranks[1].kill()
        await fleet.start(FakeWorker("new", group_id="g", rank=1, world_size=2))
        await frontend.wait_finished(1)
        assert frontend.tokens[1] == counted(3, 5)
    assert ranks[0].directives == ["serve"]


class RegistrationStream:
    """The core's side of a worker's registration stream, whose first message is already there."""

    def __init__(self, registration: pb.WorkerRegistration) -> None:
        self._unread = [registration]
        self.directives: list[str | None] = []

    async def read(self) -> pb.RegisterWorkerRequest:
        if not self._unread:
            await asyncio.Event().wait()
        heartbeat = pb.WorkerHeartbeat(registration=self._unread.pop(), state=READY)
        return pb.RegisterWorkerRequest(heartbeat=heartbeat)

    async def write(self, response: pb.RegisterWorkerResponse) -> None:
        self.directives.append(response.directive.WhichOneof("directive"))


async def test_a_hung_group_whose_ranks_registered_in_one_turn_waits_for_a_rank_to_register_again(
    service: CoreService, fleet: Fleet
) -> None:
    ranks = [FakeWorker(f"rank-{n}", group_id="g", rank=n, world_size=2) for n in (0, 1)]
    for worker in ranks:
        await worker.listen()
    streams: list[Any] = [RegistrationStream(worker.registration()) for worker in ranks]
    # Both are read, and their ranks added, before the loop runs anything that either starts.
    serving = [asyncio.create_task(service.registry.serve(None, stream)) for stream in streams]
    await until(lambda: states(service) == {"g": READY}, "the group is whole")
    ranks[1].hold_results()
    async with AttachedFrontend(service.address) as frontend:
        await frontend.submit(1, [1, 2, 3], max_tokens=5)
        await until(lambda: ranks[1].plans, "it has a plan")
        ranks[1].busy_us = int(MAX_HANGS * LIMIT_S * 1e6)
        await until(lambda: streams[1].directives == ["serve", "stop"], "it was asked to stop")
        num_infos = [worker.num_infos for worker in ranks]
        await frontend.submit(2, [7], max_tokens=3)
        await until(lambda: 2 in frontend.accepted, "the core has answered another message")
        assert states(service) == {"g": HUNG}
        assert [worker.num_infos for worker in ranks] == num_infos, "no one connects to it"
        await ranks[1].kill()
        await fleet.start(FakeWorker("new", group_id="g", rank=1, world_size=2))
        await frontend.wait_finished(1, 2)
        assert frontend.tokens[1] == counted(3, 5)
    for task in serving:
        task.cancel()
    await ranks[0].kill()


async def test_a_worker_that_reads_no_plans_holds_up_nobody_else(
    service: CoreService, fleet: Fleet
) -> None:
    long_model = {"model": "long", "max_model_len": 100_000, "num_gpu_blocks": 30_000}
    stalled = FakeWorker("stalled", **long_model)  # type: ignore[arg-type]
    stalled.may_read.clear()
    await fleet.start(stalled)
    await fleet.start(FakeWorker("sound"))
    await until(lambda: set(states(service).values()) == {READY}, "both are used")
    async with AttachedFrontend(service.address) as frontend:
        # More than a stream's window takes: the core's write waits.
        await frontend.submit(1, [5] * 40_000, max_tokens=2, model="long")
        await until(lambda: 1 in frontend.accepted, "the request was accepted")
        for handle in range(2, 6):
            await frontend.submit(handle, range(handle), max_tokens=30)
        await frontend.wait_finished(*range(2, 6))
        await until(lambda: stalled.epochs[1:], "its stream was given up")
        await frontend.cancel(1)
        stalled.may_read.set()
        await until(lambda: states(service)["stalled"] == READY, "it is used again")


async def test_a_worker_that_another_core_has_taken_over_is_left_to_it(
    service: CoreService, fleet: Fleet
) -> None:
    worker = await fleet.start(FakeWorker("w"))
    async with AttachedFrontend(service.address) as frontend:
        await frontend.submit(1, [7], max_tokens=3)
        await frontend.wait_finished(1)
    worker.last_epoch = 50
    worker.break_stream()
    await until(lambda: not states(service), "it was given up")
    assert (worker.epochs, worker.stop_reason) == ([1], None)
    worker.register(service.address, last_epoch=50)
    await until(lambda: states(service) == {"w": READY}, "it has come back by its own wish")
    assert worker.epochs == [1, 51]


@pytest.mark.parametrize("way", ["loses_up", "loses_down"])
async def test_a_worker_that_is_cut_off_in_one_direction_loses_its_requests_until_it_is_not(
    service: CoreService, fleet: Fleet, way: str
) -> None:
    """Its heartbeats use another connection, so nothing else shows the loss."""
    worker = FakeWorker("cut-off")
    await worker.listen()
    async with one_way_proxy(worker.address) as proxy:
        worker.advertise = proxy.address
        await fleet.start(worker)
        async with AttachedFrontend(service.address) as frontend:
            await frontend.submit(1, [1, 2, 3], max_tokens=300)
            await frontend.wait_tokens(1, 5)
            setattr(proxy, way, True)
            await until(lambda: states(service)["cut-off"] != READY, "it is not used")
            await fleet.start(FakeWorker("sound"))
            await frontend.wait_finished(1)
            assert frontend.tokens[1] == counted(3, 300)
        setattr(proxy, way, False)
        await until(lambda: states(service)["cut-off"] == READY, "it is used again")
    assert worker.directives == ["serve"], "its registration went on"
