"""Adapters in steps of a GPU, which are launched ahead and replayed: tokens and log probabilities
are those of a CPU, and have the same bits in any batch."""

from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pagewire.v1 import context_pb2
from tests.kernels.gpu.test_whole_model import packed_model
from tests.support.checkpoints import checkpoint, make_checkpoint
from tests.support.gpu_kernels import DEVICE, INTERPRETED, MARKS
from tests.support.lora import random_adapter
from tests.support.runners import EagerRecorder, HostEvent, host, make_cache
from tests.support.worker_driver import PlanBuilder, Row, sampler_params
from worker_service.adapters.peft_format import ModelAdapter
from worker_service.adapters.store import AdapterStore
from worker_service.config import CacheConfig, ModelConfig
from worker_service.errors import BadAdapter
from worker_service.loader import load_model
from worker_service.models.adapters import AdapterSlots
from worker_service.models.native import NativeModel
from worker_service.plan import StepResult
from worker_service.runner.device.cuda_graphs import CudaGraphRecorder
from worker_service.runner.device.in_flight_step import CudaEvent
from worker_service.runner.device.state import DeviceState, StateShape
from worker_service.runner.device.steps import DeviceSteps
from worker_service.runner.model_runner import ModelRunner
from worker_service.service.wire import decode_plan

pytestmark = [*MARKS, pytest.mark.filterwarnings("ignore::RuntimeWarning")]
"""The interpreter's numpy warns of what is in rows that pad a batch, which attend over nothing."""

LONG = pytest.mark.long
BLOCK_SIZE = 4
MAX_LORAS, MAX_RANK = 2, 20
PROMPTS = ([5, 6, 7, 8, 9], [10, 20, 30, 40, 50, 60, 70, 80, 90], [100, 7, 50])
NUM_CHUNK = 6
NUM_DECODES = 2


class Steps:
    """Runs sequences with adapters of a model on a CPU, or as on a GPU."""

    def __init__(self, model: NativeModel, made: Sequence[ModelAdapter], *, on_gpu: bool) -> None:
        self.store: AdapterStore[ModelAdapter] = AdapterStore(len(made))
        slots = AdapterSlots(model, self.store, MAX_LORAS, MAX_RANK)
        model.adapters = slots
        for adapter in made:
            slots.prepare(adapter)
            self.store.add(adapter)
        cache = make_cache(model, BLOCK_SIZE, device=DEVICE if on_gpu else None)
        if on_gpu:
            shape = StateShape(sizes=[4], mixed=[16], with_adapters=True)
            recorder = EagerRecorder() if INTERPRETED else CudaGraphRecorder(DEVICE)
            state = DeviceState(model, cache, BLOCK_SIZE, shape, recorder)
            make_event = HostEvent if INTERPRETED else CudaEvent
            device = DeviceSteps(model, cache, state, make_event, adapters=slots)
            self.runner = ModelRunner(model, cache, BLOCK_SIZE, device=device, adapters=self.store)
        else:
            self.runner = host(model, cache, BLOCK_SIZE, self.store)
        self.builder = PlanBuilder(block_size=BLOCK_SIZE)

    def add(self, seq_id: int, prompt: Sequence[int], digest: bytes | None, **params: Any) -> None:
        kind = context_pb2.CONTEXT_KIND_ADAPTER
        context = [] if digest is None else [context_pb2.ContextPart(kind=kind, digest=digest)]
        sampling = sampler_params(temperature=0.0, **params)
        self.builder.add(seq_id, prompt, sampling=sampling, context=context)

    def run(self, rows: Sequence[Row], **fields: Any) -> StepResult:
        return self.runner.launch(decode_plan(self.builder.plan(rows, **fields), 0)).collect()


Outputs = list[tuple[list[int], list[float]]]


def generate(
    steps: Steps, digests: Sequence[bytes | None], chosen: Sequence[int], first: int, **params: Any
) -> Outputs:
    """Tokens, and the log probability of each if `params` request them, of some of `PROMPTS` with
    these adapters: a chunk of the longest prompt, a mixed batch and decodes. first: the sequence
    id of the first."""
    prompts = {first + i: PROMPTS[i] for i in chosen}
    for i in chosen:
        steps.add(first + i, PROMPTS[i], digests[i], **params)
    outputs: dict[int, tuple[list[int], list[float]]] = {seq_id: ([], []) for seq_id in prompts}
    lengths = {seq_id: len(prompt) for seq_id, prompt in prompts.items()}
    chunked = [seq_id for seq_id, length in lengths.items() if length > NUM_CHUNK]
    plans = [[Row(seq_id, NUM_CHUNK, sample=False) for seq_id in chunked]] if chunked else []
    lengths |= {seq_id: lengths[seq_id] - NUM_CHUNK for seq_id in chunked}
    plans.append([Row(seq_id, length) for seq_id, length in lengths.items()])
    plans += [[Row(seq_id) for seq_id in prompts]] * NUM_DECODES
    for rows in plans:
        result = steps.run(rows)
        for at, row in enumerate(rows):
            if row.sample:
                tokens, logprobs = outputs[row.seq_id]
                tokens.append(int(result.token_ids[at]))
                if params:
                    logprobs.append(float(result.logprobs[at].logprobs[0]))
    steps.run([], forget_seq_ids=np.array([*prompts], "<i4").tobytes())
    return [*outputs.values()]


@cache
def _on_cpu(path: Path) -> NativeModel:
    config = ModelConfig(model=str(path), device="cpu", dtype="float32")
    model = load_model(config, CacheConfig(block_size=BLOCK_SIZE)).model
    assert isinstance(model, NativeModel)
    return model


def _models(case: str, folder: Path) -> tuple[NativeModel, NativeModel]:
    """On a CPU, and with the weights and kernels of a GPU."""
    family, *quantization = case.removesuffix(" dora").split()
    if not quantization:
        return _on_cpu(checkpoint(family)), packed_model(checkpoint(family))
    path = make_checkpoint(family, folder, hidden_size=64, intermediate_size=96, head_dim=16)
    config = ModelConfig(
        model=str(path), device="cpu", dtype="float32", quantization=quantization[0]
    )
    plain = load_model(config, CacheConfig(block_size=BLOCK_SIZE)).model
    assert isinstance(plain, NativeModel)
    return plain, packed_model(path, quantization=quantization[0])


@pytest.mark.parametrize(
    "case",
    [
        "gpt2 dora",
        pytest.param("llama", marks=LONG),
        pytest.param("llama dora", marks=LONG),
        pytest.param("mixtral", marks=LONG),
        pytest.param("deepseek_v3", marks=LONG),
        pytest.param("llama_tied int8", marks=LONG),
        pytest.param("llama_tied int8 dora", marks=LONG),
    ],
)
def test_tokens_are_those_of_a_cpu_and_bits_those_of_other_batches(
    case: str, tmp_path: Path
) -> None:
    plain, model = _models(case, tmp_path)
    has_dora = case.endswith("dora")
    made = [
        random_adapter(plain, seed, rank=rank, uses_dora=has_dora and rank < 20)
        for seed, rank in enumerate((4, 20, 1))
    ]
    a, b, c = (adapter.info.digest for adapter in made)
    here, there = Steps(plain, made, on_gpu=False), Steps(model, made, on_gpu=True)
    every, mix = range(len(PROMPTS)), [a, None, b]
    expected = generate(here, mix, every, 1, logprobs=0)
    without = generate(here, [None] * 3, every, 11, logprobs=0)
    assert expected[0][0] != without[0][0], "the adapter changes nothing"
    found = generate(there, mix, every, 1, logprobs=0)
    _assert_close(found, expected)
    assert [tokens for tokens, _ in generate(there, mix, every, 11)] == [
        tokens for tokens, _ in expected
    ], "sampled in a replay"
    # Rows of the base, also where no row has an adapter, and an adapter alone, in another slot.
    plain_alone = generate(there, mix, [1], 21, logprobs=0)
    other = generate(there, [c, None, None], [0, 1], 31, logprobs=0)
    alone = generate(there, mix, [2], 41, logprobs=0)
    assert [plain_alone[0], other[1], alone[0]] == [found[1], found[1], found[2]]
    _assert_close(other[:1], generate(here, [c, None, None], [0], 31, logprobs=0))


def _assert_close(found: Outputs, expected: Outputs) -> None:
    for (tokens, logprobs), (expected_tokens, expected_logprobs) in zip(
        found, expected, strict=True
    ):
        assert tokens == expected_tokens
        np.testing.assert_allclose(logprobs, expected_logprobs, atol=2e-3, rtol=0)


def test_dora_of_experts_is_refused() -> None:
    model = packed_model(checkpoint("mixtral"))
    slots = AdapterSlots(model, AdapterStore(1), MAX_LORAS, MAX_RANK)
    with pytest.raises(BadAdapter, match=r"use_dora: expected linear layers .*, got .*experts"):
        slots.prepare(random_adapter(_on_cpu(checkpoint("mixtral")), 1, uses_dora=True))
