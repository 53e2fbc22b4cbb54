"""Families with the experts of GLM-4.5 and another attention, or other names: Solar Open, K-EXAONE
(`ExaoneMoe`), Hunyuan 3 (`HYV3`), Trinity (`Afmoe`) and Kolibri 1."""

from collections.abc import Mapping, Sequence
from typing import Any

from worker_service.models.decoder.specs import DecoderSettings, LayerSpec, NormPlace
from worker_service.models.decoder_families.common import (
    NAMES,
    Config,
    NotNative,
    attention_of,
    biases_of,
    by_lines,
    decoder_of,
    gated_mlp,
    have_experts,
    head_dim_of,
    mixture_of,
    rotary_of,
    with_keys,
    with_values,
)
from worker_service.models.decoder_families.llama_kin import exaone4_attentions
from worker_service.models.decoder_families.scored_mixtures import (
    SCORED_NAMES,
    scored_experts,
)
from worker_service.models.feed_forward.experts import ExpertsSpec, SharedSpec
from worker_service.models.layers.norms import NormSpec
from worker_service.models.mixers.attention import AttentionSpec

_NO_NAMES: Mapping[str, str] = {}

_EXAONE_NAMES = {"feed_forward.correction": "mlp.e_score_correction_bias"}

_HUNYUAN_NAMES = by_lines("""
feed_forward.router       mlp.router.gate
feed_forward.correction   mlp.expert_bias
feed_forward.shared.up    mlp.shared_mlp.gate_proj mlp.shared_mlp.up_proj
feed_forward.shared.down  mlp.shared_mlp.down_proj
""")

_AFMOE_NORM_NAMES = by_lines("""
attention.qkv             self_attn.q_proj self_attn.gate_proj self_attn.k_proj self_attn.v_proj
attention_output_norm     post_attention_layernorm
feed_forward_norm         pre_mlp_layernorm
feed_forward_output_norm  post_mlp_layernorm
""")

_AFMOE_NAMES = by_lines("""
feed_forward.router      mlp.router.gate
feed_forward.correction  mlp.expert_bias
""")

_KOLIBRI_NORM_NAMES = by_lines("""
attention_output_norm     post_attn_norm
feed_forward_output_norm  post_ffn_norm
""")

_KOLIBRI_NAMES = {"feed_forward.correction": "moe.router.expert_bias"}


def solar_open_settings(config: Config) -> DecoderSettings:
    """Solar Open: experts in all layers."""
    config = with_keys(config, {}, head_dim=128, num_key_value_heads=8, n_routed_experts=128)
    config = with_keys(config, {}, moe_intermediate_size=1280)
    attention = attention_of(
        config,
        config["head_dim"],
        rotary_of(config, config["head_dim"], theta=1e6),
        qkv_bias=bool(config.get("attention_bias", False)),
    )
    num_layers = config["num_hidden_layers"]
    return _decoder(config, [attention] * num_layers, [True] * num_layers)


def exaone_moe_settings(config: Config) -> DecoderSettings:
    """K-EXAONE: the attention of EXAONE 4."""
    names = {"n_routed_experts": "num_experts", "n_shared_experts": "num_shared_experts"}
    config = with_keys(
        config, names, n_routed_experts=64, routed_scaling_factor=2.5, moe_intermediate_size=1024
    )
    kinds = have_experts(config, config.get("first_k_dense_replace", 1))
    return _decoder(config, exaone4_attentions(config), kinds, expert_names=_EXAONE_NAMES)


def hy_v3_settings(config: Config) -> DecoderSettings:
    """Hunyuan 3, whose heads have norms."""
    if config.get("mlp_bias"):
        raise NotNative("mlp_bias")
    config = _with_usual_keys(config, "router_scaling_factor", 2.826, num_experts=192)
    config = with_keys(config, {}, moe_intermediate_size=1536, num_key_value_heads=8)
    head_dim = head_dim_of(config, 128)
    attention = attention_of(
        config,
        head_dim,
        rotary_of(config, head_dim, theta=11_158_840.0),
        head_norm=NormSpec(eps=config.get("rms_norm_eps", 1e-5)),
        **biases_of(config),
    )
    attentions = [attention] * config["num_hidden_layers"]
    return _decoder(config, attentions, have_experts(config, 1), expert_names=_HUNYUAN_NAMES)


def afmoe_settings(config: Config) -> DecoderSettings:
    """Trinity: norms around each part, and the attention of EXAONE 4 with gates."""
    if config.get("attention_bias"):
        raise NotNative("attention_bias")
    if config.get("sliding_window", 1024) is None:
        raise NotNative("sliding_window of null")
    config = _with_usual_keys(config, "route_scale", 1.0, num_experts=64)
    config = with_keys(
        config,
        {"sliding_window_pattern": "global_attn_every_n_layers"},
        head_dim=128,
        sliding_window=1024,
        num_experts_per_tok=6,
        n_shared_experts=2,
    )
    has_scale = bool(config.get("mup_enabled", False))
    return _decoder(
        config,
        exaone4_attentions(config, gates_output=True, gate_is_separate=True),
        have_experts(config, config.get("num_dense_layers", 1)),
        names=_AFMOE_NORM_NAMES,
        expert_names=_AFMOE_NAMES,
        embedding_scale=config["hidden_size"] ** 0.5 if has_scale else 1.0,
        scales_virtual_tokens=True,
    )


def kolibri1_settings(config: Config) -> DecoderSettings:
    """Kolibri 1: the attention of EXAONE 4, norms around each part, and experts that are chosen by
    logits with a correction."""
    config = with_keys(config, {}, head_dim=128, num_key_value_heads=4, rms_norm_eps=1e-6)
    config = with_keys(config, {}, sliding_window=513, sliding_window_pattern=5)
    experts = mixture_of(
        config,
        num_experts=config.get("num_local_experts") or config.get("num_experts", 384),
        num_chosen=config.get("num_experts_per_tok", 6),
        scoring="sigmoid_of_chosen",
        normalizes=bool(config.get("norm_topk_prob", False)),
        inner_size=config.get("moe_intermediate_size", 512),
        shared=SharedSpec(inner_size=config.get("shared_expert_intermediate_size", 512)),
        corrects=True,
    )
    kinds = [True] * config["num_hidden_layers"]
    return _decoder(
        config,
        exaone4_attentions(config),
        kinds,
        names=_KOLIBRI_NORM_NAMES,
        expert_names=_KOLIBRI_NAMES,
        experts=experts,
    )


def _with_usual_keys(config: Config, scale: str, default: float, *, num_experts: int) -> Config:
    """scale: the key of `routed_scaling_factor`, which has this default. Weights of experts always
    add up to it."""
    names = {
        "n_routed_experts": "num_experts",
        "n_shared_experts": "num_shared_experts",
        "routed_scaling_factor": scale,
    }
    config = with_keys(config, names, n_routed_experts=num_experts, routed_scaling_factor=default)
    return with_values(config, n_group=1, topk_group=1, norm_topk_prob=True)


def _decoder(
    config: Config,
    attentions: Sequence[AttentionSpec],
    have_experts: Sequence[bool],
    *,
    names: Mapping[str, str] = _NO_NAMES,
    expert_names: Mapping[str, str] = _NO_NAMES,
    experts: ExpertsSpec | None = None,
    **others: Any,
) -> DecoderSettings:
    """attentions, have_experts: of each layer; names, expert_names: those that differ from Llama's,
    and from GLM-4.5's; experts: others than GLM-4.5's; others: further settings of the decoder."""
    norm = NormSpec(eps=config.get("rms_norm_eps", 1e-5))
    experts = experts or scored_experts(config, num_chosen=8, normalizes=True)
    dense = gated_mlp(config, bias=False) if not all(have_experts) else experts
    layers = [
        LayerSpec(
            attention=attention,
            feed_forward=experts if has_experts else dense,
            norm=norm,
            norm_place=NormPlace.AROUND if "attention_output_norm" in names else NormPlace.BEFORE,
            names={**SCORED_NAMES, **names, **expert_names} if has_experts else {**NAMES, **names},
        )
        for attention, has_experts in zip(attentions, have_experts, strict=True)
    ]
    return decoder_of(config, layers, norm, ignores_further_layers=True, **others)
