"""A worker and the core it registers with."""

import asyncio
import logging
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import grpc
import pytest

from pagewire.v1 import scheduler_service_pb2, status_pb2, worker_service_pb2
from tests.support.counting_model import CountingModel, loaded_counting_model, next_token
from tests.support.fake_registry import LEASE_MS, FakeRegistry, Registered, fake_registry
from tests.support.running_worker import Steps, running_worker
from tests.support.waiting import until
from tests.support.worker_driver import PlanBuilder, Row, values
from worker_service.address import Address, advertised
from worker_service.errors import InvalidOption, WorkerRejected
from worker_service.load_progress import FrontendFiles, LoadProgress
from worker_service.loader import LoadedModel
from worker_service.runner.torch_executor import TorchExecutor
from worker_service.service import lifecycle

READY, DRAINING = status_pb2.WORKER_STATE_READY, status_pb2.WORKER_STATE_DRAINING


@pytest.fixture
def core_address() -> Iterator[str]:
    # Not tmp_path: the path of a unix socket is limited to some hundred characters.
    with TemporaryDirectory(prefix="pw-") as folder:
        yield f"unix:{folder}/core.sock"


async def first_stream(registry: FakeRegistry) -> Registered:
    await until(lambda: registry.streams, "the worker registers")
    return registry.streams[0]


async def test_a_worker_reports_how_far_it_has_loaded_its_model(core_address: str) -> None:
    progress, may_end = LoadProgress(show_bar=False), threading.Event()

    def load() -> LoadedModel:
        with progress.phase("loading weights", 1000) as advance:
            advance(370)
            assert may_end.wait(60)
        return loaded_counting_model()

    async with (
        fake_registry(core_address) as registry,
        running_worker(load=load, progress=progress, core=core_address),
    ):
        await until(lambda: registry.loads, "the worker reports its load")
        heartbeats = registry.loads[0].heartbeats
        await until(lambda: len(heartbeats) > 1 and heartbeats[-1].loading.done_bytes, "bytes")
        last = heartbeats[-1]
        assert not any(heartbeat.HasField("registration") for heartbeat in heartbeats)
        assert last.state == status_pb2.WORKER_STATE_STARTING
        assert (last.loading.group_id, last.loading.model) == ("group", "counting")
        assert (last.loading.phase, last.loading.done_bytes) == ("loading weights", 370)
        assert last.loading.total_bytes == 1000
        may_end.set()
        stream = await first_stream(registry)
        assert stream.registration.model.name == "counting"
        await until(lambda: not registry.loads[0].is_open, "the load's stream ends")


async def test_a_worker_sends_files_that_it_has_read_before_it_has_loaded_its_model(
    core_address: str,
) -> None:
    progress, may_end = LoadProgress(show_bar=False), threading.Event()

    def load() -> LoadedModel:
        assert may_end.wait(60)
        return loaded_counting_model()

    async with (
        fake_registry(core_address) as registry,
        running_worker(load=load, progress=progress, core=core_address) as running,
    ):
        request = worker_service_pb2.WorkerServiceGetModelAssetsRequest()
        with pytest.raises(grpc.aio.AioRpcError, match="still loading"):
            await running.stub.GetModelAssets(request).read()
        await until(lambda: registry.loads, "the worker reports its load")
        heartbeats = registry.loads[0].heartbeats
        await until(lambda: heartbeats, "a first report")
        assert not heartbeats[0].loading.address
        progress.publish(FrontendFiles("counting", {"config.json": b"{}", "empty": b""}))
        await until(lambda: heartbeats[-1].loading.address, "it says where they are")
        last = heartbeats[-1].loading
        assert (last.address, last.fingerprint) == (running.worker.address, "counting")
        chunks = [response.chunk async for response in running.stub.GetModelAssets(request)]
        found = [(chunk.file_name, chunk.data) for chunk in chunks]
        assert found == [("config.json", b"{}"), ("empty", b"")]
        may_end.set()
        assert (await first_stream(registry)).registration.model.fingerprint == "counting"


async def test_a_worker_waits_for_its_core_and_finds_it_again_when_it_is_lost(
    core_address: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    async with running_worker(core=core_address) as running:
        await running.initialize(9)
        await until(lambda: "not registered" in caplog.text, "the worker says that it waits")
        assert {record.levelname for record in caplog.records if "core=" in record.message} == {
            "INFO"
        }
        async with fake_registry(core_address) as registry:
            stream = await first_stream(registry)
            assert stream.registration.last_epoch == 9
            caplog.clear()
        await until(lambda: "not registered" in caplog.text, "the loss is logged")
        [first, *_] = [logged for logged in caplog.records if "not registered" in logged.message]
        assert first.levelname == "WARNING"
        async with fake_registry(core_address) as registry:
            again = await first_stream(registry)
            assert again.registration.worker_id == stream.registration.worker_id
        # It serves all the time.
        await running.initialize(10)


async def test_a_worker_that_was_stopped_says_that_its_lease_expired_and_registers_again(
    core_address: str, caplog: pytest.LogCaptureFixture
) -> None:
    async with fake_registry(core_address) as registry, running_worker(core=core_address):
        await until(lambda: registry.streams and registry.streams[0].heartbeats[1:], "heartbeats")
        stream = registry.streams[0]
        now = time.monotonic()
        while time.monotonic() < now + 2 * LEASE_MS / 1000:
            pass  # as a process that is stopped: nothing else runs on its event loop
        stream.directives.put_nowait(None)
        await until(
            lambda: "the lease expired: this process sent nothing for " in caplog.text,
            "the worker's reason",
        )
        await until(lambda: len(registry.streams) == 2, "the worker registers again")
    [line] = [message for message in caplog.messages if "lease" in message]
    assert line.startswith("not registered, trying until the core answers core=")


def find_a_route_at_try(number: int, monkeypatch: pytest.MonkeyPatch) -> list[Address | None]:
    """Let a worker find its own address only at this try; returns the cores of all tries. Whether
    names of hosts are known is up to the machine, which a test cannot change."""
    tried: list[Address | None] = []

    def try_once(listening: Address, core: Address | None) -> Address:
        tried.append(core)
        if len(tried) < number:
            raise InvalidOption("advertise: there is no route to the core")
        return advertised(listening, core)

    monkeypatch.setattr(lifecycle, "advertised", try_once)
    return tried


async def test_a_worker_outlives_a_time_in_which_its_core_s_name_is_not_known(
    core_address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where a name lives no longer than what it names, which is being started again."""
    tried = find_a_route_at_try(3, monkeypatch)
    async with (
        fake_registry(core_address) as registry,
        running_worker(core=core_address) as running,
    ):
        stream = await first_stream(registry)
        assert stream.registration.address == running.worker.address
        assert len(tried) == 3


async def test_a_report_of_a_load_without_an_address_begins_another_stream_at_once(
    core_address: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    progress, may_end = LoadProgress(show_bar=False), threading.Event()

    def load() -> LoadedModel:
        assert may_end.wait(60)
        return loaded_counting_model()

    find_a_route_at_try(2, monkeypatch)
    async with (
        fake_registry(core_address) as registry,
        running_worker(load=load, progress=progress, core=core_address) as running,
    ):
        await until(lambda: registry.loads and registry.loads[0].heartbeats[1:], "two reports")
        progress.publish(FrontendFiles("counting", {"config.json": b"{}"}))
        await until(lambda: registry.loads[1:] and registry.loads[1].heartbeats, "another stream")
        reported = registry.loads[1].heartbeats[0].loading
        assert reported.address == running.worker.address
        assert "reason=advertise: there is no route to the core" in caplog.text
        may_end.set()
        await first_stream(registry)


async def test_a_worker_that_is_told_its_address_looks_for_none(
    core_address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lifecycle, "advertised", lambda *_: pytest.fail("nobody asked"))
    told = "worker-7.pool:7620"
    async with (
        fake_registry(core_address) as registry,
        running_worker(core=core_address, advertise=told),
    ):
        assert (await first_stream(registry)).registration.address == told


async def test_an_idle_worker_that_is_told_to_end_takes_what_the_core_has_just_sent(
    core_address: str,
) -> None:
    async with (
        fake_registry(core_address) as registry,
        running_worker(core=core_address) as running,
    ):
        stream = await first_stream(registry)
        await running.initialize(1)
        await until(lambda: len(stream.heartbeats) > 1, "the worker has been welcomed")
        running.worker.end()
        await until(lambda: stream.heartbeats[-1].state == DRAINING, "the core is notified")
        steps, plans = Steps(running.stub), PlanBuilder()
        plans.add(1, [2])
        await steps.send(plans.plan([Row(1)]))
        assert values((await steps.result()).token_ids) == [next_token([2])]
        assert not running.task.done()
        assert await steps.finish() == grpc.StatusCode.OK
        await asyncio.wait_for(running.task, 60)


@pytest.mark.parametrize("how", ["stop", "end of the stream"])
async def test_an_idle_worker_that_is_told_to_end_is_released_by_the_core(
    core_address: str, how: str
) -> None:
    stop = scheduler_service_pb2.WorkerDirective(stop=scheduler_service_pb2.Stop(reason="drained"))
    async with (
        fake_registry(core_address) as registry,
        running_worker(core=core_address) as running,
    ):
        stream = await first_stream(registry)
        await until(lambda: len(stream.heartbeats) > 1, "the worker has been welcomed")
        running.worker.end()
        await until(lambda: stream.heartbeats[-1].state == DRAINING, "the core is notified")
        assert not running.task.done()
        stream.directives.put_nowait(stop if how == "stop" else None)
        await asyncio.wait_for(running.task, 60)


async def test_the_grace_period_bounds_the_end() -> None:
    async with running_worker(grace_period_s=0.05) as running:
        await running.initialize(1)
        steps = Steps(running.stub)
        await steps.send(PlanBuilder().plan([]))
        await steps.result()
        running.worker.end()
        await asyncio.wait_for(running.task, 60)
        assert (await steps.error()).code() in (
            grpc.StatusCode.UNAVAILABLE,
            grpc.StatusCode.CANCELLED,
        )


async def test_a_worker_that_is_sent_away_ends_with_the_reason(core_address: str) -> None:
    reason = "another model is served under this name"
    stop = scheduler_service_pb2.WorkerDirective(stop=scheduler_service_pb2.Stop(reason=reason))
    async with (
        fake_registry(core_address) as registry,
        running_worker(core=core_address) as running,
    ):
        (await first_stream(registry)).directives.put_nowait(stop)
        with pytest.raises(WorkerRejected, match=reason):
            await asyncio.wait_for(running.task, 60)


async def test_a_worker_can_end_while_it_loads() -> None:
    loading, may_load = threading.Event(), threading.Event()

    def load():  # type: ignore[no-untyped-def]
        loading.set()
        assert may_load.wait(60)
        raise AssertionError("nobody waits for this any more")

    async with running_worker(load=load) as running:
        await until(loading.is_set, "loading has begun")
        running.worker.end()
        await asyncio.wait_for(running.task, 60)
        may_load.set()


@pytest.mark.parametrize("method", ["profile_blocks", "make_runner"])
async def test_a_worker_can_end_while_it_prepares_to_serve(
    method: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    begun, may_go_on = threading.Event(), threading.Event()

    def prepare(*_: object, **__: object) -> None:
        begun.set()
        assert may_go_on.wait(60)

    async with running_worker() as running:
        await until(running.worker.ready.is_set, "the model is loaded")
        # In place of what takes minutes with a large model, and no time with this one.
        monkeypatch.setattr(TorchExecutor, method, prepare)
        call = asyncio.ensure_future(
            running.stub.ProfileBlocks(
                worker_service_pb2.ProfileBlocksRequest(max_num_seqs=3, max_num_batched_tokens=64)
            )
            if method == "profile_blocks"
            else running.initialize(1)
        )
        await until(begun.is_set, "the preparation has begun")
        running.worker.end_at_once()
        await asyncio.wait_for(running.task, 60)
        assert not running.worker.is_stuck
        assert "the process ends during the " in caplog.text
        may_go_on.set()
        with pytest.raises(grpc.aio.AioRpcError):
            await call


async def test_a_model_that_cannot_be_loaded_ends_the_worker(tmp_path: Path) -> None:
    def load():  # type: ignore[no-untyped-def]
        raise WorkerRejected("no such model")

    async with running_worker(CountingModel(), load=load) as running:
        with pytest.raises(WorkerRejected, match="no such model"):
            await asyncio.wait_for(running.task, 60)
