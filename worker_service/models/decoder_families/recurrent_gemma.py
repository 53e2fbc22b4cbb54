"""RecurrentGemma (Botev et al. 2024): two recurrences to one layer of attention with a window, and
the norms, embeddings and gated MLP of Gemma."""

import torch

from worker_service.errors import UnsupportedModel
from worker_service.models.decoder.specs import DecoderSettings, LayerSpec, MixerSpec
from worker_service.models.decoder_families.common import (
    Config,
    attention_of,
    by_lines,
    decoder_of,
    head_dim_of,
    rotary_of,
    with_keys,
)
from worker_service.models.feed_forward.mlp import MLPSpec
from worker_service.models.layers.norms import NormSpec
from worker_service.models.mixers.recurrent_unit import RecurrentUnitSpec

_ATTENTION, _RECURRENT = "attention", "recurrent"
"""In `block_types`."""

_NAMES = {
    _ATTENTION: by_lines("""
attention.qkv           temporal_block.q_proj temporal_block.k_proj temporal_block.v_proj
attention.output        temporal_block.o_proj
"""),
    _RECURRENT: by_lines("""
attention.gate          temporal_block.linear_y
attention.inputs        temporal_block.linear_x
attention.convolution   temporal_block.conv_1d
attention.gates         temporal_block.rg_lru
attention.decay         temporal_block.rg_lru.recurrent_param
attention.output        temporal_block.linear_out
"""),
}
_SHARED_NAMES = by_lines("""
attention_norm          temporal_pre_norm
feed_forward_norm       channel_pre_norm
feed_forward.up         mlp_block.gate_proj mlp_block.up_proj
feed_forward.down       mlp_block.down_proj
""")


def recurrent_gemma_settings(config: Config) -> DecoderSettings:
    """RecurrentGemma. Its configuration states no length; it was trained on 8,192 tokens."""
    config = with_keys(
        config,
        {},
        hidden_size=2560,
        num_hidden_layers=26,
        num_attention_heads=10,
        vocab_size=256_000,
        intermediate_size=7680,
        max_position_embeddings=8192,
    )
    kinds = list(config.get("block_types") or (_RECURRENT, _RECURRENT, _ATTENTION))
    if not set(kinds) <= {_RECURRENT, _ATTENTION}:
        raise UnsupportedModel(
            f"config.json: block_types: expected {_RECURRENT} or {_ATTENTION}, got"
            f" {', '.join(map(str, kinds))}"
        )
    size, num_heads = config["hidden_size"], config["num_attention_heads"]
    num_channels = config.get("lru_width") or size
    if num_channels % num_heads:
        raise UnsupportedModel(
            f"config.json: lru_width: expected a multiple of {num_heads} heads, got {num_channels}"
        )
    if not (soft_cap := config.get("logits_soft_cap", 30.0)) or soft_cap < 0:
        raise UnsupportedModel(
            f"config.json: logits_soft_cap: expected a number above 0, got {soft_cap}"
        )
    head_dim = head_dim_of(config)
    rotary = rotary_of(config, head_dim, partial=config.get("partial_rotary_factor", 0.5))
    activation = config.get("hidden_activation", "gelu_pytorch_tanh")
    norm = NormSpec(eps=config.get("rms_norm_eps", 1e-6), offset=1.0)
    mixers: dict[str, MixerSpec] = {
        _ATTENTION: attention_of(
            config,
            head_dim,
            rotary,
            window=config.get("attention_window_size", 2048),
            qkv_bias=bool(config.get("attention_bias", False)),
            output_bias=True,
        ),
        _RECURRENT: RecurrentUnitSpec(
            num_channels=num_channels,
            num_blocks=num_heads,
            width=config.get("conv1d_width", 4),
            activation=activation,
        ),
    }
    mlp = MLPSpec(inner_size=config["intermediate_size"] // 2, activation=activation, bias=True)
    layers = [
        LayerSpec(
            attention=mixers[kind],
            feed_forward=mlp,
            norm=norm,
            names=_SHARED_NAMES | _NAMES[kind],
        )
        for kind in (kinds[i % len(kinds)] for i in range(config["num_hidden_layers"]))
    ]
    return decoder_of(
        config,
        layers,
        norm,
        max_model_len=config["max_position_embeddings"],
        tie_word_embeddings=bool(config.get("tie_word_embeddings", True)),
        embedding_scale=torch.tensor(size**0.5, dtype=torch.bfloat16).item(),
        logits_soft_cap=float(soft_cap),
    )
