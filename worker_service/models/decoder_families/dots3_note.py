"""Dots 3 Note, the text model: latent attention with gates of heads and a norm of the end of keys,
in most layers over a window and of other sizes, elsewhere as far as it is not sparse; experts as in
DeepSeek-V3 (Dots Studio 2026)."""

from dataclasses import replace

from worker_service.models.decoder.specs import DecoderSettings, LayerSpec
from worker_service.models.decoder_families.common import (
    FULL,
    SLIDING,
    Config,
    by_lines,
    decoder_of,
    gated_mlp,
    have_experts,
    layer_types,
    require,
    values_of_layer,
    with_keys,
    with_values,
)
from worker_service.models.decoder_families.latent import (
    EXPERT_NAMES,
    LATENT_NAMES,
    MLP_NAMES,
    latent_attention,
    scored_experts,
)
from worker_service.models.decoder_families.scored_mixtures import SHARED_NAMES
from worker_service.models.feed_forward.experts import ExpertsSpec, SharedSpec
from worker_service.models.layers.norms import NormSpec
from worker_service.models.mixers.latent_attention import LatentAttentionSpec, OutputGates

_INDEXED = "indexed_attention"
"""In `layer_types`."""

_NAMES = LATENT_NAMES | by_lines("""
attention.inputs      self_attn.q_a_proj self_attn.kv_a_proj_with_mqa self_attn.g_proj
attention.end_norm    self_attn.k_rope_only_layernorm
""")

_SIZES = {
    "num_attention_heads": 128,
    "q_lora_rank": 1024,
    "head_dim": 256,
    "moe_intermediate_size": 1536,
    "num_experts_per_tok": 8,
    "max_position_embeddings": 524_288,
    "sliding_window": 512,
}
"""Defaults of `transformers`."""

_THETAS = {_INDEXED: 8e7, FULL: 8e7, SLIDING: 5e4}


def dots3_note_settings(config: Config) -> DecoderSettings:
    """Dots 3 Note. Indexers choose the tokens that a token sees: all of sequences of up to
    `index_topk` tokens, which are the longest ones here. Layers behind the last one are not
    used."""
    for key in ("attention_bias", "mlp_bias"):
        require(config, key, False)
    config = with_keys(config, {}, **_SIZES)
    num_layers, norm = config["num_hidden_layers"], NormSpec(eps=config.get("rms_norm_eps", 1e-5))
    default = [SLIDING if i > 1 and i % 4 != 1 else _INDEXED for i in range(num_layers)]
    kinds = layer_types(config, default, (_INDEXED, FULL, SLIDING))
    configs = [with_values(config, **values_of_layer(config, i)) for i in range(num_layers)]
    layers = [
        LayerSpec(
            attention=_attention(of_layer, kind),
            feed_forward=_experts(of_layer) if is_sparse else gated_mlp(of_layer),
            norm=norm,
            names=_NAMES | (EXPERT_NAMES | SHARED_NAMES if is_sparse else MLP_NAMES),
        )
        for of_layer, kind, is_sparse in zip(configs, kinds, have_experts(config, 1), strict=True)
    ]
    length = config["max_position_embeddings"]
    if _INDEXED in kinds:
        length = min(config.get("index_topk", 2048), length)
    return decoder_of(
        config,
        layers,
        norm,
        max_model_len=length,
        ignores_further_layers=True,
        unused_names=r".*\.self_attn\.indexer\..*",
    )


def _attention(config: Config, kind: str) -> LatentAttentionSpec:
    """Latents have factors. What is rotated of a head is `qk_rope_head_dim`, whatever
    `partial_rotary_factor` says, as in `transformers`."""
    num_heads, stored = config["num_attention_heads"], config.get("rope_parameters") or {}
    require(config, "num_key_value_heads", num_heads)
    rope = {"rope_type": "default", "rope_theta": _THETAS[kind]} | dict(stored.get(kind) or {})
    rope.pop("partial_rotary_factor", None)
    spec = latent_attention(with_values(config, rope_parameters=rope), config["q_lora_rank"])
    size, query_dim = config["hidden_size"], config["q_lora_rank"]
    return replace(
        spec,
        scale=(spec.key_dim + spec.rotary_dim) ** -0.5 * (size / query_dim) ** 0.5,
        latent_scale=(size / spec.latent_dim) ** 0.5,
        eps=config.get("rms_norm_eps", 1e-5),
        norms_ends=True,
        gates=OutputGates.OF_HEADS,
        window=config["sliding_window"] if kind == SLIDING else None,
    )


def _experts(config: Config) -> ExpertsSpec:
    """Shared experts have a size of their own."""
    experts = scored_experts(config, num_experts=256, num_groups=1, num_chosen_groups=1, scale=1.0)
    shared = config.get("shared_experts_intermediate_size", 1536)
    num_shared = config.get("n_shared_experts", 1)
    return replace(experts, shared=SharedSpec(inner_size=shared * num_shared))
