"""Ling 3 (`BailingHybrid`): Kimi delta attention with bounded decays, and in the last layer of each
group latent attention whose heads have gates; experts as in DeepSeek-V3."""

from dataclasses import replace

from worker_service.errors import UnsupportedModel
from worker_service.models.decoder.specs import DecoderSettings, FeedForwardSpec, LayerSpec
from worker_service.models.decoder_families.common import (
    FULL,
    Config,
    by_lines,
    decoder_of,
    gated_mlp,
    have_experts,
    layer_types,
    require,
    with_keys,
)
from worker_service.models.decoder_families.latent import (
    EXPERT_NAMES,
    MLP_NAMES,
    latent_attention,
    scored_experts,
)
from worker_service.models.decoder_families.scored_mixtures import SHARED_NAMES
from worker_service.models.feed_forward.experts import ExpertsSpec
from worker_service.models.layers.norms import NormSpec
from worker_service.models.mixers.delta_net import KimiDeltaSpec
from worker_service.models.mixers.latent_attention import OutputGates

_LINEAR = "linear_attention"
"""In `layer_types`."""

_KEYS = {
    "n_routed_experts": "num_experts",
    "num_experts_per_tok": "num_experts_per_token",
    "n_shared_experts": "num_shared_experts",
    "norm_topk_prob": "moe_renormalize",
    "n_group": "num_expert_group",
    "max_position_embeddings": "model_max_length",
}

_SIZES = {
    "num_attention_heads": 32,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 768,
    "max_position_embeddings": 262_144,
    "rope_theta": 6e6,
    "q_lora_rank": None,
}
"""Defaults of `transformers`."""

_NORM_NAMES = by_lines("""
attention_norm          input_layernorm
attention.output        attention.dense
feed_forward_norm       post_attention_layernorm
""")

_DELTA_NAMES = _NORM_NAMES | by_lines("""
attention.inputs        attention.q_proj attention.k_proj attention.v_proj
attention.narrow        attention.f_proj attention.g_proj attention.b_proj
attention.convolution   attention.q_conv1d attention.k_conv1d attention.v_conv1d
attention.decay         attention.A_log
attention.decay_bias    attention.dt_bias
attention.norm          attention.o_norm
""")

_LATENT_NAMES = _NORM_NAMES | by_lines("""
attention.inputs        attention.q_proj attention.kv_a_proj_with_mqa attention.g_proj
attention.latent_norm   attention.kv_a_layernorm
attention.expansion     attention.kv_b_proj
""")

_QUERY_NAMES = by_lines("""
attention.inputs        attention.q_a_proj attention.kv_a_proj_with_mqa attention.g_proj
attention.query_norm    attention.q_a_layernorm
attention.query         attention.q_b_proj
""")
"""With latents of queries."""

_EXPERT_NAMES = EXPERT_NAMES | SHARED_NAMES | {"feed_forward.correction": "mlp.gate.expert_bias"}


def bailing_hybrid_settings(config: Config) -> DecoderSettings:
    """Ling 3. Layers behind the last one are not used."""
    config = with_keys(config, _KEYS, **_SIZES)
    for key, value in (("attention_bias", False), ("hidden_act", "silu")):
        require(config, key, value)
    norm = NormSpec(eps=config.get("rms_norm_eps", 1e-6))
    delta = KimiDeltaSpec(
        num_heads=config.get("linear_num_heads", config["num_attention_heads"]),
        head_dim=config.get("linear_head_dim") or config.get("head_dim", 128),
        width=config.get("linear_conv_kernel_dim") or config.get("short_conv_kernel_size", 4),
        eps=norm.eps,
        is_narrow=False,
        decay_bound=_decay_bound(config),
        decay_axes=(0, 0),
    )
    latent = replace(latent_attention(config, 0), gates=OutputGates.OF_HEADS)
    of_latent = _LATENT_NAMES | (_QUERY_NAMES if latent.query_latent_dim is not None else {})
    experts = scored_experts(config, num_experts=512, num_groups=8, num_chosen_groups=4, scale=2.5)
    dense = gated_mlp(config, bias=False)

    def layer(kind: str, part: FeedForwardSpec) -> LayerSpec:
        of_part = _EXPERT_NAMES if isinstance(part, ExpertsSpec) else MLP_NAMES
        return LayerSpec(
            attention=latent if kind == FULL else delta,
            feed_forward=part,
            norm=norm,
            names=(of_latent if kind == FULL else _DELTA_NAMES) | of_part,
        )

    size, num_layers = config.get("layer_group_size", 6), config["num_hidden_layers"]
    default = [_LINEAR if i % size else FULL for i in range(1, num_layers + 1)]
    kinds = layer_types(config, default, (_LINEAR, FULL))
    have = have_experts(config, config.get("first_k_dense_replace", 2))
    parts = [experts if is_sparse else dense for is_sparse in have]
    layers = [layer(kind, part) for kind, part in zip(kinds, parts, strict=True)]
    length = latent.rotary.max_model_len()
    return decoder_of(config, layers, norm, max_model_len=length, ignores_further_layers=True)


def _decay_bound(config: Config) -> float:
    if not config.get("kda_safe_gate", True):
        return 0.0
    bound = float(config.get("kda_lower_bound", -5.0))
    if not bound < 0:
        raise UnsupportedModel(f"config.json: kda_lower_bound: expected one below 0, got {bound:g}")
    return bound
