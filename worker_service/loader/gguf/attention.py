"""The sizes of attention's heads, and which layers have a window."""

from typing import Any

from worker_service.loader.gguf.metadata import Metadata
from worker_service.loader.gguf.rope import rope_parameters


def head_dims(meta: Metadata, default: int) -> tuple[int, int]:
    """Elements of a head, and those of them that RoPE rotates; of latent attention only the
    latter."""
    traits = meta.architecture.traits
    if "latent" in traits:
        meta.require("attention.causal", True, "true")
        rotary_dim = meta.number("rope.dimension_count")
        return rotary_dim, rotary_dim
    head_dim = meta.number("attention.key_length", default)
    rotary_dim = meta.number("rope.dimension_count", head_dim)
    size = f"{head_dim}, the size of a head"
    if "values" not in traits:
        meta.require("attention.value_length", head_dim, size)
    if "no-rope" in traits:
        rotary_dim = head_dim
    elif "part" not in traits or rotary_dim > head_dim:
        meta.require("rope.dimension_count", head_dim, size)
    is_causal = meta.architecture.is_causal
    meta.require("attention.causal", is_causal, str(is_causal).lower())
    return head_dim, rotary_dim


def layer_types(meta: Metadata, num_layers: int, window: int | None) -> list[str]:
    """The type of each layer's attention; window: tokens, if any."""
    key = "attention.sliding_window_pattern"
    pattern = meta.get(key, meta.architecture.window_period)
    if isinstance(pattern, int) and pattern > 0:
        full = 0 if meta.architecture.name == "modern-bert" else pattern - 1
        pattern = [layer % pattern != full for layer in range(num_layers)]
    num_further = meta.get("nextn_predict_layers", 0)  # which are after the others
    if not isinstance(pattern, list) or len(pattern) - num_layers not in (0, num_further):
        expected = f"a positive number, or one value for each of {num_layers} layers"
        raise meta.fault(key, expected, pattern)
    slides = (window is not None and bool(value) for value in pattern[:num_layers])
    return ["sliding_attention" if is_sliding else "full_attention" for is_sliding in slides]


def latent(meta: Metadata, rotary_dim: int) -> dict[str, Any]:
    """The fields of latent attention. Files name the sizes of heads of expanded keys and values
    apart from those of what is cached, or are of before those had names."""
    latent_dim, key = meta.number("attention.kv_lora_rank"), "attention.key_length"
    value, suffix = "attention.value_length", "_mla"
    if meta.get(f"{key}{suffix}", 0):
        size = latent_dim + rotary_dim
        meta.require(key, size, f"{size}, the sizes of latents and of what is rotated")
        if meta.architecture.name == "kimi-linear":
            meta.get(value, 0)  # hidden_size / num_heads, of no part
        else:
            meta.require(value, latent_dim, f"{latent_dim}, the size of latents")
    else:
        suffix = ""
    key_dim = meta.number(f"{key}{suffix}")
    if key_dim <= rotary_dim:
        raise meta.fault(f"{key}{suffix}", f"more than {rotary_dim}, what is rotated", key_dim)
    default = meta.number("embedding_length") // meta.number("attention.head_count")
    rope = rope_parameters(meta, rotary_dim)
    if rope["rope_type"] == "yarn":
        weight = float(meta.get("rope.scaling.yarn_log_multiplier", 0.0)) / 0.1
        rope |= {"mscale": weight, "mscale_all_dim": weight}
    has_latents = meta.has_tensor("attn_q_a.weight")
    return {
        "num_key_value_heads": meta.number("attention.head_count"),
        "kv_lora_rank": latent_dim,
        "q_lora_rank": meta.number("attention.q_lora_rank") if has_latents else None,
        "qk_nope_head_dim": key_dim - rotary_dim,
        "qk_rope_head_dim": rotary_dim,
        "v_head_dim": meta.number(f"{value}{suffix}", default),
        "rope_parameters": rope,
        "has_split_expansion": meta.has_tensor("attn_k_b.weight"),
    }
