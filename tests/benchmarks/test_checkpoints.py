"""Checkpoints of random weights are whole, the same each time, and readable by others."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from benchmarks.adapters import write_adapters
from benchmarks.models import checkpoints
from benchmarks.models.gguf_file import write_gguf_adapter
from benchmarks.models.model_shapes import SHAPES, Shape
from tests.support.in_process import InProcessEngine
from worker_service.adapters.peft_format import read_peft
from worker_service.loader.gguf.adapter import read_gguf_lora

TINY = Shape(
    name="tiny",
    model_type="qwen3",
    vocab_size=600,
    hidden_size=32,
    intermediate_size=48,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    max_position_embeddings=128,
    tied=True,
    extra={"rope_theta": 5000.0},
)

SIZES = ("vocab_size", "hidden_size", "intermediate_size", "num_layers", "num_heads")
SIZES += ("num_kv_heads", "head_dim", "max_position_embeddings")


def test_transformers_loads_all_of_it(tmp_path: Path) -> None:
    path = checkpoints.checkpoint(TINY, "float32", tmp_path)
    model, report = AutoModelForCausalLM.from_pretrained(path, output_loading_info=True)
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]
    assert model.config.rope_parameters["rope_theta"] == 5000.0
    assert model.get_input_embeddings().weight is model.get_output_embeddings().weight


def test_llama_cpp_gets_the_same_weights(tmp_path: Path) -> None:
    source = load_file(checkpoints.checkpoint(TINY, "float32", tmp_path) / "model.safetensors")
    file = gguf.GGUFReader(checkpoints.gguf(TINY, "float32", tmp_path))
    tensors = {tensor.name: torch.tensor(tensor.data) for tensor in file.tensors}
    assert len(tensors) == len(source)
    down = source["model.layers.1.mlp.down_proj.weight"]
    assert torch.equal(tensors["blk.1.ffn_down.weight"], down)
    query = source["model.layers.0.self_attn.q_proj.weight"]
    assert torch.equal(tensors["blk.0.attn_q.weight"], query)


LAYERS = ["conv", "full_attention", "conv"]
SMALL: dict[str, dict[str, Any]] = {
    "llama-160m": {"tied": False},
    "qwen3-moe-0.4b": {
        "tied": False,
        "num_experts": 6,
        "experts_per_token": 2,
        "extra": {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 48},
    },
    "lfm2-350m": {
        "num_layers": 3,
        "extra": {"layer_types": LAYERS, "block_auto_adjust_ff_dim": False, "block_ff_dim": 48},
    },
    "granite4-h-350m": {
        "extra": {
            "layer_types": ["mamba", "attention"],
            "shared_intermediate_size": 48,
            "mamba_n_heads": 4,
            "mamba_d_head": 16,
            "mamba_d_state": 8,
        },
    },
}
"""Shapes of different layers, made small."""


@pytest.mark.parametrize("name", SMALL)
def test_a_file_for_llama_cpp_is_the_model_of_its_checkpoint(name: str, tmp_path: Path) -> None:
    fields: dict[str, Any] = {size: getattr(TINY, size) for size in SIZES} | SMALL[name]
    extra = SHAPES[name].extra | fields.pop("extra", {})
    shape = replace(SHAPES[name], **fields, extra=extra)
    made = [make(shape, "float32", tmp_path) for make in (checkpoints.checkpoint, checkpoints.gguf)]
    prompts = [[5, 300, 17, 42], list(range(10, 40))]
    expected, found = (InProcessEngine(path).generate(prompts, 8, logprobs=0) for path in made)
    for ours, others in zip(found, expected, strict=True):
        assert ours.token_ids == others.token_ids
        np.testing.assert_allclose(ours.logprobs, others.logprobs, atol=1e-5)


@pytest.mark.parametrize("model_type", ["qwen3", "llama"])
def test_llama_cpp_gets_the_same_adapters(model_type: str, tmp_path: Path) -> None:
    shape = replace(TINY, model_type=model_type)
    [name] = write_adapters(shape, 1, tmp_path)
    write_gguf_adapter(shape, tmp_path / name, tmp_path / "adapter.gguf")
    config = checkpoints.config_of(shape, "bfloat16")
    expected = read_peft(tmp_path / name)
    assert read_gguf_lora(tmp_path / "adapter.gguf", config).info == expected.info


@pytest.mark.parametrize(
    "name",
    ["smollm2-135m", "gemma3-270m", "tiny-hybrid", "lfm2-350m", "qwen3.5-0.8b", "granite4-h-350m"],
)
def test_the_weights_of_a_shape_are_those_of_its_model(name: str) -> None:
    shape = SHAPES[name]
    matrices = [
        parameter.numel()
        for name, parameter in checkpoints._skeleton(shape).named_parameters()
        if parameter.dim() == 2 and "embed" not in name and "lm_head" not in name
    ]
    assert sum(matrices) == shape.layer_weights
