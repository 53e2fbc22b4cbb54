"""Gemma 4: experts beside the MLP, norms of values, too, heads of other sizes in layers with full
attention, keys that are values before their norms, layers that share keys and values, and
embeddings of each layer."""

from collections.abc import Mapping, Sequence
from typing import Any

from worker_service.errors import UnsupportedModel
from worker_service.models.decoder.per_layer import PerLayerSpec
from worker_service.models.decoder.specs import (
    DecoderSettings,
    FeedForwardSpec,
    LayerSpec,
    NormPlace,
)
from worker_service.models.decoder_families.common import (
    FULL,
    SLIDING,
    Config,
    NotNative,
    attention_of,
    biases_of,
    by_lines,
    decoder_of,
    every,
    layer_types,
    mixture_of,
    require,
    rotary_of,
    values_of_layer,
    with_values,
)
from worker_service.models.decoder_families.gemma import NAMES_AROUND
from worker_service.models.feed_forward.dense_and_experts import DenseAndExpertsSpec
from worker_service.models.feed_forward.experts import ExpertStorage
from worker_service.models.feed_forward.mlp import MLPSpec
from worker_service.models.layers.norms import NormSpec
from worker_service.models.mixers.attention import AttentionSpec

_NAMES = {**NAMES_AROUND, "scalar": "layer_scalar"}
_BESIDE_EXPERTS = by_lines("""
feed_forward.dense_norm           pre_feedforward_layernorm
feed_forward.dense.up             mlp.gate_proj mlp.up_proj
feed_forward.dense.down           mlp.down_proj
feed_forward.dense_output_norm    post_feedforward_layernorm_1
feed_forward.router_norm          router.scale
feed_forward.experts_norm         pre_feedforward_layernorm_2
feed_forward.experts.router       router.proj
feed_forward.experts.factors      router.per_expert_scale
feed_forward.experts.experts      experts.gate_up_proj experts.down_proj
feed_forward.experts_output_norm  post_feedforward_layernorm_2
""")
_MODULES = " ".join(f"experts.*.{name}_proj" for name in ("gate", "up", "down"))
"""Names of experts with modules of their own, as in GGUF files."""

_OF_DENSE = ("feed_forward_norm", "feed_forward.up", "feed_forward.down")
PER_LAYER = by_lines("""
per_layer.gate        per_layer_input_gate
per_layer.projection  per_layer_projection
per_layer.norm        post_per_layer_input_norm
""")
_K_IS_V = {"attention.qkv": "self_attn.q_proj self_attn.k_proj self_attn.k_proj"}
SHARES = {"attention.qkv": "self_attn.q_proj"}
_ROPE: Mapping[str, Mapping[str, Any]] = {
    SLIDING: {"rope_type": "default", "rope_theta": 10_000.0},
    FULL: {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1e6},
}


def gemma4_settings(config: Config) -> DecoderSettings:
    """The text model of Gemma 4."""
    if config.get("use_bidirectional_attention") == "all":
        raise NotNative("use_bidirectional_attention")
    norm = NormSpec(eps=config.get("rms_norm_eps", 1e-6))
    kinds = layer_types(config, every(config, 6))
    kinds[-1] = FULL
    sources = shared_sources(config, kinds)
    attentions = [
        _attention(config, index, kind, norm, source)
        for index, (kind, source) in enumerate(zip(kinds, sources, strict=True))
    ]
    per_layer, has_experts = _per_layer(config, norm), bool(config.get("enable_moe_block", False))
    layers = [
        LayerSpec(
            attention=attention,
            feed_forward=_feed_forward(config, norm, source, has_experts=has_experts),
            norm=norm,
            norms_feed_forward=not has_experts,
            norm_place=NormPlace.AROUND,
            names=_names(config, kind, source, per_layer, has_experts=has_experts),
            per_layer=per_layer,
            has_scalar=True,
        )
        for attention, kind, source in zip(attentions, kinds, sources, strict=True)
    ]
    return decoder_of(
        config,
        layers,
        norm,
        max_model_len=config["max_position_embeddings"],
        tie_word_embeddings=config.get("tie_word_embeddings", True),
        embedding_scale=config["hidden_size"] ** 0.5,
        logits_soft_cap=config.get("final_logit_softcapping"),
        per_layer=per_layer,
    )


def gemma4_unified_settings(config: Config) -> DecoderSettings:
    """Gemma 4 without embeddings of layers and experts."""
    return gemma4_settings(
        with_values(config, hidden_size_per_layer_input=0, enable_moe_block=False)
    )


def _k_is_v(config: Config, kind: str) -> bool:
    return kind == FULL and bool(config.get("attention_k_eq_v", False))


def _names(
    config: Config,
    kind: str,
    source: int | None,
    per_layer: PerLayerSpec | None,
    *,
    has_experts: bool,
) -> dict[str, str]:
    names = _NAMES if per_layer is None else _NAMES | PER_LAYER
    if has_experts:
        names = {path: name for path, name in names.items() if path not in _OF_DENSE}
        names |= _BESIDE_EXPERTS
        if config.get("has_expert_modules"):
            names |= {"feed_forward.experts.experts": _MODULES}
    if source is not None:
        return names | SHARES
    return names | _K_IS_V if _k_is_v(config, kind) else names


def _feed_forward(
    config: Config, norm: NormSpec, source: int | None, *, has_experts: bool
) -> FeedForwardSpec:
    is_wide = config.get("use_double_wide_mlp", False) and source is not None
    activation = config.get("hidden_activation", "gelu_pytorch_tanh")
    inner_size = config["intermediate_size"] * (2 if is_wide else 1)
    dense = MLPSpec(inner_size=inner_size, activation=activation)
    if not has_experts:
        return dense
    experts = mixture_of(
        config,
        num_experts=config["num_experts"],
        num_chosen=config["top_k_experts"],
        normalizes=True,
        inner_size=config["moe_intermediate_size"],
        activation=activation,
        has_factors=True,
        storage=ExpertStorage.SEPARATE if config.get("has_expert_modules") else ExpertStorage.STACK,
    )
    return DenseAndExpertsSpec(dense=dense, experts=experts, norm=norm)


def _attention(
    config: Config, index: int, kind: str, norm: NormSpec, source: int | None
) -> AttentionSpec:
    sizes = {key: config.get(key) for key in ("head_dim", "num_key_value_heads")}
    if config.get("per_layer_config") is not None:
        found = values_of_layer(config, index)
        sizes |= {key: found[key] for key in sizes if found.get(key)}
    elif kind == FULL:
        sizes["head_dim"] = config.get("global_head_dim", 512)
        if _k_is_v(config, kind) and config.get("num_global_key_value_heads"):
            sizes["num_key_value_heads"] = config["num_global_key_value_heads"]
    head_dim = sizes["head_dim"] or 256
    rope = (config.get("rope_parameters") or _ROPE).get(kind) or _ROPE[kind]
    return attention_of(
        config,
        head_dim,
        rotary_of(config, head_dim, rope),
        num_kv_heads=sizes["num_key_value_heads"] or 4,
        scale=1.0,
        window=config.get("sliding_window", 512) if kind == SLIDING else None,
        head_norm=norm,
        norms_values=True,
        source=source,
        **biases_of(config),
    )


def shared_sources(config: Config, kinds: Sequence[str], default: int = 0) -> list[int | None]:
    """Of each layer, the layer whose keys and values it attends to; None: its own. default: number
    of layers that share them."""
    num_shared = config.get("num_kv_shared_layers", default) or 0
    num_own = len(kinds) - num_shared
    last = {kind: index for index, kind in enumerate(kinds[: max(num_own, 0)])}
    if num_own < 1 or not set(kinds) <= last.keys():
        raise UnsupportedModel(
            "config.json: num_kv_shared_layers: expected a layer of every type before those that"
            f" share keys and values, got {num_shared} of {len(kinds)} layers"
        )
    return [None if index < num_own else last[kind] for index, kind in enumerate(kinds)]


def _per_layer(config: Config, norm: NormSpec) -> PerLayerSpec | None:
    size = config.get("hidden_size_per_layer_input", 256)
    if not size:
        return None
    vocab_size = config["vocab_size"]
    require(config, "vocab_size_per_layer_input", vocab_size)
    return PerLayerSpec(
        size=size,
        vocab_size=vocab_size,
        table_size=vocab_size,
        activation=config.get("hidden_activation", "gelu_pytorch_tanh"),
        eps=norm.eps,
    )
