"""Real models, on the CPU's own kernels: rows that fill up a batch disturb no others."""

from collections import deque
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from tests.support.checkpoints import VOCAB_SIZE, checkpoint
from tests.support.runners import RUNNERS
from tests.support.worker_driver import PlanBuilder, Row, sampler_params
from worker_service import wire
from worker_service.cache_engine import CacheEngine
from worker_service.executor import Step
from worker_service.loader import ModelConfig, load_model
from worker_service.model_runner import ModelRunner
from worker_service.models.interface import Model
from worker_service.plan import StepResult

BLOCK_SIZE = 16
NUM_STEPS = 6
PARAMS = {"temperature": 0.8, "top_p": 0.9, "logprobs": 1}


def generate(model: Model, make_runner: Callable[[Any, CacheEngine, int], ModelRunner]) -> Any:
    """Tokens and log probabilities of three sequences, two steps launched at a time."""
    cache = CacheEngine(
        model.kv_cache_spec,
        block_size=BLOCK_SIZE,
        num_gpu_blocks=64,
        num_cpu_blocks=0,
        device=torch.device("cpu"),
    )
    runner, plans = make_runner(model, cache, BLOCK_SIZE), PlanBuilder(block_size=BLOCK_SIZE)
    draw = np.random.default_rng(1)
    lengths = {1: 5, 2: 33, 3: 16}
    for seq_id, length in lengths.items():
        params = PARAMS if seq_id == 2 else {"temperature": 0.0}
        plans.add(
            seq_id,
            draw.integers(0, VOCAB_SIZE, length).tolist(),
            sampling=sampler_params(seed=seq_id, **params),
        )
    steps: deque[Step] = deque()
    results: list[StepResult] = []
    every = [Row(seq_id) for seq_id in lengths]
    for rows in [[Row(*item) for item in lengths.items()], *[every] * NUM_STEPS, every[:2]]:
        steps.append(runner.launch(wire.decode_plan(plans.plan(rows), 0)))
        if len(steps) == 2:
            results.append(steps.popleft().collect())
    results += [step.collect() for step in steps]
    logprobs = [float(e.logprobs[0]) for result in results for e in result.logprobs.values()]
    return [result.token_ids.tolist() for result in results], logprobs


@pytest.mark.parametrize(
    ("family", "dtype"),
    [("llama", "float32"), ("llama", "bfloat16"), ("qwen3", "float32"), ("gpt2", "float32")],
)
def test_every_runner_gives_the_same_tokens(family: str, dtype: str) -> None:
    config = ModelConfig(model=str(checkpoint(family)), device="cpu", dtype=dtype)
    model = load_model(config).model
    expected_tokens, expected_logprobs = generate(model, RUNNERS["host"])
    for kind in ("eager", "recorded"):
        tokens, logprobs = generate(model, RUNNERS[kind])
        assert tokens == expected_tokens
        np.testing.assert_allclose(logprobs, expected_logprobs, atol=1e-5)
