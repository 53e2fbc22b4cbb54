"""A model that is ready to run, its cache groups, and the identity of its arithmetic."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer

from pagewire_kernels.select import Kernels
from worker_service.config import CacheConfig, ModelConfig
from worker_service.distributed.communicator import Communicator
from worker_service.distributed.layout import Layout
from worker_service.loader.kernels import FP8
from worker_service.models.interface import Model, Pools
from worker_service.models.kv_cache_spec import BLOCK_UNIT
from worker_service.models.linear.packing import cpu_arithmetic
from worker_service.models.native import NativeModel


@dataclass(frozen=True, kw_only=True, slots=True)
class LoadedModel:
    """A model with its weights on the device, and the facts about it that other modules need."""

    model: Model
    config: ModelConfig
    """The given configuration, with `device`, `dtype`, `max_model_len` and `attention_backend`
    resolved."""

    block_size: int
    """Tokens per KV block, of the cache group with most: as configured, or chosen by the attention
    backend's default."""

    model_dir: Path
    hf_config: Mapping[str, Any]
    """The content of `config.json`."""

    eos_token_ids: tuple[int, ...]
    """Tokens that end a sequence; may be empty."""

    bos_token_id: int | None
    assets: Mapping[str, bytes]
    """The files that frontends need, by name."""

    tokenizer: Callable[[], Tokenizer] | None
    """Returns the one that they describe; None if there is none that can be used, or if the model
    pools."""

    fingerprint: str
    weights: str
    """The format in which most weights are stored."""

    batch_invariant: bool
    """Whether the logits of a row are guaranteed to be bitwise independent of the batch and of how
    its tokens are divided into prefill chunks and decodes."""

    kernels: Kernels

    pooler: Pools | None = None
    """What follows the pooling; None: the model generates tokens."""

    communicator: Communicator = field(default_factory=lambda: Communicator(Layout()))
    """Connects the ranks that have shards of the model."""


ARITHMETIC_VERSION = 4
"""Incremented when a change to a kernel changes the rounding of its results."""


def arithmetic_of(loaded: LoadedModel) -> str:
    """Return the identity of the arithmetic behind a model's logits, such as `cpu/avx512_bf16/4`.

    It names everything that changes the rounding of a sum: instruction set or GPU architecture,
    attention backend, model implementation, tensor parallelism, dtype of the KV cache, and
    `--quantization`.
    """
    config, device = loaded.config, torch.device(loaded.config.device)
    backend = config.attention_backend or "none"
    if device.type == "cuda":
        major, minor = torch.cuda.get_device_capability(device)
        invariant = "-invariant" if loaded.batch_invariant else ""
        parts = ["cuda", f"sm{major}{minor}", f"{backend}{invariant}"]
        if isinstance(loaded.model, NativeModel) and loaded.model.packs_with_triton:
            parts.append("packed")
    else:
        parts = [device.type, cpu_arithmetic(getattr(torch, config.dtype))]
        parts += [] if backend == "cpu" else [backend]
    if not isinstance(loaded.model, NativeModel):
        parts.append("transformers")
    if config.layout.tensor_parallel_size > 1:
        parts.append(f"tp{config.layout.tensor_parallel_size}")
    stored = {FP8: "kv-fp8", torch.int8: "kv-int8"}.get(loaded.model.kv_cache_spec.dtype)
    parts += [] if stored is None else [stored]
    if config.quantization is not None:
        parts.append(config.quantization)
    return "/".join([*parts, str(ARITHMETIC_VERSION)])


def release_windows(loaded: LoadedModel, cache: CacheConfig) -> LoadedModel:
    """The model with its windows as cache groups of their own. Models stay in one group whose
    attention backend needs blocks of a larger multiple of tokens than groups can have."""
    able = loaded.kernels.attention.abilities
    if able.block_multiple > BLOCK_UNIT:
        return loaded
    spec = replace(loaded.model.kv_cache_spec, releases_windows=True)
    loaded.model.kv_cache_spec = spec
    block_size = cache.block_size or spec.choose_block_size(able.default_block_size)
    return replace(loaded, block_size=block_size)


def describe_cache(loaded: LoadedModel) -> str:
    """The cache groups, each with its attention backend, and the share of blocks that is unused:
    `growing of 80 tokens (triton), window 512 of 16 tokens (flash), 1.2% unused`."""
    spec, size = loaded.model.kv_cache_spec, loaded.block_size
    if not spec.layers:
        return "none"
    parts = [
        f"{group.lifetime.value}{f' {group.span}' if group.span else ''} of {group.block_tokens}"
        f" tokens ({loaded.kernels.attention_of(group.span or None).name})"
        if group.has_tokens
        else f"{group.lifetime.value} of {group.num_blocks} blocks"
        for group in spec.groups(size)
    ]
    return ", ".join([*parts, f"{spec.padding(size):.1%} unused"])
