"""Hunyuan: norms of heads after RoPE, whose base a fixed `alpha` may stretch; an MLP, or experts
beside one that all rows have."""

from typing import Any

from worker_service.models.decoder.specs import DecoderSettings, FeedForwardSpec, LayerSpec
from worker_service.models.decoder_families.common import (
    NAMES,
    Config,
    attention_of,
    biases_of,
    by_lines,
    decoder_of,
    gated_mlp,
    head_dim_of,
    mixture_of,
    require,
    rotary_of,
)
from worker_service.models.decoder_families.mixtures import QWEN_NAMES
from worker_service.models.feed_forward.experts import ExpertsSpec, SharedSpec
from worker_service.models.layers.norms import NormSpec
from worker_service.models.layers.rotary import RotarySettings

_NORMS = by_lines("""
attention.query_norm  self_attn.query_layernorm
attention.key_norm    self_attn.key_layernorm
""")

_DENSE_NAMES = NAMES | _NORMS

_MOE_NAMES = (
    QWEN_NAMES
    | _NORMS
    | by_lines("""
feed_forward.router       mlp.gate.wg
feed_forward.shared.up    mlp.shared_mlp.gate_proj mlp.shared_mlp.up_proj
feed_forward.shared.down  mlp.shared_mlp.down_proj
""")
)


def hunyuan_dense_settings(config: Config) -> DecoderSettings:
    """Hunyuan with an MLP in all layers."""
    mlps = [gated_mlp(config, bias=False)] * config["num_hidden_layers"]
    return _decoder(config, mlps, _DENSE_NAMES)


def hunyuan_moe_settings(config: Config) -> DecoderSettings:
    """Hunyuan with experts in all layers, which may have their numbers in lists."""
    inner_size = config["intermediate_size"]

    def experts(layer: int) -> ExpertsSpec:
        return mixture_of(
            config,
            num_experts=_of_layer(config.get("num_experts", 1), layer),
            num_chosen=_of_layer(config.get("moe_topk", 1), layer),
            normalizes=True,
            inner_size=inner_size,
            shared=SharedSpec(inner_size=inner_size),
            has_float_router=True,
        )

    layers = [experts(layer) for layer in range(config["num_hidden_layers"])]
    return _decoder(config, layers, _MOE_NAMES)


def _of_layer(value: Any, layer: int) -> int:
    return int(value[layer] if isinstance(value, list) else value)


def _decoder(config: Config, feed_forwards: list[Any], names: dict[str, str]) -> DecoderSettings:
    """feed_forwards: those of each layer."""
    require(config, "use_qk_norm", True)
    require(config, "use_cla", False)
    head_dim, norm = head_dim_of(config), NormSpec(eps=config.get("rms_norm_eps", 1e-5))
    attention = attention_of(
        config,
        head_dim,
        _rotary(config, head_dim),
        **biases_of(config),
        head_norm=norm,
        norm_follows_rotary=True,
    )

    def layer(feed_forward: FeedForwardSpec) -> LayerSpec:
        return LayerSpec(attention=attention, feed_forward=feed_forward, norm=norm, names=names)

    return decoder_of(config, [*map(layer, feed_forwards)], norm)


def _rotary(config: Config, head_dim: int) -> RotarySettings:
    """The embedding, of which `dynamic` scaling with an `alpha` does not depend on lengths."""
    stored = config.get("rope_scaling") or config.get("rope_parameters") or {}
    alpha = stored.get("alpha")
    if (stored.get("rope_type") or stored.get("type")) != "dynamic" or not alpha:
        return rotary_of(config, head_dim)
    theta = float(stored.get("rope_theta") or config.get("rope_theta") or 10000.0)
    stretched = theta * float(alpha) ** (head_dim / (head_dim - 2))
    return rotary_of(config, head_dim, {"rope_theta": stretched})
