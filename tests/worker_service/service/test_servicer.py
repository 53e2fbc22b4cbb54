"""The worker's rpcs over a real channel."""

import asyncio
import socket
import threading
from pathlib import Path

import grpc
import pytest
from google.rpc import error_details_pb2
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_status import rpc_status
from torch import Tensor

from pagewire.v1 import model_pb2, plan_pb2
from pagewire.v1 import worker_service_pb2 as pb
from pagewire_kernels.batch import StepBatch
from tests.support.counting_model import CountingModel, loaded_counting_model, next_token
from tests.support.running_worker import NUM_BLOCKS, RunningWorker, Steps, running_worker
from tests.support.waiting import until
from tests.support.worker_driver import PlanBuilder, Row, column, sampler_params, values
from worker_service.engine import step_stats
from worker_service.engine.executor import BlockCounts
from worker_service.errors import DeviceLost
from worker_service.loader import LoadedModel
from worker_service.runner.model_executor import ModelExecutor

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
        assert self.proceed.wait(20)
        return super().forward(batch)


class BrokenModel(CountingModel):
    """Fails at any batch of three tokens."""

    def forward(self, batch: StepBatch) -> Tensor:
        if len(batch.token_ids) == 3:
            raise ZeroDivisionError("the model is broken")
        return super().forward(batch)


class WithoutDevice(ModelExecutor):
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


async def test_the_core_learns_who_the_worker_is() -> None:
    async with running_worker() as running:
        info = await running.stub.GetInfo(pb.GetInfoRequest())
        assert (info.device, info.num_weight_loads, info.last_epoch) == ("cpu", 1, 0)
        assert (info.model.name, info.model.vocab_size) == ("counting", 97)
        assert values(info.model.eos_token_ids) == [0]
        assert not info.model.HasField("bos_token_id")
        [group] = info.model.cache_groups
        assert (group.lifetime, group.block_tokens) == (model_pb2.CACHE_LIFETIME_GROWING, 4)
        assert info.model.block_bytes == 128
        assert not info.model.uses_cuda_graphs
        await running.initialize(41)
        assert (await running.stub.GetInfo(pb.GetInfoRequest())).last_epoch == 41


async def test_a_message_without_plans_is_refused_by_name() -> None:
    async with running_worker() as running:
        await running.initialize(1)
        steps = Steps(running.stub)
        await steps.send_together()
        error = await steps.error()
        assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert error.details().startswith("plans: expected at least one plan")


async def test_plans_sent_together_are_executed_in_order() -> None:
    async with running_worker() as running:
        await running.initialize(1)
        plans, steps = PlanBuilder(), Steps(running.stub)
        plans.add(1, [1])
        decodes = [plans.plan([Row(1)]) for _ in range(8)]
        for plan in decodes:
            plan.max_results = 4
        await steps.send_together(*decodes)
        results: list[plan_pb2.StepResult] = []
        while len(results) < 8:
            together = await steps.results()
            assert len(together) <= 4
            results += together
        assert [result.step_id for result in results] == list(range(1, 9))
        tokens = [1]
        for result in results:
            assert values(result.token_ids) == [next_token(tokens)]
            tokens += values(result.token_ids)
        assert await steps.finish() == grpc.StatusCode.OK


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


async def test_log_probabilities_and_failed_rows_travel() -> None:
    async with running_worker(CountingModel(poison=96)) as running:
        await running.initialize(1)
        plans, steps = PlanBuilder(), Steps(running.stub)
        asking = sampler_params(temperature=0.0, logprobs=2, prompt_logprobs=1)
        plans.add(1, [1, 96])
        plans.add(2, [1, 2, 3], sampling=asking)
        await steps.send(plans.plan([Row(1, 2), Row(2, 3)]))
        result = await steps.result()
        best = next_token([1, 2, 3])
        assert values(result.token_ids) == [-1, best]
        assert [(error.row, error.reason) for error in result.errors] == [
            (0, plan_pb2.ROW_ERROR_REASON_NON_FINITE_LOGITS)
        ]
        assert result.errors[0].message
        (logprobs,) = result.logprobs
        assert (logprobs.row, logprobs.sampled_rank) == (1, 1)
        assert values(logprobs.token_ids) == [best, best, (best + 1) % 97]
        assert len(logprobs.logprobs) == 3 * 4
        (prompt,) = result.prompt_logprobs
        assert (prompt.row, prompt.start, prompt.width) == (1, 1, 2)
        assert values(prompt.token_ids)[::2] == [2, 3]
        assert len(prompt.logprobs) == len(prompt.token_ids) == 4 * 4
        assert len(prompt.ranks) == 2 * 4


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


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"seq_ids": column([8])}, "seq_ids"),
        ({"copy": b"odd"}, "copy"),
        ({"block_updates": column([1, 0, 0, NUM_BLOCKS])}, "block_updates"),
    ],
)
async def test_a_bad_plan_ends_its_stream_and_the_worker_serves_the_next(
    fields: dict[str, bytes], field: str
) -> None:
    async with running_worker() as running:
        await running.initialize(1)
        steps, plans = Steps(running.stub), PlanBuilder(epoch=1)
        plans.add(1, [4])
        good = plans.plan([Row(1)])
        await steps.send(good, plan_pb2.StepPlan(epoch=1, step_id=2, **fields))
        assert values((await steps.result()).token_ids) == [next_token([4])]
        error = await steps.error()
        assert error.code() == grpc.StatusCode.INVALID_ARGUMENT
        assert details(error) == ("INVALID_PLAN", [field])
        assert field in error.details()
        await running.initialize(2)
        await decode(running, 2)


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
            await asyncio.wait_for(running.task, 10)


async def test_a_worker_whose_device_is_lost_between_steps_ends() -> None:
    async with running_worker(executor=WithoutDevice) as running:
        with pytest.raises(grpc.aio.AioRpcError, match="batch cannot be computed: RuntimeError"):
            await running.stub.ProfileBlocks(
                pb.ProfileBlocksRequest(max_num_seqs=1, max_num_batched_tokens=1)
            )
        with pytest.raises(DeviceLost, match="it answers nothing any more"):
            await asyncio.wait_for(running.task, 10)


async def test_plans_of_a_cancelled_stream_are_dropped() -> None:
    model = BlockedModel()
    async with running_worker(model) as running:
        await running.initialize(1)
        steps, plans = Steps(running.stub), PlanBuilder(epoch=1)
        plans.add(1, [1])
        await steps.send(*(plans.plan([Row(1)]) for _ in range(8)))
        await until(model.entered.is_set, "the first plan runs")
        steps.cancel()
        await asyncio.wait_for(running.worker.wait_idle(), 10)
        model.proceed.set()
        await running.initialize(2)
        assert len(model.batches) == 1
        await decode(running, 2)


async def test_model_assets_come_in_chunks_of_at_most_a_mebibyte(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "tokenizer.json").write_bytes(bytes(range(256)) * 10_000)

    def load() -> LoadedModel:
        return loaded_counting_model(model_dir=tmp_path)

    async with running_worker(load=load) as running:
        await running.worker.ready.wait()
        files: dict[str, bytes] = {}
        async for response in running.stub.GetModelAssets(pb.WorkerServiceGetModelAssetsRequest()):
            chunk = response.chunk
            assert len(chunk.data) <= 2**20
            files[chunk.file_name] = files.get(chunk.file_name, b"") + chunk.data
        assert files["config.json"] == b"{}"
        assert files["tokenizer.json"] == bytes(range(256)) * 10_000


async def test_the_number_of_blocks_follows_from_the_largest_batch() -> None:
    async with running_worker() as running:
        answer = await running.stub.ProfileBlocks(
            pb.ProfileBlocksRequest(max_num_seqs=3, max_num_batched_tokens=64)
        )
        assert (answer.num_gpu_blocks, answer.num_cpu_blocks) == (3 * 256 // 4, 0)


async def test_caches_need_a_block() -> None:
    async with running_worker() as running:
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            await running.initialize(1, num_gpu_blocks=0)
        assert details(raised.value) == ("INVALID_PLAN", ["num_gpu_blocks"])


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


async def test_health_turns_to_serving_once_the_model_is_loaded() -> None:
    may_load = threading.Event()

    def load() -> LoadedModel:
        assert may_load.wait(20)
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


async def test_what_is_no_plan_in_the_middle_of_a_stream_ends_it_after_the_results_due() -> None:
    async with running_worker() as running:
        await running.initialize(1)
        plans = PlanBuilder(epoch=1)
        plans.add(1, [1])
        call = running.channel.stream_stream(
            "/pagewire.v1.WorkerService/ExecuteSteps",
            response_deserializer=pb.ExecuteStepsResponse.FromString,
        )()
        await call.write(pb.ExecuteStepsRequest(plans=[plans.plan([Row(1)])]).SerializeToString())
        await call.write(b"\xff\xff\xff not a message")
        assert (await call.read()).results[0].step_id == 1
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await call.read()
        assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        await decode(running, 2)
