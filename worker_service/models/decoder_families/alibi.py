"""BLOOM and MPT: biases by distance instead of positions (ALiBi, Press et al. 2022)."""

import math

from worker_service.models.decoder.specs import DecoderSettings, LayerSpec
from worker_service.models.decoder_families.common import (
    Config,
    NotNative,
    attention_of,
    by_lines,
    decoder_of,
    with_keys,
)
from worker_service.models.feed_forward.mlp import MLPSpec
from worker_service.models.layers.norms import NormSpec
from worker_service.models.mixers.attention import QKVStorage

_BLOOM = by_lines("""
attention_norm     input_layernorm
attention.qkv      self_attention.query_key_value
attention.output   self_attention.dense
feed_forward_norm  post_attention_layernorm
feed_forward.up    mlp.dense_h_to_4h
feed_forward.down  mlp.dense_4h_to_h
""")
_MPT = by_lines("""
attention_norm     norm_1
attention.qkv      attn.Wqkv
attention.output   attn.out_proj
feed_forward_norm  norm_2
feed_forward.up    ffn.up_proj
feed_forward.down  ffn.down_proj
""")
_TRAINED_LENGTH = 2048


def slopes_of(num_heads: int) -> tuple[float, ...]:
    """The slopes of BLOOM and Falcon: a geometric sequence of a power of two heads, and every
    second one of the next such sequence for the others."""
    closest = 2 ** math.floor(math.log2(num_heads))
    slopes = [2 ** (-8 / closest * (head + 1)) for head in range(closest)]
    finer = [2 ** (-4 / closest * (head + 1)) for head in range(0, 2 * closest, 2)]
    return tuple((slopes + finer)[:num_heads])


def bloom_settings(config: Config) -> DecoderSettings:
    """BLOOM: a norm of embeddings. The longest sequence is that which it was trained on."""
    if config.get("apply_residual_connection_post_layernorm"):
        raise NotNative("apply_residual_connection_post_layernorm")
    names = {
        "hidden_size": "n_embed",
        "num_hidden_layers": "n_layer",
        "num_attention_heads": "n_head",
        "max_position_embeddings": "seq_length",
    }
    config = with_keys(config, names, max_position_embeddings=_TRAINED_LENGTH)
    size, num_heads = config["hidden_size"], config["num_attention_heads"]
    norm = NormSpec(eps=config.get("layer_norm_epsilon", 1e-5), is_rms=False)
    layer = LayerSpec(
        attention=attention_of(
            config,
            size // num_heads,
            None,
            num_kv_heads=num_heads,
            alibi_slopes=slopes_of(num_heads),
            qkv_bias=True,
            output_bias=True,
            storage=QKVStorage.BY_GROUP,
        ),
        feed_forward=MLPSpec(inner_size=4 * size, activation="gelu_new", is_gated=False, bias=True),
        norm=norm,
        names=_BLOOM,
    )
    return decoder_of(
        config,
        [layer] * config["num_hidden_layers"],
        norm,
        tie_word_embeddings=config.get("tie_word_embeddings", True),
        embedding_norm=norm,
    )


def mpt_settings(config: Config) -> DecoderSettings:
    """MPT: norms without a bias. The longest sequence is that which it was trained on."""
    names = {
        "hidden_size": "d_model",
        "num_hidden_layers": "n_layers",
        "num_attention_heads": "n_heads",
        "max_position_embeddings": "max_seq_len",
    }
    config = with_keys(config, names, max_position_embeddings=_TRAINED_LENGTH)
    size, num_heads = config["hidden_size"], config["num_attention_heads"]
    attention = config.get("attn_config") or {}
    if attention.get("clip_qkv") or attention.get("qk_ln") or not attention.get("alibi", True):
        raise NotNative("attn_config")
    for key, default in (("expansion_ratio", 4), ("no_bias", True), ("logit_scale", None)):
        if config.get(key, default) != default:
            raise NotNative(key)
    padded, largest = 2 ** math.ceil(math.log2(num_heads)), attention.get("alibi_bias_max", 8)
    slopes = [2 ** (-largest / padded * (head + 1)) for head in range(padded)]
    if padded != num_heads:
        slopes = slopes[1::2] + slopes[::2]
    norm = NormSpec(eps=config.get("layer_norm_epsilon", 1e-5), is_rms=False, bias=False)
    layer = LayerSpec(
        attention=attention_of(
            config,
            size // num_heads,
            None,
            num_kv_heads=num_heads,
            scale=attention.get("softmax_scale") or (size / num_heads) ** -0.5,
            alibi_slopes=tuple(slopes[:num_heads]),
            storage=QKVStorage.CONSECUTIVE,
        ),
        feed_forward=MLPSpec(inner_size=4 * size, activation="gelu", is_gated=False),
        norm=norm,
        names=_MPT,
    )
    return decoder_of(
        config,
        [layer] * config["num_hidden_layers"],
        norm,
        tie_word_embeddings=config.get("tie_word_embeddings", True),
    )
