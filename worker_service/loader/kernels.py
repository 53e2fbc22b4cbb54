"""The kernels of a model, selected by the attention features that it needs.

These are read from its configuration, by the same keys that native models read when they are built.
Some features of models that run through transformers appear only at run time; the trial run then
fails with the backend's error.
"""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch

from pagewire_kernels.interface import AttentionNeeds
from pagewire_kernels.select import Kernels, select_kernels
from worker_service.config import CacheConfig, ModelConfig
from worker_service.distributed.communicator import require_symmetric_memory
from worker_service.errors import InvalidOption
from worker_service.models.encoders.families import ENCODERS

FP8 = torch.float8_e4m3fn
CACHE_DTYPES = {"auto": None, "fp8": FP8, "int8": torch.int8}
"""By `--kv-cache-dtype`."""

_SOFT_CAP_KEYS = ("attn_logit_softcapping", "attention_logit_cap")
_MODELS_WITH_SINKS = ("gpt_oss",)
_MODELS_WITH_ALIBI = ("bloom", "mpt")
_ALWAYS_IN_A_WINDOW = ("MistralForCausalLM",)


def attention_needs(
    config: Mapping[str, Any],
    dtype: torch.dtype,
    *,
    cache_dtype: torch.dtype | None,
    block_size: int | None,
    batch_invariant: bool,
) -> AttentionNeeds:
    """Derive the attention features that a model needs.

    config: content of `config.json`; dtype: of activations; cache_dtype: of the KV cache, None if
    it is `dtype`; block_size: tokens per KV block, None for the backend's default.
    """
    text = config.get("text_config") or config
    return AttentionNeeds(
        dtype=dtype,
        head_dim=head_dim(text),
        cache_dtype=cache_dtype,
        block_size=block_size,
        chunks=bool(text.get("attention_chunk_size", text.get("model_type") == "llama4_text")),
        sliding_window=any(_windows(text)),
        soft_cap=any(text.get(key) for key in _SOFT_CAP_KEYS),
        sinks=text.get("model_type") in _MODELS_WITH_SINKS,
        alibi=bool(text.get("alibi")) or text.get("model_type") in _MODELS_WITH_ALIBI,
        packed=any(name in ENCODERS for name in config.get("architectures") or ()),
        batch_invariant=batch_invariant,
    )


def head_dim(config: Mapping[str, Any]) -> int:
    """Elements of the largest attention head, from the usual fields of `config.json`; 64 without
    them."""
    layers = [config, *_configs_of_layers(config).values()]
    return max(*map(_head_dim_of_all, layers), config.get("global_head_dim") or 0)


def _head_dim_of_all(config: Mapping[str, Any]) -> int:
    """Elements of a head, where those of all layers are equal; of latent attention, those of the
    latent with the end of keys."""
    if latent := config.get("kv_lora_rank"):
        return int(latent) + int(config.get("qk_rope_head_dim", 64))
    sizes, counts = (
        ("hidden_size", "n_embd", "dim", "d_model"),
        ("num_attention_heads", "n_head", "n_heads"),
    )
    size, heads = (
        next((config[key] for key in keys if config.get(key)), 0) for keys in (sizes, counts)
    )
    return int(config.get("head_dim") or size // (heads or 1) or 64)


def _configs_of_layers(config: Mapping[str, Any]) -> dict[int, Mapping[str, Any]]:
    """By layer, the configuration of those that differ from others (Gemma 4, Dots 3 Note)."""
    layers = (config.get("per_layer_config") or {}).items()
    return {int(index): {**config, **layer} for index, layer in layers}


def needs_of_windows(config: Mapping[str, Any], needs: AttentionNeeds) -> AttentionNeeds | None:
    """What layers with a window need of attention, if they have smaller heads than others, which
    may then be served by another backend. needs: those of all layers."""
    text = config.get("text_config") or config
    kinds, others = text.get("layer_types") or (), _configs_of_layers(text)
    windows = [others.get(i, text) for i, kind in enumerate(kinds) if kind == "sliding_attention"]
    size = max(map(_head_dim_of_all, windows), default=needs.head_dim)
    return replace(needs, head_dim=size) if size < needs.head_dim else None


def _windows(config: Mapping[str, Any]) -> Iterator[bool]:
    yield "sliding_attention" in (config.get("layer_types") or ())
    default = 4096 if (config.get("architectures") or [""])[0] in _ALWAYS_IN_A_WINDOW else None
    window = config.get("sliding_window", default)
    yield window is not None and config.get("use_sliding_window", True)


def choose_kernels(
    config: ModelConfig,
    cache: CacheConfig,
    hf_config: Mapping[str, Any],
    dtype: torch.dtype,
    device: torch.device,
) -> Kernels:
    """The kernels of a model with this `config.json`. Raises InvalidOption if there are none."""
    needs = attention_needs(
        hf_config,
        dtype,
        cache_dtype=CACHE_DTYPES[cache.kv_cache_dtype],
        block_size=cache.block_size,
        batch_invariant=config.batch_invariant,
    )
    if config.symmetric_memory:
        require_symmetric_memory(device, torch.__version__)
    windowed = needs_of_windows(hf_config, needs)
    if windowed is not None:
        needs = replace(needs, sliding_window=False)
    try:
        return select_kernels(device, needs, config.attention_backend, windowed)
    except ValueError as error:
        raise InvalidOption(str(error)) from error


def require_cache_dtype(dtype: str, device: torch.device, attention: str | None) -> None:
    """Raise InvalidOption if no attention backend of this device supports a KV cache dtype.

    dtype: `--kv-cache-dtype`; attention: `--attention-backend`.
    """
    if dtype == "fp8" and device.type == "cpu" and attention != "reference":
        raise InvalidOption(
            "kv_cache_dtype: expected auto or int8 on a CPU, got fp8, which needs a GPU or"
            " --attention-backend reference"
        )
    if dtype == "int8" and device.type != "cpu":
        raise InvalidOption("kv_cache_dtype: expected auto or fp8 on a GPU, got int8")
