"""Step 3.5 and 3.7: attention with a gate of each head, more heads in layers with a window, and
experts that are chosen by the sigmoid of their scores. The activations of gates have a limit in
some layers."""

from collections.abc import Sequence
from typing import Any

from pagewire_kernels.reference import Gate
from worker_service.errors import UnsupportedModel
from worker_service.models.decoder.specs import DecoderSettings, LayerSpec
from worker_service.models.decoder_families.common import (
    FULL,
    NAMES,
    SLIDING,
    Config,
    attention_of,
    by_lines,
    decoder_of,
    gated_mlp,
    have_experts,
    layer_types,
    mixture_of,
    require,
    rotaries_by_type,
    with_keys,
)
from worker_service.models.feed_forward.experts import ExpertsSpec, ExpertStorage, SharedSpec
from worker_service.models.layers.norms import NormSpec

_GATED_NAMES = NAMES | by_lines("""
attention.qkv             self_attn.q_proj self_attn.g_proj self_attn.k_proj self_attn.v_proj
""")

_EXPERT_NAMES = {k: v for k, v in _GATED_NAMES.items() if "feed_forward." not in k} | by_lines("""
feed_forward.router       moe.gate
feed_forward.correction   moe.router_bias
feed_forward.experts      moe.gate_proj.weight moe.up_proj.weight moe.down_proj.weight
feed_forward.shared.up    share_expert.gate_proj share_expert.up_proj
feed_forward.shared.down  share_expert.down_proj
""")


def step3p5_settings(config: Config) -> DecoderSettings:
    """Step 3.5, which is the text model of Step 3.7. Layers behind the last one are not used."""
    if config.get("attention_bias"):
        raise UnsupportedModel("config.json: attention_bias: expected false, got true")
    for key in ("use_head_wise_attn_gate", "use_qk_norm", "use_moe_router_bias"):
        require(config, key, True)
    require(config, "moe_router_activation", "sigmoid")
    require(config, "norm_expert_weight", True)
    config = with_keys(config, {}, num_key_value_heads=8)
    head_dim = int(config.get("head_dim") or 128)
    norm = NormSpec(eps=config.get("rms_norm_eps", 1e-5), offset=1.0)
    rotaries = rotaries_by_type(config, head_dim, {FULL: 1e4, SLIDING: 1e4}, partial=1.0)
    num_layers, num_heads = config["num_hidden_layers"], config["num_attention_heads"]
    kinds = layer_types(config, [FULL] * num_layers)
    attentions = {
        kind: attention_of(
            config,
            head_dim,
            rotaries[kind],
            num_heads=(config.get("num_sliding_attention_heads") if is_sliding else 0) or num_heads,
            window=config["sliding_window"] if is_sliding else None,
            scale=float(config.get("query_pre_attn_scalar") or head_dim) ** -0.5,
            head_norm=norm,
            gates_output=True,
            gate_is_separate=True,
            gates_heads=True,
        )
        for kind, is_sliding in ((FULL, False), (SLIDING, True))
        if kind in kinds
    }
    gates, shared_gates = (
        _gates(config, key, num_layers) for key in ("swiglu_limits", "swiglu_limits_shared")
    )
    parts = zip(kinds, have_experts(config, 3), gates, shared_gates, strict=True)
    layers = [
        LayerSpec(
            attention=attentions[kind],
            feed_forward=_experts(config, gate, shared_gate)
            if has_experts
            else gated_mlp(config, gate=shared_gate),
            norm=norm,
            names=_EXPERT_NAMES if has_experts else _GATED_NAMES,
        )
        for kind, has_experts, gate, shared_gate in parts
    ]
    return decoder_of(config, layers, norm, ignores_further_layers=True)


def _experts(config: Config, gate: Gate | None, shared_gate: Gate | None) -> ExpertsSpec:
    return mixture_of(
        config,
        num_experts=config.get("n_routed_experts", 288),
        num_chosen=config.get("num_experts_per_tok", 8),
        scoring="sigmoid",
        normalizes=True,
        scale=float(config.get("moe_router_scaling_factor", 1.0)),
        inner_size=config.get("moe_intermediate_size", 1280),
        shared=SharedSpec(inner_size=config.get("share_expert_dim", 1280), gate=shared_gate),
        corrects=True,
        has_float_router=True,
        gate=gate,
        storage=ExpertStorage.STACKS,
    )


def _gates(config: Config, key: str, num_layers: int) -> list[Gate | None]:
    """The gate of each layer; None: it has no limit."""
    limits: Sequence[Any] = (config.get(key) or [None] * num_layers)[:num_layers]
    if len(limits) < num_layers or any(limit and limit < 0 for limit in limits):
        raise UnsupportedModel(
            f"config.json: {key}: expected a limit above 0, or none, of each of {num_layers}"
            f" layers, got {', '.join(map(str, limits))}"
        )
    return [Gate(limit=float(x), limits_active=True) if x else None for x in limits]
