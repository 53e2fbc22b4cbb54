"""A.X-K2: norms with gates, and latent attention with gates, as far as it is not sparse; experts as
in DeepSeek-V3."""

from dataclasses import replace

from worker_service.models.decoder.specs import DecoderSettings, LayerSpec
from worker_service.models.decoder_families.common import (
    Config,
    by_lines,
    gated_mlp,
    have_experts,
    require,
    with_keys,
    with_values,
)
from worker_service.models.decoder_families.latent import (
    latent_attention,
    latent_decoder,
    scored_experts,
)
from worker_service.models.feed_forward.experts import ExpertsSpec
from worker_service.models.layers.norms import NormSpec
from worker_service.models.mixers.latent_attention import OutputGates

_NAMES = by_lines("""
attention_norm          input_layernorm.norm
attention_norm.narrow   input_layernorm.mlp.fc1
attention_norm.wide     input_layernorm.mlp.fc2
""")

_SPARSE_NAMES = by_lines("""
feed_forward_norm          post_attention_layernorm.norm
feed_forward_norm.narrow   post_attention_layernorm.mlp.fc1
feed_forward_norm.wide     post_attention_layernorm.mlp.fc2
""")
"""Of layers with experts."""

_SIZES = {
    "num_attention_heads": 32,
    "kv_lora_rank": 128,
    "q_lora_rank": 384,
    "qk_rope_head_dim": 32,
    "qk_nope_head_dim": 64,
    "v_head_dim": 64,
    "moe_intermediate_size": 512,
    "num_experts_per_tok": 8,
    "max_position_embeddings": 131_072,
}
"""Defaults of `transformers`."""


def axk2_settings(config: Config) -> DecoderSettings:
    """A.X-K2. Indexers choose the tokens that a token sees: all of sequences of up to `index_topk`
    tokens, which are the longest ones here."""
    for key, value in (
        ("mlp_bias", False),
        ("moe_layer_freq", 1),
        ("layer_types", ["indexed_attention"] * config["num_hidden_layers"]),
    ):
        require(config, key, value)
    config = with_keys(config, {}, **_SIZES)
    require(config, "head_dim", config["qk_rope_head_dim"])
    groups = {key: config.get(key) or 1 for key in ("n_group", "topk_group")}
    config = with_values(config, **groups)
    experts = scored_experts(config, num_experts=128, num_groups=1, num_chosen_groups=1, scale=2.5)
    dense = gated_mlp(config, bias=False)
    has_experts = have_experts(config, config.get("first_k_dense_replace", 1))
    eps = config.get("rms_norm_eps", 1e-6)
    settings = latent_decoder(
        config,
        [experts if is_sparse else dense for is_sparse in has_experts],
        max_model_len=min(config.get("index_topk", 2048), config["max_position_embeddings"]),
        unused_names=r".*\.self_attn\.indexer\..*",
    )
    attention = replace(latent_attention(config, 384), gates=OutputGates.OF_QUERIES)
    norm = NormSpec(eps=eps, gate_rank=config.get("gated_norm_rank", 16))

    def gated(layer: LayerSpec) -> LayerSpec:
        of_part = _SPARSE_NAMES if isinstance(layer.feed_forward, ExpertsSpec) else {}
        names = {**layer.names, **_NAMES, **of_part}
        return replace(layer, attention=attention, norm=norm, names=names)

    return replace(settings, layers=tuple(map(gated, settings.layers)))
