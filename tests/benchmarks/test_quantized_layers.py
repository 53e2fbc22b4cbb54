"""Benchmarks' quantized checkpoints are read by the worker as what they were rounded to."""

from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.models.checkpoints import checkpoint
from benchmarks.models.model_shapes import SHAPES
from tests.support.paged_driver import PagedDriver
from worker_service.config import ModelConfig
from worker_service.loader import load_model

SHAPE = replace(
    SHAPES["llama-160m"],
    vocab_size=512,
    hidden_size=128,
    intermediate_size=256,
    num_layers=1,
    num_heads=2,
    num_kv_heads=1,
)


@pytest.mark.parametrize("kind", ["awq", "gptq"])
def test_checkpoints_of_a_format_are_served(kind: str, tmp_path: Path) -> None:
    logits = []
    for shape in (SHAPE, SHAPE.quantized(kind)):
        folder = checkpoint(shape, "float32", tmp_path)
        loaded = load_model(ModelConfig(model=str(folder), device="cpu", dtype="float32"))
        logits.append(PagedDriver(loaded.model).run([(0, 0, [1, 5, 7])])[0])
    error = (logits[1] - logits[0]).norm() / logits[0].norm()
    assert 0.01 < error < 0.3
