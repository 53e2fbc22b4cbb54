"""The attention features that a configuration requires."""

from dataclasses import fields
from typing import Any

import pytest
import torch

from pagewire_kernels.interface import AttentionNeeds
from worker_service.loader.kernels import attention_needs, needs_of_windows

FEATURES = ("chunks", "sliding_window", "soft_cap", "sinks", "alibi", "packed")


def _needs(config: dict[str, Any]) -> AttentionNeeds:
    return attention_needs(
        config, torch.bfloat16, cache_dtype=None, block_size=None, batch_invariant=False
    )


@pytest.mark.parametrize(
    ("config", "features"),
    [
        ({"architectures": ["LlamaForCausalLM"]}, set()),
        ({"architectures": ["BertModel"]}, {"packed"}),
        ({"architectures": ["MistralForCausalLM"]}, {"sliding_window"}),
        ({"architectures": ["MistralForCausalLM"], "sliding_window": None}, set()),
        ({"sliding_window": 4096, "use_sliding_window": False}, set()),
        ({"sliding_window": 4096}, {"sliding_window"}),
        (
            {"layer_types": ["full_attention", "sliding_attention"], "model_type": "gpt_oss"},
            {"sliding_window", "sinks"},
        ),
        ({"text_config": {"attn_logit_softcapping": 50.0}}, {"soft_cap"}),
        ({"alibi": True}, {"alibi"}),
        ({"text_config": {"model_type": "llama4_text"}}, {"chunks"}),
        ({"model_type": "llama4_text", "attention_chunk_size": 48}, {"chunks"}),
        ({"model_type": "llama4_text", "attention_chunk_size": None}, set()),
    ],
)
def test_features_are_read_from_their_keys(config: dict[str, Any], features: set[str]) -> None:
    needs = _needs({"hidden_size": 64, "num_attention_heads": 4} | config)
    assert {feature for feature in FEATURES if getattr(needs, feature)} == features
    assert set(FEATURES) < {field.name for field in fields(needs)}


@pytest.mark.parametrize(
    ("config", "size"),
    [
        ({"hidden_size": 64, "num_attention_heads": 4}, 16),
        ({"hidden_size": 64, "num_attention_heads": 4, "head_dim": 24}, 24),
        ({"head_dim": 64, "kv_lora_rank": 512, "qk_rope_head_dim": 32}, 544),
        ({"hidden_size": 64, "num_attention_heads": 4, "kv_lora_rank": 512}, 576),
        ({"n_embd": 96, "n_head": 2}, 48),
        ({"text_config": {"hidden_size": 64, "num_attention_heads": 8}}, 8),
    ],
)
def test_the_head_size_is_given_or_derived(config: dict[str, Any], size: int) -> None:
    assert _needs(config).head_dim == size


def test_the_largest_heads_count_where_layers_differ() -> None:
    shape = {"head_dim": 256, "per_layer_config": {"05": {"head_dim": 512}, "07": {"x": 1}}}
    assert _needs(shape).head_dim == 512
    assert _needs({"head_dim": 256}).head_dim == 256


GEMMA = {"head_dim": 256, "layer_types": ["sliding_attention", "full_attention"]}


@pytest.mark.parametrize(
    ("other", "of_windows"),
    [
        ({}, None),
        ({"global_head_dim": 512}, 256),
        ({"per_layer_config": {"1": {"head_dim": 512}}}, 256),
        ({"per_layer_config": {"00": {"head_dim": 512}}}, None),
    ],
)
def test_windows_with_smaller_heads_are_asked_for_apart(
    other: dict[str, Any], of_windows: int | None
) -> None:
    config = GEMMA | other
    windowed = needs_of_windows(config, _needs(config))
    assert (None if windowed is None else windowed.head_dim) == of_windows
