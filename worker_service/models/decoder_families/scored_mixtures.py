"""GLM-4.5 (`Glm4Moe`) and dots1: Llama's layers, of which all but the first have shared experts,
and others that are chosen among groups by the sigmoid of their scores, as in DeepSeek-V3."""

from worker_service.models.decoder.specs import DecoderSettings, LayerSpec
from worker_service.models.decoder_families.common import (
    FULL,
    NAMES,
    SLIDING,
    Config,
    attention_of,
    biases_of,
    by_lines,
    decoder_of,
    grouped,
    head_dim_of,
    layer_types,
    mixture_of,
    rotary_of,
)
from worker_service.models.decoder_families.draft_heads import with_layer_behind
from worker_service.models.decoder_families.mixtures import QWEN_NAMES
from worker_service.models.feed_forward.experts import ExpertsSpec, SharedSpec
from worker_service.models.feed_forward.mlp import MLPSpec
from worker_service.models.layers.norms import NormSpec

SHARED_NAMES = by_lines("""
feed_forward.shared.up    mlp.shared_experts.gate_proj mlp.shared_experts.up_proj
feed_forward.shared.down  mlp.shared_experts.down_proj
""")

SCORED_NAMES = (
    QWEN_NAMES | SHARED_NAMES | {"feed_forward.correction": "mlp.gate.e_score_correction_bias"}
)


def glm4_moe_settings(config: Config) -> DecoderSettings:
    """GLM-4.5, of which heads are rotated in part. A layer after the last one drafts
    tokens."""
    norm = NormSpec(eps=config.get("rms_norm_eps", 1e-5))
    head_dim = head_dim_of(config)
    has_norms = config.get("use_qk_norm", False)
    attention = attention_of(
        config,
        head_dim,
        rotary_of(config, head_dim, partial=0.5),
        num_kv_heads=config.get("num_key_value_heads", 8) or config["num_attention_heads"],
        qkv_bias=bool(config.get("attention_bias", False)),
        head_norm=norm if has_norms else None,
    )
    num_layers = config["num_hidden_layers"]
    dense = MLPSpec(
        inner_size=config["intermediate_size"], activation=config.get("hidden_act", "silu")
    )
    experts = scored_experts(config, num_chosen=8, normalizes=True)
    num_dense = config.get("first_k_dense_replace", 1)
    layers = [
        LayerSpec(attention=attention, feed_forward=dense, norm=norm, names=NAMES)
        if i < num_dense
        else LayerSpec(attention=attention, feed_forward=experts, norm=norm, names=SCORED_NAMES)
        for i in range(num_layers)
    ]
    settings = decoder_of(config, layers, norm, ignores_further_layers=True)
    return with_layer_behind(settings)


def dots1_settings(config: Config) -> DecoderSettings:
    """dots1, whose heads have norms, and whose last layers may have a window."""
    norm = NormSpec(eps=config.get("rms_norm_eps", 1e-6))
    head_dim = head_dim_of(config)
    rotary = rotary_of(config, head_dim)
    dense = MLPSpec(
        inner_size=config["intermediate_size"], activation=config.get("hidden_act", "silu")
    )
    experts = scored_experts(config, num_chosen=None, normalizes=False)
    window = config.get("sliding_window", 4096)
    first_window = config.get("max_window_layers", 62) if window is not None else 1 << 30
    num_layers, num_dense = config["num_hidden_layers"], config.get("first_k_dense_replace", 0)
    default = [SLIDING if i >= first_window else FULL for i in range(num_layers)]

    def layer(index: int, kind: str) -> LayerSpec:
        attention = attention_of(
            config,
            head_dim,
            rotary,
            window=window if kind == SLIDING else None,
            **biases_of(config),
            head_norm=norm,
        )
        if index < num_dense:
            return LayerSpec(attention=attention, feed_forward=dense, norm=norm, names=NAMES)
        return LayerSpec(attention=attention, feed_forward=experts, norm=norm, names=SCORED_NAMES)

    kinds = layer_types(config, default)
    return decoder_of(config, [layer(i, kind) for i, kind in enumerate(kinds)], norm)


def scored_experts(config: Config, *, num_chosen: int | None, normalizes: bool) -> ExpertsSpec:
    """Experts that are chosen by the sigmoid of their scores and a correction, beside shared ones.
    num_chosen, normalizes: defaults; None: there is none."""
    inner_size = config.get("moe_intermediate_size", 1408)
    chosen = config["num_experts_per_tok"] if num_chosen is None else num_chosen
    num_shared = config.get("n_shared_experts", 1)
    return mixture_of(
        config,
        num_experts=config.get("n_routed_experts") or config["num_local_experts"],
        num_chosen=config.get("num_experts_per_tok") or chosen,
        **grouped(config, normalizes=normalizes),
        inner_size=inner_size,
        shared=SharedSpec(inner_size=inner_size * num_shared),
        corrects=True,
        has_float_router=True,
    )
