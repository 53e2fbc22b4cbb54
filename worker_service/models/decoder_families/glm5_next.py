"""GLM-5 Next, the text model: Kimi delta attention with bounded decays, in every fourth layer
latent attention without a rotary embedding, as far as it is not sparse, hyper-connections that mix
streams, and experts as in DeepSeek-V3. All gates of MLPs have a limit."""

from dataclasses import replace

from pagewire_kernels.reference import Gate
from worker_service.errors import UnsupportedModel
from worker_service.models.decoder.hyper import HyperConnectionsSpec
from worker_service.models.decoder.specs import DecoderSettings, LayerSpec
from worker_service.models.decoder_families.common import (
    Config,
    by_lines,
    decoder_of,
    gated_mlp,
    have_experts,
    layer_types,
    require,
    with_keys,
)
from worker_service.models.decoder_families.kimi_linear import (
    DELTA_NAMES,
    NORM_NAMES,
    unrotated_latents,
)
from worker_service.models.decoder_families.latent import (
    EXPERT_NAMES,
    LATENT_NAMES,
    MLP_NAMES,
    scored_experts,
)
from worker_service.models.decoder_families.scored_mixtures import SHARED_NAMES
from worker_service.models.layers.norms import NormSpec
from worker_service.models.mixers.delta_net import KimiDeltaSpec

_LINEAR, _INDEXED = "linear_attention", "indexed_attention"
"""In `layer_types`."""

_STREAM_NAMES = by_lines("""
attention_streams       hc_attn_fn hc_attn_base hc_attn_scale
feed_forward_streams    hc_ffn_fn hc_ffn_base hc_ffn_scale
""")

_SIZES = {
    "num_attention_heads": 64,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 2048,
    "max_position_embeddings": 1_048_576,
    "qk_rope_head_dim": 0,
    "qk_nope_head_dim": 256,
    "v_head_dim": 256,
}
"""Defaults of `transformers`."""


def glm5_next_settings(config: Config) -> DecoderSettings:
    """GLM-5 Next. Indexers choose groups of tokens that a token sees: all of sequences of up to
    `index_topk` tokens, which are the longest here. Layers behind the last one are not used."""
    for key, value in (("attention_bias", False), ("qk_rope_head_dim", 0), ("hidden_act", "silu")):
        require(config, key, value)
    if config.get("index_kpool", 16) > 1:  # otherwise the last tokens may not be seen
        require(config, "index_kpool_always_select_tail", True)
    limit = config.get("swiglu_limit", 10.0)
    if not limit or limit < 0:
        raise UnsupportedModel(f"config.json: swiglu_limit: expected one above 0, got {limit}")
    config, gate = with_keys(config, {}, **_SIZES), Gate(limit=float(limit))
    norm = NormSpec(eps=config.get("rms_norm_eps", 1e-5))
    delta = KimiDeltaSpec(
        num_heads=config.get("linear_num_heads", 64),
        head_dim=config.get("linear_head_dim", 128),
        width=config.get("linear_conv_kernel_dim", 4),
        eps=norm.eps,
        decay_bound=float(config.get("linear_lower_bound", -5.0) or 0.0),
        decay_axes=(0, 0),
    )
    latent = replace(
        unrotated_latents(config),
        query_latent_dim=config.get("q_lora_rank", 1536),
        eps=norm.eps,
    )
    streams = HyperConnectionsSpec(
        num_streams=config.get("hc_mult", 4),
        magnitude=2.0,
        offset=float(config.get("hc_eps", 1e-6)),
        eps=norm.eps,
        num_divisions=config.get("hc_sinkhorn_iters", 20),
        has_head=False,
    )
    experts = scored_experts(config, num_experts=288, num_groups=1, num_chosen_groups=1, scale=2.5)
    shared = None if experts.shared is None else replace(experts.shared, gate=gate)
    experts, dense = replace(experts, gate=gate, shared=shared), gated_mlp(config, gate=gate)
    default = [_INDEXED if i % 4 == 3 else _LINEAR for i in range(config["num_hidden_layers"])]
    kinds = layer_types(config, default, (_LINEAR, _INDEXED))
    layers = [
        LayerSpec(
            attention=delta if kind == _LINEAR else latent,
            feed_forward=experts if is_sparse else dense,
            norm=norm,
            hyper_connections=streams,
            names=(NORM_NAMES | DELTA_NAMES if kind == _LINEAR else LATENT_NAMES)
            | (EXPERT_NAMES | SHARED_NAMES if is_sparse else MLP_NAMES)
            | _STREAM_NAMES,
        )
        for kind, is_sparse in zip(kinds, have_experts(config, 3), strict=True)
    ]
    return decoder_of(
        config,
        layers,
        norm,
        max_model_len=min(config.get("index_topk", 2048), config["max_position_embeddings"]),
        hyper_connections=streams,
        ignores_further_layers=True,
        unused_names=r".*\.self_attn\.indexer\..*",
    )
