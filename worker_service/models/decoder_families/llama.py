"""Llama (Touvron et al. 2023), Mistral, Qwen2 and Qwen3: RMS norms before attention and a gated
MLP, RoPE, grouped queries."""

from collections.abc import Iterator

from worker_service.models.decoder import (
    AttentionSpec,
    DecoderSettings,
    LayerSpec,
    MLPSpec,
    NormSpec,
)
from worker_service.models.decoder_families.common import Config, by_lines
from worker_service.models.layers import SCALING_TYPES, RotarySettings

NAMES = by_lines("""
attention_norm          input_layernorm
attention.qkv           self_attn.q_proj self_attn.k_proj self_attn.v_proj
attention.query_norm    self_attn.q_norm
attention.key_norm      self_attn.k_norm
attention.output        self_attn.o_proj
feed_forward_norm       post_attention_layernorm
feed_forward.up         mlp.gate_proj mlp.up_proj
feed_forward.down       mlp.down_proj
""")


def llama_settings(config: Config) -> DecoderSettings | None:
    """Settings of these families; None for a rotary embedding that is not supported."""
    architecture = config["architectures"][0]
    num_heads = config["num_attention_heads"]
    hidden_size = config["hidden_size"]
    qwen3, qwen2 = architecture == "Qwen3ForCausalLM", architecture == "Qwen2ForCausalLM"
    default_head_dim = 128 if qwen3 else hidden_size // num_heads
    head_dim = config.get("head_dim") or default_head_dim
    llama_or_qwen3 = architecture in ("LlamaForCausalLM", "Qwen3ForCausalLM")
    attention_bias = bool(config.get("attention_bias", False)) and llama_or_qwen3
    rotary = RotarySettings.from_config(config, head_dim)
    if rotary.scaling_type not in SCALING_TYPES:
        return None
    if rotary.parameters.get("partial_rotary_factor", 1.0) != 1.0:
        return None
    norm = NormSpec(eps=config.get("rms_norm_eps", 1e-6))
    num_kv_heads = config.get("num_key_value_heads")
    mlp = MLPSpec(
        inner_size=config["intermediate_size"],
        activation=config.get("hidden_act", "silu"),
        bias=bool(config.get("mlp_bias", False)) and architecture == "LlamaForCausalLM",
    )

    def layer(window: int | None) -> LayerSpec:
        attention = AttentionSpec(
            num_heads=num_heads,
            num_kv_heads=num_kv_heads or (8 if architecture == "MistralForCausalLM" else num_heads),
            head_dim=head_dim,
            scale=head_dim**-0.5,
            rotary=rotary,
            window=window,
            qkv_bias=qwen2 or attention_bias,
            output_bias=attention_bias,
            head_norm=norm if qwen3 else None,
        )
        return LayerSpec(attention=attention, feed_forward=mlp, norm=norm, names=NAMES)

    return DecoderSettings(
        architecture=architecture,
        vocab_size=config["vocab_size"],
        hidden_size=hidden_size,
        embedding_size=hidden_size,
        num_layers=config["num_hidden_layers"],
        max_model_len=rotary.max_model_len(),
        tie_word_embeddings=bool(config.get("tie_word_embeddings", False)),
        layers=tuple(map(layer, _windows(config, architecture))),
        final_norm=norm,
    )


def _windows(config: Config, architecture: str) -> Iterator[int | None]:
    """The sliding window of each layer: Mistral has one for all layers, Qwen one for the layers
    that it lists, Llama none."""
    num_layers = config["num_hidden_layers"]
    if architecture == "MistralForCausalLM":
        yield from [config.get("sliding_window", 4096)] * num_layers
    elif architecture == "LlamaForCausalLM" or not config.get("use_sliding_window", False):
        yield from [None] * num_layers
    else:
        window = config.get("sliding_window", 4096)
        first = config.get("max_window_layers", 28)
        kinds = config.get("layer_types") or ["full_attention"] * first + [
            "sliding_attention"
        ] * max(0, num_layers - first)
        for kind in kinds[:num_layers]:
            yield window if kind == "sliding_attention" else None
