"""The configuration of a GGUF model as `transformers` would describe it.

What all families have is read here; experts, states and the rest by functions that tables name
(`experts.py`, `families.py`).
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from worker_service.errors import BadCheckpoint, UnsupportedModel
from worker_service.loader.gguf.architectures import (
    ARCHITECTURES,
    DEEPSEEK2,
    FALCON_MAMBA,
    LATENT,
    MISTRAL,
    MISTRAL4,
    MIXTRAL,
    OLMO3,
    YOUTU,
    Architecture,
)
from worker_service.loader.gguf.attention import head_dims, latent, layer_types
from worker_service.loader.gguf.encoders import encoder, pooling
from worker_service.loader.gguf.end_tokens import eos_token_ids, token_id
from worker_service.loader.gguf.experts import MIXTURES, SIGMOID, SOFTMAX, expert_fields
from worker_service.loader.gguf.families import FIELDS
from worker_service.loader.gguf.file import Gguf, open_gguf
from worker_service.loader.gguf.gemma import GEMMA3N, GEMMA4
from worker_service.loader.gguf.hybrids import (
    HYBRIDS,
    STATES_ALONE,
    of_some_layers,
    states_alone,
)
from worker_service.loader.gguf.metadata import Metadata
from worker_service.loader.gguf.rope import rope_parameters

_ACTIVATIONS = {
    **dict.fromkeys(("arcee", "jais2", "nemotron"), "relu2"),
    "apertus": "xielu",
    "gpt_neox": "gelu",
    "phi": "gelu_new",
    "starcoder2": "gelu_pytorch_tanh",
}
"""Those of MLPs by `model_type`, of models that have another one than SiLU."""

_EPSILONS = ["layer_norm_eps", "layer_norm_epsilon", "norm_eps", "norm_epsilon"]
"""The fields of the epsilon of norms of layers."""

_NO_EFFECT = (
    *(".vocab_size", ".tensor_data_layout", ".rope.scaling.finetuned"),
    ".rope.scaling.original_context_length",
    ".rope.dimension_sections",  # positions of text are the same in all of them
    ".n_deepstack_layers",  # of images
    *(".indexer.head_count", ".indexer.key_length", ".indexer.types"),  # of longer texts
)
"""Ends of settings that describe a file or its history, or have an effect with others only."""

_SAVED = {"F32": "float32", "F16": "float16"}


def gguf_config(path: Path) -> dict[str, Any]:
    """The content that `config.json` would have. Raises BadCheckpoint or UnsupportedModel."""
    gguf = open_gguf(path)
    name = gguf.metadata.get("general.architecture")
    if not isinstance(name, str) or name not in ARCHITECTURES:
        raise UnsupportedModel(
            f"{path}: general.architecture: expected one of {', '.join(ARCHITECTURES)}, got"
            f" {name!r}"
        )
    return _read(_metadata(path, gguf))


def unread_settings(path: Path) -> list[str]:
    """Settings of a file's architecture that are not used. Raises as `gguf_config` does."""
    meta = _metadata(path, open_gguf(path))
    _read(meta)
    return sorted(key for key in meta.unread if not key.endswith(_NO_EFFECT))


def _metadata(path: Path, gguf: Gguf) -> Metadata:
    return Metadata(path, gguf, ARCHITECTURES[gguf.metadata["general.architecture"]])


def _read(meta: Metadata) -> dict[str, Any]:
    """The equivalent of `config.json`."""
    tensors = meta.tensors
    if "token_embd.weight" not in tensors:
        raise BadCheckpoint(f"{meta.path}: missing tensor token_embd.weight")
    hidden_size = meta.number("embedding_length")
    window = meta.get("attention.sliding_window") and meta.number("attention.sliding_window")
    model = _model(meta, window)
    config: dict[str, Any] = {
        "architectures": [model.class_name],
        "model_type": model.kind,
        "dtype": _dtype(meta),
        "vocab_size": tensors["token_embd.weight"].shape[0],
        "hidden_size": hidden_size,
        "num_hidden_layers": _num_layers(meta),
        "max_position_embeddings": meta.number("context_length"),
        "bos_token_id": token_id(meta, "bos_token_id"),
        "eos_token_id": eos_token_ids(meta),
        "pad_token_id": None,
    }
    if model.kind in STATES_ALONE:
        return config | states_alone(meta, hidden_size, model.kind)
    num_heads = meta.number("attention.head_count")
    head_dim, rotary_dim = head_dims(meta, hidden_size // num_heads)
    config |= {
        "intermediate_size": _of_layers(meta, model.kind, "feed_forward_length"),
        "num_attention_heads": num_heads,
        "num_key_value_heads": _of_layers(meta, model.kind, "attention.head_count_kv", num_heads),
        "head_dim": head_dim,
        "rope_parameters": rope_parameters(meta, rotary_dim),
    }
    if model.is_encoder:
        return config | encoder(meta, config, window) | pooling(meta, model.kind)
    config |= _of_decoder(meta, model, config, window, rotary_dim)
    if model.kind in FIELDS:
        config |= FIELDS[model.kind](meta, config)
    return config | pooling(meta, model.kind)


def _of_decoder(
    meta: Metadata,
    model: Architecture,
    config: Mapping[str, Any],
    window: int | None,
    rotary_dim: int,
) -> dict[str, Any]:
    """The fields that all families of decoders have, and those of experts and of latents."""
    kind, epsilon = model.kind, "attention.layer_norm_rms_epsilon"
    norms, default = ["rms_norm_eps"], None
    if "layer-norms" in model.traits:
        norms, default = _EPSILONS, meta.get(epsilon, 0.0) or None
        epsilon = "attention.layer_norm_epsilon"
    fields: dict[str, Any] = {
        **dict.fromkeys(norms, meta.real(epsilon, default)),
        "hidden_act": _ACTIVATIONS.get(kind, "silu"),
        "attention_bias": any(map(meta.has_tensor, ("attn_q.bias", "attn_qkv.bias"))),
        "mlp_bias": meta.has_tensor("ffn_up.bias"),
        "tie_word_embeddings": "output.weight" not in meta.tensors,
        "sliding_window": window or None,
    }
    if kind in LATENT:
        fields |= latent(meta, config["head_dim"])
    if model.window_period is not None:
        fields["layer_types"] = layer_types(meta, config["num_hidden_layers"], window)
    if "part" in model.traits:
        share = rotary_dim / config["head_dim"]
        fields["rope_parameters"] = config["rope_parameters"] | {"partial_rotary_factor": share}
    may_lack = kind in HYBRIDS or kind == GEMMA4
    if kind in MIXTURES and (not may_lack or meta.get("expert_count", 0)):
        fields |= expert_fields(meta, config["intermediate_size"], kind)
    return fields


def _model(meta: Metadata, window: int | None) -> Architecture:
    """The architecture with the class and `model_type` of this file's model."""
    row = meta.architecture
    num_experts = meta.get("expert_count", 0)
    if row.name == "llama" and (window or num_experts):
        row = row.as_model(*(MIXTRAL if num_experts else MISTRAL))
    elif row.name == "olmo2" and window:
        row = row.as_model(*OLMO3)
    elif row.name == "mamba" and meta.get("ssm.dt_b_c_rms", False):
        row = row.as_model(*FALCON_MAMBA)
    elif row.name == "deepseek2" and not num_experts:
        row = row.as_model(*YOUTU)
    elif row.name == "deepseek2":
        corrects = any(key.endswith("exp_probs_b.bias") for key in meta.tensors)
        scores = meta.get("expert_gating_func", SIGMOID if corrects else SOFTMAX)
        if scores == SOFTMAX:
            is_normed = meta.get("expert_weights_norm", False)
            row = row.as_model(*(MISTRAL4 if is_normed else DEEPSEEK2))
    elif window and "windows" not in row.traits:
        meta.require("attention.sliding_window", None, "none")
    if num_experts and row.kind not in MIXTURES:
        meta.require("expert_count", 0, "none")
    return row


def _dtype(meta: Metadata) -> str:
    """The dtype of all matrices; bfloat16 if they have several, or are quantized."""
    types = {tensor.type for tensor in meta.tensors.values() if len(tensor.shape) > 1}
    return _SAVED.get(types.pop(), "bfloat16") if len(types) == 1 else "bfloat16"


def _num_layers(meta: Metadata) -> int:
    num_layers, num_tensors = meta.number("block_count"), len(meta.tensors)
    if num_layers > num_tensors:
        expected = f"at most the number of tensors, {num_tensors}"
        raise meta.fault("block_count", expected, num_layers)
    further = meta.get("nextn_predict_layers", 0)
    if not isinstance(further, int) or not 0 <= further < num_layers:
        expected = f"a number below that of layers, {num_layers}"
        raise meta.fault("nextn_predict_layers", expected, further)
    return num_layers - further


def _of_layers(meta: Metadata, kind: str, key: str, default: int | None = None) -> int:
    """A number of all layers, or of those that have the part that it describes."""
    if kind in (GEMMA3N, GEMMA4, "mimo_v2_flash"):  # which read those of their layers themselves
        return meta.by_layer(key, _num_layers(meta))[0]
    return of_some_layers(meta, kind, key, default)
