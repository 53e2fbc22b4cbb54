"""Loading takes as much memory as the packed weights, 15 % and `SMALL_BYTES` more at most."""

import json
import os
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import LlamaConfig

from benchmarks.models.quantized_layers import CONFIGS, GROUP_SIZE
from tests.support.checkpoints import checkpoint
from tests.support.gguf_files import add_config, write
from tests.support.peak_memory import measure

HIDDEN, INNER, NUM_LAYERS, VOCAB_SIZE = 768, 2304, 16, 16_384
"""Enough weights that a second copy of them is far more than `SMALL_BYTES`."""

SMALL_BYTES = 24 << 20
"""What threads and the model's first steps take, whatever its size."""

CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "dtype": "bfloat16",
    "vocab_size": VOCAB_SIZE,
    "hidden_size": HIDDEN,
    "intermediate_size": INNER,
    "num_hidden_layers": NUM_LAYERS,
    "num_attention_heads": 12,
    "num_key_value_heads": 12,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-6,
    "hidden_act": "silu",
    "tie_word_embeddings": True,
}

LARGE_TABLE: dict[str, Any] = {**CONFIG, "vocab_size": 98_304, "num_hidden_layers": 4}
"""A model of which most is the table that embedding and head share."""


def _names(num_layers: int = NUM_LAYERS) -> Iterator[tuple[str, list[int]]]:
    """Of all matrices of layers, with their shapes."""
    for layer in range(num_layers):
        for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
            yield f"model.layers.{layer}.self_attn.{name}", [HIDDEN, HIDDEN]
        for name in ("gate_proj", "up_proj"):
            yield f"model.layers.{layer}.mlp.{name}", [INNER, HIDDEN]
        yield f"model.layers.{layer}.mlp.down_proj", [HIDDEN, INNER]


def _norms(num_layers: int = NUM_LAYERS) -> Iterator[str]:
    for layer in range(num_layers):
        yield f"model.layers.{layer}.input_layernorm.weight"
        yield f"model.layers.{layer}.post_attention_layernorm.weight"
    yield "model.norm.weight"


def _write(
    path: Path,
    tensors: dict[str, Tensor],
    settings: dict[str, Any] | None,
    config: dict[str, Any] = CONFIG,
) -> Path:
    path.mkdir()
    norms = _norms(config["num_hidden_layers"])
    shared = {name: torch.ones(HIDDEN, dtype=torch.bfloat16) for name in norms}
    shared["model.embed_tokens.weight"] = _numbers([config["vocab_size"], HIDDEN])
    save_file({**shared, **tensors}, path / "model.safetensors")
    config = config if settings is None else {**config, "quantization_config": settings}
    (path / "config.json").write_text(json.dumps(config))
    return path


def _numbers(shape: list[int]) -> Tensor:
    return torch.empty(shape, dtype=torch.bfloat16).uniform_(-0.1, 0.1)


def _words(*shape: int) -> Tensor:
    return torch.randint(-(1 << 31), 1 << 31, shape, dtype=torch.int32)


def _dense(path: Path, config: dict[str, Any] = CONFIG) -> Path:
    names = _names(config["num_hidden_layers"])
    return _write(path, {f"{name}.weight": _numbers(shape) for name, shape in names}, None, config)


def _awq(path: Path) -> Path:
    tensors = {}
    for name, (outputs, inputs) in _names():
        groups = inputs // GROUP_SIZE
        tensors[f"{name}.qweight"] = _words(inputs, outputs // 8)
        tensors[f"{name}.qzeros"] = _words(groups, outputs // 8)
        tensors[f"{name}.scales"] = torch.rand(groups, outputs).half()
    return _write(path, tensors, CONFIGS["awq"])


def _fp8(path: Path) -> Path:
    tensors = {}
    for name, (outputs, inputs) in _names():
        tensors[f"{name}.weight"] = torch.randn(outputs, inputs).to(torch.float8_e4m3fn)
        tensors[f"{name}.weight_scale_inv"] = torch.rand(outputs // 128, inputs // 128)
    settings = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    return _write(path, tensors, settings)


def _nf4(path: Path) -> Path:
    tensors = {}
    for name, (outputs, inputs) in _names():
        state = {"shape": [outputs, inputs], "blocksize": 64}
        size = outputs * inputs
        tensors[f"{name}.weight"] = torch.randint(256, (size // 2, 1), dtype=torch.uint8)
        tensors[f"{name}.weight.absmax"] = torch.rand(size // 64)
        tensors[f"{name}.weight.quant_map"] = torch.linspace(-1.0, 1.0, 16)
        tensors[f"{name}.weight.quant_state.bitsandbytes__nf4"] = torch.tensor(
            list(json.dumps(state).encode()), dtype=torch.uint8
        )
    settings = {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}
    return _write(path, tensors, settings)


def _w8a8(path: Path) -> Path:
    tensors = {}
    for name, (outputs, inputs) in _names():
        tensors[f"{name}.weight"] = torch.randint(-128, 128, (outputs, inputs), dtype=torch.int8)
        tensors[f"{name}.weight_scale"] = torch.rand(outputs, 1)
    return _write(path, tensors, CONFIGS["w8a8"])


def _gguf(kind: str, path: Path) -> Path:
    file = path.with_suffix(".gguf")
    writer = gguf.GGUFWriter(file, "llama")
    add_config(writer, LlamaConfig(**CONFIG))
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, NUM_LAYERS)
    random = np.random.default_rng(0)

    def add(name: str, shape: list[int], kind: str) -> None:
        data_type = gguf.GGMLQuantizationType[kind]
        block, num_bytes = gguf.GGML_QUANT_SIZES[data_type]
        outputs, inputs = shape
        blocks = random.integers(0, 256, (outputs, inputs // block, num_bytes), np.uint8)
        blocks &= 0x3B  # so that scales of half precision, wherever they are, are finite
        stored = names.get_name(f"{name}.weight", try_suffixes=(".weight",))
        assert stored is not None
        writer.add_tensor(stored, blocks.reshape(outputs, -1), raw_dtype=data_type)

    add("model.embed_tokens", [VOCAB_SIZE, HIDDEN], "Q6_K")
    for name, shape in _names():
        add(name, shape, kind)
    for name in _norms():
        stored = names.get_name(name, try_suffixes=(".weight",))
        assert stored is not None
        writer.add_tensor(stored, np.ones(HIDDEN, np.float32))
    write(writer)
    return file


FORMATS: dict[str, Callable[[Path], Path]] = {
    "dense": _dense,
    "large table": lambda path: _dense(path, LARGE_TABLE),
    "awq": _awq,
    "fp8": _fp8,
    "nf4": _nf4,
    "w8a8": _w8a8,
    "Q4_K": lambda path: _gguf("Q4_K", path),
    "Q5_0": lambda path: _gguf("Q5_0", path),
}


@pytest.fixture(scope="module")
def path_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The checkpoint of a format, which is written once."""
    folder = tmp_path_factory.mktemp("peak")

    @cache
    def path_of(name: str) -> Path:
        torch.manual_seed(0)
        return FORMATS[name](folder / name.replace(" ", "_").lower())

    return path_of


@pytest.mark.skipif(
    not os.access("/proc/self/clear_refs", os.W_OK), reason="the peak cannot be measured here"
)
@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("dense", {}),
        ("large table", {"quantization": "int4"}),
        ("Q4_K", {}),
        pytest.param("fp8", {}, marks=pytest.mark.long),
        pytest.param("nf4", {}, marks=pytest.mark.long),
        pytest.param("dense", {"quantization": "int8"}, marks=pytest.mark.long),
        pytest.param("dense", {"quantization": "int4"}, marks=pytest.mark.long),
        pytest.param("dense", {"quantization": "fp8"}, marks=pytest.mark.long),
        pytest.param("awq", {}, marks=pytest.mark.long),
        pytest.param("w8a8", {}, marks=pytest.mark.long),
        pytest.param("Q5_0", {}, marks=pytest.mark.long),
    ],
)
def test_the_peak_is_the_packed_weights_15_percent_and_a_small_constant(
    name: str, options: dict[str, str], path_of: Callable[[str], Path]
) -> None:
    _load_within_the_limit(path_of(name), options)


def test_a_cache_of_rounded_weights_takes_no_more(
    path_of: Callable[[str], Path], tmp_path: Path
) -> None:
    options = {"quantization": "int4", "quantization_cache": str(tmp_path)}
    for _ in range(2):  # the cache is written, and then read
        _load_within_the_limit(path_of("dense"), options)
        assert list(tmp_path.iterdir())


def _load_within_the_limit(path: Path, options: dict[str, str]) -> None:
    loaded = measure(checkpoint("llama"), path, options)
    packed = loaded.packed_bytes
    assert packed <= loaded.peak_bytes <= 1.15 * packed + SMALL_BYTES
