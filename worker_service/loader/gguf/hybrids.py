"""The configuration of GGUF models with layers that keep a state, as `transformers` would describe
it."""

from collections.abc import Mapping, Sequence
from typing import Any

from worker_service.errors import UnsupportedModel
from worker_service.loader.gguf.metadata import Metadata

STATES_ALONE = ("mamba", "falcon_mamba", "mamba2")
"""`model_type` of models without attention."""

DELTA_NETS = ("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text")
"""`model_type` of models with attention and gated delta nets."""

HYBRIDS = (
    *("lfm2", "lfm2_moe", "granitemoehybrid", "falcon_h1", "nemotron_h", "jamba"),
    *(*DELTA_NETS, "kimi_linear"),
)
"""`model_type` of models with attention and states."""

_LINEAR = "linear_attention"
"""In `layer_types`."""


def of_some_layers(meta: Metadata, kind: str, key: str, default: int | None = None) -> int:
    """A number of all layers, of `HYBRIDS` but for those that have 0, and another part."""
    counts = meta.get(key, default)
    if kind not in HYBRIDS or not isinstance(counts, list):
        return meta.number(key, default)
    found = {count for count in counts if count != 0}
    if len(found) > 1 or not all(isinstance(count, int) and count > 0 for count in found):
        expected = "0, or a positive number that is the same for all other layers"
        raise meta.fault(key, expected, counts)
    return int(found.pop()) if found else default or 1


def states_alone(meta: Metadata, hidden_size: int, kind: str) -> dict[str, Any]:
    """The fields of `STATES_ALONE`, of which files name no heads."""
    size = meta.number("ssm.inner_size")
    fields = {
        "hidden_act": "silu",
        "tie_word_embeddings": "output.weight" not in meta.tensors,
        "layer_norm_epsilon": meta.real("attention.layer_norm_rms_epsilon"),
        "state_size": meta.number("ssm.state_size"),
        "conv_kernel": meta.number("ssm.conv_kernel"),
        "expand": size / hidden_size,
        "use_bias": meta.has_tensor("ssm_in.bias"),
        "use_conv_bias": meta.has_tensor("ssm_conv1d.bias"),
    }
    if kind != "mamba2":
        rank = meta.number("ssm.time_step_rank")
        return fields | {"intermediate_size": size, "time_step_rank": rank}
    num_heads, head_dim = _heads_of_states(meta)
    num_groups = meta.number("ssm.group_count")
    return fields | {"num_heads": num_heads, "head_dim": head_dim, "n_groups": num_groups}


def _mixers(meta: Metadata, num_layers: int, of_state: str) -> list[str]:
    """The type of each layer, which keeps a state if it has no heads of keys."""
    counts = meta.by_layer("attention.head_count_kv", num_layers)
    return ["full_attention" if count else of_state for count in counts]


def _heads_of_states(meta: Metadata) -> tuple[int, int]:
    """Heads of Mamba-2, and their size."""
    size, num_heads = meta.number("ssm.inner_size"), meta.number("ssm.time_step_rank")
    if size % num_heads:
        raise meta.fault("ssm.time_step_rank", f"a divisor of {size}, ssm.inner_size", num_heads)
    return num_heads, size // num_heads


def lfm2(meta: Metadata, config: Mapping[str, Any]) -> dict[str, Any]:
    """The fields that only LFM2 has."""
    num_layers = config["num_hidden_layers"]
    return {
        "norm_eps": config["rms_norm_eps"],
        "layer_types": _mixers(meta, num_layers, "conv"),
        "conv_L_cache": meta.number("shortconv.l_cache"),
        "conv_bias": meta.has_tensor("shortconv.conv.bias"),
        "block_auto_adjust_ff_dim": False,
        "num_dense_layers": meta.get("leading_dense_block_count", 0),
        "use_expert_bias": meta.has_tensor("exp_probs_b.bias"),
    }


def granite_hybrid(meta: Metadata, config: Mapping[str, Any]) -> dict[str, Any]:
    """The fields that only Granite 4 has."""
    num_experts, size = meta.get("expert_count", 0), config["intermediate_size"]
    shared = meta.number("expert_shared_feed_forward_length", None if num_experts else size)
    return {
        **multipliers(meta, config["head_dim"]),
        **_mamba2(meta),
        "layer_types": _mixers(meta, config["num_hidden_layers"], _LINEAR),
        "position_embedding_type": "rope" if meta.get("rope.scaling.finetuned", True) else "nope",
        "has_separate_modules": True,
        "num_local_experts": num_experts,
        "shared_intermediate_size": shared,
        "mamba_expand": meta.number("ssm.inner_size") / config["hidden_size"],
    }


def _mamba2(meta: Metadata) -> dict[str, Any]:
    """The fields of Mamba-2 with the names of Bamba."""
    num_heads, head_dim = _heads_of_states(meta)
    return {
        "mamba_n_heads": num_heads,
        "mamba_d_head": head_dim,
        "mamba_d_state": meta.number("ssm.state_size"),
        "mamba_d_conv": meta.number("ssm.conv_kernel"),
        "mamba_n_groups": meta.number("ssm.group_count"),
        "mamba_conv_bias": meta.has_tensor("ssm_conv1d.bias"),
        "mamba_proj_bias": meta.has_tensor("ssm_in.bias"),
    }


def multipliers(meta: Metadata, head_dim: int) -> dict[str, Any]:
    """Those of Granite, and of MiniCPM, whose older files lack them."""
    default = None if meta.architecture.name == "minicpm" else 1.0
    return {
        "attention_multiplier": meta.real("attention.scale", head_dim**-0.5),
        "embedding_multiplier": meta.real("embedding_scale", default),
        "residual_multiplier": meta.real("residual_scale", default),
        "logits_scaling": meta.real("logit_scale", default),
    }


def falcon_h1(meta: Metadata, _: Mapping[str, Any]) -> dict[str, Any]:
    """The fields that only Falcon-H1 has. Weights in files are multiplied already, so that
    there are no multipliers; norms of states follow the gate, as in all models that have
    them."""
    if "output.weight" not in meta.tensors:
        raise UnsupportedModel(
            f"{meta.path}: expected a tensor output.weight, since embeddings are multiplied in"
            " these files by a number that the file does not have, and logits by another"
        )
    return {
        **_mamba2(meta),
        "mamba_d_ssm": meta.number("ssm.inner_size"),
        "mamba_rms_norm": meta.has_tensor("ssm_norm.weight"),
        "mamba_norm_before_gate": False,
        "projectors_bias": meta.has_tensor("ssm_out.bias"),
    }


def nemotron_h(meta: Metadata, config: Mapping[str, Any]) -> dict[str, Any]:
    """The fields that only Nemotron-H has."""
    num_layers = config["num_hidden_layers"]
    num_heads, head_dim = _heads_of_states(meta)
    sizes = meta.by_layer("feed_forward_length", num_layers)
    kinds = _mixers(meta, num_layers, _LINEAR)
    for layer, size in enumerate(sizes):
        if size and kinds[layer] == _LINEAR:
            has_experts = f"blk.{layer}.ffn_gate_inp.weight" in meta.tensors
            kinds[layer] = "moe" if has_experts else "mlp"
    return {
        "layers_block_type": kinds,
        "moe_latent_size": meta.get("moe_latent_size", 0) or None,
        "mlp_hidden_act": "relu2",
        "mamba_num_heads": num_heads,
        "mamba_head_dim": head_dim,
        "n_groups": meta.number("ssm.group_count"),
        "ssm_state_size": meta.number("ssm.state_size"),
        "conv_kernel": meta.number("ssm.conv_kernel"),
        "use_conv_bias": meta.has_tensor("ssm_conv1d.bias"),
        "use_bias": meta.has_tensor("ssm_in.bias"),
    }


def jamba(meta: Metadata, config: Mapping[str, Any]) -> dict[str, Any]:
    """The fields that only Jamba has."""
    num_layers, tensors = config["num_hidden_layers"], meta.tensors
    kinds = _mixers(meta, num_layers, _LINEAR)
    period, offset = _period(meta, [kind != _LINEAR for kind in kinds], "attention")
    routers = [f"blk.{layer}.ffn_gate_inp.weight" in tensors for layer in range(num_layers)]
    expert_period, expert_offset = _period(meta, routers, "experts")
    return {
        "attn_layer_period": period,
        "attn_layer_offset": offset,
        "expert_layer_period": expert_period,
        "expert_layer_offset": expert_offset,
        "num_experts": config.get("num_experts", 1),
        "mamba_expand": meta.number("ssm.inner_size") / config["hidden_size"],
        "mamba_d_state": meta.number("ssm.state_size"),
        "mamba_d_conv": meta.number("ssm.conv_kernel"),
        "mamba_dt_rank": meta.number("ssm.time_step_rank"),
        "mamba_conv_bias": meta.has_tensor("ssm_conv1d.bias"),
        "mamba_proj_bias": meta.has_tensor("ssm_in.bias"),
    }


def delta_net(meta: Metadata, config: Mapping[str, Any]) -> dict[str, Any]:
    """The fields that only Qwen3-Next and Qwen3.5 have."""
    num_layers, key = config["num_hidden_layers"], "attention.recurrent_layers"
    interval = meta.number("full_attention_interval", 4)
    keep_states = meta.get(key, [bool((i + 1) % interval) for i in range(num_layers)])
    if not isinstance(keep_states, list) or len(keep_states) < num_layers:
        raise meta.fault(key, f"a value for each of {num_layers} layers", keep_states)
    num_key_heads, (num_heads, size) = meta.number("ssm.group_count"), _heads_of_states(meta)
    if num_heads % num_key_heads:
        expected = f"a divisor of {num_heads}, ssm.time_step_rank"
        raise meta.fault("ssm.group_count", expected, num_key_heads)
    return {
        "layer_types": [_LINEAR if k else "full_attention" for k in keep_states[:num_layers]],
        "linear_num_key_heads": num_key_heads,
        "linear_num_value_heads": num_heads,
        "linear_key_head_dim": meta.number("ssm.state_size"),
        "linear_value_head_dim": size,
        "linear_conv_kernel_dim": meta.number("ssm.conv_kernel"),
    }


def qwen3_next(meta: Metadata, config: Mapping[str, Any]) -> dict[str, Any]:
    """The fields that only Qwen3-Next has."""
    separate = {"norm_topk_prob": True, "has_separate_inputs": meta.has_tensor("attn_qkv.weight")}
    return delta_net(meta, config) | separate


def kimi_linear(meta: Metadata, config: Mapping[str, Any]) -> dict[str, Any]:
    """The fields that only Kimi Linear has."""
    tensors = meta.tensors
    betas = [name for name in tensors if name.endswith("ssm_beta.weight")]
    return {
        "layer_types": _mixers(meta, config["num_hidden_layers"], _LINEAR),
        "linear_num_heads": tensors[betas[0]].shape[0] if betas else None,
        "linear_head_dim": meta.number("kda.head_dim"),
        "linear_conv_kernel_dim": meta.number("ssm.conv_kernel"),
        "num_local_experts": config["n_routed_experts"],
        "norm_topk_prob": True,
        "moe_router_activation_func": "sigmoid",
    }


def _period(meta: Metadata, layers: Sequence[bool], part: str) -> tuple[int, int]:
    """(period, offset) of the layers with a part. Raises UnsupportedModel unless they are at
    regular distances."""
    found = [index for index, has_part in enumerate(layers) if has_part]
    if not found:
        return len(layers) + 1, len(layers)
    period = found[1] - found[0] if len(found) > 1 else len(layers)
    if found != list(range(found[0] % period, len(layers), period)):
        raise UnsupportedModel(
            f"{meta.path}: expected {part} in layers at regular distances, got {found}"
        )
    return period, found[0]
