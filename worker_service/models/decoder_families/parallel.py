"""Families with layer norms and RoPE, many of which compute attention and MLP in parallel: Cohere,
Phi, StableLM, StarCoder 2, Nemotron, Jais 2, GPT-NeoX, GPT-J and Falcon."""

from collections.abc import Sequence
from typing import Any

from worker_service.models.decoder.specs import DecoderSettings, FeedForwardSpec, LayerSpec
from worker_service.models.decoder_families.alibi import slopes_of
from worker_service.models.decoder_families.common import (
    NAMES,
    SLIDING,
    Config,
    NotNative,
    attention_of,
    biases_of,
    by_lines,
    decoder_of,
    every,
    gated_mlp,
    have_experts,
    head_dim_of,
    layer_types,
    mixture_of,
    require,
    rotary_of,
    with_keys,
    with_values,
)
from worker_service.models.decoder_families.mixtures import QWEN_NAMES
from worker_service.models.decoder_families.scored_mixtures import SHARED_NAMES
from worker_service.models.feed_forward.experts import ExpertsSpec, SharedSpec
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
_PHI = by_lines("""
attention_norm    input_layernorm
attention.qkv     self_attn.q_proj self_attn.k_proj self_attn.v_proj
attention.output  self_attn.dense
feed_forward.up   mlp.fc1
feed_forward.down mlp.fc2
""")
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
    """Cohere 1 and 2: scaled logits; in Cohere 2 no RoPE in layers with full attention, and windows
    in the others."""
    if config.get("use_qk_norm"):
        raise NotNative("use_qk_norm")
    num_layers, mlp = config["num_hidden_layers"], gated_mlp(config, bias=False)
    norm = _norm(config, "layer_norm_eps", bias=False)
    if config["architectures"][0] == "CohereForCausalLM":
        rotated = [(None, True)] * num_layers
        return _cohere_decoder(config, rotated, [mlp] * num_layers, norm, theta=500_000.0)
    kinds = layer_types(config, every(config, config.get("sliding_window_pattern", 4)))
    window = config.get("sliding_window", 4096)
    windows = [(window, True) if kind == SLIDING else (None, False) for kind in kinds]
    return _cohere_decoder(config, windows, [mlp] * num_layers, norm)


def cohere2_moe_settings(config: Config) -> DecoderSettings:
    """Cohere 2 with experts in all layers but the first ones, which may have RoPE without a
    window."""
    num_layers, eps = config["num_hidden_layers"], config.get("rms_norm_eps")
    num_dense, period = (
        config.get("first_k_dense_replace", 0),
        config.get("sliding_window_pattern", 4),
    )
    prefix = config.get("prefix_dense_sliding_window_pattern", 1)
    default = every(with_values(config, num_hidden_layers=num_dense), prefix)
    default += every(with_values(config, num_hidden_layers=num_layers - num_dense), period)
    window, size = config.get("sliding_window", 4096), config["intermediate_size"]
    num_shared = config.get("num_shared_experts", 0)
    averages = config.get("shared_expert_combination_strategy", "average") == "average"
    scale = 0.5 if averages and num_shared else 1.0
    scoring = config.get("expert_selection_fn", "softmax")
    require(config, "expert_selection_fn", "softmax", "sigmoid")
    require(config, "shared_expert_combination_strategy", "average", "sum")
    experts = mixture_of(
        config,
        num_experts=config.get("num_experts", 8),
        num_chosen=config.get("num_experts_per_tok", 2),
        scoring="softmax_of_chosen" if scoring == "softmax" else scoring,
        normalizes=scoring == "sigmoid" and bool(config.get("norm_topk_prob", True)),
        scale=scale,
        inner_size=size,
        shared=SharedSpec(inner_size=size * num_shared, scale=scale) if num_shared else None,
    )
    dense_size = config.get("prefix_dense_intermediate_size") or size
    dense = gated_mlp(config, bias=False, inner_size=dense_size)
    kinds, parts = layer_types(config, default), have_experts(config, num_dense)
    return _cohere_decoder(
        with_keys(config, {}, head_dim=128),
        [
            (window, True) if kind == SLIDING else (None, prefix == 1 and not has_experts)
            for kind, has_experts in zip(kinds, parts, strict=True)
        ],
        [experts if has_experts else dense for has_experts in parts],
        _norm(config, "layer_norm_eps", bias=False) if eps is None else NormSpec(eps=eps),
    )


def _cohere_decoder(
    config: Config,
    windows: Sequence[tuple[int | None, bool]],
    feed_forwards: Sequence[FeedForwardSpec],
    norm: NormSpec,
    theta: float = 10_000.0,
) -> DecoderSettings:
    """Layers with one norm, and RoPE of neighbouring elements. windows: of each layer, and whether
    it has RoPE; feed_forwards: of each layer; theta: the default."""
    head_dim = head_dim_of(config)
    rotary = rotary_of(config, head_dim, theta=theta)
    layers = [
        LayerSpec(
            attention=attention_of(
                config,
                head_dim,
                rotary if has_rope else None,
                window=window,
                **biases_of(config),
                has_pairs=True,
            ),
            feed_forward=feed_forward,
            norm=norm,
            is_parallel=True,
            names=_names_of(feed_forward),
        )
        for (window, has_rope), feed_forward in zip(windows, feed_forwards, strict=True)
    ]
    return decoder_of(
        config,
        layers,
        norm,
        max_model_len=rotary.max_model_len(),
        tie_word_embeddings=config.get("tie_word_embeddings", True),
        logits_scale=config.get("logit_scale", 0.0625),
    )


def _names_of(feed_forward: FeedForwardSpec) -> dict[str, str]:
    """Of a layer whose parts share one norm."""
    if not isinstance(feed_forward, ExpertsSpec):
        return _SHARED
    names = QWEN_NAMES if feed_forward.shared is None else QWEN_NAMES | SHARED_NAMES
    return {path: name for path, name in names.items() if path != "feed_forward_norm"}


def phi_settings(config: Config) -> DecoderSettings:
    """Phi 1 to 2: one norm, RoPE of a half of each head, biases, also of the LM head."""
    if config.get("qk_layernorm"):
        raise NotNative("qk_layernorm")
    head_dim, norm = head_dim_of(config), _norm(config, "layer_norm_eps")
    activation = config.get("hidden_act", "gelu_new")
    layer = LayerSpec(
        attention=attention_of(
            config,
            head_dim,
            rotary_of(config, head_dim, partial=0.5),
            qkv_bias=True,
            output_bias=True,
        ),
        feed_forward=_plain_mlp(config["intermediate_size"], activation, bias=True),
        norm=norm,
        is_parallel=True,
        names=_PHI,
    )
    return decoder_of(config, [layer] * config["num_hidden_layers"], norm, has_head_bias=True)


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
    config = with_keys(config, {}, attention_bias=False, mlp_bias=False)
    return _squared_relu_decoder(config, _norm(config, "norm_eps", offset=1.0), partial=0.5)


def jais2_settings(config: Config) -> DecoderSettings:
    """Jais 2: Nemotron's layers with biases, whose heads are rotated in full."""
    config = with_keys(config, {}, attention_bias=True, mlp_bias=True)
    return _squared_relu_decoder(config, _norm(config, "layer_norm_eps"), partial=None)


def _squared_relu_decoder(
    config: Config, norm: NormSpec, *, partial: float | None
) -> DecoderSettings:
    """partial: see `rotary_of`."""
    head_dim = head_dim_of(config)
    layer = LayerSpec(
        attention=attention_of(
            config,
            head_dim,
            rotary_of(config, head_dim, partial=partial),
            **biases_of(config),
        ),
        feed_forward=_plain_mlp(
            config["intermediate_size"],
            config.get("hidden_act", "relu2"),
            bool(config["mlp_bias"]),
        ),
        norm=norm,
        names=_NEMOTRON,
    )
    return decoder_of(config, [layer] * config["num_hidden_layers"], norm)


def gpt_neox_settings(config: Config) -> DecoderSettings:
    """GPT-NeoX and Pythia: two norms of the same input, RoPE of a part of each head."""
    head_dim, norm = head_dim_of(config), _norm(config, "layer_norm_eps")
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
            **biases_of(config, default=True),
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
