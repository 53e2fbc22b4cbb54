"""The worker's rpcs over a real channel."""

import asyncio
import shutil
import socket
import tempfile
import threading
from pathlib import Path

import grpc
import pytest
from google.rpc import error_details_pb2
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_status import rpc_status
from torch import Tensor

from pagewire.v1 import worker_service_pb2 as pb
from pagewire_kernels.batch import StepBatch
from tests.support.counting_model import CountingModel, loaded_counting_model, next_token
from tests.support.running_worker import RunningWorker, Steps, running_worker
from tests.support.waiting import until
from tests.support.worker_driver import PlanBuilder, Row, values
from worker_service.engine import step_stats
from worker_service.engine.executor import BlockCounts
from worker_service.errors import DeviceLost
from worker_service.loader import LoadedModel
from worker_service.runner.torch_executor import TorchExecutor

SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING


class BlockedModel(CountingModel):
    """Waits in each forward pass until it is let through."""

    def __init__(self) -> None:
        super().__init__()
        self.entered = threading.Event()
        self.proceed = threading.Event()

    def forward(self, batch: StepBatch) -> Tensor:
        self.entered.set()
        assert self.proceed.wait(60)
        return super().forward(batch)


class BrokenModel(CountingModel):
    """Fails at any batch of three tokens."""

    def forward(self, batch: StepBatch) -> Tensor:
        if len(batch.token_ids) == 3:
            raise ZeroDivisionError("the model is broken")
        return super().forward(batch)


class WithoutDevice(TorchExecutor):
    """One whose device fails for good when it measures memory, and is lost in any failure."""

    def profile_blocks(self, *, max_num_seqs: int, max_num_batched_tokens: int) -> BlockCounts:
        raise RuntimeError("an illegal memory access was encountered")

    def check_device(self) -> None:
        raise DeviceLost("it answers nothing any more")


def details(error: grpc.aio.AioRpcError) -> tuple[str, list[str]]:
    """Reason and fields in an error's details."""
    status = rpc_status.from_call(error)
    info, fields = error_details_pb2.ErrorInfo(), error_details_pb2.BadRequest()
    for detail in status.details:
        detail.Unpack(info)
        detail.Unpack(fields)
    assert info.domain == "pagewire"
    return info.reason, [violation.field for violation in fields.field_violations]


async def decode(running: RunningWorker, epoch: int, count: int = 3) -> None:
    """One short sequence through a stream of its own, checked."""
    plans = PlanBuilder(epoch=epoch)
    tokens = [3, 1, 4]
    plans.add(1, tokens)
    steps = Steps(running.stub)
    await steps.send(plans.plan([Row(1, 3)]), *(plans.plan([Row(1)]) for _ in range(count - 1)))
    for step_id in range(1, count + 1):
        result = await steps.result()
        assert (result.epoch, result.step_id) == (epoch, step_id)
        assert values(result.token_ids) == [next_token(tokens)]
        tokens.append(next_token(tokens))
    assert await steps.finish() == grpc.StatusCode.OK


async def test_a_message_without_plans_is_refused_by_name() -> None:
    async with running_worker() as running:
        await running.initialize(1)
        steps = Steps(running.stub)
        await steps.send_together()
        error = await steps.error()
        assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert error.details().startswith("plans: expected at least one plan")


async def test_steps_are_logged_one_by_one_and_in_summary(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(step_stats, "INTERVAL_S", 0.0)
    caplog.set_level("DEBUG", logger="worker_service")
    async with running_worker() as running:
        await running.initialize(1)
        await decode(running, 1, count=2)
    assert "steps epoch=1 num_steps=1 tokens_per_s=" in caplog.text
    assert "step done epoch=1 step_id=2 num_rows=1 num_tokens=1 num_errors=0" in caplog.text


async def test_an_epoch_that_no_core_draws_locks_nobody_out() -> None:
    async with running_worker() as running:
        await running.initialize(3)
        with pytest.raises(grpc.aio.AioRpcError) as caches:
            await running.initialize(2**64 - 1)
        steps, plans = Steps(running.stub), PlanBuilder(epoch=3 + 2**32 + 1)
        plans.add(1, [1])
        await steps.send(plans.plan([Row(1)]))
        for error in (caches.value, await steps.error()):
            assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
            assert details(error) == ("INVALID_PLAN", ["epoch"])
        await decode(running, 3)
        await running.initialize(3 + 2**32)


async def test_an_exception_in_the_model_ends_the_stream_as_internal(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with running_worker(BrokenModel()) as running:
        await running.initialize(1)
        steps, plans = Steps(running.stub), PlanBuilder(epoch=1)
        plans.add(1, [1, 2, 3])
        await steps.send(plans.plan([Row(1, 3)]))
        error = await steps.error()
        assert (error.code(), details(error)[0]) == (grpc.StatusCode.INTERNAL, "STEP_FAILED")
        assert "the model is broken" not in error.details()
        assert "the model is broken" in caplog.text
        second, plans = Steps(running.stub), PlanBuilder(epoch=2)
        plans.add(1, [1, 2])
        await second.send(plans.plan([Row(1, 2)]))
        assert values((await second.result()).token_ids) == [next_token([1, 2])]


async def test_a_worker_whose_device_is_lost_in_a_step_ends() -> None:
    async with running_worker(BrokenModel(), executor=WithoutDevice) as running:
        await running.initialize(1)
        steps, plans = Steps(running.stub), PlanBuilder(epoch=1)
        plans.add(1, [1, 2, 3])
        await steps.send(plans.plan([Row(1, 3)]))
        assert (await steps.error()).code() == grpc.StatusCode.INTERNAL
        with pytest.raises(DeviceLost, match="it answers nothing any more"):
            await asyncio.wait_for(running.task, 60)


async def test_a_worker_whose_device_is_lost_between_steps_ends() -> None:
    async with running_worker(executor=WithoutDevice) as running:
        with pytest.raises(grpc.aio.AioRpcError, match="batch cannot be computed: RuntimeError"):
            await running.stub.ProfileBlocks(
                pb.ProfileBlocksRequest(max_num_seqs=1, max_num_batched_tokens=1)
            )
        with pytest.raises(DeviceLost, match="it answers nothing any more"):
            await asyncio.wait_for(running.task, 60)


async def test_plans_of_a_cancelled_stream_are_dropped() -> None:
    model = BlockedModel()
    async with running_worker(model) as running:
        await running.initialize(1)
        steps, plans = Steps(running.stub), PlanBuilder(epoch=1)
        plans.add(1, [1])
        await steps.send(*(plans.plan([Row(1)]) for _ in range(8)))
        await until(model.entered.is_set, "the first plan runs")
        steps.cancel()
        await asyncio.wait_for(running.worker.wait_idle(), 60)
        model.proceed.set()
        await running.initialize(2)
        assert len(model.batches) == 1
        await decode(running, 2)


async def test_a_profile_is_written_where_it_was_told_to(tmp_path: Path) -> None:
    async with running_worker(profile_dir=tmp_path) as running:
        await running.initialize(1)
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            await running.stub.StopProfile(pb.StopProfileRequest())
        assert raised.value.code() == grpc.StatusCode.FAILED_PRECONDITION
        await running.stub.StartProfile(pb.StartProfileRequest())
        await decode(running, 1)
        path = Path((await running.stub.StopProfile(pb.StopProfileRequest())).path)
        assert path.parent == tmp_path
        assert "aten::" in await asyncio.to_thread(path.read_text)


async def test_a_profile_is_a_temporary_file_unless_told_otherwise() -> None:
    async with running_worker() as running:
        await running.initialize(1)
        await running.stub.StartProfile(pb.StartProfileRequest())
        path = Path((await running.stub.StopProfile(pb.StopProfileRequest())).path)
        assert path.is_relative_to(tempfile.gettempdir())
        assert await asyncio.to_thread(path.is_file)
        await asyncio.to_thread(shutil.rmtree, path.parent)


async def test_health_turns_to_serving_once_the_model_is_loaded() -> None:
    may_load = threading.Event()

    def load() -> LoadedModel:
        assert may_load.wait(60)
        return loaded_counting_model()

    async with running_worker(load=load) as running:
        health = health_pb2_grpc.HealthStub(running.channel)
        request = health_pb2.HealthCheckRequest(service="pagewire.v1.WorkerService")
        assert (await health.Check(request)).status == NOT_SERVING
        alive = health_pb2.HealthCheckRequest(service="liveness")
        assert (await health.Check(alive)).status == SERVING, "no reason to restart it"
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            await running.stub.GetInfo(pb.GetInfoRequest())
        assert raised.value.code() == grpc.StatusCode.UNAVAILABLE
        may_load.set()
        await running.worker.ready.wait()
        assert (await health.Check(request)).status == SERVING
        assert (await health.Check(health_pb2.HealthCheckRequest())).status == SERVING


async def test_garbage_on_the_port_harms_nobody() -> None:
    async with running_worker() as running:
        host, port = str(running.worker.address).rsplit(":", 1)

        def send_garbage() -> None:
            with socket.create_connection((host, int(port)), timeout=10) as wire:
                try:
                    wire.sendall(b"\xff\x00garbage" * 120_000)
                except (BrokenPipeError, ConnectionResetError):
                    return

        await asyncio.to_thread(send_garbage)
        await running.initialize(1)
        await decode(running, 1)


@pytest.mark.parametrize("rpc", ["ExecuteSteps", "GetInfo", "GetModelAssets"])
async def test_what_is_no_message_ends_its_call_alone_and_is_no_error_of_ours(
    rpc: str, caplog: pytest.LogCaptureFixture
) -> None:
    async with running_worker() as running:
        await running.initialize(1)
        call = running.channel.stream_stream(f"/pagewire.v1.WorkerService/{rpc}")()
        await call.write(b"\xff\xff\xff not a message")
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await call.read()
        assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert details(refused.value)[1] == ["request"]
        await decode(running, 2)
    assert not [record for record in caplog.records if record.levelname == "ERROR"]
