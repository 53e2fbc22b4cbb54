"""Llama (Touvron et al. 2023), Mistral, Qwen2 and Qwen3: RMS norms before attention and a gated
MLP, RoPE, grouped queries."""

from collections.abc import Iterator

from worker_service.models.decoder import DecoderSettings, LayerSpec, MLPSpec, NormSpec
from worker_service.models.decoder_families.common import (
    FULL,
    NAMES,
    SLIDING,
    Config,
    attention_of,
    decoder_of,
    head_dim_of,
    rotary_of,
)


def llama_settings(config: Config) -> DecoderSettings:
    """Settings of these families."""
    architecture = config["architectures"][0]
    qwen3, qwen2 = architecture == "Qwen3ForCausalLM", architecture == "Qwen2ForCausalLM"
    llama_or_qwen3 = architecture in ("LlamaForCausalLM", "Qwen3ForCausalLM")
    bias = bool(config.get("attention_bias", False)) and llama_or_qwen3
    head_dim = head_dim_of(config, 128 if qwen3 else None)
    rotary = rotary_of(config, head_dim)
    default_kv_heads = 8 if architecture == "MistralForCausalLM" else config["num_attention_heads"]
    norm = NormSpec(eps=config.get("rms_norm_eps", 1e-6))
    mlp = MLPSpec(
        inner_size=config["intermediate_size"],
        activation=config.get("hidden_act", "silu"),
        bias=bool(config.get("mlp_bias", False)) and architecture == "LlamaForCausalLM",
    )

    def layer(window: int | None) -> LayerSpec:
        attention = attention_of(
            config,
            head_dim,
            rotary,
            num_kv_heads=config.get("num_key_value_heads") or default_kv_heads,
            window=window,
            qkv_bias=qwen2 or bias,
            output_bias=bias,
            head_norm=norm if qwen3 else None,
        )
        return LayerSpec(attention=attention, feed_forward=mlp, norm=norm, names=NAMES)

    return decoder_of(config, [*map(layer, _windows(config, architecture))], norm)


def _windows(config: Config, architecture: str) -> Iterator[int | None]:
    """The sliding window of each layer: Mistral has one for all layers, Qwen one for the layers
    that it lists, Llama none."""
    num_layers = config["num_hidden_layers"]
    if architecture == "LlamaForCausalLM":
        yield from [None] * num_layers
        return
    window = config.get("sliding_window", 4096)
    if architecture == "MistralForCausalLM":
        yield from [window] * num_layers
        return
    first = config.get("max_window_layers", 28)
    kinds = config.get("layer_types") or [FULL] * first + [SLIDING] * max(0, num_layers - first)
    has_windows = config.get("use_sliding_window", False)
    for kind in kinds[:num_layers]:
        yield window if has_windows and kind == SLIDING else None
