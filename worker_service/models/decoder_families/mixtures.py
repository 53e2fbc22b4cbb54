"""Mixtral (Jiang et al. 2024), Qwen2-MoE, Qwen3-MoE and Mellum: Llama's layers, with experts in
place of the MLP."""

from worker_service.models.decoder.specs import DecoderSettings, LayerSpec
from worker_service.models.decoder_families.common import (
    FULL,
    NAMES,
    SLIDING,
    STACKED_EXPERTS,
    Config,
    attention_of,
    biases_of,
    by_lines,
    decoder_of,
    gated_mlp,
    have_experts,
    head_dim_of,
    layer_types,
    mixture_of,
    rotaries_by_type,
    rotary_of,
)
from worker_service.models.feed_forward.experts import ExpertStorage, SharedSpec
from worker_service.models.feed_forward.mlp import MLPSpec
from worker_service.models.layers.norms import NormSpec

_ATTENTION_NAMES = {path: name for path, name in NAMES.items() if "feed_forward." not in path}

MIXTRAL_NAMES = _ATTENTION_NAMES | {
    "feed_forward.router": "block_sparse_moe.gate",
    "feed_forward.experts": " ".join(f"block_sparse_moe.experts.*.{w}" for w in ("w1", "w3", "w2")),
}

QWEN_NAMES = _ATTENTION_NAMES | by_lines("""
feed_forward.router   mlp.gate
feed_forward.experts  mlp.experts.*.gate_proj mlp.experts.*.up_proj mlp.experts.*.down_proj
""")

STACK_NAMES = {"feed_forward.experts": "mlp.experts.gate_up_proj mlp.experts.down_proj"}

QWEN_SHARED_NAMES = QWEN_NAMES | by_lines("""
feed_forward.shared.up    mlp.shared_expert.gate_proj mlp.shared_expert.up_proj
feed_forward.shared.down  mlp.shared_expert.down_proj
feed_forward.shared.gate  mlp.shared_expert_gate
""")


def mixtral_settings(config: Config) -> DecoderSettings:
    """Mixtral: all layers have a window, or none."""
    head_dim = head_dim_of(config)
    norm = NormSpec(eps=config.get("rms_norm_eps", 1e-5))
    layer = LayerSpec(
        attention=attention_of(
            config,
            head_dim,
            rotary_of(config, head_dim, theta=1e6),
            num_kv_heads=config.get("num_key_value_heads", 8) or config["num_attention_heads"],
            window=config.get("sliding_window"),
        ),
        feed_forward=mixture_of(
            config,
            num_experts=config.get("num_local_experts") or config.get("num_experts") or 8,
            num_chosen=config.get("num_experts_per_tok", 2),
            normalizes=True,
            inner_size=config["intermediate_size"],
        ),
        norm=norm,
        names=MIXTRAL_NAMES,
    )
    return decoder_of(config, [layer] * config["num_hidden_layers"], norm)


def qwen_moe_settings(config: Config) -> DecoderSettings:
    """Qwen2-MoE, which has a shared expert with a gate, and Qwen3-MoE, which has norms of heads.
    Some layers may have an MLP. Qwen3-VL has tensors of all experts."""
    is_qwen3 = config["architectures"][0] == "Qwen3MoeForCausalLM"
    head_dim = head_dim_of(config)
    rotary = rotary_of(config, head_dim)
    norm = NormSpec(eps=config.get("rms_norm_eps", 1e-6))
    has_windows, window = (
        config.get("use_sliding_window", False),
        config.get("sliding_window", 4096),
    )
    activation = config.get("hidden_act", "silu")
    num_experts = config.get("num_experts")
    if num_experts is None:
        num_experts = config.get("num_local_experts", 128 if is_qwen3 else 60)
    storage = _storage(config) if is_qwen3 else ExpertStorage.SEPARATE
    step, mlp_layers = config.get("decoder_sparse_step", 1), config.get("mlp_only_layers") or ()
    shared = None
    if not is_qwen3:
        inner_size = config.get("shared_expert_intermediate_size", 5632)
        shared = SharedSpec(inner_size=inner_size, is_gated=True)

    def layer(index: int, kind: str) -> LayerSpec:
        has_experts = index not in mlp_layers and num_experts > 0 and (index + 1) % step == 0
        attention = attention_of(
            config,
            head_dim,
            rotary,
            num_kv_heads=config.get("num_key_value_heads", 4 if is_qwen3 else 16)
            or config["num_attention_heads"],
            window=window if has_windows and kind == SLIDING else None,
            qkv_bias=bool(config.get("attention_bias" if is_qwen3 else "qkv_bias", not is_qwen3)),
            output_bias=is_qwen3 and bool(config.get("attention_bias", False)),
            head_norm=norm if is_qwen3 else None,
        )
        if not has_experts:
            mlp = MLPSpec(inner_size=config["intermediate_size"], activation=activation)
            return LayerSpec(attention=attention, feed_forward=mlp, norm=norm, names=NAMES)
        experts = mixture_of(
            config,
            num_experts=num_experts,
            num_chosen=config.get("num_experts_per_tok", 8 if is_qwen3 else 4),
            normalizes=bool(config.get("norm_topk_prob", False)),
            inner_size=config.get("moe_intermediate_size", 768 if is_qwen3 else 1408),
            activation=activation,
            shared=shared,
            storage=storage,
        )
        names = QWEN_NAMES if is_qwen3 else QWEN_SHARED_NAMES
        if storage is not ExpertStorage.SEPARATE:
            names = names | STACK_NAMES
        return LayerSpec(attention=attention, feed_forward=experts, norm=norm, names=names)

    kinds = _layer_types(config, is_qwen3)
    return decoder_of(config, [layer(i, kind) for i, kind in enumerate(kinds)], norm)


def _storage(config: Config) -> ExpertStorage:
    """Qwen3-VL has tensors of all experts, as published or as `transformers` writes them."""
    stack = config.get(STACKED_EXPERTS)
    if stack is None:
        return ExpertStorage.SEPARATE
    is_transposed = stack[1] == config["hidden_size"]
    return ExpertStorage.TRANSPOSED_HALVES if is_transposed else ExpertStorage.STACK


def mellum_settings(config: Config) -> DecoderSettings:
    """Mellum: Qwen3-MoE with windows in some layers, which have another base of RoPE."""
    head_dim, norm = head_dim_of(config, 128), NormSpec(eps=config.get("rms_norm_eps", 1e-6))
    rotaries = rotaries_by_type(config, head_dim, {FULL: 500_000.0, SLIDING: 10_000.0})
    num_layers = config["num_hidden_layers"]
    experts = mixture_of(
        config,
        num_experts=config.get("num_local_experts") or config.get("num_experts") or 64,
        num_chosen=config.get("num_experts_per_tok", 8),
        normalizes=bool(config.get("norm_topk_prob", True)),
        inner_size=config.get("moe_intermediate_size", 896),
    )
    mlp = gated_mlp(config, bias=False)
    layers = [
        LayerSpec(
            attention=attention_of(
                config,
                head_dim,
                rotaries[kind],
                num_kv_heads=config.get("num_key_value_heads", 4),
                window=config.get("sliding_window", 1024) if kind == SLIDING else None,
                head_norm=norm,
                **biases_of(config),
            ),
            feed_forward=experts if has_experts else mlp,
            norm=norm,
            names=QWEN_NAMES if has_experts else NAMES,
        )
        for kind, has_experts in zip(
            layer_types(config, [FULL] * num_layers), have_experts(config, 0), strict=True
        )
    ]
    return decoder_of(config, layers, norm, max_model_len=rotaries[FULL].max_model_len())


def _layer_types(config: Config, is_qwen3: bool) -> list[str]:
    """Of Qwen3-MoE, all layers are of the same type; of Qwen2-MoE those that are listed, or every
    second one of the first layers has a window."""
    num_layers = config["num_hidden_layers"]
    if is_qwen3:
        return [SLIDING] * num_layers
    num_first = config.get("max_window_layers", 28)
    windows = [SLIDING if i % 2 == 0 and i < num_first else FULL for i in range(num_layers)]
    return layer_types(config, windows)
