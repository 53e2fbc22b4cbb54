"""The parameters of rotary embeddings, as `transformers` would have them."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from worker_service.errors import BadCheckpoint, UnsupportedModel
from worker_service.loader.gguf.metadata import ROPE_FREQUENCIES, Metadata
from worker_service.models.layers.rotary import TABLE_FACTOR

LONG_ROPE = {
    "long_factor": "rope_factors_long.weight",
    "short_factor": "rope_factors_short.weight",
}
"""Tensors of factors for lengths."""

LONG_ROPES = ("phi3", "phimoe", "minicpm", "minicpm3")
"""Architectures that have them."""

SECTIONS = "mrope_section"
"""The parameter of models whose positions are those of images, too."""

_LLAMA3 = {
    "low_freq_factor": 1.0,
    "original_max_position_embeddings": 8192,
}
"""The parameters of all Llama 3 models with scaled RoPE; files hold only the resulting factors."""


def rope_parameters(meta: Metadata, head_dim: int) -> dict[str, Any]:
    """The parameters of all layers; head_dim: the elements that are rotated."""
    theta = meta.real("rope.freq_base", 10000.0)
    factor = meta.get("rope.scaling.factor", meta.get("rope.scale_linear", 0.0))
    kind = meta.get("rope.scaling.type", "linear" if factor else "none")  # as in llama.cpp
    if kind == "longrope" and meta.architecture.name in LONG_ROPES:
        kind = "none"  # its factors are read from tensors
    if kind not in ("none", "linear", "yarn"):
        raise meta.fault("rope.scaling.type", "none, linear or yarn", kind, UnsupportedModel)
    further = {} if meta.architecture.name in LONG_ROPES else _table_factor(meta)
    if ROPE_FREQUENCIES in meta.tensors and meta.architecture.name != "gemma4":
        return _llama3(meta, theta, head_dim) | further
    rope = {"rope_type": "default" if kind == "none" else kind, "rope_theta": theta, **further}
    if kind != "none":
        rope["factor"] = meta.real("rope.scaling.factor", factor)
    if kind == "yarn":
        trained = meta.get("rope.scaling.original_context_length", 0)
        rope["original_max_position_embeddings"] = trained or meta.number("context_length")
        others = {"attention_factor": "attn_factor", "beta_fast": "beta_fast"}
        for name, stored in {**others, "beta_slow": "beta_slow"}.items():
            key = f"rope.scaling.yarn_{stored}"
            if meta.get(key, 0.0):
                rope[name] = meta.real(key)
    return rope


def _table_factor(meta: Metadata) -> dict[str, float]:
    """What queries and keys are multiplied by with their rotation, whatever the type of scaling."""
    key = "rope.scaling.attn_factor"
    return {TABLE_FACTOR: meta.real(key)} if meta.get(key, 0.0) else {}


def _llama3(meta: Metadata, theta: float, head_dim: int) -> dict[str, Any]:
    """The RoPE parameters that produce the stored factors, which must be those of Llama 3, or
    of Llama 4, which interpolates between no wavelengths."""
    stored = meta.tensors[ROPE_FREQUENCIES].stored_values().float().numpy()
    factor = float(stored.max())
    wavelengths = 2 * np.pi * theta ** (np.arange(0, 2 * len(stored), 2) / head_dim)
    cycles = _LLAMA3["original_max_position_embeddings"] / wavelengths
    high = 1.0 if meta.architecture.name == "llama4" else 4.0
    smooth = (cycles - 1.0) / (high - 1.0) if high > 1.0 else np.float64(cycles > 1.0)
    smooth = smooth.clip(0.0, 1.0)
    expected = 1.0 / ((1.0 - smooth) / factor + smooth)
    if len(stored) != head_dim // 2 or not np.allclose(stored, expected, rtol=1e-4):
        raise UnsupportedModel(
            f"{meta.path}: {ROPE_FREQUENCIES}: expected the {head_dim // 2} factors of Llama"
            f" {3 if high > 1.0 else 4} (original_max_position_embeddings 8192, low_freq_factor"
            f" 1, high_freq_factor {high:g})"
        )
    return {
        "rope_type": "llama3",
        "rope_theta": theta,
        "factor": factor,
        "high_freq_factor": high,
        **_LLAMA3,
    }


def with_local_rope(rope: dict[str, Any], theta: float) -> dict[str, Any]:
    """RoPE of layers with full attention, and that of layers with a window. theta: of the
    latter."""
    local_rope = {"rope_type": "default", "rope_theta": theta}
    local_rope |= {key: rope[key] for key in (TABLE_FACTOR,) if key in rope}
    return {"full_attention": rope, "sliding_attention": local_rope}


def scaled_by_position(meta: Metadata, rope: Mapping[str, Any]) -> dict[str, Any]:
    """The parameters of RoPE, with that by which queries are scaled with their positions."""
    scale, trained = "attention.temperature_scale", rope.get("original_max_position_embeddings")
    if not meta.get(scale, 0.0):
        return dict(rope)
    if trained is None:
        meta.require(scale, 0.0, "0 without rope.scaling.type yarn")
    meta.require("attention.temperature_length", trained, f"{trained}, the trained length")
    return {**rope, "llama_4_scaling_beta": meta.real(scale)}


def long_rope(
    meta: Metadata, rope: dict[str, Any], num_factors: int, length: int | None = None
) -> dict[str, Any]:
    """The fields of `LONG_ROPES`: RoPE factors beyond the trained length. length: that one, if the
    file does not say it."""
    if not any(name in meta.tensors for name in LONG_ROPE.values()):
        meta.require("rope.scaling.type", "none", "none without tensors rope_factors_*")
        return {"rope_parameters": rope | _table_factor(meta)}
    trained = meta.number("rope.scaling.original_context_length", length)
    rope |= {"rope_type": "longrope", "original_max_position_embeddings": trained}
    if meta.get("rope.scaling.attn_factor", 0.0):
        rope["attention_factor"] = meta.real("rope.scaling.attn_factor")
    for key, name in LONG_ROPE.items():
        tensor = meta.tensors.get(name)
        if tensor is None or tensor.shape != [num_factors]:
            found = "none" if tensor is None else tensor.shape
            raise BadCheckpoint(f"{meta.path}: {name}: expected {num_factors} numbers, got {found}")
        rope[key] = tensor.stored_values().tolist()
    return {"rope_parameters": rope, "original_max_position_embeddings": trained}
