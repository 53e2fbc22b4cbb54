"""Kimi Linear (Kimi Team 2025): Kimi delta attention, and in every fourth layer latent attention
without a rotary embedding; experts as in DeepSeek-V3."""

from collections.abc import Sequence
from typing import Any

from worker_service.models.decoder.specs import DecoderSettings, FeedForwardSpec, LayerSpec
from worker_service.models.decoder_families.common import (
    FULL,
    Config,
    by_lines,
    decoder_of,
    gated_mlp,
    grouped,
    have_experts,
    layer_types,
    mixture_of,
    require,
    with_keys,
)
from worker_service.models.decoder_families.latent import MLP_NAMES, SPLIT_NAMES
from worker_service.models.feed_forward.experts import ExpertsSpec, SharedSpec
from worker_service.models.layers.norms import NormSpec
from worker_service.models.layers.rotary import NO_ROTATION, RotarySettings
from worker_service.models.mixers.delta_net import KimiDeltaSpec
from worker_service.models.mixers.latent_attention import LatentAttentionSpec

_LINEAR = "linear_attention"
"""In `layer_types`."""

_KEYS = {
    "num_experts": "num_local_experts",
    "num_experts_per_token": "num_experts_per_tok",
    "num_shared_experts": "n_shared_experts",
    "moe_renormalize": "norm_topk_prob",
    "num_expert_group": "n_group",
    "model_max_length": "max_position_embeddings",
}
"""Keys of published checkpoints, and those that they stand for."""

NORM_NAMES = by_lines("""
attention_norm          input_layernorm
feed_forward_norm       post_attention_layernorm
""")

DELTA_NAMES = by_lines("""
attention.inputs        self_attn.q_proj self_attn.k_proj self_attn.v_proj
attention.narrow        self_attn.f_a_proj self_attn.g_a_proj self_attn.b_proj
attention.decays        self_attn.f_b_proj
attention.gates         self_attn.g_b_proj
attention.convolution   self_attn.q_conv1d self_attn.k_conv1d self_attn.v_conv1d
attention.decay         self_attn.A_log
attention.decay_bias    self_attn.dt_bias
attention.norm          self_attn.o_norm
attention.output        self_attn.o_proj
""")

_LATENT_NAMES = by_lines("""
attention.inputs        self_attn.q_proj self_attn.kv_a_proj_with_mqa
attention.latent_norm   self_attn.kv_a_layernorm
attention.expansion     self_attn.kv_b_proj
attention.output        self_attn.o_proj
""")

_EXPERTS = "block_sparse_moe.experts.*"
_SHARED = "block_sparse_moe.shared_experts"
_EXPERT_NAMES = by_lines(f"""
feed_forward.router       block_sparse_moe.gate
feed_forward.correction   block_sparse_moe.gate.e_score_correction_bias
feed_forward.experts      {_EXPERTS}.w1 {_EXPERTS}.w3 {_EXPERTS}.w2
feed_forward.shared.up    {_SHARED}.gate_proj {_SHARED}.up_proj
feed_forward.shared.down  {_SHARED}.down_proj
""")


def kimi_linear_settings(config: Config) -> DecoderSettings:
    """Kimi Linear."""
    config = with_keys(config, {usual: own for own, usual in _KEYS.items()}, hidden_act="silu")
    for key, value in (
        ("hidden_act", "silu"),
        ("moe_router_activation_func", "sigmoid"),
        ("moe_layer_freq", 1),
        ("mla_use_nope", True),
        ("q_lora_rank", None),
        ("attention_bias", False),
        ("num_nextn_predict_layers", 0),
    ):
        require(config, key, value)
    norm = NormSpec(eps=config.get("rms_norm_eps", 1e-5))
    linear: Config = config.get("linear_attn_config") or {}
    sizes = [
        linear.get(nested) or config.get(own) or default
        for nested, own, default in (
            ("num_heads", "linear_num_heads", 32),
            ("head_dim", "linear_head_dim", 128),
            ("short_conv_kernel_size", "linear_conv_kernel_dim", 4),
        )
    ]
    num_heads, head_dim, width = sizes
    delta = KimiDeltaSpec(num_heads=num_heads, head_dim=head_dim, width=width, eps=norm.eps)
    latent, of_latent = unrotated_latents(config), _LATENT_NAMES
    if config.get("has_split_expansion"):  # of a GGUF file
        of_latent = of_latent | SPLIT_NAMES

    def layer(kind: str, part: FeedForwardSpec) -> LayerSpec:
        of_part = _EXPERT_NAMES if isinstance(part, ExpertsSpec) else MLP_NAMES
        own = of_latent if kind == FULL else DELTA_NAMES
        return LayerSpec(
            attention=latent if kind == FULL else delta,
            feed_forward=part,
            norm=norm,
            names=NORM_NAMES | own | of_part,
        )

    kinds, parts = _kinds(config, linear), _parts(config)
    layers = [layer(kind, part) for kind, part in zip(kinds, parts, strict=True)]
    length = config.get("max_position_embeddings", 1 << 20)
    return decoder_of(config, layers, norm, max_model_len=length)


def unrotated_latents(config: Config) -> LatentAttentionSpec:
    """Latent attention without latents of queries, of which nothing is rotated."""
    rotary_dim, key_dim = config.get("qk_rope_head_dim", 64), config.get("qk_nope_head_dim", 128)
    return LatentAttentionSpec(
        num_heads=config["num_attention_heads"],
        latent_dim=config.get("kv_lora_rank", 512),
        query_latent_dim=None,
        key_dim=key_dim,
        rotary_dim=rotary_dim,
        value_dim=config.get("v_head_dim") or 128,
        scale=(key_dim + rotary_dim) ** -0.5,
        rotary=RotarySettings(
            rotary_dim=rotary_dim,
            theta=1.0,
            scaling_type=NO_ROTATION,
            max_position_embeddings=config.get("max_position_embeddings", 1 << 20),
        ),
        eps=1e-6,  # whatever `rms_norm_eps` is
        bias=False,
        has_pairs=False,
    )


def _parts(config: Config) -> Sequence[FeedForwardSpec]:
    """What follows attention, by layer."""
    size, num_shared = config.get("moe_intermediate_size", 1024), config.get("n_shared_experts", 1)
    experts = mixture_of(
        config,
        num_experts=config.get("num_local_experts", 256),
        num_chosen=config.get("num_experts_per_tok", 8),
        **grouped(config, scale=2.446),
        inner_size=size,
        activation="silu",
        shared=SharedSpec(inner_size=size * num_shared),
        corrects=True,
    )
    dense = gated_mlp(config, bias=False)
    kinds = have_experts(config, config.get("first_k_dense_replace", 1))
    return [experts if is_sparse else dense for is_sparse in kinds]


def _kinds(config: Config, linear: Config) -> list[str]:
    """The type of each layer, which published checkpoints list by their numbers from 1 on."""
    layers = range(1, config["num_hidden_layers"] + 1)
    default: list[Any] = [_LINEAR if i % 4 or not i else FULL for i in range(len(layers))]
    if "full_attn_layers" in linear and "kda_layers" in linear:
        names = {FULL: linear["full_attn_layers"], _LINEAR: linear["kda_layers"]}
        default = [next((k for k, own in names.items() if i in own), None) for i in layers]
    return layer_types(config, default, (FULL, _LINEAR))
