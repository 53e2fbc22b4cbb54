"""Llama 4: chunks in layers with RoPE, the others without RoPE, and experts whose inputs are scaled
by the sigmoid of their logits."""

from typing import Any

from worker_service.errors import UnsupportedModel
from worker_service.models.decoder.specs import DecoderSettings, LayerSpec
from worker_service.models.decoder_families.common import (
    FULL,
    NAMES,
    Config,
    attention_of,
    biases_of,
    by_lines,
    decoder_of,
    gated_mlp,
    head_dim_of,
    layer_types,
    mixture_of,
    rotary_of,
)
from worker_service.models.feed_forward.experts import ExpertsSpec, ExpertStorage, SharedSpec
from worker_service.models.layers.norms import NormSpec
from worker_service.models.layers.rotary import (
    NO_ROTATION,
    QUERY_OFFSET,
    QUERY_SCALING,
    RotarySettings,
)

CHUNKED = "chunked_attention"

_ATTENTION = {path: name for path, name in NAMES.items() if "_norm" not in path.split(".")[-1]} | {
    path: NAMES[path] for path in ("attention_norm", "feed_forward_norm")
}
"""Norms of heads have no weights."""

_DENSE = _ATTENTION | by_lines("""
feed_forward.up    feed_forward.gate_proj feed_forward.up_proj
feed_forward.down  feed_forward.down_proj
""")

_MOE = {path: name for path, name in _ATTENTION.items() if "feed_forward." not in path} | by_lines(
    """
feed_forward.router       feed_forward.router
feed_forward.experts      feed_forward.experts.gate_up_proj feed_forward.experts.down_proj
feed_forward.shared.up    feed_forward.shared_expert.gate_proj feed_forward.shared_expert.up_proj
feed_forward.shared.down  feed_forward.shared_expert.down_proj
"""
)
_MODULES = " ".join(f"feed_forward.experts.*.{name}_proj" for name in ("gate", "up", "down"))


def llama4_settings(config: Config) -> DecoderSettings:
    """The text model of Llama 4."""
    num_layers = config["num_hidden_layers"]
    head_dim, norm = head_dim_of(config, 128), NormSpec(eps=config.get("rms_norm_eps", 1e-5))
    rotary = rotary_of(config, head_dim, theta=500_000.0)
    interval = config.get("no_rope_layer_interval", 4)
    default = [int((layer + 1) % interval != 0) for layer in range(num_layers)]
    rotates = config.get("no_rope_layers") or default
    chunk, step = (
        config.get("attention_chunk_size", 8192),
        config.get("interleave_moe_layer_step", 1),
    )
    moe_layers = config.get("moe_layers")
    if moe_layers is None:
        moe_layers = range(step - 1, num_layers, step)
    l2_norm = NormSpec(eps=norm.eps, affine=False) if config.get("use_qk_norm", True) else None
    experts, moe_names = _experts(config)
    mlp = gated_mlp(config, inner_size=config.get("intermediate_size_mlp", 16384), bias=False)

    def layer(index: int, kind: str) -> LayerSpec:
        has_rope = bool(rotates[index])
        attention = attention_of(
            config,
            head_dim,
            rotary if has_rope else _query_scaling(config, head_dim, rotary.max_model_len()),
            num_kv_heads=config.get("num_key_value_heads", 8) or config["num_attention_heads"],
            chunk=chunk if kind == CHUNKED else None,
            head_norm=l2_norm if has_rope else None,
            norm_follows_rotary=True,
            **biases_of(config),
            has_pairs=has_rope,
        )
        is_moe = index in moe_layers
        return LayerSpec(
            attention=attention,
            feed_forward=experts if is_moe else mlp,
            norm=norm,
            names=moe_names if is_moe else _DENSE,
        )

    has_chunks = chunk is not None
    usual = [CHUNKED if r and has_chunks else FULL for r in rotates]
    kinds = layer_types(config, usual, (CHUNKED, FULL))
    if CHUNKED in kinds and (chunk is None or chunk < 1):
        raise UnsupportedModel(
            f"config.json: attention_chunk_size: expected at least 1 for {CHUNKED}, got {chunk}"
        )
    layers = [layer(i, kind) for i, kind in enumerate(kinds)]
    return decoder_of(config, layers, norm, max_model_len=rotary.max_model_len())


def _query_scaling(config: Config, head_dim: int, length: int) -> RotarySettings | None:
    """The table that scales queries of layers without RoPE by their positions; None if nothing
    does."""
    if not config.get("attn_temperature_tuning", True):
        return None
    parameters: dict[str, Any] = {
        QUERY_SCALING: float(config.get("attn_scale", 0.1)),
        QUERY_OFFSET: 1,
        "original_max_position_embeddings": config.get("floor_scale", 8192),
    }
    return RotarySettings(
        rotary_dim=head_dim,
        theta=1.0,
        scaling_type=NO_ROTATION,
        max_position_embeddings=length,
        parameters=parameters,
    )


def _experts(config: Config) -> tuple[ExpertsSpec, dict[str, str]]:
    """The experts, and the names of a layer that has them. Checkpoints of compressed-tensors,
    and GGUF files, have modules of each expert."""
    quantization = config.get("quantization_config") or {}
    is_separate = quantization.get("quant_method") == "compressed-tensors"
    is_separate = is_separate or bool(config.get("has_expert_modules"))
    inner_size = config["intermediate_size"]
    spec = mixture_of(
        config,
        num_experts=config.get("num_local_experts") or config.get("num_experts") or 16,
        num_chosen=config.get("num_experts_per_tok", 1),
        scoring="sigmoid_of_chosen",
        scales_inputs=True,
        inner_size=inner_size,
        shared=SharedSpec(inner_size=inner_size),
        storage=ExpertStorage.SEPARATE if is_separate else ExpertStorage.TRANSPOSED_HALVES,
    )
    return spec, _MOE | {"feed_forward.experts": _MODULES} if is_separate else _MOE
