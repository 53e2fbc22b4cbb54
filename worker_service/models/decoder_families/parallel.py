"""Families with layer norms and RoPE, many of which compute attention and MLP in parallel: Cohere,
StableLM, StarCoder 2, Nemotron, GPT-NeoX, GPT-J and Falcon."""

from typing import Any

from worker_service.models.decoder.specs import DecoderSettings, LayerSpec
from worker_service.models.decoder_families.alibi import slopes_of
from worker_service.models.decoder_families.common import (
    NAMES,
    SLIDING,
    Config,
    NotNative,
    attention_of,
    by_lines,
    decoder_of,
    every,
    gated_mlp,
    head_dim_of,
    layer_types,
    rotary_of,
    with_keys,
)
from worker_service.models.feed_forward.mlp import MLPSpec
from worker_service.models.layers.norms import NormSpec
from worker_service.models.mixers.attention import QKVStorage

_SHARED = {path: name for path, name in NAMES.items() if path != "feed_forward_norm"}
"""Of layers whose parts share one norm."""

_STARCODER2 = {
    **NAMES,
    "feed_forward.up": "mlp.c_fc",
    "feed_forward.down": "mlp.c_proj",
}
_NEMOTRON = {**NAMES, "feed_forward.up": "mlp.up_proj"}
_NEOX = by_lines("""
attention_norm     input_layernorm
attention.qkv      attention.query_key_value
attention.output   attention.dense
feed_forward_norm  post_attention_layernorm
feed_forward.up    mlp.dense_h_to_4h
feed_forward.down  mlp.dense_4h_to_h
""")
_GPTJ = by_lines("""
attention_norm     ln_1
attention.qkv      attn.q_proj attn.k_proj attn.v_proj
attention.output   attn.out_proj
feed_forward.up    mlp.fc_in
feed_forward.down  mlp.fc_out
""")
_FALCON = {
    **_NEOX,
    "attention.qkv": "self_attention.query_key_value",
    "attention.output": "self_attention.dense",
}


def _norm(config: Config, key: str, **others: Any) -> NormSpec:
    return NormSpec(eps=config.get(key, 1e-5), is_rms=False, **others)


def _plain_mlp(inner_size: int, activation: str, bias: bool) -> MLPSpec:
    return MLPSpec(inner_size=inner_size, activation=activation, is_gated=False, bias=bias)


def cohere_settings(config: Config) -> DecoderSettings:
    """Cohere 1 and 2: one norm without a bias, RoPE of neighbouring elements, scaled logits; in
    Cohere 2 no RoPE in layers with full attention, and windows in the others."""
    if config.get("use_qk_norm"):
        raise NotNative("use_qk_norm")
    is_first = config["architectures"][0] == "CohereForCausalLM"
    head_dim, norm = head_dim_of(config), _norm(config, "layer_norm_eps", bias=False)
    rotary = rotary_of(config, head_dim, theta=500_000.0 if is_first else 10_000.0)
    window, kinds = None, [SLIDING] * config["num_hidden_layers"]
    if not is_first:
        window = config.get("sliding_window", 4096)
        kinds = layer_types(config, every(config, config.get("sliding_window_pattern", 4)))
    bias = bool(config.get("attention_bias", False))
    layers = [
        LayerSpec(
            attention=attention_of(
                config,
                head_dim,
                rotary if kind == SLIDING else None,
                window=window if kind == SLIDING else None,
                qkv_bias=bias,
                output_bias=bias,
                has_pairs=True,
            ),
            feed_forward=gated_mlp(config, bias=False),
            norm=norm,
            is_parallel=True,
            names=_SHARED,
        )
        for kind in kinds
    ]
    return decoder_of(
        config,
        layers,
        norm,
        max_model_len=rotary.max_model_len(),
        tie_word_embeddings=config.get("tie_word_embeddings", True),
        logits_scale=config.get("logit_scale", 0.0625),
    )


def stablelm_settings(config: Config) -> DecoderSettings:
    """StableLM: RoPE of a quarter of each head."""
    if config.get("qk_layernorm"):
        raise NotNative("qk_layernorm")
    head_dim, norm = head_dim_of(config), _norm(config, "layer_norm_eps")
    is_parallel = bool(config.get("use_parallel_residual", False))
    layer = LayerSpec(
        attention=attention_of(
            config,
            head_dim,
            rotary_of(config, head_dim, partial=0.25),
            qkv_bias=bool(config.get("use_qkv_bias", False)),
        ),
        feed_forward=gated_mlp(config, bias=False),
        norm=norm,
        is_parallel=is_parallel,
        names=_SHARED if is_parallel else NAMES,
    )
    return decoder_of(config, [layer] * config["num_hidden_layers"], norm)


def starcoder2_settings(config: Config) -> DecoderSettings:
    """StarCoder 2: a plain MLP, and one window for all layers."""
    head_dim, norm = head_dim_of(config), _norm(config, "norm_epsilon")
    bias = bool(config.get("use_bias", True))
    layer = LayerSpec(
        attention=attention_of(
            config,
            head_dim,
            rotary_of(config, head_dim),
            window=config.get("sliding_window"),
            qkv_bias=bias,
            output_bias=bias,
        ),
        feed_forward=_plain_mlp(
            config["intermediate_size"], config.get("hidden_act", "gelu_pytorch_tanh"), bias
        ),
        norm=norm,
        names=_STARCODER2,
    )
    tied = config.get("tie_word_embeddings", True)
    return decoder_of(config, [layer] * config["num_hidden_layers"], norm, tie_word_embeddings=tied)


def nemotron_settings(config: Config) -> DecoderSettings:
    """Nemotron: norms with an offset of 1, a plain MLP with squared ReLU."""
    head_dim, norm = head_dim_of(config), _norm(config, "norm_eps", offset=1.0)
    bias = bool(config.get("attention_bias", False))
    layer = LayerSpec(
        attention=attention_of(
            config,
            head_dim,
            rotary_of(config, head_dim, partial=0.5),
            qkv_bias=bias,
            output_bias=bias,
        ),
        feed_forward=_plain_mlp(
            config["intermediate_size"],
            config.get("hidden_act", "relu2"),
            bool(config.get("mlp_bias", False)),
        ),
        norm=norm,
        names=_NEMOTRON,
    )
    return decoder_of(config, [layer] * config["num_hidden_layers"], norm)


def gpt_neox_settings(config: Config) -> DecoderSettings:
    """GPT-NeoX and Pythia: two norms of the same input, RoPE of a part of each head."""
    head_dim, norm = head_dim_of(config), _norm(config, "layer_norm_eps")
    bias = bool(config.get("attention_bias", True))
    stored = {
        "rope_theta": config.get("rotary_emb_base"),
        "partial_rotary_factor": config.get("rotary_pct", 0.25),
        **(config.get("rope_scaling") or config.get("rope_parameters") or {}),
    }
    layer = LayerSpec(
        attention=attention_of(
            config,
            head_dim,
            rotary_of(config, head_dim, stored, partial=0.25),
            num_kv_heads=config["num_attention_heads"],
            qkv_bias=bias,
            output_bias=bias,
            storage=QKVStorage.BY_GROUP,
        ),
        feed_forward=_plain_mlp(
            config["intermediate_size"], config.get("hidden_act", "gelu"), True
        ),
        norm=norm,
        is_parallel=bool(config.get("use_parallel_residual", True)),
        names=_NEOX,
    )
    return decoder_of(config, [layer] * config["num_hidden_layers"], norm)


def gptj_settings(config: Config) -> DecoderSettings:
    """GPT-J: one norm, RoPE of neighbouring elements in the first 64 of a head, a head with a
    bias."""
    names = {
        "hidden_size": "n_embd",
        "num_hidden_layers": "n_layer",
        "num_attention_heads": "n_head",
        "max_position_embeddings": "n_positions",
    }
    config = with_keys(config, names)
    inner_size = config.get("n_inner") or 4 * config["hidden_size"]
    head_dim, norm = head_dim_of(config), _norm(config, "layer_norm_epsilon")
    rotary_dim = config.get("rotary_dim", 64) or head_dim
    layer = LayerSpec(
        attention=attention_of(
            config,
            head_dim,
            rotary_of(config, rotary_dim, {}),
            num_kv_heads=config["num_attention_heads"],
            has_pairs=True,
        ),
        feed_forward=_plain_mlp(inner_size, config.get("activation_function", "gelu_new"), True),
        norm=norm,
        is_parallel=True,
        names=_GPTJ,
    )
    layers = [layer] * config["num_hidden_layers"]
    return decoder_of(config, layers, norm, has_head_bias=True)


def falcon_settings(config: Config) -> DecoderSettings:
    """Falcon, in its three architectures: one head of keys, as many as of queries, or groups."""
    size, num_heads = config["hidden_size"], config["num_attention_heads"]
    inner_size = config.get("ffn_hidden_size") or 4 * size
    config = with_keys(config, {}, max_position_embeddings=2048)
    head_dim, norm = size // num_heads, _norm(config, "layer_norm_epsilon")
    has_groups = bool(config.get("new_decoder_architecture", False))
    has_one = bool(config.get("multi_query", True)) and not has_groups
    is_parallel, names = bool(config.get("parallel_attn", True)), _FALCON
    num_norms = config.get("num_ln_in_parallel_attn") or (2 if has_groups else 1)
    if has_groups and not is_parallel:
        raise NotNative("new_decoder_architecture without parallel_attn")
    if is_parallel and num_norms == 2 and not has_groups:
        raise NotNative("num_ln_in_parallel_attn")
    if is_parallel and num_norms == 2:
        names = {**names, "attention_norm": "ln_attn", "feed_forward_norm": "ln_mlp"}
    elif is_parallel:
        names = {path: name for path, name in names.items() if path != "feed_forward_norm"}
    num_kv_heads = config.get("num_kv_heads") or num_heads
    bias, slopes = bool(config.get("bias", False)), ()
    if config.get("alibi", False):
        slopes = tuple(slope * head_dim**-0.5 for slope in slopes_of(num_heads))
    layer = LayerSpec(
        attention=attention_of(
            config,
            head_dim,
            None if slopes else rotary_of(config, head_dim),
            num_kv_heads=1 if has_one else num_kv_heads,
            alibi_slopes=slopes,
            qkv_bias=bias,
            output_bias=bias,
            storage=QKVStorage.CONSECUTIVE if has_one else QKVStorage.BY_GROUP,
        ),
        feed_forward=_plain_mlp(inner_size, config.get("activation", "gelu"), bias),
        norm=norm,
        is_parallel=is_parallel,
        names=names,
    )
    tied = config.get("tie_word_embeddings", True)
    layers = [layer] * config["num_hidden_layers"]
    return decoder_of(config, layers, norm, tie_word_embeddings=tied)
