"""Which worker groups are woken, since there may be a plan for them, and after what."""

import asyncio
from dataclasses import replace

import pytest

from scheduler_service.core import (
    EngineOutputs,
    ResultMismatch,
    SchedulerConfig,
    SchedulerCore,
    StepResult,
)
from scheduler_service.core.config import MoveKV, Role
from scheduler_service.core.request import Request
from scheduler_service.core.step_plan import StepPlan
from scheduler_service.core_service.driver import CoreDriver
from tests.support.core_driver import make_capacity, make_request


class Deployment:
    """A core with worker groups, none of which plans by itself."""

    def __init__(self, config: SchedulerConfig, **models: str) -> None:
        """`models`: by group."""
        self.now = 0.0
        self.driver = CoreDriver(SchedulerCore(config), clock=lambda: self.now)
        self._work = {
            group_id: self.driver.add_worker_group(make_capacity(group_id, model=model))
            for group_id, model in models.items()
        }
        self.pop_woken()

    def submit(self, request: Request) -> None:
        """Queue a request."""
        self.driver.core.submit(request, self.now)
        self.driver.follow_up()

    def next_plan(self, group_id: str) -> StepPlan | None:
        """A group's next step."""
        plan = self.driver.core.schedule(group_id, self.now)
        self.driver.follow_up()
        return plan

    def apply(self, group_id: str, result: StepResult) -> None:
        """Apply a group's result."""
        self.driver.core.update(group_id, result, self.now)
        self.driver.follow_up(group_id)

    def pop_woken(self) -> set[str]:
        """Groups that were woken since the last call."""
        woken = {group_id for group_id, work in self._work.items() if work.is_set()}
        for work in self._work.values():
            work.clear()
        return woken


async def test_a_request_wakes_the_groups_of_its_model_that_can_plan() -> None:
    deployment = Deployment(SchedulerConfig(pipeline_depth=2), full="m", idle="m", other="n")
    driver = deployment.driver
    deployment.submit(make_request())
    assert deployment.pop_woken() == {"full", "idle"}
    assert deployment.next_plan("full") is not None
    assert deployment.next_plan("full") is not None
    deployment.pop_woken()
    deployment.submit(make_request(handle=2, request_id="r2"))
    assert deployment.pop_woken() == {"idle"}
    driver.close()


class Awaited(asyncio.Event):
    """A frontend's stream: its writer waits for outputs."""

    def deliver(self, outbox: EngineOutputs) -> None:
        self.set()


async def test_the_outputs_of_a_result_are_written_before_the_next_step_is_planned() -> None:
    driver = CoreDriver(SchedulerCore(SchedulerConfig()), clock=lambda: 0.0)
    driver.add_frontend("f0", writer := Awaited())
    planner = driver.add_worker_group(make_capacity("g"))
    driver.core.submit(make_request(), 0.0)
    driver.follow_up()
    assert driver.core.schedule("g", 0.0) is not None
    driver.follow_up()
    ran: list[str] = []

    async def run(name: str, event: asyncio.Event) -> None:
        event.clear()
        await event.wait()
        ran.append(name)

    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(run("planner", planner))
        tasks.create_task(run("writer", writer))
        await asyncio.sleep(0)
        driver.core.update("g", StepResult(step_id=1, token_ids=[7]), 0.0)
        driver.follow_up("g")
    assert ran == ["writer", "planner"]
    driver.close()


async def test_a_deadline_that_a_group_comes_upon_wakes_the_groups_of_the_requests_model() -> None:
    deployment = Deployment(SchedulerConfig(), one="m", another="n")
    driver = deployment.driver
    deployment.submit(make_request(model="n", deadline=1.0))
    deployment.pop_woken()
    deployment.now = 2.0
    assert deployment.next_plan("one") is None
    assert len(driver.core.requests) == 0
    assert deployment.pop_woken() == {"another"}
    driver.close()


@pytest.mark.parametrize("then", ["ends", "goes on"])
async def test_a_group_that_drains_is_woken_when_nothing_can_come_to_it_any_more(then: str) -> None:
    """What was on its way to one of two that drain has ended, or is in the other."""
    deployment = Deployment(SchedulerConfig(), first="m", second="m")
    driver = deployment.driver
    deployment.submit(make_request(max_tokens=1 if then == "ends" else 4))
    assert deployment.next_plan("first") is not None
    driver.drain_worker_group("first")
    driver.drain_worker_group("second")
    assert not driver.is_drained("second")
    deployment.pop_woken()
    deployment.apply("first", StepResult(step_id=1, token_ids=[7]))
    if then == "goes on":
        assert deployment.next_plan("first") is not None
    assert driver.is_drained("second")
    assert deployment.pop_woken() == {"first", "second"}
    driver.close()


async def test_a_lease_and_its_fetch_are_planned_before_the_first_token_is_sent() -> None:
    driver = CoreDriver(SchedulerCore(SchedulerConfig(move_kv=MoveKV.ALWAYS)), clock=lambda: 0.0)
    layout = {"kv_layout": (("layout", "one"),), "addresses": ("there",), "epoch": 7}
    work = {
        role: driver.add_worker_group(replace(make_capacity(role), role=role, **layout))  # type: ignore[arg-type]
        for role in (Role.PREFILL, Role.DECODE)
    }
    driver.core.submit(make_request(prompt_token_ids=[*range(20)]), 0.0)
    assert driver.core.schedule(Role.PREFILL, 0.0) is not None
    driver.follow_up()
    mailbox = Bell()
    driver.add_frontend("f0", mailbox)
    done: list[str] = []

    async def plan(role: Role) -> None:
        work[role].clear()
        await work[role].wait()
        step = driver.core.schedule(role, 0.0)
        driver.follow_up()
        assert step is not None
        done.extend(["lease"] * len(step.leases) + ["fetch"] * len(step.fetches))

    async def send() -> None:
        await mailbox.rung.wait()
        done.append("token")

    async with asyncio.TaskGroup() as tasks:
        for role in work:
            tasks.create_task(plan(role))
        tasks.create_task(send())
        await asyncio.sleep(0)
        driver.core.update(Role.PREFILL, StepResult(step_id=1, token_ids=[7]), 0.0)
        driver.follow_up(Role.PREFILL)
    assert done == ["lease", "fetch", "token"]
    driver.close()


class Bell:
    """Rings when there are outputs."""

    def __init__(self) -> None:
        self.rung = asyncio.Event()

    def deliver(self, outbox: EngineOutputs) -> None:
        self.rung.set()


async def test_a_span_that_cannot_be_exported_disturbs_no_caller() -> None:
    deployment = Deployment(SchedulerConfig(), one="m")
    driver, problems = deployment.driver, list[object]()

    def export(traced: object) -> None:
        raise RuntimeError("no exporter")

    driver.on_traced = export
    loop = asyncio.get_running_loop()
    loop.set_exception_handler(lambda _, context: problems.append(context["exception"]))
    deployment.submit(make_request(traceparent=f"00-{'1' * 32}-{'2' * 16}-01"))
    driver.core.cancel("f0", 1, deployment.now)
    driver.follow_up()
    await asyncio.sleep(0)
    assert [str(problem) for problem in problems] == ["no exporter"]
    driver.close()


class Unplannable(SchedulerCore):
    """Plans for group `bad` fail by an error that the core does not declare, half way."""

    def schedule(self, worker_group_id: str, now: float) -> StepPlan | None:
        plan = super().schedule(worker_group_id, now)
        if worker_group_id == "bad":
            raise KeyError(17)
        return plan


class Received:
    """Keeps the errors of requests by their handles."""

    def __init__(self) -> None:
        self.errors: dict[int, Exception] = {}

    def deliver(self, outbox: EngineOutputs) -> None:
        self.errors |= dict(outbox.requests_failed)


async def test_an_undeclared_error_ends_the_requests_of_its_group_and_wakes_the_others() -> None:
    driver = CoreDriver(Unplannable(SchedulerConfig()), clock=lambda: 0.0)
    mailbox = Received()
    driver.add_frontend("f0", mailbox)
    driver.add_worker_group(make_capacity("bad"))
    other = driver.add_worker_group(make_capacity("good", model="n"))
    driver.core.submit(make_request(handle=1, request_id="r1"), 0.0)
    driver.core.submit(make_request(handle=2, request_id="r2", model="n"), 0.0)
    driver.follow_up()
    other.clear()
    with pytest.raises(KeyError), driver.contained("bad"):
        driver.core.schedule("bad", 0.0)
    driver.core.check()
    assert other.is_set()
    assert driver.is_drained("bad"), "it is gone"
    assert {handle: str(error) for handle, error in mailbox.errors.items()} == {
        1: "the scheduler failed with KeyError: 17 while it worked on this request; it may be "
        "tried again, and the core's log says more"
    }
    driver.close()


async def test_a_result_that_does_not_match_is_no_fault_and_ends_no_request() -> None:
    driver = CoreDriver(SchedulerCore(SchedulerConfig()), clock=lambda: 0.0)
    mailbox = Received()
    driver.add_frontend("f0", mailbox)
    driver.add_worker_group(make_capacity("g"))
    driver.core.submit(make_request(), 0.0)
    with pytest.raises(ResultMismatch), driver.contained("g"):
        driver.core.update("g", StepResult(step_id=7, token_ids=[]), 0.0)
    assert not mailbox.errors
    assert len(driver.core.requests) == 1
    driver.close()
