"""LFM2 (Liquid AI 2025): Llama's layers, most of which have a short convolution in place of
attention; and its mixtures of experts, which are chosen as in DeepSeek-V3, without groups. LFM3
has norms around each part, windows, and a gate for each head of attention."""

from collections.abc import Sequence

from worker_service.models.decoder.specs import (
    DecoderSettings,
    FeedForwardSpec,
    LayerSpec,
    MixerSpec,
    NormPlace,
)
from worker_service.models.decoder_families.common import (
    FULL,
    SLIDING,
    Config,
    NotNative,
    attention_of,
    by_lines,
    decoder_of,
    gated_mlp,
    head_dim_of,
    layer_types,
    mixture_of,
    rotaries_by_type,
    rotary_of,
    with_keys,
    with_values,
)
from worker_service.models.feed_forward.experts import ExpertsSpec
from worker_service.models.feed_forward.mlp import MLPSpec
from worker_service.models.layers.norms import NormSpec
from worker_service.models.mixers.convolution import ShortConvolutionSpec

_CONVOLUTION = "conv"
"""In `layer_types`."""

_ATTENTION_NAMES = by_lines("""
attention.qkv           self_attn.q_proj self_attn.k_proj self_attn.v_proj
attention.query_norm    self_attn.q_layernorm
attention.key_norm      self_attn.k_layernorm
attention.output        self_attn.out_proj
""")

_CONVOLUTION_NAMES = by_lines("""
attention.inputs        conv.in_proj
attention.convolution   conv.conv
attention.output        conv.out_proj
""")

_MLP_NAMES = by_lines("""
attention_norm          operator_norm
feed_forward_norm       ffn_norm
feed_forward.up         feed_forward.w1 feed_forward.w3
feed_forward.down       feed_forward.w2
""")

_EXPERT_NAMES = by_lines("""
attention_norm          operator_norm
feed_forward_norm       ffn_norm
feed_forward.router     feed_forward.gate
feed_forward.correction feed_forward.expert_bias
""") | {"feed_forward.experts": " ".join(f"feed_forward.experts.*.w{i}" for i in (1, 3, 2))}

_LFM3_ATTENTION_NAMES = by_lines("""
attention.qkv           self_attn.q_proj self_attn.gate_proj self_attn.k_proj self_attn.v_proj
attention.query_norm    self_attn.q_norm
attention.key_norm      self_attn.k_norm
attention.output        self_attn.o_proj
""")

_LFM3_UNGATED = {"attention.qkv": "self_attn.q_proj self_attn.k_proj self_attn.v_proj"}

_OUTPUT_NORMS = by_lines("""
attention_output_norm     post_operator_norm
feed_forward_output_norm  post_ffn_norm
""")

_LFM3_ROPE = {
    SLIDING: {"rope_type": "default", "rope_theta": 10_000.0},
    FULL: {"rope_type": "proportional", "rope_theta": 1_000_000.0, "partial_rotary_factor": 0.5},
}
"""Defaults of `transformers`."""


def lfm2_settings(config: Config) -> DecoderSettings:
    """LFM2."""
    num_layers, full = config["num_hidden_layers"], config.get("full_attn_idxs")
    with_attention = range(num_layers) if full is None else full
    default = [FULL if i in with_attention else _CONVOLUTION for i in range(num_layers)]
    mlp = MLPSpec(inner_size=_inner_size(config), activation="silu")
    return _decoder(config, default, [mlp] * num_layers)


def lfm2_moe_settings(config: Config) -> DecoderSettings:
    """LFM2 with experts, in all but the first layers."""
    num_layers, num_dense = config["num_hidden_layers"], config.get("num_dense_layers", 2)
    corrects = bool(config.get("use_expert_bias", True))
    experts = mixture_of(
        config,
        num_experts=config.get("num_experts", 32),
        num_chosen=config.get("num_experts_per_tok", 4),
        scoring="sigmoid",
        normalizes=bool(config.get("norm_topk_prob", True)),
        epsilon=1e-6,
        scale=float(config.get("routed_scaling_factor", 1.0)),
        inner_size=config.get("moe_intermediate_size", 1792),
        activation="silu",
        corrects=corrects,
    )
    dense = MLPSpec(inner_size=config.get("intermediate_size", 7168), activation="silu")
    parts = [dense if i < num_dense else experts for i in range(num_layers)]
    return _decoder(config, config["layer_types"], parts)


def _inner_size(config: Config) -> int:
    """Columns of the MLP, which `intermediate_size` states before they are adjusted."""
    size = int(config.get("block_ff_dim") or config.get("intermediate_size", 12288))
    if not config.get("block_auto_adjust_ff_dim", True):
        return size
    size = int(2 * size / 3)
    multiplier = config.get("block_ffn_dim_multiplier", 1.0)
    if multiplier is None:
        return size
    multiple = config.get("block_multiple_of", 256)
    return -(-int(multiplier * size) // multiple) * int(multiple)


def _decoder(
    config: Config, default: Sequence[str], parts: Sequence[FeedForwardSpec]
) -> DecoderSettings:
    """default, parts: by layer, what mixes tokens without `layer_types`, and what follows it."""
    kinds = layer_types(config, default, (FULL, _CONVOLUTION))
    config = with_keys(config, {}, num_key_value_heads=8, max_position_embeddings=128_000)
    norm = NormSpec(eps=config.get("norm_eps", 1e-5))
    head_dim = head_dim_of(config)
    rotary = rotary_of(config, head_dim, theta=1e6)
    attention = attention_of(config, head_dim, rotary, head_norm=norm)
    convolution = _convolution(config, 3)

    def layer(kind: str, part: FeedForwardSpec) -> LayerSpec:
        names = _MLP_NAMES
        if isinstance(part, ExpertsSpec):
            names = {
                k: v for k, v in _EXPERT_NAMES.items() if part.corrects or "correction" not in k
            }
        is_attention = kind == FULL
        return LayerSpec(
            attention=attention if is_attention else convolution,
            feed_forward=part,
            norm=norm,
            names=names | (_ATTENTION_NAMES if is_attention else _CONVOLUTION_NAMES),
        )

    is_tied = config.get("tie_embedding", config.get("tie_word_embeddings", True))
    return decoder_of(
        config,
        [layer(kind, part) for kind, part in zip(kinds, parts, strict=True)],
        norm,
        norm_name="model.embedding_norm",
        tie_word_embeddings=bool(is_tied),
        max_model_len=rotary.max_model_len(),
    )


def lfm3_settings(config: Config) -> DecoderSettings:
    """LFM3."""
    if config.get("attention_bias"):
        raise NotNative("attention_bias")
    config = with_keys(config, {}, head_dim=128, num_key_value_heads=4)
    config = with_keys(config, {}, max_position_embeddings=128_000)
    config = with_values(config, rope_parameters=config.get("rope_parameters") or _LFM3_ROPE)
    default = [
        FULL if i % 4 == 2 else SLIDING if i % 4 == 0 and i > 0 else _CONVOLUTION
        for i in range(config["num_hidden_layers"])
    ]
    kinds = layer_types(config, default, (FULL, SLIDING, _CONVOLUTION))
    head_dim, norm = config["head_dim"], NormSpec(eps=config.get("norm_eps", 1e-5))
    rotaries = rotaries_by_type(config, head_dim, {FULL: 1e6, SLIDING: 1e6})
    has_gates = bool(config.get("use_attention_gate", True))
    has_output_norms = bool(config.get("use_sandwich_norm", True))
    of_attention = _LFM3_ATTENTION_NAMES | ({} if has_gates else _LFM3_UNGATED)

    def layer(kind: str) -> LayerSpec:
        mixer: MixerSpec = _convolution(config, 7)
        if kind != _CONVOLUTION:
            mixer = attention_of(
                config,
                head_dim,
                rotaries[kind],
                window=config.get("sliding_window", 256) if kind == SLIDING else None,
                head_norm=norm,
                gates_output=has_gates,
                gate_is_separate=has_gates,
                gates_heads=has_gates,
            )
        return LayerSpec(
            attention=mixer,
            feed_forward=gated_mlp(config, activation="silu", bias=False),
            norm=norm,
            norm_place=NormPlace.AROUND if has_output_norms else NormPlace.BEFORE,
            names=_MLP_NAMES
            | (_CONVOLUTION_NAMES if kind == _CONVOLUTION else of_attention)
            | (_OUTPUT_NORMS if has_output_norms else {}),
        )

    return decoder_of(
        config,
        [layer(kind) for kind in kinds],
        norm,
        norm_name="model.embedding_norm",
        tie_word_embeddings=bool(config.get("tie_word_embeddings", True)),
        max_model_len=rotaries[FULL].max_model_len(),
    )


def _convolution(config: Config, width: int) -> ShortConvolutionSpec:
    """width: the default."""
    return ShortConvolutionSpec(
        num_channels=config["hidden_size"],
        width=config.get("conv_L_cache", width),
        bias=bool(config.get("conv_bias", False)),
    )
