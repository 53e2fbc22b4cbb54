"""What a model asks of attention, as far as its configuration tells.

Native models read the same keys when they are built. Of others some features show only when the
model runs; then the trial run after loading fails with the backend's own words.
"""

from collections.abc import Iterator, Mapping
from typing import Any

import torch

from pagewire_kernels.backends import AttentionNeeds

FP8 = torch.float8_e4m3fn

_SOFT_CAP_KEYS = ("attn_logit_softcapping", "attention_logit_cap")
_MODELS_WITH_SINKS = ("gpt_oss",)
_ALWAYS_IN_A_WINDOW = ("MistralForCausalLM",)


def attention_needs(
    config: Mapping[str, Any],
    dtype: torch.dtype,
    *,
    cache_dtype: torch.dtype | None,
    block_size: int | None,
    batch_invariant: bool,
) -> AttentionNeeds:
    """From the content of `config.json` and what the worker was told."""
    text = config.get("text_config") or config
    return AttentionNeeds(
        dtype=dtype,
        head_dim=head_dim(text),
        cache_dtype=cache_dtype,
        block_size=block_size,
        sliding_window=any(_windows(text)),
        soft_cap=any(text.get(key) for key in _SOFT_CAP_KEYS),
        sinks=text.get("model_type") in _MODELS_WITH_SINKS,
        alibi=bool(text.get("alibi")),
        batch_invariant=batch_invariant,
    )


def head_dim(config: Mapping[str, Any]) -> int:
    """Elements of an attention head, where the configuration tells them in a usual way."""
    size = config.get("hidden_size") or config.get("n_embd") or 0
    heads = config.get("num_attention_heads") or config.get("n_head") or 1
    return int(config.get("head_dim") or size // heads or 64)


def _windows(config: Mapping[str, Any]) -> Iterator[bool]:
    yield "sliding_attention" in (config.get("layer_types") or ())
    default = 4096 if (config.get("architectures") or [""])[0] in _ALWAYS_IN_A_WINDOW else None
    window = config.get("sliding_window", default)
    yield window is not None and config.get("use_sliding_window", True)
