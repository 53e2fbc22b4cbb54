"""Families that differ from Llama in one or two parts: norms elsewhere, layers without RoPE, scaled
streams, tensors that hold several weights."""

from dataclasses import replace
from typing import Any

from worker_service.errors import UnsupportedModel
from worker_service.models.decoder.specs import DecoderSettings, LayerSpec, NormPlace
from worker_service.models.decoder_families.common import (
    FULL,
    NAMES,
    SLIDING,
    Config,
    NotNative,
    attention_of,
    biases_of,
    decoder_of,
    every,
    gated_mlp,
    head_dim_of,
    layer_types,
    rotaries_by_type,
    rotary_of,
    unrotated,
)
from worker_service.models.feed_forward.mlp import MLPSpec
from worker_service.models.layers.norms import NormSpec
from worker_service.models.layers.rotary import QUERY_SCALING
from worker_service.models.mixers.attention import AttentionSpec, QKVStorage

_INPUT_NORMS = ("attention_norm", "feed_forward_norm")
OUTPUT_NORMS = {
    **{path: name for path, name in NAMES.items() if path not in _INPUT_NORMS},
    "attention_output_norm": "post_attention_layernorm",
    "feed_forward_output_norm": "post_feedforward_layernorm",
}
_FUSED = {**NAMES, "attention.qkv": "self_attn.qkv_proj", "feed_forward.up": "mlp.gate_up_proj"}
_GLM = {**NAMES, "feed_forward.up": "mlp.gate_up_proj"}
_GLM4 = {
    **_GLM,
    "attention_output_norm": "post_self_attn_layernorm",
    "feed_forward_output_norm": "post_mlp_layernorm",
}
_PLAIN = {**NAMES, "feed_forward.up": "mlp.up_proj"}

_NANOCHAT = {**NAMES, "feed_forward.up": "mlp.fc1", "feed_forward.down": "mlp.fc2"}

_APERTUS = {
    **_PLAIN,
    "attention_norm": "attention_layernorm",
    "feed_forward_norm": "feedforward_layernorm",
    "feed_forward.xielu": "mlp.act_fn",
}
_APERTUS_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 12_000_000.0,
    "factor": 8.0,
    "original_max_position_embeddings": 8192,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
}
_MINISTRAL3_ROPE = {
    "rope_type": "yarn",
    "rope_theta": 1_000_000.0,
    "factor": 16.0,
    "original_max_position_embeddings": 16384,
    "mscale_all_dim": 1.0,
    "mscale": 1.0,
    QUERY_SCALING: 0.1,
}
"""Defaults of `transformers`."""


def _rms(config: Config, eps: float = 1e-6) -> NormSpec:
    return NormSpec(eps=config.get("rms_norm_eps", eps))


def olmo_settings(config: Config) -> DecoderSettings:
    """OLMo: layer norms without weights."""
    if config.get("clip_qkv") is not None:
        raise NotNative("clip_qkv")
    head_dim, norm = head_dim_of(config), NormSpec(eps=1e-5, is_rms=False, affine=False)
    layer = LayerSpec(
        attention=attention_of(config, head_dim, rotary_of(config, head_dim), **biases_of(config)),
        feed_forward=gated_mlp(config, bias=False),
        norm=norm,
        names=NAMES,
    )
    return decoder_of(config, [layer] * config["num_hidden_layers"], norm)


def olmo2_settings(config: Config) -> DecoderSettings:
    """OLMo 2 and 3: norms after each part, and of all heads together; windows in OLMo 3."""
    head_dim, norm, length = head_dim_of(config), _rms(config, 1e-5), None
    if config["architectures"][0] == "Olmo3ForCausalLM":
        kinds = layer_types(config, every(config, 4))
        rotaries = rotaries_by_type(config, head_dim, {FULL: 500_000.0, SLIDING: 500_000.0})
        length = rotaries[FULL].max_model_len()
    else:
        kinds = [FULL] * config["num_hidden_layers"]
        rotaries = {FULL: rotary_of(config, head_dim)}
    window = config.get("sliding_window", 4096) if length else None
    layers = [
        LayerSpec(
            attention=attention_of(
                config,
                head_dim,
                rotaries[kind],
                window=window if kind == SLIDING else None,
                head_norm=norm,
                norm_spans_heads=True,
                **biases_of(config),
            ),
            feed_forward=gated_mlp(config, bias=False),
            norm=norm,
            norm_place=NormPlace.AFTER,
            names=OUTPUT_NORMS,
        )
        for kind in kinds
    ]
    settings = decoder_of(config, layers, norm)
    return settings if length is None else replace(settings, max_model_len=length)


def exaone4_settings(config: Config) -> DecoderSettings:
    """EXAONE 4: norms after each part."""
    norm = _rms(config, 1e-5)
    layers = [
        LayerSpec(
            attention=attention,
            feed_forward=gated_mlp(config, bias=False),
            norm=norm,
            norm_place=NormPlace.AFTER,
            names=OUTPUT_NORMS,
        )
        for attention in exaone4_attentions(config)
    ]
    return decoder_of(config, layers, norm)


def exaone4_attentions(config: Config, **others: Any) -> list[AttentionSpec]:
    """EXAONE 4's: norms of heads, and no RoPE in layers with full attention, if others have
    windows. others: further fields."""
    head_dim, norm = head_dim_of(config), _rms(config, 1e-5)
    rotary, window = rotary_of(config, head_dim), config.get("sliding_window", 4096)
    period = config.get("sliding_window_pattern", 4) if window else 1
    return [
        attention_of(
            config,
            head_dim,
            rotary if kind == SLIDING or not window else unrotated(rotary),
            window=window if kind == SLIDING else None,
            head_norm=norm,
            **others,
        )
        for kind in layer_types(config, every(config, period))
    ]


def smollm3_settings(config: Config) -> DecoderSettings:
    """SmolLM3: no RoPE in every fourth layer, or in those that the configuration lists."""
    head_dim, norm, num_layers = head_dim_of(config), _rms(config), config["num_hidden_layers"]
    rotary = rotary_of(config, head_dim, theta=2_000_000.0)
    interval = config.get("no_rope_layer_interval", 4)
    default = [int((layer + 1) % interval != 0) for layer in range(num_layers)]
    rotates = config.get("no_rope_layers") or default
    window = config.get("sliding_window") if config.get("use_sliding_window") else None
    kinds = layer_types(
        config, [SLIDING if window and not has_rope else FULL for has_rope in rotates]
    )
    layers = [
        LayerSpec(
            attention=attention_of(
                config,
                head_dim,
                rotary if has_rope else None,
                window=window if kind == SLIDING else None,
                **biases_of(config),
            ),
            feed_forward=gated_mlp(config),
            norm=norm,
            names=NAMES,
        )
        for kind, has_rope in zip(kinds, rotates, strict=True)
    ]
    return decoder_of(
        config,
        layers,
        norm,
        max_model_len=rotary.max_model_len(),
        tie_word_embeddings=config.get("tie_word_embeddings", True),
    )


def phi3_settings(config: Config) -> DecoderSettings:
    """Phi-3 and 4: tensors that hold several weights, and LongRoPE, which older checkpoints call
    su or yarn. The length that they were trained on is beside its parameters."""
    head_dim, norm = head_dim_of(config), _rms(config, 1e-5)
    stored = dict(config.get("rope_scaling") or config.get("rope_parameters") or {})
    if (stored.get("rope_type") or stored.get("type")) in ("su", "yarn"):
        stored["rope_type"] = "longrope"
    for key in ("rope_theta", "partial_rotary_factor"):
        if config.get(key) is not None:
            stored.setdefault(key, config.get(key))
    trained = "original_max_position_embeddings"
    stored[trained] = config.get(trained) or 4096
    layer = LayerSpec(
        attention=attention_of(
            config,
            head_dim,
            rotary_of(config, head_dim, stored, partial=1.0),
            window=config.get("sliding_window"),
            storage=QKVStorage.CONSECUTIVE,
        ),
        feed_forward=gated_mlp(config, bias=False, is_fused=True),
        norm=norm,
        names=_FUSED,
    )
    return decoder_of(config, [layer] * config["num_hidden_layers"], norm)


def seed_oss_settings(config: Config) -> DecoderSettings:
    """Seed-OSS: biases of queries, keys and values."""
    head_dim, norm = head_dim_of(config, 128), _rms(config)
    attention = attention_of(
        config,
        head_dim,
        rotary_of(config, head_dim),
        num_kv_heads=config.get("num_key_value_heads", 8) or config["num_attention_heads"],
        qkv_bias=bool(config.get("attention_bias", True)),
        output_bias=bool(config.get("attention_out_bias", False)),
    )
    layer = LayerSpec(attention=attention, feed_forward=gated_mlp(config), norm=norm, names=NAMES)
    return decoder_of(config, [layer] * config["num_hidden_layers"], norm)


def ministral3_settings(config: Config) -> DecoderSettings:
    """Ministral 3: queries are scaled by their positions."""
    head_dim, norm = head_dim_of(config, 128), _rms(config, 1e-5)
    stored = config.get("rope_parameters") or config.get("rope_scaling") or _MINISTRAL3_ROPE
    rotary = rotary_of(config, head_dim, stored, theta=config.get("rope_theta") or 10000.0)
    layer = LayerSpec(
        attention=attention_of(
            config,
            head_dim,
            rotary,
            num_kv_heads=config.get("num_key_value_heads", 8) or config["num_attention_heads"],
            window=config.get("sliding_window"),
        ),
        feed_forward=gated_mlp(config, bias=False),
        norm=norm,
        names=NAMES,
    )
    return decoder_of(config, [layer] * config["num_hidden_layers"], norm)


def glm4_settings(config: Config) -> DecoderSettings:
    """GLM and GLM-4: RoPE of neighbouring elements in half of each head; in GLM-4 norms around each
    part."""
    head_dim, norm = head_dim_of(config, 128), _rms(config, 1.5625e-7)
    is_first = config["architectures"][0] == "GlmForCausalLM"
    layer = LayerSpec(
        attention=attention_of(
            config,
            head_dim,
            rotary_of(config, head_dim, partial=0.5),
            num_kv_heads=config.get("num_key_value_heads", 2),
            qkv_bias=bool(config.get("attention_bias", True)),
            has_pairs=True,
        ),
        feed_forward=gated_mlp(config, bias=False, is_fused=True),
        norm=norm,
        norm_place=NormPlace.BEFORE if is_first else NormPlace.AROUND,
        names=_GLM if is_first else _GLM4,
    )
    return decoder_of(config, [layer] * config["num_hidden_layers"], norm)


def ernie4_5_settings(config: Config) -> DecoderSettings:
    """ERNIE 4.5 without experts: RoPE of neighbouring elements."""
    head_dim, norm = head_dim_of(config, 128), _rms(config, 1e-5)
    bias = bool(config.get("use_bias", False))
    layer = LayerSpec(
        attention=attention_of(
            config,
            head_dim,
            rotary_of(config, head_dim, theta=500_000.0),
            num_kv_heads=config.get("num_key_value_heads", 2) or config["num_attention_heads"],
            qkv_bias=bias,
            output_bias=bias,
            has_pairs=True,
        ),
        feed_forward=gated_mlp(config, bias=bias),
        norm=norm,
        names=NAMES,
    )
    return decoder_of(
        config,
        [layer] * config["num_hidden_layers"],
        norm,
        tie_word_embeddings=config.get("tie_word_embeddings", True),
    )


def arcee_settings(config: Config) -> DecoderSettings:
    """Arcee: a plain MLP with squared ReLU."""
    head_dim, norm = head_dim_of(config), _rms(config, 1e-5)
    rotary = rotary_of(config, head_dim)
    layer = LayerSpec(
        attention=attention_of(config, head_dim, rotary, **biases_of(config)),
        feed_forward=MLPSpec(
            inner_size=config["intermediate_size"],
            activation=config.get("hidden_act", "relu2"),
            is_gated=False,
            bias=bool(config.get("mlp_bias", False)),
        ),
        norm=norm,
        names=_PLAIN,
    )
    return decoder_of(config, [layer] * config["num_hidden_layers"], norm)


def nanochat_settings(config: Config) -> DecoderSettings:
    """nanochat: norms without weights, also of embeddings and heads, RoPE in the other direction,
    and a plain MLP with squared ReLU. Rotated heads have the same norm, as those have that YaRN or
    LongRoPE multiplies by a factor."""
    head_dim = head_dim_of(config)
    rotary = rotary_of(config, head_dim)
    rotary = replace(rotary, parameters={**rotary.parameters, "attention_factor": 1.0})
    norm = NormSpec(eps=config.get("rms_norm_eps", 1e-6), affine=False)
    layer = LayerSpec(
        attention=attention_of(
            config,
            head_dim,
            rotary,
            head_norm=norm,
            rotates_back=True,
            **biases_of(config),
        ),
        feed_forward=MLPSpec(
            inner_size=config["intermediate_size"],
            activation=config.get("hidden_act", "relu2"),
            is_gated=False,
        ),
        norm=norm,
        names=_NANOCHAT,
    )
    return decoder_of(
        config,
        [layer] * config["num_hidden_layers"],
        norm,
        embedding_norm=norm,
        logits_soft_cap=config.get("final_logit_softcapping", 15.0),
    )


def apertus_settings(config: Config) -> DecoderSettings:
    """Apertus: norms of heads, a plain MLP with xIELU. The LM head of Apertus 1.5 may lack the last
    tokens, those of images and sounds."""
    if config.get("hidden_act", "xielu") != "xielu" or config.get("mlp_bias"):
        raise NotNative("hidden_act, mlp_bias")
    head_dim, norm = head_dim_of(config), _rms(config, 1e-5)
    stored = config.get("rope_parameters") or config.get("rope_scaling") or _APERTUS_ROPE
    rotary = rotary_of(config, head_dim, stored, theta=config.get("rope_theta") or 12_000_000.0)
    layer = LayerSpec(
        attention=attention_of(config, head_dim, rotary, head_norm=norm, **biases_of(config)),
        feed_forward=MLPSpec(
            inner_size=config["intermediate_size"], activation=None, is_gated=False
        ),
        norm=norm,
        names=_APERTUS,
    )
    layers, vocab_size = [layer] * config["num_hidden_layers"], config["vocab_size"]
    head_size = config.get("output_vocab_size") or vocab_size
    if head_size == vocab_size:
        return decoder_of(config, layers, norm)
    if not 0 < head_size < vocab_size or config.get("tie_word_embeddings"):
        raise UnsupportedModel(
            f"config.json: output_vocab_size: expected {vocab_size}, or fewer with an LM head that"
            f" is not tied to the embedding, got {head_size}"
        )
    return decoder_of(config, layers, norm, vocab_size=head_size, num_embeddings=vocab_size)
