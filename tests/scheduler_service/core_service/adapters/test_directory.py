"""Changes of tables that a worker does not complete are undone on all workers, in the end."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Generator
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from typing import Any

import grpc
import pytest

from pagewire.v1 import scheduler_service_pb2 as pb
from pagewire.v1 import worker_service_pb2 as worker_pb
from pagewire.v1.adapter_pb2 import AdapterInfo, AdapterSet
from scheduler_service.core import ContextKind, ContextPart, SchedulerConfig, SchedulerCore
from scheduler_service.core_service.adapters.directory import AdapterDirectory
from scheduler_service.core_service.adapters.tables import contents
from scheduler_service.core_service.driver import CoreDriver
from scheduler_service.core_service.workers.errors import SessionFailed
from scheduler_service.errors import DuplicateAdapter, Unavailable, UnknownAdapter
from tests.support.clocks import Clock
from tests.support.core_driver import make_request

MODEL = "m"


def error_of_call(code: grpc.StatusCode, details: str) -> grpc.aio.AioRpcError:
    """How a call to a worker ends."""
    none = grpc.aio.Metadata()
    return grpc.aio.AioRpcError(code, none, none, details)


class Worker:
    """A stub's calls. Its contents are paths."""

    def __init__(self, name: str) -> None:
        self.table = AdapterSet()
        self.contents: dict[bytes, str] = {}
        self.files = {"/kept", "/new", "/later", "/x", "/own"}
        self.loses_answers = False
        self.num_put = 0
        self.on_load: Callable[[], Awaitable[None]] | None = None
        self.on_set: Callable[[], None] = lambda: None
        self.answered = asyncio.Event()
        """Set when it has set a table."""
        self.is_asked, self.may_answer = asyncio.Event(), asyncio.Event()
        """Set when it is to set a table, and unless it lets such a call wait."""
        self.may_answer.set()
        self.registration = pb.WorkerRegistration(worker_id=name, address=name)
        self.registration.model.name, self.registration.model.max_loras = MODEL, 1

    async def LoadAdapter(
        self, request: worker_pb.WorkerServiceLoadAdapterRequest, **_: float
    ) -> worker_pb.WorkerServiceLoadAdapterResponse:
        if self.on_load is not None:
            await self.on_load()
        if request.path not in self.files:
            raise error_of_call(grpc.StatusCode.NOT_FOUND, "no such file")
        info = AdapterInfo(digest=request.path.encode().ljust(32), rank=1, num_bytes=1)
        self.contents[info.digest] = request.path
        return worker_pb.WorkerServiceLoadAdapterResponse(adapter=info)

    async def SetAdapters(
        self, request: worker_pb.SetAdaptersRequest, **_: float
    ) -> worker_pb.SetAdaptersResponse:
        self.is_asked.set()
        await self.may_answer.wait()
        wanted = contents(request.adapters).keys()
        self.on_set()
        if missing := wanted - self.contents.keys():
            return worker_pb.SetAdaptersResponse(missing=missing)
        if request.adapters.version < self.table.version:
            raise error_of_call(grpc.StatusCode.ABORTED, "stale")
        self.table.CopyFrom(request.adapters)
        self.contents = {digest: self.contents[digest] for digest in wanted}
        if self.loses_answers:
            raise error_of_call(grpc.StatusCode.UNAVAILABLE, "lost")
        self.answered.set()
        return worker_pb.SetAdaptersResponse()

    async def GetAdapter(
        self, request: worker_pb.GetAdapterRequest, **_: float
    ) -> AsyncIterator[worker_pb.GetAdapterResponse]:
        yield worker_pb.GetAdapterResponse(data=self.contents[request.digest].encode())

    def PutAdapter(self, **_: float) -> "Putting":
        return Putting(self)


class Putting:
    """A call of `PutAdapter`."""

    def __init__(self, worker: Worker) -> None:
        self.worker = worker
        self.path = b""

    async def write(self, request: worker_pb.PutAdapterRequest) -> None:
        self.path += request.data

    async def done_writing(self) -> None:
        self.worker.contents[self.path.ljust(32)] = self.path.decode()
        self.worker.num_put += 1

    def __await__(self) -> Generator[None, None, None]:
        yield


def make_directory(*workers: Worker, **settings: float) -> AdapterDirectory:
    by_address = {worker.registration.address: worker for worker in workers}

    @asynccontextmanager
    async def dial(address: str) -> AsyncIterator[Any]:
        yield by_address[address]

    driver = CoreDriver(SchedulerCore(SchedulerConfig()), clock=Clock())
    return AdapterDirectory(
        driver, dial, on_change=lambda: None, collect_interval_s=0.001, **settings
    )


@asynccontextmanager
async def running(directory: AdapterDirectory) -> AsyncIterator[asyncio.Task[None]]:
    """A context in which the directory's background task runs."""
    task = asyncio.create_task(directory.run())
    yield task
    task.cancel()
    with suppress(asyncio.CancelledError):
        await task


@pytest.mark.parametrize("has_lost_content", [False, True])
async def test_a_worker_whose_answers_were_lost_gets_the_valid_table_later(
    has_lost_content: bool,
) -> None:
    one, two = Worker("a"), Worker("b")
    directory = make_directory(one, two, settle_s=0.0)
    async with directory.joined([one.registration]), directory.joined([two.registration]):
        kept = await directory.load("kept", "/kept", MODEL, replace=False, names=())
        two.loses_answers = True
        with pytest.raises(Unavailable, match="lost"):
            await directory.load("new", "/new", MODEL, replace=False, names=())
        assert directory.num_changes == {("load", "done"): 1, ("load", "failed"): 1}
        if has_lost_content:
            two.table, two.contents = AdapterSet(), {}
        two.loses_answers = False
        two.answered.clear()
        async with running(directory), asyncio.timeout(10):
            await two.answered.wait()
        [announced] = directory.announced()
        assert one.table == two.table == announced.adapters
        assert list(two.table.adapters) == [kept]
        assert two.contents == one.contents == {kept.digest: "/kept"}
        assert two.num_put == has_lost_content
        usage = [(adapter.name, state, number) for _, adapter, state, number in directory.usage()]
        assert usage == [("kept", "running", 0), ("kept", "waiting", 0)]


async def test_a_worker_may_leave_while_others_get_the_valid_table() -> None:
    one, two = Worker("a"), Worker("b")
    directory = make_directory(one, two, settle_s=0.0)
    async with directory.joined([one.registration]), AsyncExitStack() as stack:
        async with directory.joined([two.registration]):
            one.loses_answers = two.loses_answers = True
            with pytest.raises(Unavailable, match="lost"):
                await directory.load("new", "/new", MODEL, replace=False, names=())
            one.loses_answers = two.loses_answers = False
            one.is_asked.clear()
            one.may_answer.clear()
            restoring = await stack.enter_async_context(running(directory))
            async with asyncio.timeout(10):
                await one.is_asked.wait()
        one.answered.clear()
        one.may_answer.set()
        async with asyncio.timeout(10):
            await one.answered.wait()
        await directory.load("later", "/later", MODEL, replace=False, names=())
        assert [adapter.name for adapter in one.table.adapters] == ["later"]
        assert not restoring.done()


@pytest.mark.parametrize("was_lost", [False, True])
async def test_workers_agree_after_one_could_not_join(was_lost: bool) -> None:
    """Those that were there may have a later table then than the one that is valid."""
    one, two, three = workers = [Worker(name) for name in "abc"]
    directory = make_directory(*workers, settle_s=0.0)
    digest = b"/other".ljust(32)
    table = two.registration.adapters
    table.version = 7
    table.adapters.add(name="other", digest=digest, path="/other")
    if not was_lost:
        two.contents[digest] = "/other"
    async with directory.joined([one.registration]):
        one.loses_answers = True
        for _ in range(2):
            with pytest.raises(SessionFailed, match="lost"):
                async with directory.joined([two.registration]):
                    pass
        one.loses_answers = False
        async with directory.joined([three.registration]):
            await directory.load("new", "/new", MODEL, replace=False, names=())
            assert one.table == three.table
            async with directory.joined([two.registration]):
                [announced] = directory.announced()
                assert one.table == two.table == three.table == announced.adapters
                assert "new" in [adapter.name for adapter in one.table.adapters]
                held = {*contents(one.table)}
                assert (digest in held) == (not was_lost)


def submit(directory: AdapterDirectory, digest: bytes) -> None:
    context = (ContextPart(ContextKind.ADAPTER, digest),)
    driver = directory.driver
    driver.core.submit(make_request(model=MODEL, context=context), driver.clock())


async def test_no_request_gets_a_content_that_workers_are_dropping() -> None:
    worker = Worker("a")
    directory = make_directory(worker, settle_s=0.0, retain_s=0.0)
    async with directory.joined([worker.registration]):
        adapter = await directory.load("x", "/x", MODEL, replace=False, names=())
        await directory.unload("x")
        refused = asyncio.Event()

        def try_now() -> None:
            with pytest.raises(UnknownAdapter):
                submit(directory, adapter.digest)
            refused.set()

        worker.on_set = try_now
        async with running(directory), asyncio.timeout(10):
            await refused.wait()
            while worker.contents:
                await worker.answered.wait()


async def test_a_content_is_kept_for_a_request_that_came_and_ended_between_two_checks() -> None:
    """A worker may have yet to execute the plan with it, which it would refuse."""
    worker = Worker("a")
    directory = make_directory(worker, settle_s=0.0, retain_s=60.0)
    clock = directory.driver.clock
    assert isinstance(clock, Clock)
    async with directory.joined([worker.registration]):
        adapter = await directory.load("x", "/x", MODEL, replace=False, names=())
        await directory.unload("x")
        [model] = directory._models.values()
        await model.collect(60.0)
        clock.now += 61.0
        submit(directory, adapter.digest)
        [seq_group] = directory.driver.core.requests.seq_groups()
        request = seq_group.request
        directory.driver.core.abort(request.tenant, request.request_id, clock())
        assert len(directory.driver.core.requests) == 0
        await model.collect(60.0)
        assert adapter.digest in worker.contents
        clock.now += 61.0
        await model.collect(60.0)
        assert not worker.contents


async def test_no_request_gets_a_content_that_only_some_workers_have_dropped() -> None:
    workers = Worker("a"), Worker("b")
    directory = make_directory(*workers, settle_s=0.0)
    async with directory.joined([worker.registration for worker in workers]):
        adapter = await directory.load("x", "/x", MODEL, replace=False, names=())
        await directory.unload("x")
        [model] = directory._models.values()
        workers[1].loses_answers = True
        await model.collect(0.0)
        assert not workers[0].contents
        with pytest.raises(UnknownAdapter):
            submit(directory, adapter.digest)
        workers[1].loses_answers = False
        await model.bring_up()
        assert workers[0].table == workers[1].table == model.table
        assert not contents(model.table)


async def test_requests_end_whose_adapter_no_worker_has_brought_until_tables_are_settled() -> None:
    worker = Worker("a")
    directory = make_directory(worker, settle_s=2.0)
    requests, clock = directory.driver.core.requests, directory.driver.clock
    assert isinstance(clock, Clock)
    async with directory.joined([worker.registration]):
        submit(directory, bytes(32))
        assert len(requests) == 1
        clock.now += 3.0
        settled = asyncio.Event()
        directory.on_change = settled.set
        async with running(directory), asyncio.timeout(10):
            await settled.wait()
        assert len(requests) == 0


async def test_a_name_means_the_adapter_of_one_model() -> None:
    """Also while it is being loaded, and if a worker was started with such an adapter."""
    first, second = Worker("a"), Worker("b")
    second.registration.model.name = "other"
    started = await second.LoadAdapter(worker_pb.WorkerServiceLoadAdapterRequest(path="/own"))
    second.registration.adapters.adapters.add(name="x", digest=started.adapter.digest, path="/own")
    directory = make_directory(first, second, settle_s=0.0)

    async def load(model: str) -> None:
        await directory.load("x", "/x", model, replace=False, names=())

    async def load_elsewhere() -> None:
        async with directory.joined([second.registration]):
            with pytest.raises(DuplicateAdapter, match="an adapter of the model 'm'"):
                await load("other")
        tried.set()

    tried = asyncio.Event()
    first.on_load = load_elsewhere
    async with directory.joined([first.registration]):
        await load(MODEL)
        assert tried.is_set()
        with pytest.raises(DuplicateAdapter):
            await load("other")
        assert [len(table.adapters.adapters) for table in directory.announced()] == [1, 0]
        await directory.unload("x")
        second.registration.adapters.Clear()
        async with directory.joined([second.registration]):
            await load("other")
