"""MiMo-V2-Flash: experts as in DeepSeek-V3, without shared ones, and heads of values that are
smaller than those of keys. Layers with a window have attention sinks, and twice as many heads of
keys."""

from worker_service.models.decoder.specs import DecoderSettings, LayerSpec
from worker_service.models.decoder_families.common import (
    FULL,
    NAMES,
    SLIDING,
    Config,
    attention_of,
    decoder_of,
    gated_mlp,
    have_experts,
    layer_types,
    rotaries_by_type,
    with_keys,
    with_values,
)
from worker_service.models.decoder_families.latent import EXPERT_NAMES, scored_experts
from worker_service.models.layers.norms import NormSpec
from worker_service.models.mixers.attention import AttentionSpec

_EXPERT_NAMES = EXPERT_NAMES | {k: v for k, v in NAMES.items() if "feed_forward." not in k}

_SINKS = {"attention.sinks": "self_attn.attention_sink_bias"}


def mimo_v2_flash_settings(config: Config) -> DecoderSettings:
    """MiMo-V2-Flash. Its own `sliding_window_size` does not count the token itself."""
    config = with_keys(config, {}, head_dim=192, v_head_dim=128, num_key_value_heads=4)
    config = with_keys(config, {}, moe_intermediate_size=2048, num_experts_per_tok=8)
    head_dim, norm = config["head_dim"], NormSpec(eps=config.get("rms_norm_eps", 1e-5))
    rotaries = rotaries_by_type(config, head_dim, {FULL: 5e6, SLIDING: 1e4}, partial=0.334)
    window, before = config.get("sliding_window", 129), config.get("sliding_window_size")
    value_scale = config.get("attention_value_scale", 0.707)
    scale = config.get("routed_scaling_factor")
    dense = gated_mlp(config, bias=False)
    experts = scored_experts(
        with_values(config, n_shared_experts=0, routed_scaling_factor=scale or 1.0),
        num_experts=256,
        num_groups=1,
        num_chosen_groups=1,
        scale=1.0,
    )

    def attention(kind: str) -> AttentionSpec:
        is_sliding, num_kv_heads = kind == SLIDING, config["num_key_value_heads"]
        return attention_of(
            config,
            head_dim,
            rotaries[kind],
            num_kv_heads=2 * num_kv_heads if is_sliding else num_kv_heads,
            window=(window if before is None else before + 1) if is_sliding else None,
            has_sinks=is_sliding,
            value_dim=config["v_head_dim"],
            value_scale=1.0 if value_scale is None else float(value_scale),
            qkv_bias=bool(config.get("attention_bias", False)),
        )

    num_layers = config["num_hidden_layers"]
    kinds = [SLIDING if i and (i + 1) % 6 else FULL for i in range(num_layers)]
    layers = [
        LayerSpec(
            attention=attention(kind),
            feed_forward=experts if has_experts else dense,
            norm=norm,
            names={
                **(_EXPERT_NAMES if has_experts else NAMES),
                **(_SINKS if kind == SLIDING else {}),
            },
        )
        for kind, has_experts in zip(
            layer_types(config, kinds), have_experts(config, 1), strict=True
        )
    ]
    return decoder_of(config, layers, norm, unused_names=r"model\.mtp\..*")
