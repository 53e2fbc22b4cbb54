"""The configuration of GGUF files of Gemma, as `transformers` would describe it."""

from collections.abc import Mapping, Sequence
from statistics import NormalDist
from typing import Any

from worker_service.errors import BadCheckpoint, UnsupportedModel
from worker_service.loader.gguf.attention import layer_types
from worker_service.loader.gguf.metadata import ROPE_FREQUENCIES, Metadata
from worker_service.loader.gguf.rope import with_local_rope

GEMMA3N, GEMMA4 = "gemma3n_text", "gemma4_text"
"""`model_type` of these."""

_SCALED_BY_WIDTH = {"gemma2": 46, "gemma3": 62}
"""Number of layers of the 27B models, which scale attention scores by hidden_size / num_heads
instead of head_dim."""

_NOT_ROTATED = 1e29
"""The least divisor of a frequency that is that of an element which is not rotated."""


def gemma(meta: Metadata, config: Mapping[str, Any]) -> dict[str, Any]:
    """The fields that only Gemma has."""
    architecture, num_layers = meta.architecture.name, config["num_hidden_layers"]
    is_wide = num_layers == _SCALED_BY_WIDTH.get(architecture)
    width = config["hidden_size"] // config["num_attention_heads"]
    is_gemma2 = architecture == "gemma2"
    caps = {}
    for key, default in (("attn_logit_softcapping", 50.0), ("final_logit_softcapping", 30.0)):
        stored = meta.get(key, default if is_gemma2 else 0.0)
        caps[key] = meta.real(key, default) if stored else None
    window = config["sliding_window"] or (4096 if is_gemma2 else None)
    rope = config["rope_parameters"]
    if not is_gemma2:
        rope = with_local_rope(rope, meta.real("rope.freq_base_swa", 10000.0))
    return {
        "hidden_act": "gelu_pytorch_tanh",
        "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": width if is_wide else config["head_dim"],
        "sliding_window": window,
        "layer_types": layer_types(meta, num_layers, window),
        "rope_parameters": rope,
        "use_bidirectional_attention": not meta.architecture.is_causal,
        **caps,
    }


def gemma3n(meta: Metadata, config: Mapping[str, Any]) -> dict[str, Any]:
    """The fields that only Gemma 3n has, or those that it has otherwise. Files have deviations
    of gates instead of the shares from which they are computed."""
    num_layers = config["num_hidden_layers"]
    deviations = meta.get("activation_sparsity_scale", [0.0] * num_layers)
    if not isinstance(deviations, list) or len(deviations) != num_layers:
        expected = f"a number for each of {num_layers} layers"
        raise meta.fault("activation_sparsity_scale", expected, deviations)
    shares = [round(NormalDist().cdf(value), 6) for value in deviations]
    local_theta = meta.real("rope.freq_base_swa", 10000.0)
    return {
        "hidden_activation": "gelu_pytorch_tanh",
        "intermediate_size": meta.by_layer("feed_forward_length", num_layers),
        "num_kv_shared_layers": _num_shared(meta, num_layers),
        "hidden_size_per_layer_input": meta.number("embedding_length_per_layer_input"),
        "vocab_size_per_layer_input": _num_rows(meta, "per_layer_token_embd.weight"),
        "final_logit_softcapping": meta.real("final_logit_softcapping", 30.0),
        "altup_active_idx": meta.get("altup.active_idx", 0),
        "altup_num_inputs": meta.number("altup.num_inputs"),
        "laurel_rank": _num_rows(meta, "blk.0.laurel_l.weight"),
        "activation_sparsity_pattern": shares,
        "rope_parameters": with_local_rope(config["rope_parameters"], local_theta),
    }


def _num_shared(meta: Metadata, num_layers: int) -> int:
    """The number of layers that have the keys and values of others."""
    num_shared = meta.get("attention.shared_kv_layers", 0)
    if not isinstance(num_shared, int) or not 0 <= num_shared < num_layers:
        expected = f"a number below that of layers, {num_layers}"
        raise meta.fault("attention.shared_kv_layers", expected, num_shared)
    return num_shared


def gemma4(meta: Metadata, config: Mapping[str, Any]) -> dict[str, Any]:
    """The fields that only Gemma 4 has, or those that it has otherwise. config: the others, in
    which heads are those of layers with full attention."""
    kinds, global_dim = config["layer_types"], config["head_dim"]
    head_dim = meta.number("attention.key_length_swa", global_dim)
    for key in ("attention.value_length_swa", "rope.dimension_count_swa"):
        meta.require(key, head_dim, f"{head_dim}, the size of a head in layers with a window")
    num_shared = _num_shared(meta, len(kinds))
    embedding_size = meta.get("embedding_length_per_layer_input", 0)
    capped = meta.get("final_logit_softcapping", 0.0)
    return {
        "hidden_act": "gelu_pytorch_tanh",
        "hidden_activation": "gelu_pytorch_tanh",
        "head_dim": head_dim,
        "global_head_dim": global_dim,
        "num_kv_shared_layers": num_shared,
        "hidden_size_per_layer_input": embedding_size,
        "vocab_size_per_layer_input": _num_rows(meta, "per_layer_token_embd.weight"),
        "final_logit_softcapping": meta.real("final_logit_softcapping") if capped else None,
        "rope_parameters": _ropes(meta, config["rope_parameters"], global_dim),
        **_heads_of_keys(meta, kinds, num_shared),
        **_inner_sizes(meta, len(kinds), num_shared),
    }


def _num_rows(meta: Metadata, name: str) -> int | None:
    tensor = meta.tensors.get(name)
    return None if tensor is None else tensor.shape[0]


def _heads_of_keys(meta: Metadata, kinds: Sequence[str], num_shared: int) -> dict[str, Any]:
    """Heads of keys by the type of layers, and whether those with full attention have no
    weights of values."""
    counts = meta.by_layer("attention.head_count_kv", len(kinds))
    sliding, full = (
        {count for count, of in zip(counts, kinds, strict=True) if of.startswith(kind)}
        for kind in ("sliding", "full")
    )
    if len(sliding) > 1 or len(full) > 1:
        expected = "the same number for all layers of a type"
        raise meta.fault("attention.head_count_kv", expected, counts)
    own = [i for i, kind in enumerate(kinds[: len(kinds) - num_shared]) if kind.startswith("f")]
    has_values = {f"blk.{layer}.attn_v.weight" in meta.tensors for layer in own}
    if len(has_values) > 1:
        raise BadCheckpoint(
            f"{meta.path}: attn_v.weight: expected it in all layers with full attention, or in none"
        )
    k_is_v = has_values == {False}
    if not k_is_v and sliding | full != (sliding or full):
        expected = "the same number for all layers, which have attn_v.weight"
        raise meta.fault("attention.head_count_kv", expected, counts)
    return {
        "num_key_value_heads": next(iter(sliding or full)),
        "num_global_key_value_heads": next(iter(full), None),
        "attention_k_eq_v": k_is_v,
    }


def _inner_sizes(meta: Metadata, num_layers: int, num_shared: int) -> dict[str, Any]:
    """The size of MLPs, which may be twice as large in layers that share keys and values."""
    sizes = meta.by_layer("feed_forward_length", num_layers)
    own, shared = sizes[: num_layers - num_shared], sizes[num_layers - num_shared :]
    size, is_wide = own[0], bool(shared) and shared[0] != own[0]
    if own != [size] * len(own) or shared != [size * (1 + is_wide)] * num_shared:
        expected = "the same number for all layers, or twice as many for those that share keys"
        raise meta.fault("feed_forward_length", expected, sizes)
    return {"intermediate_size": size, "use_double_wide_mlp": is_wide}


def _ropes(meta: Metadata, rope: Mapping[str, Any], global_dim: int) -> dict[str, Any]:
    """The rotary embeddings of both types of layers. Of those with full attention, a part of
    the elements is rotated: the frequencies of the others have a huge divisor."""
    if rope["rope_type"] != "default":
        raise meta.fault("rope.scaling.type", "none", rope["rope_type"], UnsupportedModel)
    share, tensor = 1.0, meta.tensors.get(ROPE_FREQUENCIES)
    if tensor is not None:
        divisors = tensor.stored_values().flatten()
        count = int((divisors == 1.0).sum())
        if tensor.shape != [global_dim // 2] or not (
            (divisors[:count] == 1.0).all() and (divisors[count:] > _NOT_ROTATED).all()
        ):
            raise UnsupportedModel(
                f"{meta.path}: {ROPE_FREQUENCIES}: expected {global_dim // 2} divisors, of"
                f" which the first are 1, and the others more than {_NOT_ROTATED:g}"
            )
        share = count / len(divisors)
    full = {"rope_type": "proportional", "partial_rotary_factor": share}
    full["rope_theta"] = rope["rope_theta"]
    return with_local_rope(full, meta.real("rope.freq_base_swa", 10000.0))
