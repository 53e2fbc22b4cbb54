"""The fields of `config.json` that only some families have: a function for each that has any."""

from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

from worker_service.errors import UnsupportedModel
from worker_service.loader.gguf import gemma, hybrids
from worker_service.loader.gguf.attention import layer_types
from worker_service.loader.gguf.metadata import Metadata
from worker_service.loader.gguf.rope import (
    LONG_ROPES,
    SECTIONS,
    long_rope,
    scaled_by_position,
    with_local_rope,
)

Config: TypeAlias = Mapping[str, Any]


def rotary_dim(config: Config) -> int:
    """Elements of a head that RoPE rotates."""
    share = config["rope_parameters"].get("partial_rotary_factor", 1.0)
    return round(config["head_dim"] * share)


def _llama4(meta: Metadata, config: Config) -> dict[str, Any]:
    """Files do not say which models norm queries and keys, or how positions are seen: all but the
    one with 128 experts, and as in the released models."""
    num_layers = config["num_hidden_layers"]
    fields = {
        "intermediate_size_mlp": meta.number("feed_forward_length"),
        "interleave_moe_layer_step": meta.number("interleave_moe_layer_step"),
        "use_qk_norm": config["num_local_experts"] != 128,
    }
    meta.require("leading_dense_block_count", 0, "0")
    if meta.get("attention.sliding_window", -1) == 0:
        full = ["full_attention"] * num_layers
        return {**fields, "no_rope_layers": [1] * num_layers, "layer_types": full}
    meta.require("attention.sliding_window_pattern", 4, "4")
    return fields


def _mistral4(meta: Metadata, config: Config) -> dict[str, Any]:
    rope = scaled_by_position(meta, config["rope_parameters"])
    return {"rope_parameters": rope, "has_expert_modules": True}


def _ministral3(meta: Metadata, config: Config) -> dict[str, Any]:
    rope = scaled_by_position(meta, config["rope_parameters"])
    if rope["rope_type"] == "yarn":
        weight = float(meta.get("rope.scaling.yarn_log_multiplier", 0.0))
        rope |= {"mscale": weight, "mscale_all_dim": weight}
    return {"rope_parameters": rope}


def _minicpm3(meta: Metadata, config: Config) -> dict[str, Any]:
    """With the numbers of the released model, which files do not have."""
    num_factors, length = config["qk_rope_head_dim"] // 2, config["max_position_embeddings"]
    rope = long_rope(meta, config["rope_parameters"], num_factors, length)
    return {**rope, "scale_emb": 12, "scale_depth": 1.4, "dim_model_base": 256}


def _mlp_types(meta: Metadata, config: Config) -> list[str]:
    layers = range(config["num_hidden_layers"])
    routers = [f"blk.{layer}.ffn_gate_inp.weight" in meta.tensors for layer in layers]
    return ["sparse" if has_experts else "dense" for has_experts in routers]


def _mimo(meta: Metadata, config: Config) -> dict[str, Any]:
    """Files count the tokens of a window without the token itself."""
    num_layers, window = config["num_hidden_layers"], meta.number("attention.sliding_window")
    counts = meta.by_layer("attention.head_count_kv", num_layers)
    kinds = layer_types(meta, num_layers, window)
    full = {"full_attention": 1, "sliding_attention": 2}
    expected = [full[kind] * config["num_key_value_heads"] for kind in kinds]
    if counts != expected:
        raise meta.fault("attention.head_count_kv", f"{expected}", counts, UnsupportedModel)
    rope, theta = config["rope_parameters"], meta.real("rope.freq_base_swa", 10000.0)
    scale = meta.get("attention.value_scale", 1.0)
    return {
        "v_head_dim": meta.number("attention.value_length", config["head_dim"]),
        "attention_value_scale": meta.real("attention.value_scale", 1.0) if scale else 1.0,
        "sliding_window": window + 1,
        "layer_types": kinds,
        "mlp_layer_types": _mlp_types(meta, config),
        "rope_parameters": {
            "full_attention": rope,
            "sliding_attention": {**rope, "rope_theta": theta},
        },
    }


def _granite(meta: Metadata, config: Config) -> dict[str, Any]:
    meta.require("rope.scaling.finetuned", True, "true, since layers without RoPE are not read")
    meta.require("expert_shared_feed_forward_length", 0, "none")
    fields, head_dim = hybrids.multipliers(meta, config["head_dim"]), config["head_dim"]
    if meta.architecture.name in LONG_ROPES:  # MiniCPM 4
        rope, length = config["rope_parameters"], config["max_position_embeddings"]
        fields |= long_rope(meta, rope, head_dim // 2, length)
    return fields


def _phi3(meta: Metadata, config: Config) -> dict[str, Any]:
    return long_rope(meta, config["rope_parameters"], rotary_dim(config) // 2)


def _phimoe(meta: Metadata, config: Config) -> dict[str, Any]:
    return {**_phi3(meta, config), "lm_head_bias": "output.bias" in meta.tensors}


def _gpt_oss(_: Metadata, config: Config) -> dict[str, Any]:
    return {"rope_parameters": {**config["rope_parameters"], "truncate": False}}


def _olmo3(meta: Metadata, config: Config) -> dict[str, Any]:
    rope = config["rope_parameters"]
    theta = meta.real("rope.freq_base_swa", rope["rope_theta"])
    return {"rope_parameters": with_local_rope(rope, theta)}


def _olmo(meta: Metadata, _: Config) -> dict[str, Any]:
    limit = meta.get("attention.clamp_kqv", 0.0)
    return {"clip_qkv": meta.real("attention.clamp_kqv") if limit else None}


def _glm4(meta: Metadata, config: Config) -> dict[str, Any]:
    """With sections of positions, queries and keys have another order, see `orders_of`."""
    sections = meta.get("rope.dimension_sections", [])
    if not isinstance(sections, list) or not any(sections):
        return {}
    return {"rope_parameters": {**config["rope_parameters"], SECTIONS: sections[:3]}}


def _cohere(meta: Metadata, _: Config) -> dict[str, Any]:
    has_norms = meta.has_tensor("attn_q_norm.weight")
    return {"logit_scale": meta.real("logit_scale"), "use_qk_norm": has_norms}


def _cohere2_moe(meta: Metadata, config: Config) -> dict[str, Any]:
    """Files have the epsilon of one kind of norms, which says which kind."""
    rms_epsilon = meta.get("attention.layer_norm_rms_epsilon", 0.0) or None
    return {**_cohere(meta, config), "rms_norm_eps": rms_epsilon}


def _stablelm(meta: Metadata, config: Config) -> dict[str, Any]:
    meta.get("use_parallel_residual", False)  # wrong in files: tensors say it
    return {
        "use_parallel_residual": not meta.has_tensor("ffn_norm.weight"),
        "use_qkv_bias": config["attention_bias"],
        "qk_layernorm": meta.has_tensor("attn_q_norm.weight"),
    }


def _falcon(meta: Metadata, config: Config) -> dict[str, Any]:
    num_kv_heads = config["num_key_value_heads"]
    return {
        "new_decoder_architecture": num_kv_heads > 1,
        "num_ln_in_parallel_attn": 2 if meta.has_tensor("attn_norm_2.weight") else 1,
        "num_kv_heads": num_kv_heads,
        "ffn_hidden_size": config["intermediate_size"],
    }


def _keys_of_all_heads(meta: Metadata, config: Config) -> dict[str, Any]:
    num_heads = config["num_attention_heads"]
    meta.require("attention.head_count_kv", num_heads, f"{num_heads}, that of heads of queries")
    return {}


def _gpt2(meta: Metadata, config: Config) -> dict[str, Any]:
    if config["model_type"] == "gpt2":
        _keys_of_all_heads(meta, config)
    else:
        meta.require("attention.head_count_kv", 1, "1")
    return {
        "n_embd": config["hidden_size"],
        "n_layer": config["num_hidden_layers"],
        "n_head": config["num_attention_heads"],
        "n_positions": config["max_position_embeddings"],
        "n_inner": config["intermediate_size"],
        "has_linear_layers": True,
    }


def _gpt_neox(meta: Metadata, config: Config) -> dict[str, Any]:
    _keys_of_all_heads(meta, config)
    return {"use_parallel_residual": bool(meta.get("use_parallel_residual"))}


def _mpt(meta: Metadata, config: Config) -> dict[str, Any]:
    _keys_of_all_heads(meta, config)
    return {
        "attn_config": {
            "alibi_bias_max": int(meta.real("attention.max_alibi_bias")),
            "clip_qkv": meta.get("attention.clamp_kqv", 0.0),
            "qk_ln": meta.has_tensor("attn_q_norm.weight"),
        }
    }


FIELDS: dict[str, Callable[[Metadata, Config], dict[str, Any]]] = {
    "gemma2": gemma.gemma,
    "gemma3_text": gemma.gemma,
    "gemma3n_text": gemma.gemma3n,
    "gemma4_text": gemma.gemma4,
    "llama4_text": _llama4,
    "mistral4": _mistral4,
    "ministral3": _ministral3,
    "lfm2": hybrids.lfm2,
    "lfm2_moe": hybrids.lfm2,
    "falcon_h1": hybrids.falcon_h1,
    "nemotron_h": hybrids.nemotron_h,
    "jamba": hybrids.jamba,
    "kimi_linear": hybrids.kimi_linear,
    "granitemoehybrid": hybrids.granite_hybrid,
    "qwen3_next": hybrids.qwen3_next,
    **dict.fromkeys(("qwen3_5_text", "qwen3_5_moe_text"), hybrids.delta_net),
    **dict.fromkeys(("granite", "granitemoe"), _granite),
    "phi3": _phi3,
    "phimoe": _phimoe,
    "gpt_oss": _gpt_oss,
    **dict.fromkeys(("olmo3", "mellum"), _olmo3),
    **dict.fromkeys(("cohere", "cohere2"), _cohere),
    "cohere2_moe": _cohere2_moe,
    "stablelm": _stablelm,
    "falcon": _falcon,
    **dict.fromkeys(("gpt2", "gpt_bigcode"), _gpt2),
    "mpt": _mpt,
    "bloom": _keys_of_all_heads,
    "gpt_neox": _gpt_neox,
    "minicpm3": _minicpm3,
    "mimo_v2_flash": _mimo,
    **dict.fromkeys(
        ("deepseek_v32", "glm_moe_dsa"),
        lambda meta, _: {"index_topk": meta.number("attention.indexer.top_k")},
    ),
    "hy_v3": lambda meta, config: {"mlp_layer_types": _mlp_types(meta, config)},
    "starcoder2": lambda _, config: {"use_bias": config["attention_bias"]},
    "gemma": lambda *_: dict.fromkeys(("hidden_act", "hidden_activation"), "gelu_pytorch_tanh"),
    **dict.fromkeys(("olmo", "olmoe"), _olmo),
    "glm4": _glm4,
    "minimax_m2": lambda _, config: {"rotary_dim": rotary_dim(config)},
    "seed_oss": lambda meta, _: {"attention_out_bias": "blk.0.attn_output.bias" in meta.tensors},
    "glm4_moe": lambda meta, _: {"use_qk_norm": "blk.0.attn_q_norm.weight" in meta.tensors},
    "ernie4_5": lambda _, config: {"use_bias": config["attention_bias"]},
}
"""By `model_type`; each function gets the fields that all families have."""
