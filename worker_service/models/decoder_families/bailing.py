"""Ling 2 (`BailingMoeV2`) and Sarvam: GLM-4.5's layers under other names, in which one tensor has
queries, keys and values."""

from worker_service.models.decoder.specs import DecoderSettings, LayerSpec
from worker_service.models.decoder_families.common import (
    NAMES,
    Config,
    attention_of,
    by_lines,
    decoder_of,
    gated_mlp,
    require,
    rotary_of,
    with_keys,
)
from worker_service.models.decoder_families.scored_mixtures import (
    SCORED_NAMES,
    glm4_moe_settings,
    scored_experts,
)
from worker_service.models.layers.norms import NormSpec
from worker_service.models.mixers.attention import QKVStorage

_KEYS = {
    "n_routed_experts": "num_experts",
    "n_shared_experts": "num_shared_experts",
    "attention_bias": "use_qkv_bias",
}

_OWN_NAMES = by_lines("""
attention.qkv            attention.query_key_value
attention.query_norm     attention.query_layernorm
attention.key_norm       attention.key_layernorm
attention.output         attention.dense
""")

_EXPERT_NAMES = _OWN_NAMES | {"feed_forward.correction": "mlp.gate.expert_bias"}


def glm4_moe_or_sarvam_settings(config: Config) -> DecoderSettings:
    """GLM-4.5, or Sarvam, for which `transformers` has no class of its own."""
    is_sarvam = config.get("model_type") == "sarvam_moe"
    return bailing_moe_settings(config) if is_sarvam else glm4_moe_settings(config)


def bailing_moe_settings(config: Config) -> DecoderSettings:
    """Ling 2, and Sarvam, whose defaults these are."""
    for key, value in (
        ("score_function", "sigmoid"),
        ("use_qk_norm", True),
        ("use_bias", False),
        ("norm_head", False),
    ):
        require(config, key, value)
    config = with_keys(config, _KEYS, head_dim=64, num_key_value_heads=4, n_routed_experts=128)
    config = with_keys(config, {}, moe_intermediate_size=1024, routed_scaling_factor=2.5)
    norm = NormSpec(eps=config.get("rms_norm_eps", 1e-6))
    attention = attention_of(
        config,
        config["head_dim"],
        rotary_of(config, config["head_dim"], theta=8_000_000.0, partial=1.0),
        qkv_bias=bool(config.get("attention_bias", False)),
        head_norm=norm,
        storage=QKVStorage.CONSECUTIVE,
    )
    experts, dense = scored_experts(config, num_chosen=6, normalizes=True), gated_mlp(config)
    num_dense = config.get("first_k_dense_replace", 1)
    layers = [
        LayerSpec(
            attention=attention,
            feed_forward=dense if i < num_dense else experts,
            norm=norm,
            names=NAMES | _OWN_NAMES if i < num_dense else SCORED_NAMES | _EXPERT_NAMES,
        )
        for i in range(config["num_hidden_layers"])
    ]
    return decoder_of(config, layers, norm, ignores_further_layers=True)
