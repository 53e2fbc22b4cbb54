"""Mixtures of experts that differ from Mixtral and Qwen-MoE in one or two parts: OLMoE,
MiniMax-M2, ERNIE 4.5, Phi-MoE and Flint."""

from worker_service.models.decoder.specs import DecoderSettings, LayerSpec
from worker_service.models.decoder_families.common import (
    FULL,
    NAMES,
    SLIDING,
    Config,
    NotNative,
    attention_of,
    biases_of,
    by_lines,
    decoder_of,
    gated_mlp,
    head_dim_of,
    layer_types,
    mixture_of,
    require,
    rotary_of,
    unrotated,
    with_keys,
)
from worker_service.models.decoder_families.mixtures import MIXTRAL_NAMES, QWEN_NAMES
from worker_service.models.decoder_families.scored_mixtures import SHARED_NAMES
from worker_service.models.feed_forward.experts import SharedSpec
from worker_service.models.feed_forward.mlp import MLPSpec
from worker_service.models.layers.norms import NormSpec

_MINIMAX_NAMES = MIXTRAL_NAMES | {
    "feed_forward.correction": "block_sparse_moe.e_score_correction_bias"
}

_ERNIE_NAMES = QWEN_NAMES | {"feed_forward.correction": "mlp.moe_statics.e_score_correction_bias"}

_FLINT_SINKS = {"attention.sinks": "self_attn.softmax_offset"}

_FLINT_SHARED_NAMES = by_lines("""
feed_forward.shared.up    mlp.shared_expert.gate_proj mlp.shared_expert.up_proj
feed_forward.shared.down  mlp.shared_expert.down_proj
""")


def olmoe_settings(config: Config) -> DecoderSettings:
    """OLMoE: norms of all heads together."""
    if config.get("clip_qkv") is not None:
        raise NotNative("clip_qkv")
    head_dim, norm = head_dim_of(config), NormSpec(eps=config.get("rms_norm_eps", 1e-5))
    layer = LayerSpec(
        attention=attention_of(
            config,
            head_dim,
            rotary_of(config, head_dim),
            **biases_of(config),
            head_norm=norm,
            norm_spans_heads=True,
        ),
        feed_forward=mixture_of(
            config,
            num_experts=config.get("num_experts") or config.get("num_local_experts") or 64,
            num_chosen=config.get("num_experts_per_tok", 8),
            normalizes=bool(config.get("norm_topk_prob", False)),
            inner_size=config["intermediate_size"],
        ),
        norm=norm,
        names=QWEN_NAMES,
    )
    return decoder_of(config, [layer] * config["num_hidden_layers"], norm)


def minimax_m2_settings(config: Config) -> DecoderSettings:
    """MiniMax-M2: norms of all heads together, heads that are rotated in part, and sigmoid scores
    with a correction."""
    head_dim = config.get("head_dim", 128)
    norm = NormSpec(eps=config.get("rms_norm_eps", 1e-6))
    partial = config.get("rotary_dim", head_dim) / head_dim
    layer = LayerSpec(
        attention=attention_of(
            config,
            head_dim,
            rotary_of(config, head_dim, theta=5e6, partial=partial),
            num_kv_heads=config.get("num_key_value_heads", 8),
            head_norm=norm,
            norm_spans_heads=True,
        ),
        feed_forward=mixture_of(
            config,
            num_experts=config.get("num_local_experts") or config.get("num_experts") or 256,
            num_chosen=config.get("num_experts_per_tok", 8),
            scoring="sigmoid",
            normalizes=True,
            inner_size=config["intermediate_size"],
            corrects=True,
        ),
        norm=norm,
        names=_MINIMAX_NAMES,
    )
    return decoder_of(config, [layer] * config["num_hidden_layers"], norm)


def phimoe_settings(config: Config) -> DecoderSettings:
    """Phi-MoE: layer norms, and two experts that are weighted by SparseMixer."""
    require(config, "num_experts_per_tok", 2)
    head_dim, norm = (
        head_dim_of(config),
        NormSpec(eps=config.get("rms_norm_eps", 1e-5), is_rms=False),
    )
    layer = LayerSpec(
        attention=attention_of(
            config,
            head_dim,
            rotary_of(config, head_dim, theta=1e6),
            num_kv_heads=config.get("num_key_value_heads", 8) or config["num_attention_heads"],
            window=config.get("sliding_window"),
            **biases_of(config),
        ),
        feed_forward=mixture_of(
            config,
            num_experts=config.get("num_local_experts") or config.get("num_experts") or 16,
            num_chosen=2,
            scoring="sparsemixer",
            nearness=2 * float(config.get("router_jitter_noise", 0.01)),
            inner_size=config["intermediate_size"],
        ),
        norm=norm,
        names=MIXTRAL_NAMES,
    )
    return decoder_of(
        config,
        [layer] * config["num_hidden_layers"],
        norm,
        has_head_bias=bool(config.get("lm_head_bias", False)),
    )


def ernie4_5_moe_settings(config: Config) -> DecoderSettings:
    """ERNIE 4.5 with experts in some of its layers, which are chosen with a correction. Weights
    rotate neighbouring elements of heads."""
    if config.get("use_bias", False):
        raise NotNative("use_bias")
    head_dim, norm = head_dim_of(config), NormSpec(eps=config.get("rms_norm_eps", 1e-5))
    activation = config.get("hidden_act", "silu")
    attention = attention_of(
        config,
        head_dim,
        rotary_of(config, head_dim, theta=500_000.0),
        num_kv_heads=config.get("num_key_value_heads", 4) or config["num_attention_heads"],
        has_pairs=True,
    )
    inner_size = config.get("moe_intermediate_size", 1536)
    num_shared = config.get("moe_num_shared_experts", 2)
    experts = mixture_of(
        config,
        num_experts=config.get("moe_num_experts", 64),
        num_chosen=config.get("moe_k", 6),
        normalizes=True,
        min_sum=float(config.get("moe_norm_min", 1e-12)),
        inner_size=inner_size,
        activation=activation,
        shared=SharedSpec(inner_size=inner_size * num_shared) if num_shared else None,
        corrects=True,
        correction_is_row=True,
        has_float_router=True,
    )
    mlp = MLPSpec(inner_size=config["intermediate_size"], activation=activation)
    num_layers, interval = config["num_hidden_layers"], config.get("moe_layer_interval", 1)
    first, last = config.get("moe_layer_start_index", 1), config.get("moe_layer_end_index", -1)
    last = num_layers - 1 if last == -1 else last
    names = _ERNIE_NAMES | (SHARED_NAMES if num_shared else {})

    def layer(index: int) -> LayerSpec:
        if (index + 1) % interval == 0 and first <= index <= last:
            return LayerSpec(attention=attention, feed_forward=experts, norm=norm, names=names)
        return LayerSpec(attention=attention, feed_forward=mlp, norm=norm, names=NAMES)

    return decoder_of(
        config,
        [layer(i) for i in range(num_layers)],
        norm,
        tie_word_embeddings=bool(config.get("tie_word_embeddings", True)),
    )


def flint_settings(config: Config) -> DecoderSettings:
    """Flint: Qwen3-MoE with attention sinks, RoPE in layers with a window alone, sigmoid scores,
    and an MLP in the first layers."""
    config = with_keys(config, {}, head_dim=128, num_key_value_heads=4)
    head_dim, norm = config["head_dim"], NormSpec(eps=config.get("rms_norm_eps", 1e-6))
    rotary = rotary_of(config, head_dim)
    experts = mixture_of(
        config,
        num_experts=config.get("num_experts", 256),
        num_chosen=config.get("num_experts_per_tok", 6),
        scoring="sigmoid",
        normalizes=bool(config.get("norm_topk_prob", True)),
        inner_size=config.get("moe_intermediate_size", 512),
        shared=SharedSpec(inner_size=config.get("shared_expert_intermediate_size", 1024)),
        has_float_router=True,
    )
    num_layers, step = config["num_hidden_layers"], config.get("decoder_sparse_step", 1)
    dense_layers, dense = config.get("mlp_only_layers"), gated_mlp(config, bias=False)
    dense_layers = (0, 1) if dense_layers is None else dense_layers

    def layer(index: int, kind: str) -> LayerSpec:
        is_sparse = index not in dense_layers and (index + 1) % step == 0
        names = QWEN_NAMES | _FLINT_SHARED_NAMES if is_sparse else NAMES
        attention = attention_of(
            config,
            head_dim,
            rotary if kind == SLIDING else unrotated(rotary),
            window=config.get("sliding_window", 513) if kind == SLIDING else None,
            head_norm=norm,
            has_sinks=True,
            **biases_of(config),
        )
        return LayerSpec(
            attention=attention,
            feed_forward=experts if is_sparse else dense,
            norm=norm,
            names={**names, **_FLINT_SINKS},
        )

    kinds = [
        FULL if i < 2 or i % 4 == 1 or i == num_layers - 1 else SLIDING for i in range(num_layers)
    ]
    layers = [layer(i, kind) for i, kind in enumerate(layer_types(config, kinds))]
    return decoder_of(config, layers, norm)
