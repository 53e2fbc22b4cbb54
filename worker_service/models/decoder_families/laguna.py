"""Laguna: attention whose output is multiplied by softplus of a product of the row, with a number
of heads of its own in each layer, and experts that are chosen by the sigmoid of their scores."""

from worker_service.errors import UnsupportedModel
from worker_service.models.decoder.specs import DecoderSettings, LayerSpec
from worker_service.models.decoder_families.common import (
    FULL,
    NAMES,
    SLIDING,
    Config,
    NotNative,
    attention_of,
    decoder_of,
    gated_mlp,
    have_experts,
    layer_types,
    mixture_of,
    require,
    rotaries_by_type,
    with_keys,
    with_values,
)
from worker_service.models.decoder_families.mixtures import QWEN_NAMES
from worker_service.models.decoder_families.scored_mixtures import SHARED_NAMES
from worker_service.models.feed_forward.experts import ExpertsSpec, SharedSpec
from worker_service.models.layers.norms import NormSpec
from worker_service.models.mixers.attention import AttentionSpec

_GATED = {"attention.qkv": "self_attn.q_proj self_attn.g_proj self_attn.k_proj self_attn.v_proj"}

_DENSE_NAMES = NAMES | _GATED

_EXPERT_NAMES = (
    QWEN_NAMES
    | {path: name.replace("shared_experts", "shared_expert") for path, name in SHARED_NAMES.items()}
    | _GATED
    | {"feed_forward.correction": "mlp.experts.e_score_correction_bias"}
)

_ROPE = {
    FULL: {"rope_theta": 500_000.0, "partial_rotary_factor": 0.5},
    SLIDING: {"rope_theta": 10_000.0, "partial_rotary_factor": 1.0},
}
"""The default."""


def laguna_settings(config: Config) -> DecoderSettings:
    """Laguna."""
    for key in ("attention_bias", "moe_router_logit_softcapping"):
        if config.get(key):
            raise NotNative(key)
    require(config, "moe_apply_router_weight_on_input", False)
    gating = require(config, "gating", True, "per-head", "per-element")
    config = with_keys(config, {}, head_dim=128, num_key_value_heads=8)
    config = with_values(config, rope_parameters=config.get("rope_parameters") or _ROPE)
    head_dim, norm = config["head_dim"], NormSpec(eps=config.get("rms_norm_eps", 1e-6))
    thetas = {kind: float(numbers["rope_theta"]) for kind, numbers in _ROPE.items()}
    rotaries = rotaries_by_type(config, head_dim, thetas, partial=1.0)
    num_layers = config["num_hidden_layers"]

    def attention(kind: str, num_heads: int) -> AttentionSpec:
        return attention_of(
            config,
            head_dim,
            rotaries[kind],
            num_heads=num_heads,
            window=config.get("sliding_window", 512) if kind == SLIDING else None,
            head_norm=norm,
            gates_output=True,
            gate_is_separate=True,
            gates_heads=gating != "per-element",
            has_softplus_gates=True,
        )

    kinds, heads = layer_types(config, [FULL] * num_layers), _heads(config, num_layers)
    parts = zip(kinds, heads, have_experts(config, 1), strict=True)
    experts, dense = _experts(config), gated_mlp(config, bias=False)
    layers = [
        LayerSpec(
            attention=attention(kind, num_heads),
            feed_forward=experts if has_experts else dense,
            norm=norm,
            names=_EXPERT_NAMES if has_experts else _DENSE_NAMES,
        )
        for kind, num_heads, has_experts in parts
    ]
    return decoder_of(config, layers, norm)


def _experts(config: Config) -> ExpertsSpec:
    return mixture_of(
        config,
        num_experts=config.get("num_experts", 256),
        num_chosen=config.get("num_experts_per_tok", 8),
        scoring="sigmoid",
        normalizes=True,
        scale=float(config.get("moe_routed_scaling_factor", 1.0)),
        inner_size=config.get("moe_intermediate_size", 512),
        shared=SharedSpec(inner_size=config.get("shared_expert_intermediate_size", 512)),
        corrects=True,
        has_float_router=True,
    )


def _heads(config: Config, num_layers: int) -> list[int]:
    """The number of heads of queries in each layer."""
    key, default = "num_attention_heads_per_layer", [config["num_attention_heads"]] * num_layers
    found = list(config.get(key) or default)
    if len(found) != num_layers:
        raise UnsupportedModel(
            f"config.json: {key}: expected a number for each of {num_layers} layers,"
            f" got {', '.join(map(str, found))}"
        )
    return found
