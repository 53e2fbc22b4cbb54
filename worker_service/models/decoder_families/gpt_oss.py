"""gpt-oss: attention sinks, windows in every other layer, and experts with biases and a clamped
gate, which are stored in MXFP4."""

from pagewire_kernels.reference import Gate
from worker_service.models.decoder.specs import DecoderSettings, LayerSpec
from worker_service.models.decoder_families.common import (
    FULL,
    NAMES,
    SLIDING,
    Config,
    attention_of,
    biases_of,
    decoder_of,
    layer_types,
    mixture_of,
    rotary_of,
)
from worker_service.models.feed_forward.experts import ExpertStorage
from worker_service.models.layers.norms import NormSpec

_BIASES = "mlp.experts.gate_up_proj_bias mlp.experts.down_proj_bias"

_NAMES = {path: name for path, name in NAMES.items() if "feed_forward." not in path} | {
    "attention.sinks": "self_attn.sinks",
    "feed_forward.router": "mlp.router",
    "feed_forward.experts": f"mlp.experts.gate_up_proj mlp.experts.down_proj {_BIASES}",
}

_MXFP4_NAMES = _NAMES | {
    "feed_forward.experts": f"mlp.experts.*.gate_up_proj mlp.experts.*.down_proj {_BIASES}",
}

_MODULE_NAMES = _NAMES | {
    "feed_forward.experts": " ".join(f"mlp.experts.*.{w}_proj" for w in ("gate", "up", "down")),
}
"""In GGUF files."""

_ROTARY = {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}
"""The defaults of `rope_parameters`."""


def gpt_oss_settings(config: Config) -> DecoderSettings:
    """gpt-oss."""
    norm = NormSpec(eps=config.get("rms_norm_eps", 1e-5))
    head_dim = config.get("head_dim", 64)
    stored = config.get("rope_scaling") or config.get("rope_parameters") or _ROTARY
    theta = config.get("rope_theta") or 150000.0
    rotary = rotary_of(config, head_dim, stored, theta=theta)
    names, storage = _NAMES, ExpertStorage.TRANSPOSED_STACK
    if config.get("has_expert_modules"):
        names, storage = _MODULE_NAMES, ExpertStorage.SEPARATE
    elif (config.get("quantization_config") or {}).get("quant_method") == "mxfp4":
        names, storage = _MXFP4_NAMES, ExpertStorage.IN_TURN
    experts = mixture_of(
        config,
        num_experts=config.get("num_local_experts") or config.get("num_experts") or 128,
        num_chosen=config.get("num_experts_per_tok", 4),
        scoring="softmax_of_chosen",
        inner_size=config["intermediate_size"],
        bias=True,
        gate=Gate(
            limit=float(config.get("swiglu_limit", 7.0)),
            alpha=float(config.get("swiglu_alpha", 1.702)),
            offset=1.0,
        ),
        storage=storage,
    )
    window = config.get("sliding_window", 128)

    def layer(kind: str) -> LayerSpec:
        attention = attention_of(
            config,
            head_dim,
            rotary,
            num_kv_heads=config.get("num_key_value_heads", 8) or config["num_attention_heads"],
            window=window if kind == SLIDING else None,
            has_sinks=True,
            **biases_of(config, default=True),
        )
        return LayerSpec(attention=attention, feed_forward=experts, norm=norm, names=names)

    kinds = [FULL if i % 2 else SLIDING for i in range(config["num_hidden_layers"])]
    return decoder_of(config, [*map(layer, layer_types(config, kinds))], norm)
