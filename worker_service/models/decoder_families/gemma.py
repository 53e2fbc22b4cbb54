"""Gemma 1, 2 and 3: norms with an offset of 1, scaled embeddings, a gated MLP with GELU; from
Gemma 2 on norms before and after each part, and windows in most layers."""

from worker_service.models.decoder.specs import DecoderSettings, LayerSpec, NormPlace
from worker_service.models.decoder_families.common import (
    FULL,
    NAMES,
    SLIDING,
    Config,
    NotNative,
    attention_of,
    biases_of,
    decoder_of,
    every,
    head_dim_of,
    layer_types,
    rotaries_by_type,
    rotary_of,
)
from worker_service.models.feed_forward.mlp import MLPSpec
from worker_service.models.layers.norms import NormSpec
from worker_service.models.mixers.attention import AttentionSpec

NAMES_AROUND = {
    **NAMES,
    "attention_output_norm": "post_attention_layernorm",
    "feed_forward_norm": "pre_feedforward_layernorm",
    "feed_forward_output_norm": "post_feedforward_layernorm",
}
GELU = "gelu_pytorch_tanh"
THETAS = {FULL: 1_000_000.0, SLIDING: 10_000.0}
"""Of Gemma 3."""


def gemma_settings(config: Config) -> DecoderSettings:
    """Gemma 1. Old checkpoints name the wrong GELU."""
    head_dim = head_dim_of(config, 256)
    attention = attention_of(config, head_dim, rotary_of(config, head_dim), **biases_of(config))
    activation = config.get("hidden_act", GELU)
    return _decoder(
        config,
        [attention] * config["num_hidden_layers"],
        GELU if activation == "gelu" else activation,
        place=NormPlace.BEFORE,
    )


def gemma2_settings(config: Config) -> DecoderSettings:
    """Gemma 2: attention scores and logits with soft caps."""
    head_dim = head_dim_of(config, 256)
    rotary = rotary_of(config, head_dim)
    window = config.get("sliding_window", 4096)
    attentions = [
        attention_of(
            config,
            head_dim,
            rotary,
            scale=config.get("query_pre_attn_scalar", 256) ** -0.5,
            window=window if kind == SLIDING else None,
            soft_cap=config.get("attn_logit_softcapping", 50.0),
            **biases_of(config),
        )
        for kind in layer_types(config, every(config, 2))
    ]
    activation = config.get("hidden_activation", GELU)
    cap = config.get("final_logit_softcapping", 30.0)
    return _decoder(config, attentions, activation, soft_cap=cap)


def gemma3_settings(config: Config) -> DecoderSettings:
    """Gemma 3: queries and keys with norms, and another rotary embedding in layers with windows."""
    head_dim = head_dim_of(config, 256)
    rotaries = rotaries_by_type(config, head_dim, THETAS)
    window = config.get("sliding_window", 4096)
    attentions = [
        attention_of(
            config,
            head_dim,
            rotaries[kind],
            scale=config.get("query_pre_attn_scalar", 256) ** -0.5,
            window=window if kind == SLIDING else None,
            head_norm=_norm(config),
            **biases_of(config),
        )
        for kind in layer_types(config, every(config, config.get("sliding_window_pattern", 6)))
    ]
    activation, cap = config.get("hidden_activation", GELU), config.get("final_logit_softcapping")
    return _decoder(config, attentions, activation, soft_cap=cap)


def _norm(config: Config) -> NormSpec:
    return NormSpec(eps=config.get("rms_norm_eps", 1e-6), offset=1.0)


def _decoder(
    config: Config,
    attentions: list[AttentionSpec],
    activation: str,
    *,
    place: NormPlace = NormPlace.AROUND,
    soft_cap: float | None = None,
) -> DecoderSettings:
    """attentions: of each layer. Raises NotNative for attention that is not causal."""
    if config.get("use_bidirectional_attention"):
        raise NotNative("use_bidirectional_attention")
    norm = _norm(config)
    mlp = MLPSpec(inner_size=config["intermediate_size"], activation=activation)
    names = NAMES_AROUND if place is NormPlace.AROUND else NAMES
    return decoder_of(
        config,
        [
            LayerSpec(attention=spec, feed_forward=mlp, norm=norm, norm_place=place, names=names)
            for spec in attentions
        ],
        norm,
        max_model_len=config["max_position_embeddings"],
        tie_word_embeddings=config.get("tie_word_embeddings", True),
        embedding_scale=config["hidden_size"] ** 0.5,
        logits_soft_cap=soft_cap,
    )
