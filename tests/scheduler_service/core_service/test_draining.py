"""Worker groups are drained: what they run goes on in others, and operators see it."""

import asyncio

import pytest
from typer.testing import CliRunner, Result

from pagewire.v1 import scheduler_service_pb2 as pb
from pagewire.v1 import status_pb2
from pagewire.v1.scheduler_service_pb2_grpc import SchedulerServiceStub
from pagewire_cli.app import app
from pagewire_client.errors import DeadlineExceeded, NotFound
from scheduler_service.core_service.service import CoreService
from tests.scheduler_service.core_service.conftest import Fleet
from tests.support.attached_frontend import AttachedFrontend
from tests.support.fake_worker import FakeWorker, counted
from tests.support.waiting import until

DRAINING = status_pb2.WORKER_STATE_DRAINING


async def status_of(core: SchedulerServiceStub) -> dict[str, status_pb2.WorkerGroupStatus]:
    answer = await core.GetStatus(pb.SchedulerServiceGetStatusRequest())
    return {group.group_id: group for group in answer.status.groups}


def ready_groups(service: CoreService) -> set[str]:
    return {group.group_id for group in service.registry if group.is_ready}


async def start_two(service: CoreService, fleet: Fleet) -> tuple[FakeWorker, FakeWorker]:
    """One group, on which the first request runs, and one that joined later."""
    leaving = await fleet.start(FakeWorker("leaving"))
    await until(lambda: ready_groups(service) == {"leaving"}, "the first group is ready")
    staying = await fleet.start(FakeWorker("staying"))
    await until(lambda: "staying" in ready_groups(service), "both groups are ready")
    return leaving, staying


async def run_drain(service: CoreService, *arguments: str) -> Result:
    """`pagewire drain`, while the core goes on."""
    command = ["drain", *arguments, "--core", service.address]
    return await asyncio.to_thread(CliRunner().invoke, app, command)


@pytest.mark.parametrize("by", ["operator", "worker"])
async def test_what_runs_goes_on_in_another_group_at_once(
    service: CoreService, fleet: Fleet, core: SchedulerServiceStub, by: str
) -> None:
    leaving, staying = await start_two(service, fleet)
    async with AttachedFrontend(service.address) as frontend:
        await frontend.submit(1, [1, 2, 3], max_tokens=200)
        await frontend.wait_tokens(1, 3)
        leaving.hold_results()
        await until(lambda: len(leaving.plans) >= leaving.num_results + 2, "a step is in flight")
        if by == "operator":
            await core.DrainWorker(pb.DrainWorkerRequest(group_id="leaving"))
        else:
            leaving.heartbeat_state = DRAINING
        await until(lambda: "drain" in leaving.directives, "it was asked to drain")
        group = (await status_of(core))["leaving"]
        assert (group.state, group.num_running_sequences) == (DRAINING, 0)
        num_planned = len(leaving.plans)
        leaving.may_answer.set()
        await until(lambda: leaving.stop_reason == "drained", "it was asked to stop")
        assert len(leaving.plans) == num_planned, "nothing more was planned there"
        await until(lambda: "leaving" not in ready_groups(service), "the group is gone")
        await frontend.wait_finished(1)
        assert frontend.tokens[1] == counted(3, 200)
        [moved] = [new for plan in staying.plans for new in plan.new_sequences]
        assert moved.num_prompt_tokens == 3
        assert len(moved.token_ids) // 4 > 3, "with the tokens it had"
    assert list(await status_of(core)) == ["staying"]


async def test_a_group_that_leaves_gets_no_request_back_when_the_others_are_drained_too(
    service: CoreService, fleet: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other one is drained just when the first has been found to be drained."""
    leaving, staying = await start_two(service, fleet)
    is_drained = service.driver.is_drained

    def drain_the_other_then(group_id: str) -> bool:
        drained = is_drained(group_id)
        if drained and group_id == "leaving":
            service.registry.drain("staying")
        return drained

    monkeypatch.setattr(service.driver, "is_drained", drain_the_other_then)
    async with AttachedFrontend(service.address) as frontend:
        await frontend.submit(1, [1, 2, 3], max_tokens=200)
        await frontend.wait_tokens(1, 3)
        leaving.hold_results()
        await until(lambda: len(leaving.plans) >= leaving.num_results + 2, "a step is in flight")
        service.registry.drain("leaving")
        leaving.may_answer.set()
        await frontend.wait_finished(1)
    assert frontend.tokens[1] == counted(3, 200)
    assert leaving.stop_reason == "drained"
    assert staying.plans


async def test_a_group_whose_caches_are_being_made_is_drained_at_once(
    service: CoreService, fleet: Fleet
) -> None:
    worker = FakeWorker("starting")
    worker.may_initialize.clear()
    await fleet.start(worker)
    await until(lambda: worker.num_profiles, "it is being sized")
    service.registry.drain("starting")
    await until(lambda: worker.stop_reason == "drained", "it was asked to stop")
    assert worker.directives == ["serve", "drain", "stop"]
    worker.may_initialize.set()


async def test_the_command_waits_until_the_group_is_gone(
    service: CoreService, fleet: Fleet
) -> None:
    leaving, _ = await start_two(service, fleet)
    async with AttachedFrontend(service.address) as frontend:
        await frontend.submit(1, [1, 2, 3], max_tokens=100)
        await frontend.wait_tokens(1, 3)
        result = await run_drain(service, "leaving", "--wait", "--timeout", "20")
        assert result.exit_code == 0, result.output
        assert result.stderr.splitlines()[-1] == "leaving is drained"
        assert leaving.stop_reason == "drained"
        await frontend.wait_finished(1)
        assert frontend.tokens[1] == counted(3, 100)


async def test_the_command_gives_up_waiting_in_time_and_the_group_goes_on_draining(
    service: CoreService, fleet: Fleet, core: SchedulerServiceStub
) -> None:
    leaving = await fleet.start(FakeWorker("leaving"))
    async with AttachedFrontend(service.address) as frontend:
        await frontend.submit(1, [1, 2, 3], max_tokens=100)
        await frontend.wait_tokens(1, 3)
        leaving.hold_results()
        result = await run_drain(service, "leaving", "--wait", "--timeout", "0.3")
        assert isinstance(result.exception, DeadlineExceeded)
        assert result.exception.message == "leaving is still draining"
        assert "leaving is draining, 1 sequences run" in result.stderr
        assert (await status_of(core))["leaving"].state == DRAINING
        leaving.may_answer.set()
        await frontend.wait_finished(1)


async def test_the_command_lists_the_groups_when_there_is_no_such_one(
    service: CoreService, fleet: Fleet
) -> None:
    for others, there in (((), "none"), (("two", "one"), "one, two")):
        for name in others:
            await fleet.start(FakeWorker(name))
        result = await run_drain(service, "nobody")
        assert isinstance(result.exception, NotFound)
        assert result.exception.message == (
            f"no worker group 'nobody' is registered; there is: {there}"
        )
