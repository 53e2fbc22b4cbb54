"""The simulated worker speaks the worker protocol, over a channel and as a process."""

import asyncio
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import grpc
import numpy as np
import pytest

from pagewire.v1 import plan_pb2
from pagewire.v1 import worker_service_pb2 as pb
from pagewire.v1.worker_service_pb2_grpc import WorkerServiceStub
from tests.support.cluster import SERVING, health
from tests.support.running_worker import RunningWorker, Steps
from tests.support.worker_driver import PlanBuilder, Row, column, values
from tools.launch import environment
from worker_service.config import (
    CacheConfig,
    CostModel,
    NetworkConfig,
    SimulationConfig,
    WorkerConfig,
)
from worker_service.errors import InvalidOption, WorkerError
from worker_service.service.lifecycle import make_worker
from worker_service.simulated.executor import SimulatedExecutor

PROMPT = [5, 6, 7, 8, 9, 10]


@asynccontextmanager
async def simulated_worker(**simulation: object) -> AsyncIterator[RunningWorker]:
    """A worker on this event loop, on a free port."""
    fields = {"vocab_size": 997, "max_model_len": 64, "num_gpu_blocks": 32, "num_cpu_blocks": 8}
    model = SimulationConfig(**(fields | simulation))  # type: ignore[arg-type]
    config = WorkerConfig(
        model=model,
        cache=CacheConfig(block_size=4),
        network=NetworkConfig(listen="127.0.0.1:0"),
    )
    worker = make_worker(config, SimulatedExecutor(model, block_size=4))
    task = asyncio.create_task(worker.run())
    await asyncio.wait_for(worker.ready.wait(), 60)
    async with grpc.aio.insecure_channel(str(worker.address)) as channel:
        yield RunningWorker(worker, WorkerServiceStub(channel), channel, task)
    worker.end_at_once()
    with suppress(WorkerError):
        await asyncio.wait_for(task, 60)


def first_plan(builder: PlanBuilder) -> plan_pb2.StepPlan:
    """Sequence 1 with its whole prompt."""
    builder.add(1, PROMPT)
    return builder.plan([Row(1, len(PROMPT))])


async def test_it_tells_what_it_pretends_to_be() -> None:
    async with simulated_worker(eos_token_id=7) as worker:
        info = await worker.stub.GetInfo(pb.GetInfoRequest())
        assert (info.model.name, info.model.vocab_size) == ("simulated", 997)
        assert (info.model.max_model_len, info.model.cache_groups[0].block_tokens) == (64, 4)
        assert values(info.model.eos_token_ids) == [7]
        assert info.model.batch_invariant
        blocks = await worker.stub.ProfileBlocks(
            pb.ProfileBlocksRequest(max_num_seqs=4, max_num_batched_tokens=16)
        )
        assert (blocks.num_gpu_blocks, blocks.num_cpu_blocks) == (32, 8)
        request = pb.WorkerServiceGetModelAssetsRequest()
        assert [chunk async for chunk in worker.stub.GetModelAssets(request)] == []


async def test_a_step_takes_the_time_that_the_cost_model_says() -> None:
    cost = CostModel(step_us=20_000, token_us=4_000, sequence_us=10_000)
    async with simulated_worker(cost=cost) as worker:
        await worker.initialize(1, 32)
        steps, builder = Steps(worker.stub), PlanBuilder()
        await steps.send(first_plan(builder), builder.plan([Row(1)]))
        for expected_us in (50_000, 30_000):
            timings = (await steps.result()).timings
            assert timings.forward_us >= expected_us
            assert timings.finished_us - timings.started_us >= expected_us


async def test_swaps_take_their_time_before_the_rest() -> None:
    async with simulated_worker(cost=CostModel(step_us=10_000, block_us=15_000)) as worker:
        await worker.initialize(1, 32)
        steps, builder = Steps(worker.stub), PlanBuilder()
        await steps.send(first_plan(builder), builder.plan([], swap_out=column([0, 0, 0, 1])))
        await steps.result()
        timings = (await steps.result()).timings
        assert timings.cache_ops_us >= 30_000
        assert timings.forward_us >= 10_000


def test_costs_add_up() -> None:
    cost = CostModel(step_us=100, token_us=2, sequence_us=10, block_us=7)
    assert cost.compute_us(num_rows=3, num_tokens=8) == 100 + 3 * 10 + 5 * 2
    assert cost.swap_us(num_blocks=4) == 28
    assert CostModel().compute_us(3, 8) == CostModel().swap_us(4) == 0


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"vocab_size": 0}, "simulate_vocab_size"),
        ({"eos_token_id": 32000}, "simulate_eos_token_id"),
        ({"max_model_len": 0}, "max_model_len"),
        ({"num_gpu_blocks": 0}, "simulate_gpu_blocks"),
        ({"num_cpu_blocks": -1}, "simulate_cpu_blocks"),
    ],
)
def test_a_simulation_that_cannot_be(fields: dict[str, int], named: str) -> None:
    with pytest.raises(InvalidOption, match=f"{named}: expected"):
        SimulationConfig(**fields)  # type: ignore[arg-type]


@pytest.mark.parametrize("value", [-1.0, float("inf"), float("nan")])
def test_a_cost_that_cannot_be(value: float) -> None:
    with pytest.raises(InvalidOption, match="simulate_token_us: expected"):
        CostModel(token_us=value)


WITHOUT_TORCH = """
import runpy, sys
for name in ("torch", "transformers", "safetensors", "triton"):
    sys.modules[name] = None  # importing it fails
runpy.run_module("worker_service", run_name="__main__")
"""


def test_it_starts_serves_and_ends_where_no_torch_is_installed(tmp_path: Path) -> None:
    address = f"unix:{tmp_path}/worker.sock"
    process = subprocess.Popen(
        [sys.executable, "-c", WITHOUT_TORCH, "--simulate", "--listen", address],
        env=environment(),
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        deadline = time.monotonic() + 30
        while health(address) != SERVING:
            assert process.poll() is None, process.communicate()[1]
            assert time.monotonic() < deadline
            time.sleep(0.05)
        with grpc.insecure_channel(address) as channel:
            stub = WorkerServiceStub(channel)
            stub.InitializeCache(pb.InitializeCacheRequest(num_gpu_blocks=8, epoch=1), timeout=60)
            plans = iter([pb.ExecuteStepsRequest(plans=[first_plan(PlanBuilder(block_size=16))])])
            result = next(iter(stub.ExecuteSteps(plans, timeout=60))).results[0]
            assert np.frombuffer(result.token_ids, "<i4")[0] >= 0
    finally:
        process.send_signal(signal.SIGTERM)
        _, log = process.communicate(timeout=30)
    assert process.returncode == 0, log
