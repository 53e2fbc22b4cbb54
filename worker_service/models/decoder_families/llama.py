"""Llama (Touvron et al. 2023), Mistral, Qwen2 and Qwen3: RMS norms before attention and a gated
MLP, RoPE, grouped queries; and EXAONE 3, InternLM3, IQuest-Coder, Helium, Ministral and the Code
World Model, which differ in names, defaults and windows only."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

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
    gated_mlp,
    head_dim_of,
    layer_types,
    require,
    rotary_of,
    with_keys,
)
from worker_service.models.feed_forward.mlp import MLPSpec
from worker_service.models.layers.norms import NormSpec

_EXAONE = by_lines("""
attention_norm     ln_1
attention.qkv      attn.attention.q_proj attn.attention.k_proj attn.attention.v_proj
attention.output   attn.attention.out_proj
feed_forward_norm  ln_2
feed_forward.up    mlp.c_fc_0 mlp.c_fc_1
feed_forward.down  mlp.c_proj
""")

_CWM_ROPE = {
    "rope_type": "llama3",
    "factor": 16.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
"""The defaults of `rope_parameters`."""


def llama_settings(config: Config) -> DecoderSettings:
    """Settings of these families."""
    architecture = config["architectures"][0]
    if config.get("model_type") == "exaone":  # as transformers writes it
        return exaone_settings(config)
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


def exaone_settings(config: Config) -> DecoderSettings:
    """EXAONE 3 and 3.5."""
    names = {
        "num_hidden_layers": "num_layers",
        "rms_norm_eps": "layer_norm_epsilon",
        "hidden_act": "activation_function",
    }
    config = with_keys(config, names, num_key_value_heads=8)
    return _renamed(config, _EXAONE, theta=500_000.0, **biases_of(config))


def internlm3_settings(config: Config) -> DecoderSettings:
    """InternLM3, by its authors' keys."""
    bias = bool(config.get("bias", False))
    config = with_keys(config, {"mlp_bias": "bias"}, head_dim=128, num_key_value_heads=2)
    return _renamed(config, qkv_bias=bool(config.get("qkv_bias", False)), output_bias=bias)


def iquest_coder_settings(config: Config) -> DecoderSettings:
    """IQuest-Coder."""
    for key in ("clip_qkv", "use_sliding_window"):
        require(config, key, False)
    config = with_keys(config, {}, head_dim=128, num_key_value_heads=8)
    return _renamed(config, **biases_of(config))


def helium_settings(config: Config) -> DecoderSettings:
    """Helium: RoPE of neighbouring elements."""
    bias = bool(config.get("attention_bias", False))
    config = with_keys(config, {}, head_dim=128, num_key_value_heads=20, rms_norm_eps=1e-8)
    return _renamed(config, theta=100_000.0, qkv_bias=bias, has_pairs=True)


def ministral_settings(config: Config) -> DecoderSettings:
    """Ministral: layers have a window, or those that are listed."""
    window, num_layers = config.get("sliding_window", 4096), config["num_hidden_layers"]
    kinds = layer_types(config, [FULL if window is None else SLIDING] * num_layers)
    config = with_keys(config, {}, num_key_value_heads=8, rms_norm_eps=1e-6)
    return _renamed(config, windows=[window if kind == SLIDING else None for kind in kinds])


def cwm_settings(config: Config) -> DecoderSettings:
    """Code World Model: windows in three of four layers, and RoPE scaled as in Llama 3."""
    window, num_layers = config.get("sliding_window", 8192), config["num_hidden_layers"]
    kinds = layer_types(config, [SLIDING if i % 4 else FULL for i in range(num_layers)])
    if not (config.get("rope_scaling") or config.get("rope_parameters")):
        config = with_keys(config, {}, rope_parameters=_CWM_ROPE)
    config = with_keys(config, {}, head_dim=128, num_key_value_heads=8)
    windows = [window or None if kind == SLIDING else None for kind in kinds]
    return _renamed(config, theta=1e6, windows=windows)


def _renamed(
    config: Config,
    names: Mapping[str, str] = NAMES,
    *,
    theta: float = 10_000.0,
    windows: Sequence[int | None] = (),
    **others: Any,
) -> DecoderSettings:
    """Llama with other names or defaults. windows: of each layer; empty: none has one; others:
    further fields of attention."""
    head_dim, norm = head_dim_of(config), NormSpec(eps=config.get("rms_norm_eps", 1e-5))
    rotary, mlp = rotary_of(config, head_dim, theta=theta), gated_mlp(config)

    def layer(window: int | None) -> LayerSpec:
        attention = attention_of(config, head_dim, rotary, window=window, **others)
        return LayerSpec(attention=attention, feed_forward=mlp, norm=norm, names=names)

    layers = map(layer, windows or [None] * config["num_hidden_layers"])
    return decoder_of(config, [*layers], norm)
