"""Launching, recording and sampling where there is a GPU."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch

from pagewire.v1 import context_pb2
from tests.support.checkpoints import checkpoint
from tests.support.lora import random_adapter
from tests.support.real_generations import BLOCK_SIZE, generate
from tests.support.runners import make_cache, recorded_on_gpu
from tests.support.worker_driver import PlanBuilder, Row, sampler_params
from worker_service.adapters.peft_format import ModelAdapter
from worker_service.adapters.store import AdapterStore
from worker_service.config import ModelConfig
from worker_service.engine.executor import Step
from worker_service.kv_cache.cache_engine import CacheEngine
from worker_service.loader import LoadedModel, load_model
from worker_service.models.adapters import AdapterSlots
from worker_service.models.native import NativeModel
from worker_service.plan import StepPlan
from worker_service.runner.device.cuda_graphs import CudaGraphRecorder
from worker_service.runner.device.state import DeviceState, StateShape
from worker_service.runner.device.steps import DeviceSteps
from worker_service.runner.model_runner import ModelRunner
from worker_service.service import wire

pytestmark = pytest.mark.gpu

SIZES = [1, 2, 4, 8]
MIXED_SIZES = [16, 32, 64]


def eager(model: Any, cache: CacheEngine, block_size: int) -> ModelRunner:
    device = DeviceSteps(model, cache, DeviceState(model, cache, block_size, StateShape()))
    return ModelRunner(model, cache, block_size, device=device)


def recorded(model: Any, cache: CacheEngine, block_size: int) -> ModelRunner:
    recorder = CudaGraphRecorder(cache.device_cache.device)
    shape = StateShape(sizes=SIZES, mixed=MIXED_SIZES)
    state = DeviceState(model, cache, block_size, shape, recorder)
    assert state.graphs is not None, "the model can be recorded"
    return ModelRunner(model, cache, block_size, device=DeviceSteps(model, cache, state))


@pytest.fixture(scope="module", params=["llama", "qwen3", "gpt2"])
def loaded(request: pytest.FixtureRequest) -> LoadedModel:
    return load_model(
        ModelConfig(
            model=str(checkpoint(request.param)),
            device="cuda",
            dtype="float32",
            attention_backend="triton",
        )
    )


@pytest.mark.parametrize("depth", [1, 2, 4])
@pytest.mark.parametrize("make_runner", [eager, recorded])
def test_replayed_and_launched_ahead_are_the_tokens_of_one_step_after_the_other(
    loaded: LoadedModel, make_runner: Any, depth: int
) -> None:
    expected_tokens, expected_logprobs = generate(loaded, ModelRunner, depth=1, num_steps=30)
    tokens, logprobs = generate(loaded, make_runner, depth=depth, num_steps=30)
    assert tokens == expected_tokens
    np.testing.assert_allclose(logprobs, expected_logprobs, atol=1e-3)


@contextmanager
def never_waiting() -> Iterator[None]:
    """Whatever makes the host wait for the device raises."""
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


PARAMS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "filtered": {"temperature": 0.9, "top_k": 40, "top_p": 0.9, "min_p": 0.01, "seed": 3},
    "log probabilities": {"temperature": 0.9, "seed": 3, "logprobs": 4},
    "prompt log probabilities": {"temperature": 0.9, "seed": 3, "prompt_logprobs": 2},
    "penalised": {
        "temperature": 0.9,
        "seed": 3,
        "repetition_penalty": 1.3,
        "presence_penalty": 0.1,
    },
    "edited": {"temperature": 0.0, "logit_bias": [{"token_id": 3, "bias": 2.0}]},
    "not to end yet": {
        "temperature": 0.0,
        "min_tokens": 50,
        "suppressed_token_ids": np.array([2, 7], "<i4").tobytes(),
    },
}


@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype:UserWarning")
@pytest.mark.parametrize("name", PARAMS)
@pytest.mark.parametrize("make_runner", [eager, recorded])
def test_nothing_in_a_launch_waits_for_the_device(
    loaded: LoadedModel, make_runner: Any, name: str
) -> None:
    cache = make_cache(loaded.model, BLOCK_SIZE, device=torch.device(loaded.config.device))
    runner, plans = make_runner(loaded.model, cache, BLOCK_SIZE), PlanBuilder(block_size=BLOCK_SIZE)

    def plan(rows: list[Row]) -> StepPlan:
        return wire.decode_plan(plans.plan(rows), 0)

    for seq_id in (1, 2, 3):
        plans.add(seq_id, [seq_id] * 20, sampling=sampler_params(**PARAMS[name]))
    # What is compiled at its first call may wait then: a prompt, a mixed batch, a decode.
    kinds = [[Row(1, 20)], [Row(1), Row(2, 20)], [Row(1), Row(2)]]
    steps = [runner.launch(plan(rows)) for rows in kinds]
    expected = [step.collect() for step in steps]
    with never_waiting():
        steps = [runner.launch(plan(rows)) for rows in ([Row(3, 20)], [Row(1), Row(2), Row(3)])]
        steps += [runner.launch(plan([Row(1), Row(2), Row(3)])) for _ in range(3)]
    results = [step.collect() for step in steps]
    assert all((result.token_ids >= 0).all() for result in [*expected, *results])


@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype:UserWarning")
def test_adapters_are_put_into_slots_without_waiting_for_the_device(loaded: LoadedModel) -> None:
    model = loaded.model
    assert isinstance(model, NativeModel)
    made = [random_adapter(model, seed) for seed in range(3)]
    store: AdapterStore[ModelAdapter] = AdapterStore(len(made))
    slots = AdapterSlots(model, store, 2, 4)
    for adapter in made:
        slots.prepare(adapter)
        store.add(adapter)
    model.adapters = slots
    cache = make_cache(model, BLOCK_SIZE, device=torch.device(loaded.config.device))
    runner = recorded_on_gpu(model, cache, BLOCK_SIZE, adapters=store)
    plans = PlanBuilder(block_size=BLOCK_SIZE)
    for seq_id, adapter in enumerate(made, start=1):
        digest = adapter.info.digest
        part = context_pb2.ContextPart(kind=context_pb2.CONTEXT_KIND_ADAPTER, digest=digest)
        plans.add(seq_id, [7] * 20, sampling=sampler_params(temperature=0.0), context=[part])

    def launch(*rows: Row) -> Step:
        return runner.launch(wire.decode_plan(plans.plan(rows), 0))

    steps = [launch(Row(1, 20)), launch(Row(2, 20)), launch(Row(1), Row(2))]
    steps[-1].collect()
    with never_waiting():
        steps += [launch(Row(3, 20)), launch(Row(3), Row(1)), launch(Row(2), Row(3))]
    results = [step.collect() for step in steps[3:]]
    assert all((result.token_ids >= 0).all() for result in results)
    model.adapters = None


def test_what_cannot_be_recorded_leaves_no_trace() -> None:
    counts = torch.zeros(4, device="cuda")
    stream = torch.cuda.current_stream()
    recorder = CudaGraphRecorder(counts.device)
    with pytest.raises(RuntimeError):
        recorder.record(lambda: counts.add_(float(counts.sum())))  # waits for the device
    assert torch.cuda.current_stream() == stream
    torch.cuda.empty_cache()
    replay = recorder.record(lambda: counts.add_(1))
    counts.zero_()
    replay()
    assert counts.tolist() == [1.0] * 4
