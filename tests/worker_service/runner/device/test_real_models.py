"""Real models, on the CPU's own kernels: rows that fill up a batch disturb no others."""

import numpy as np
import pytest

from tests.support.checkpoints import checkpoint
from tests.support.real_generations import generate
from tests.support.runners import RUNNERS
from worker_service.config import ModelConfig
from worker_service.loader import load_model


@pytest.mark.parametrize(
    ("family", "dtype"),
    [("llama", "float32"), ("llama", "bfloat16"), ("qwen3", "float32"), ("gpt2", "float32")],
)
def test_every_runner_gives_the_same_tokens(family: str, dtype: str) -> None:
    config = ModelConfig(model=str(checkpoint(family)), device="cpu", dtype=dtype)
    loaded = load_model(config)
    expected_tokens, expected_logprobs = generate(loaded, RUNNERS["host"])
    for kind in ("eager", "recorded"):
        tokens, logprobs = generate(loaded, RUNNERS[kind])
        assert tokens == expected_tokens
        np.testing.assert_allclose(logprobs, expected_logprobs, atol=1e-5)
