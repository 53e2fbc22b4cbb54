"""A model in GGUF files as the rest of the worker knows models: configuration, names, tensors."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pagewire_kernels.quantized_weight import QuantizedWeight
from worker_service.errors import BadCheckpoint, UnsupportedModel
from worker_service.loader.gguf_file import Gguf, GgufTensor, open_gguf

_CLASSES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}
"""By `general.architecture`."""

_NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}
_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_LAYER = re.compile(r"blk\.(\d+)\.(\w+)\.(weight|bias)")
_ROPE_FREQUENCIES = "rope_freqs.weight"
_LLAMA3 = {
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
"""What all models of Llama 3 with scaled positions have; the file holds only the result."""

_SAVED = {"F32": "float32", "F16": "float16"}


@dataclass(frozen=True, slots=True)
class GgufTensors:
    """The tensors of one file under the names of `transformers`, as `safe_open` gives them."""

    file: Path
    tensors: Mapping[str, GgufTensor]
    heads: Mapping[str, int]
    """Heads of the projections whose rows were permuted for GGUF."""

    def keys(self) -> list[str]:
        """Names of all tensors."""
        return list(self.tensors)

    def get_slice(self, name: str) -> "_Slice":
        """A tensor that is read once it is indexed."""
        return _Slice(self, name)

    def get_tensor(self, name: str) -> Tensor:
        """A tensor, dequantized, its rows in the order of `transformers`."""
        values = self.tensors[name].read()
        order = self._order(name, values.shape[0])
        return values if order is None else values[order]

    def get_quantized(self, name: str) -> QuantizedWeight | None:
        """A weight as the file has it; None if it has it dense."""
        weight = self.tensors[name].read_quantized()
        order = None if weight is None else self._order(name, weight.shape[0])
        return weight if weight is None or order is None else weight.rows(order)

    def _order(self, name: str, num_rows: int) -> Tensor | None:
        """Which rows of the file's tensor the rows of `transformers` are, if the order differs."""
        heads = next((num for part, num in self.heads.items() if f".{part}." in name), None)
        if heads is None:
            return None
        return torch.arange(num_rows).reshape(heads, -1, 2).swapaxes(1, 2).flatten()


@dataclass(frozen=True, slots=True)
class _Slice:
    tensors: GgufTensors
    name: str

    def get_shape(self) -> list[int]:
        return list(self.tensors.tensors[self.name].shape)

    def __getitem__(self, index: Any) -> Tensor:
        return self.tensors.get_tensor(self.name)[index]


def gguf_tensors(file: Path) -> GgufTensors:
    """The tensors of one file. Raises BadCheckpoint or UnsupportedModel."""
    gguf = open_gguf(file)
    config = gguf_config(file)
    heads = {}
    if gguf.metadata["general.architecture"] == "llama":
        heads = {"q_proj": config["num_attention_heads"], "k_proj": config["num_key_value_heads"]}
    tensors = {
        _name(name): tensor
        for name, tensor in gguf.tensors.items()
        if tensor.file == file and name != _ROPE_FREQUENCIES
    }
    return GgufTensors(file, tensors, heads)


def _name(name: str) -> str:
    """The name in `transformers`; an unknown one as it is, to be refused by it."""
    match = _LAYER.fullmatch(name)
    if match and match[2] in _LAYER_NAMES:
        return f"model.layers.{match[1]}.{_LAYER_NAMES[match[2]]}.{match[3]}"
    stem, _, kind = name.rpartition(".")
    return f"{_NAMES[stem]}.{kind}" if stem in _NAMES else name


def gguf_config(path: Path) -> dict[str, Any]:
    """What `config.json` would hold. Raises BadCheckpoint or UnsupportedModel."""
    gguf = open_gguf(path)
    architecture = gguf.metadata.get("general.architecture")
    if not isinstance(architecture, str) or architecture not in _CLASSES:
        raise UnsupportedModel(
            f"{path}: general.architecture: expected one of {', '.join(_CLASSES)}, got"
            f" {architecture!r}"
        )
    return _Config(path, gguf, architecture).read()


class _Config:
    """Reads the metadata of one architecture."""

    def __init__(self, path: Path, gguf: Gguf, architecture: str) -> None:
        self._path = path
        self._gguf = gguf
        self._architecture = architecture

    def read(self) -> dict[str, Any]:
        """As in `config.json`."""
        tensors, architecture = self._gguf.tensors, self._architecture
        if self._get("expert_count", 0):
            raise UnsupportedModel(
                f"{self._path}: {architecture}.expert_count: models with experts cannot be served"
                " from GGUF; expected none"
            )
        hidden_size = self._int("embedding_length")
        num_heads = self._int("attention.head_count")
        head_dim = self._int("attention.key_length", hidden_size // num_heads)
        for key in ("attention.value_length", "rope.dimension_count"):
            if (found := self._get(key, head_dim)) != head_dim:
                raise UnsupportedModel(
                    f"{self._path}: {architecture}.{key}: expected {head_dim}, the size of a head,"
                    f" got {found}"
                )
        if "token_embd.weight" not in tensors:
            raise BadCheckpoint(f"{self._path}: missing tensor token_embd.weight")
        window = self._get("attention.sliding_window")
        name = _CLASSES[architecture]
        if window and architecture == "llama":
            name = "MistralForCausalLM"
        elif window:
            raise UnsupportedModel(
                f"{self._path}: {architecture}.attention.sliding_window: expected none, got"
                f" {window}"
            )
        types = {tensor.type for tensor in tensors.values() if len(tensor.shape) > 1}
        return {
            "architectures": [name],
            "model_type": name.removesuffix("ForCausalLM").lower(),
            "dtype": _SAVED.get(next(iter(types)), "bfloat16") if len(types) == 1 else "bfloat16",
            "vocab_size": tensors["token_embd.weight"].shape[0],
            "hidden_size": hidden_size,
            "intermediate_size": self._int("feed_forward_length"),
            "num_hidden_layers": self._int("block_count"),
            "num_attention_heads": num_heads,
            "num_key_value_heads": self._int("attention.head_count_kv", num_heads),
            "head_dim": head_dim,
            "max_position_embeddings": self._int("context_length"),
            "rms_norm_eps": self._float("attention.layer_norm_rms_epsilon"),
            "hidden_act": "silu",
            "attention_bias": "blk.0.attn_q.bias" in tensors,
            "tie_word_embeddings": "output.weight" not in tensors,
            "sliding_window": window,
            "rope_parameters": self._rope(head_dim),
            "bos_token_id": self._gguf.metadata.get("tokenizer.ggml.bos_token_id"),
            "eos_token_id": self._eos_token_ids(),
        }

    def _eos_token_ids(self) -> list[int]:
        keys = ("tokenizer.ggml.eos_token_id", "tokenizer.ggml.eot_token_id")
        found = (self._gguf.metadata.get(key) for key in keys)
        return list(dict.fromkeys(token for token in found if token is not None))

    def _rope(self, head_dim: int) -> dict[str, Any]:
        theta = self._float("rope.freq_base", 10000.0)
        kind = self._get("rope.scaling.type", "none")
        if kind not in ("none", "linear", "yarn"):
            raise UnsupportedModel(
                f"{self._path}: {self._architecture}.rope.scaling.type: expected none, linear or"
                f" yarn, got {kind!r}"
            )
        if _ROPE_FREQUENCIES in self._gguf.tensors:
            return self._llama3(theta, head_dim)
        rope = {"rope_type": "default" if kind == "none" else kind, "rope_theta": theta}
        if kind != "none":
            rope["factor"] = self._float("rope.scaling.factor")
        if kind == "yarn":
            rope["original_max_position_embeddings"] = self._int(
                "rope.scaling.original_context_length"
            )
        return rope

    def _llama3(self, theta: float, head_dim: int) -> dict[str, Any]:
        """The parameters behind stored frequency factors; they must be those of Llama 3."""
        stored = self._gguf.tensors[_ROPE_FREQUENCIES].read().float().numpy()
        factor = float(stored.max())
        wavelengths = 2 * np.pi * theta ** (np.arange(0, head_dim, 2) / head_dim)
        smooth = (_LLAMA3["original_max_position_embeddings"] / wavelengths - 1.0) / 3.0
        smooth = smooth.clip(0.0, 1.0)
        expected = 1.0 / ((1.0 - smooth) / factor + smooth)
        if stored.shape != expected.shape or not np.allclose(stored, expected, rtol=1e-4):
            raise UnsupportedModel(
                f"{self._path}: {_ROPE_FREQUENCIES}: expected the {head_dim // 2} factors of Llama"
                " 3 (of 8192 positions, low 1, high 4)"
            )
        return {"rope_type": "llama3", "rope_theta": theta, "factor": factor, **_LLAMA3}

    def _int(self, key: str, default: int | None = None) -> int:
        value = self._get(key, default)
        if isinstance(value, list) and len(set(value)) == 1:
            value = value[0]
        if not isinstance(value, int) or value < 1:
            raise BadCheckpoint(
                f"{self._path}: {self._architecture}.{key}: expected a positive number, the same"
                f" for all layers, got {value!r}"
            )
        return value

    def _float(self, key: str, default: float | None = None) -> float:
        value = self._get(key, default)
        if not isinstance(value, float | int) or not 0.0 < value < float("inf"):
            raise BadCheckpoint(
                f"{self._path}: {self._architecture}.{key}: expected a positive number, got"
                f" {value!r}"
            )
        return float(value)

    def _get(self, key: str, default: Any = None) -> Any:
        value = self._gguf.metadata.get(f"{self._architecture}.{key}", default)
        if value is None and key not in ("attention.sliding_window",):
            raise BadCheckpoint(f"{self._path}: missing metadata {self._architecture}.{key}")
        return value
