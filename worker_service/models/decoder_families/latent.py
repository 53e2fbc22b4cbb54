"""DeepSeek-V2 and V3 (also R1 and Kimi K2), GLM-4.7 Flash (`Glm4MoeLite`) and Youtu: latent
attention, with experts as in GLM-4.5, or an MLP. A layer after the last one drafts tokens in
DeepSeek-V3 and GLM-4.7 Flash."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from worker_service.errors import UnsupportedModel
from worker_service.models.decoder.specs import DecoderSettings, FeedForwardSpec, LayerSpec
from worker_service.models.decoder_families.common import (
    Config,
    NotNative,
    by_lines,
    decoder_of,
    gated_mlp,
    grouped,
    have_experts,
    mixture_of,
    require,
    rotary_of,
)
from worker_service.models.decoder_families.draft_heads import with_layer_behind
from worker_service.models.decoder_families.scored_mixtures import SHARED_NAMES
from worker_service.models.feed_forward.experts import ExpertsSpec, ExpertStorage, SharedSpec
from worker_service.models.layers.norms import NormSpec
from worker_service.models.layers.rotary import RotarySettings
from worker_service.models.mixers.latent_attention import LatentAttentionSpec

LATENT_NAMES = by_lines("""
attention_norm          input_layernorm
attention.inputs        self_attn.q_a_proj self_attn.kv_a_proj_with_mqa
attention.query_norm    self_attn.q_a_layernorm
attention.query         self_attn.q_b_proj
attention.latent_norm   self_attn.kv_a_layernorm
attention.expansion     self_attn.kv_b_proj
attention.output        self_attn.o_proj
feed_forward_norm       post_attention_layernorm
""")

_DIRECT = {"attention.inputs": "self_attn.q_proj self_attn.kv_a_proj_with_mqa"}
"""Names without latents of queries."""

SPLIT_NAMES = {"attention.expansion": "self_attn.k_b_proj self_attn.v_b_proj"}
"""Names of weights that expand latents to keys, and to values, apart from each other."""

MLP_NAMES = by_lines("""
feed_forward.up         mlp.gate_proj mlp.up_proj
feed_forward.down       mlp.down_proj
""")

EXPERT_NAMES = by_lines("""
feed_forward.router     mlp.gate
feed_forward.experts    mlp.experts.*.gate_proj mlp.experts.*.up_proj mlp.experts.*.down_proj
feed_forward.correction mlp.gate.e_score_correction_bias
""")

_LATENT_EPS = 1e-6
"""Of norms of latents, whatever `rms_norm_eps` is."""


def deepseek_v2_settings(config: Config) -> DecoderSettings:
    """DeepSeek-V2, also Lite, whose experts are chosen by the softmax of their scores."""
    require(config, "scoring_func", "softmax")
    require(config, "norm_topk_prob", False)
    require(config, "mlp_bias", False)
    method = require(config, "topk_method", "greedy", "group_limited_greedy")
    has_groups = method == "group_limited_greedy"
    experts = experts_of(
        config,
        num_experts=64,
        num_shared=2,
        inner_size=1407,
        scoring="softmax",
        scale=float(config.get("routed_scaling_factor", 1.0)),
        num_groups=config["n_group"] if has_groups else 1,
        num_chosen_groups=config["topk_group"] if has_groups else 1,
    )
    return latent_decoder(config, first_dense(config, experts, 0))


def deepseek_v3_settings(config: Config) -> DecoderSettings:
    """DeepSeek-V3, whose experts are chosen as in GLM-4.5."""
    _require_rotary_heads(config)
    experts = scored_experts(config, num_experts=256, num_groups=8, num_chosen_groups=4, scale=2.5)
    return with_layer_behind(latent_decoder(config, first_dense(config, experts, 3)))


def glm4_moe_lite_settings(config: Config) -> DecoderSettings:
    """GLM-4.7 Flash."""
    require(config, "first_k_dense_replace", 1)
    _require_rotary_heads(config)
    experts = scored_experts(config, num_experts=64, num_groups=1, num_chosen_groups=1, scale=1.8)
    dense = gated_mlp(config, bias=False)
    parts = [experts if is_sparse else dense for is_sparse in have_experts(config, 1)]
    return with_layer_behind(latent_decoder(config, parts, query_latent_dim=768, eps=1e-5))


def youtu_settings(config: Config) -> DecoderSettings:
    """Youtu, without experts."""
    _require_rotary_heads(config)
    parts = [gated_mlp(config, bias=False)] * config["num_hidden_layers"]
    is_tied = bool(config.get("tie_word_embeddings", True))
    return latent_decoder(config, parts, tie_word_embeddings=is_tied)


def _require_rotary_heads(config: Config) -> None:
    """Refuse a `head_dim`, which is that of the rotary embedding, other than what is rotated."""
    require(config, "head_dim", config.get("qk_rope_head_dim", 64))


def latent_decoder(
    config: Config,
    parts: Sequence[FeedForwardSpec],
    *,
    query_latent_dim: int = 1536,
    eps: float = 1e-6,
    residual_multiplier: float = 1.0,
    rotary_is_partial: bool = False,
    expert_names: Mapping[str, str] = EXPERT_NAMES,
    **others: Any,
) -> DecoderSettings:
    """parts: what follows attention, by layer; query_latent_dim, eps: defaults;
    rotary_is_partial: whether the rotary embedding is that of a part of each head, not of heads of
    their own; expert_names: of layers with experts; others: further settings of the decoder."""
    norm = NormSpec(eps=config.get("rms_norm_eps", eps))
    attention = latent_attention(config, query_latent_dim, rotary_is_partial=rotary_is_partial)
    names = LATENT_NAMES
    if attention.query_latent_dim is None:
        names = {path: name for path, name in names.items() if "query" not in path} | _DIRECT
    if config.get("has_split_expansion"):  # of a GGUF file
        names = names | SPLIT_NAMES

    def layer(part: FeedForwardSpec) -> LayerSpec:
        of_part = MLP_NAMES
        if isinstance(part, ExpertsSpec):
            unused = () if part.corrects else ("feed_forward.correction",)
            shared = SHARED_NAMES if part.shared is not None else {}
            of_part = {k: v for k, v in {**expert_names, **shared}.items() if k not in unused}
        return LayerSpec(
            attention=attention,
            feed_forward=part,
            norm=norm,
            names=names | of_part,
            residual_multiplier=residual_multiplier,
        )

    layers = [layer(part) for part in parts]
    return decoder_of(config, layers, norm, ignores_further_layers=True, **others)


def latent_attention(
    config: Config, query_latent_dim: int, *, rotary_is_partial: bool = False
) -> LatentAttentionSpec:
    """Latent attention with the usual keys; the arguments as for `latent_decoder`."""
    rotary_dim, key_dim = config.get("qk_rope_head_dim", 64), config.get("qk_nope_head_dim", 128)
    head_dim = key_dim + rotary_dim if rotary_is_partial else rotary_dim
    partial = rotary_dim / head_dim
    query_latent = config.get("q_lora_rank", query_latent_dim)
    has_bias = bool(config.get("attention_bias", False))
    if has_bias and query_latent is None:
        raise NotNative("attention_bias without q_lora_rank")
    rotary = rotary_of(config, head_dim, partial=partial)
    if rotary.rotary_dim != rotary_dim:
        got = rotary.parameters.get("partial_rotary_factor", 1)
        raise UnsupportedModel(
            f"config.json: partial_rotary_factor: expected {partial:g}, got {got}"
        )
    return LatentAttentionSpec(
        num_heads=config["num_attention_heads"],
        latent_dim=config.get("kv_lora_rank", 512),
        query_latent_dim=query_latent,
        key_dim=key_dim,
        rotary_dim=rotary_dim,
        value_dim=config.get("v_head_dim") or 128,
        scale=(key_dim + rotary_dim) ** -0.5 * _extension_factor(rotary),
        rotary=rotary,
        eps=_LATENT_EPS,
        bias=has_bias,
        has_pairs=bool(config.get("rope_interleave", True)),
    )


def _extension_factor(rotary: RotarySettings) -> float:
    """The factor of attention scores by which YaRN corrects their temperature, beside that of
    cosines and sines."""
    weight = float(rotary.parameters.get("mscale_all_dim") or 0.0)
    factor = float(rotary.parameters.get("factor") or 1.0)
    if rotary.scaling_type == "default" or factor <= 1:
        return 1.0
    return (0.1 * weight * math.log(factor) + 1.0) ** 2


def first_dense(config: Config, experts: ExpertsSpec, default: int) -> list[FeedForwardSpec]:
    """Parts by layer, of which the first ones are MLPs."""
    require(config, "moe_layer_freq", 1)
    num_dense, dense = config.get("first_k_dense_replace", default), gated_mlp(config, bias=False)
    return [dense if i < num_dense else experts for i in range(config["num_hidden_layers"])]


def scored_experts(
    config: Config, *, num_experts: int, num_groups: int, num_chosen_groups: int, scale: float
) -> ExpertsSpec:
    """Experts that are chosen by the sigmoid of their scores and a correction. The arguments are
    defaults."""
    require(config, "scoring_func", "sigmoid")
    require(config, "topk_method", "noaux_tc")
    return experts_of(
        config,
        num_experts=num_experts,
        num_shared=1,
        inner_size=2048 if num_groups > 1 else 1536,
        **grouped(config, scale=scale, groups=(num_groups, num_chosen_groups)),
    )


def experts_of(
    config: Config,
    *,
    num_experts: int,
    num_shared: int,
    inner_size: int,
    storage: ExpertStorage = ExpertStorage.SEPARATE,
    has_float_router: bool = True,
    **numbers: Any,
) -> ExpertsSpec:
    """num_experts, num_shared, inner_size: defaults; numbers: others of the routing."""
    size = config.get("moe_intermediate_size", inner_size)
    shared = size * (config.get("n_shared_experts", num_shared) or 0)
    return mixture_of(
        config,
        num_experts=config.get("n_routed_experts", num_experts),
        num_chosen=config["num_experts_per_tok"],
        **numbers,
        inner_size=size,
        shared=SharedSpec(inner_size=shared) if shared else None,
        corrects=numbers["scoring"] == "sigmoid",
        has_float_router=has_float_router,
        storage=storage,
    )
