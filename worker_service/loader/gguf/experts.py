"""The configuration of mixtures of experts, as `transformers` would describe it."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from worker_service.errors import UnsupportedModel
from worker_service.loader.gguf.hybrids import DELTA_NETS
from worker_service.loader.gguf.metadata import Metadata

SOFTMAX, SIGMOID = 1, 2
"""Values of `expert_gating_func`."""

_MEANINGS = {SOFTMAX: "1, which is softmax", SIGMOID: "2, which is sigmoid"}


@dataclass(frozen=True, slots=True)
class Experts:
    """What a file says of its experts."""

    count: int
    num_used: int
    """Experts that a token goes through."""
    size: int
    """Of each expert's MLP."""
    dense_size: int
    """Of an MLP without experts."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Mixture:
    """The fields of one `model_type`; None: it has none for that."""

    count: str | None = "num_experts"
    num_used: str = "num_experts_per_tok"
    size: str | None = None
    fixed: Mapping[str, Any] = field(default_factory=dict)
    """Fields that are the same for all models."""
    further: Callable[[Metadata, Experts], dict[str, Any]] | None = None
    """Reads the other fields."""
    scores: int = SOFTMAX
    """How experts are chosen."""
    is_divided: bool = True
    """Whether an expert has a share of a dense MLP, if the file does not say its size."""
    has_scale: bool = False
    """Whether weights of experts may be multiplied."""


def expert_fields(meta: Metadata, dense_size: int, kind: str) -> dict[str, Any]:
    """The fields of a mixture of experts. dense_size: of an MLP without experts."""
    mixture = MIXTURES[kind]
    count, num_used = meta.number("expert_count"), meta.number("expert_used_count")
    if num_used > count:
        raise meta.fault("expert_used_count", f"at most {count}, the number of experts", num_used)
    meta.require("expert_gating_func", mixture.scores, _MEANINGS[mixture.scores])
    default = max(1, dense_size // num_used) if mixture.is_divided else dense_size
    size = meta.number("expert_feed_forward_length", default)
    if not mixture.has_scale:
        meta.require("expert_weights_scale", 1.0, "1")
    names = {mixture.count: count, mixture.num_used: num_used, mixture.size: size}
    config: dict[str, Any] = {name: value for name, value in names.items() if name is not None}
    config |= mixture.fixed
    if mixture.further is not None:
        config |= mixture.further(meta, Experts(count, num_used, size, dense_size))
    return config


def _scored(meta: Metadata, experts: Experts) -> dict[str, Any]:
    """The fields of experts that are chosen as in DeepSeek-V3."""
    return {
        "n_routed_experts": experts.count,
        "moe_intermediate_size": experts.size,
        "n_shared_experts": meta.get("expert_shared_count", 0),
        "first_k_dense_replace": meta.get("leading_dense_block_count", 0),
        "n_group": meta.number("expert_group_count", 1),
        "topk_group": meta.number("expert_group_used_count", 1),
        "norm_topk_prob": bool(meta.get("expert_weights_norm", False)),
        "routed_scaling_factor": meta.real("expert_weights_scale", 1.0),
    }


def _deepseek2(meta: Metadata, experts: Experts) -> dict[str, Any]:
    fields = _scored(meta, experts)
    limited = "group_limited_greedy" if fields["n_group"] > 1 else "greedy"
    return fields | {"topk_method": limited}


def _deepseek3(meta: Metadata, experts: Experts) -> dict[str, Any]:
    return _scored(meta, experts) | {"topk_method": None}


def _require_size_of_shared(meta: Metadata, experts: Experts, num_shared: int) -> None:
    """Raise UnsupportedModel unless shared experts have the size of the others."""
    shared = experts.size * num_shared
    meta.require("expert_shared_feed_forward_length", shared, f"{shared}, that of shared experts")


def _exaone(meta: Metadata, experts: Experts) -> dict[str, Any]:
    fields = _scored(meta, experts)
    _require_size_of_shared(meta, experts, fields["n_shared_experts"])
    return fields


def _normed(meta: Metadata, experts: Experts) -> dict[str, Any]:
    """The fields of experts whose weights always add up to 1, and which have no groups."""
    fields = _scored(meta, experts)
    if not fields["norm_topk_prob"]:
        raise meta.fault("expert_weights_norm", "true", False, UnsupportedModel)
    meta.require("expert_group_count", 1, "1")
    return fields


def _afmoe(meta: Metadata, experts: Experts) -> dict[str, Any]:
    fields = _normed(meta, experts)
    return {**fields, "num_dense_layers": fields["first_k_dense_replace"], "mup_enabled": True}


def _hunyuan3(meta: Metadata, experts: Experts) -> dict[str, Any]:
    """Files have no number of shared experts, but their size."""
    shared = meta.number("expert_shared_feed_forward_length", experts.size)
    return _normed(meta, experts) | {"n_shared_experts": shared // experts.size}


def _cohere2(meta: Metadata, experts: Experts) -> dict[str, Any]:
    num_shared = meta.get("expert_shared_count", 0)
    _require_size_of_shared(meta, experts, num_shared)
    return {
        "prefix_dense_intermediate_size": experts.dense_size,
        "num_shared_experts": num_shared,
        "first_k_dense_replace": meta.get("leading_dense_block_count", 0),
        "norm_topk_prob": bool(meta.get("expert_weights_norm", False)),
        "expert_selection_fn": "sigmoid",
    }


def _mimo(meta: Metadata, experts: Experts) -> dict[str, Any]:
    return _scored(meta, experts) | {"norm_topk_prob": True}


def _nemotron(meta: Metadata, experts: Experts) -> dict[str, Any]:
    shared = meta.number("expert_shared_feed_forward_length")
    return {"moe_shared_expert_intermediate_size": shared} | _scored(meta, experts)


def _jamba(meta: Metadata, experts: Experts) -> dict[str, Any]:
    meta.require("expert_feed_forward_length", experts.dense_size, "feed_forward_length")
    return {}


def _hunyuan(meta: Metadata, experts: Experts) -> dict[str, Any]:
    meta.require("expert_shared_count", 1, "1")
    size = experts.size
    meta.require("expert_shared_feed_forward_length", size, f"{size}, that of experts")
    return {}


def _ernie(meta: Metadata, experts: Experts) -> dict[str, Any]:
    meta.get("expert_shared_feed_forward_length", 0)  # wrong in files: tensors have the size
    return {
        "moe_num_shared_experts": meta.get("expert_shared_count", 0),
        "moe_layer_interval": meta.number("interleave_moe_layer_step", 1),
        "moe_layer_start_index": meta.get("leading_dense_block_count", 0),
    }


def _with_shared_expert(meta: Metadata, experts: Experts) -> dict[str, Any]:
    shared = meta.number("expert_shared_feed_forward_length", experts.dense_size)
    return {"shared_expert_intermediate_size": shared}


_MODULES = {"has_expert_modules": True}
_QWEN = Mixture(
    size="moe_intermediate_size", fixed={"norm_topk_prob": False}, further=_with_shared_expert
)

MIXTURES: dict[str, Mixture] = {
    "mixtral": Mixture(count="num_local_experts"),
    "granitemoe": Mixture(count="num_local_experts", fixed=_MODULES),
    "granitemoehybrid": Mixture(count="num_local_experts", is_divided=False),
    "phimoe": Mixture(count="num_local_experts", is_divided=False),
    "gpt_oss": Mixture(
        count="num_local_experts", size="intermediate_size", fixed=_MODULES, is_divided=False
    ),
    "llama4_text": Mixture(
        count="num_local_experts", size="intermediate_size", fixed=_MODULES, is_divided=False
    ),
    "minimax_m2": Mixture(
        count="num_local_experts", size="intermediate_size", scores=SIGMOID, is_divided=False
    ),
    "gemma4_text": Mixture(
        num_used="top_k_experts",
        size="moe_intermediate_size",
        fixed={"enable_moe_block": True, **_MODULES},
        is_divided=False,
    ),
    "jamba": Mixture(further=_jamba, is_divided=False),
    "hunyuan_v1_moe": Mixture(
        num_used="moe_topk", size="intermediate_size", further=_hunyuan, is_divided=False
    ),
    "ernie4_5_moe": Mixture(
        count="moe_num_experts", num_used="moe_k", size="moe_intermediate_size", further=_ernie
    ),
    "olmoe": Mixture(fixed={"norm_topk_prob": False}, is_divided=False),
    "qwen2_moe": _QWEN,
    **dict.fromkeys(DELTA_NETS, _QWEN),
    "qwen3_moe": Mixture(size="moe_intermediate_size", fixed={"norm_topk_prob": True}),
    "lfm2_moe": Mixture(
        size="moe_intermediate_size", fixed={"norm_topk_prob": True}, scores=SIGMOID
    ),
    **dict.fromkeys(
        ("glm4_moe", "dots1"),
        Mixture(count=None, further=_scored, scores=SIGMOID, has_scale=True),
    ),
    "exaone_moe": Mixture(count=None, further=_exaone, scores=SIGMOID, has_scale=True),
    "hy_v3": Mixture(count=None, further=_hunyuan3, scores=SIGMOID, has_scale=True),
    "cohere2_moe": Mixture(size="intermediate_size", further=_cohere2, scores=SIGMOID),
    "mellum": Mixture(
        count="num_local_experts", size="moe_intermediate_size", fixed={"norm_topk_prob": True}
    ),
    "afmoe": Mixture(count=None, further=_afmoe, scores=SIGMOID, has_scale=True),
    "mimo_v2_flash": Mixture(count=None, further=_mimo, scores=SIGMOID),
    "nemotron_h": Mixture(count=None, further=_nemotron, scores=SIGMOID, has_scale=True),
    "deepseek_v2": Mixture(count=None, further=_deepseek2, has_scale=True),
    **dict.fromkeys(
        ("deepseek_v3", "deepseek_v32", "glm_moe_dsa", "kimi_linear"),
        Mixture(count=None, further=_deepseek3, scores=SIGMOID, has_scale=True),
    ),
    "mistral4": Mixture(count=None, further=_deepseek3, has_scale=True),
}
"""By `model_type`."""
