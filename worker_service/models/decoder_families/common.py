"""What families of decoders have in common."""

from collections import ChainMap
from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from typing import Any, cast

from pagewire_kernels.reference import Routing
from worker_service.errors import UnsupportedModel
from worker_service.models.decoder.specs import DecoderSettings, LayerSpec
from worker_service.models.feed_forward.experts import ExpertsSpec
from worker_service.models.feed_forward.mlp import MLPSpec
from worker_service.models.layers.norms import NormSpec
from worker_service.models.layers.rotary import (
    NO_ROTATION,
    PROPORTIONAL,
    SCALING_TYPES,
    RotarySettings,
)
from worker_service.models.mixers.attention import AttentionSpec

Config = Mapping[str, Any]
"""The content of `config.json`."""

STACKED_EXPERTS = "stacked_experts"
"""The key of the shape of a tensor of all experts' gates and up projections, if the checkpoint has
such, whichever its family stores."""

CORRECTIONS = "has_corrections"
"""The key of whether the checkpoint has corrections of the scores of experts, which some families
may lack."""

SLIDING, FULL = "sliding_attention", "full_attention"
"""Names of `layer_types`."""

_OF_ROUTING = {field.name for field in fields(Routing)}


class NotNative(Exception):
    """A variant that the layers do not compute, which may run through `transformers`."""


def by_lines(names: str) -> dict[str, str]:
    """Names of tensors by the path of attributes, from lines that begin with the path."""
    rows = (line.split(maxsplit=1) for line in names.strip().splitlines())
    return {path: " ".join(stored.split()) for path, stored in rows}


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
"""Llama's names, and those of the parts that it lacks."""


def require(config: Config, key: str, *allowed: Any) -> Any:
    """The value of a key. Raises UnsupportedModel if it is neither absent nor allowed."""
    value = config.get(key)
    if value is not None and value not in allowed:
        expected = " or ".join(map(str, allowed))
        raise UnsupportedModel(f"config.json: {key}: expected {expected}, got {value}")
    return value


def with_keys(config: Config, names: Mapping[str, str], **defaults: Any) -> Config:
    """The configuration with further keys: names: of keys, by the usual ones that they stand for;
    defaults: of absent keys."""
    found = {usual: config.get(name) for usual, name in names.items()}
    given = {usual: value for usual, value in found.items() if value is not None}
    return ChainMap(given, cast(Any, config), defaults)


def with_values(config: Config, **values: Any) -> Config:
    """The configuration with these values, whichever it has itself."""
    return ChainMap(values, cast(Any, config))


def values_of_layer(config: Config, index: int) -> Mapping[str, Any]:
    """What `per_layer_config`, whose keys are numbers or their digits, has for a layer."""
    by_layer = config.get("per_layer_config") or {}
    found: Mapping[str, Any] = by_layer.get(str(index)) or by_layer.get(index) or {}
    return found


def head_dim_of(config: Config, default: int | None = None) -> int:
    """Elements of a head. default: where `config.json` does not say it; None: those of the hidden
    size, divided by the heads."""
    own = default or config["hidden_size"] // config["num_attention_heads"]
    return int(config.get("head_dim") or own)


def rotary_of(
    config: Config,
    head_dim: int,
    parameters: Mapping[str, Any] | None = None,
    *,
    theta: float = 10000.0,
    partial: float | None = None,
) -> RotarySettings:
    """The rotary embedding of heads of this size.

    parameters: those of a type of layers; None: those of `config.json`. theta, partial: defaults;
    partial is None for families that rotate whole heads. Raises NotNative for other scaling types,
    and for another part of heads in such a family.
    """
    if parameters is not None:
        length = config["max_position_embeddings"]
        config = {"max_position_embeddings": length, "rope_parameters": parameters}
    found = RotarySettings.from_config(config, head_dim, theta)
    if found.scaling_type not in SCALING_TYPES:
        raise NotNative(f"rope_type {found.scaling_type}")
    factor = float(found.parameters.get("partial_rotary_factor", partial or 1.0))
    if found.scaling_type == PROPORTIONAL:
        factor = 1.0  # the others have a frequency of 0
    if partial is None and factor != 1.0:
        raise NotNative("partial_rotary_factor")
    return replace(found, rotary_dim=int(head_dim * factor))


def rotaries_by_type(
    config: Config, head_dim: int, thetas: Mapping[str, float], partial: float | None = None
) -> dict[str, RotarySettings]:
    """The rotary embedding of each type of layers. thetas: their defaults; partial: as for
    `rotary_of`.

    Older checkpoints have one `rope_theta` and `rope_scaling` for layers with full attention, and
    `rope_local_base_freq` for the others.
    """
    stored = dict(config.get("rope_parameters") or {})
    if stored and not all(isinstance(value, Mapping) for value in stored.values()):
        raise NotNative("rope_parameters of all layers")
    if not stored:
        full = {"rope_theta": config.get("rope_theta") or thetas[FULL]}
        local = config.get("rope_local_base_freq") or thetas[SLIDING]
        stored = {FULL: full | (config.get("rope_scaling") or {}), SLIDING: {"rope_theta": local}}
    return {
        kind: rotary_of(config, head_dim, stored.get(kind) or {}, theta=theta, partial=partial)
        for kind, theta in thetas.items()
    }


def unrotated(rotary: RotarySettings) -> RotarySettings:
    """An embedding of the same positions that rotates nothing, for layers without RoPE whose heads
    have norms, which the kernel of RoPE computes."""
    return RotarySettings(
        rotary_dim=2,
        theta=1.0,
        scaling_type=NO_ROTATION,
        max_position_embeddings=rotary.max_model_len(),
    )


def every(config: Config, period: int) -> list[str]:
    """Types of layers where the last of each period has full attention."""
    layers = range(1, config["num_hidden_layers"] + 1)
    return [SLIDING if layer % period else FULL for layer in layers]


def gated_mlp(config: Config, **others: Any) -> MLPSpec:
    """A gated MLP with the usual keys. others: further fields, or other values."""
    usual = {
        "inner_size": config["intermediate_size"],
        "activation": config.get("hidden_act", "silu"),
        "bias": bool(config.get("mlp_bias", False)),
    }
    return MLPSpec(**usual | others)


def layer_types(
    config: Config,
    default: Sequence[Any],
    allowed: Sequence[str] = (SLIDING, FULL),
    key: str = "layer_types",
) -> list[str]:
    """The type of each layer. Raises UnsupportedModel for other types, or another number."""
    num_layers, (*others, last) = config["num_hidden_layers"], allowed
    kinds = list(config.get(key) or default)
    if len(kinds) != num_layers or not set(kinds) <= {*allowed}:
        raise UnsupportedModel(
            f"config.json: {key}: expected {', '.join(others)} or {last} for each of"
            f" {num_layers} layers, got {', '.join(map(str, kinds))}"
        )
    return kinds


def have_experts(config: Config, num_dense: int) -> list[bool]:
    """Whether each layer has experts, not an MLP. num_dense: first layers that have an MLP by
    default. Raises UnsupportedModel for other types in `mlp_layer_types`, or another number."""
    layers = range(config["num_hidden_layers"])
    default = ["dense" if layer < num_dense else "sparse" for layer in layers]
    kinds = layer_types(config, default, ("dense", "sparse"), "mlp_layer_types")
    return [kind == "sparse" for kind in kinds]


def attention_of(
    config: Config, head_dim: int, rotary: RotarySettings | None, **others: Any
) -> AttentionSpec:
    """Attention with the usual keys. others: further fields, or other values. Raises
    UnsupportedModel if more of a head is rotated than there is, or nothing."""
    if rotary is not None and not 2 <= rotary.rotary_dim <= head_dim:
        raise UnsupportedModel(
            f"config.json: partial_rotary_factor: expected 2 to {head_dim} elements of a head to be"
            f" rotated, got {rotary.rotary_dim}"
        )
    num_heads = config["num_attention_heads"]
    usual = {
        "num_heads": num_heads,
        "num_kv_heads": config.get("num_key_value_heads") or num_heads,
        "head_dim": head_dim,
        "scale": head_dim**-0.5,
        "rotary": rotary,
    }
    return AttentionSpec(**usual | others)


def biases_of(config: Config, *, default: bool = False) -> dict[str, Any]:
    """Fields of attention of which all products have biases, or none."""
    has_biases = bool(config.get("attention_bias", default))
    return {"qkv_bias": has_biases, "output_bias": has_biases}


def decoder_of(
    config: Config, layers: Sequence[LayerSpec], norm: NormSpec, **others: Any
) -> DecoderSettings:
    """A decoder with the usual keys. norm: that after the last layer; others: further fields, or
    other values."""
    mixers = [layer.attention for layer in layers if layer.attention is not None]
    rotary = next((mixer.rotary for mixer in mixers if mixer.rotary), None)
    if "max_model_len" not in others:  # some have no keys from which it follows
        length = config["max_position_embeddings"] if rotary is None else rotary.max_model_len()
        others["max_model_len"] = length
    usual = {
        "architecture": config["architectures"][0],
        "vocab_size": config["vocab_size"],
        "hidden_size": config["hidden_size"],
        "embedding_size": config["hidden_size"],
        "num_layers": len(layers),
        "tie_word_embeddings": bool(config.get("tie_word_embeddings", False)),
        "layers": tuple(layers),
        "final_norm": norm,
    }
    return DecoderSettings(**usual | others)


def mixture_of(config: Config, **others: Any) -> ExpertsSpec:
    """Experts with the usual activation. others: further fields, also of `Routing`, or other
    values. Raises UnsupportedModel for impossible numbers."""
    numbers = {name: others.pop(name) for name in _OF_ROUTING & others.keys()}
    try:
        routing = Routing(**numbers)
    except ValueError as error:
        raise UnsupportedModel(f"config.json: experts: {error}") from error
    usual = {"routing": routing, "activation": config.get("hidden_act", "silu")}
    return ExpertsSpec(**usual | others)


def grouped(
    config: Config, *, normalizes: bool = True, scale: float = 1.0, groups: tuple[int, int] = (1, 1)
) -> dict[str, Any]:
    """Fields of experts that are chosen as in DeepSeek-V3: by the sigmoid of their scores, among
    those of the best groups. The arguments are defaults; groups: of all, and of the best."""
    return {
        "scoring": "sigmoid",
        "normalizes": bool(config.get("norm_topk_prob", normalizes)),
        "epsilon": 1e-20,
        "scale": float(config.get("routed_scaling_factor", scale)),
        "num_groups": config.get("n_group", groups[0]),
        "num_chosen_groups": config.get("topk_group", groups[1]),
        "num_best": 2,
    }
