"""Granite and HyperCLOVA X: multipliers of embeddings, attention scores, the residual stream and
logits; with an MLP or experts, and with windows and sinks (`…SWA`)."""

from collections.abc import Mapping, Sequence

from worker_service.models.decoder.specs import (
    DecoderSettings,
    FeedForwardSpec,
    LayerSpec,
    NormPlace,
)
from worker_service.models.decoder_families.common import (
    FULL,
    NAMES,
    SLIDING,
    Config,
    NotNative,
    attention_of,
    biases_of,
    by_lines,
    decoder_of,
    gated_mlp,
    head_dim_of,
    layer_types,
    mixture_of,
    rotary_of,
    with_keys,
    with_values,
)
from worker_service.models.decoder_families.mixtures import MIXTRAL_NAMES
from worker_service.models.feed_forward.experts import ExpertsSpec, ExpertStorage, SharedSpec
from worker_service.models.layers.norms import NormSpec
from worker_service.models.layers.rotary import RotarySettings
from worker_service.models.mixers.attention import AttentionSpec

EXPERT_NAMES = by_lines("""
feed_forward.router   block_sparse_moe.router.layer
feed_forward.experts  block_sparse_moe.input_linear.weight block_sparse_moe.output_linear.weight
""")

_MOE_SWA_NAMES = MIXTRAL_NAMES | by_lines("""
feed_forward.router   block_sparse_moe.router
feed_forward.experts  block_sparse_moe.experts.gate_up_proj block_sparse_moe.experts.down_proj
""")

SHARED_NAMES = by_lines("""
feed_forward.shared.up    shared_mlp.input_linear
feed_forward.shared.down  shared_mlp.output_linear
""")

_POST_NORMS = by_lines("""
attention_output_norm     post_norm1
feed_forward_output_norm  post_norm2
""")


def granite_settings(config: Config) -> DecoderSettings:
    """Granite."""
    return _decoder(config, _attentions(config), gated_mlp(config), NAMES)


def granite_swa_settings(config: Config) -> DecoderSettings:
    """Granite with windows."""
    config = with_keys(config, {}, rms_norm_eps=1e-5, tie_word_embeddings=True)
    return _decoder(config, _windowed(config), gated_mlp(config), NAMES)


def hyperclovax_settings(config: Config) -> DecoderSettings:
    """HyperCLOVA X: norms of the output of each part, too, and multiplied logits."""
    has_norms = config.get("use_post_norm", True)
    scale = config.get("attention_multiplier") or head_dim_of(config) ** -0.5
    return _decoder(
        config,
        _attentions(with_values(config, attention_multiplier=scale)),
        gated_mlp(config),
        NAMES | _POST_NORMS if has_norms else NAMES,
        logits_scale=float(config.get("logits_scaling", 1.0)),
    )


def granite_moe_settings(config: Config) -> DecoderSettings:
    """Granite-MoE, where tensors have the weights of all experts, except in GGUF files."""
    is_separate = config.get("has_expert_modules", False)
    storage = ExpertStorage.SEPARATE if is_separate else ExpertStorage.STACK
    names = MIXTRAL_NAMES if is_separate else MIXTRAL_NAMES | EXPERT_NAMES
    return _decoder(config, _attentions(config), granite_experts(config, storage), names)


def granite_moe_shared_settings(config: Config) -> DecoderSettings:
    """Granite-MoE with shared experts."""
    experts = granite_experts(config, ExpertStorage.STACK, _shared(config))
    return _decoder(config, _attentions(config), experts, MIXTRAL_NAMES | EXPERT_NAMES)


def granite_moe_swa_settings(config: Config) -> DecoderSettings:
    """Granite-MoE with windows, and possibly shared experts."""
    experts = granite_experts(config, ExpertStorage.STACK, _shared(config))
    return _decoder(config, _windowed(config), experts, _MOE_SWA_NAMES)


def _attentions(config: Config) -> list[AttentionSpec]:
    """The same in all layers."""
    attention = _attention(config, rotary_of(config, head_dim_of(config)))
    return [attention] * config["num_hidden_layers"]


def _windowed(config: Config) -> list[AttentionSpec]:
    """Those of layers with sinks, of which some have a window; each has a base of RoPE, or 0 for
    none."""
    num_layers, head_dim = config["num_hidden_layers"], head_dim_of(config)
    kinds = layer_types(config, [SLIDING if i % 4 else FULL for i in range(num_layers)])
    window, rotary = config.get("sliding_window", 128), rotary_of(config, head_dim)
    thetas = config.get("layer_rope_theta") or [rotary.theta] * num_layers
    stored = config.get("rope_scaling") or config.get("rope_parameters") or {}
    if not any(thetas):
        raise NotNative("layer_rope_theta of 0 in all layers")
    return [
        _attention(
            config,
            rotary_of(config, head_dim, {**stored, "rope_theta": theta}) if theta else None,
            window=window if kind == SLIDING else None,
            has_sinks=True,
        )
        for kind, theta in zip(kinds, thetas, strict=True)
    ]


def _attention(
    config: Config,
    rotary: RotarySettings | None,
    *,
    window: int | None = None,
    has_sinks: bool = False,
) -> AttentionSpec:
    return attention_of(
        config,
        head_dim_of(config),
        rotary,
        scale=config.get("attention_multiplier", 1.0),
        window=window,
        has_sinks=has_sinks,
        **biases_of(config),
    )


def _shared(config: Config) -> SharedSpec | None:
    size = config.get("shared_intermediate_size", 0)
    return SharedSpec(inner_size=size, is_fused=True) if size else None


def granite_experts(
    config: Config, storage: ExpertStorage, shared: SharedSpec | None = None
) -> ExpertsSpec:
    """The experts of a layer, of which the chosen ones' scores add up to one."""
    return mixture_of(
        config,
        num_experts=config.get("num_local_experts", 8),
        num_chosen=config.get("num_experts_per_tok", 2),
        scoring="softmax_of_chosen",
        inner_size=config["intermediate_size"],
        shared=shared,
        storage=storage,
    )


def _decoder(
    config: Config,
    attentions: Sequence[AttentionSpec],
    feed_forward: FeedForwardSpec,
    names: Mapping[str, str],
    **others: float,
) -> DecoderSettings:
    """attentions: those of all layers; others: as for `decoder_of`."""
    norm = NormSpec(eps=config.get("rms_norm_eps", 1e-6))
    if attentions[0].has_sinks:
        names = {**names, "attention.sinks": "self_attn.sinks"}
    if isinstance(feed_forward, ExpertsSpec) and feed_forward.shared is not None:
        names = {**names, **SHARED_NAMES}
    has_output_norms = "attention_output_norm" in names
    layers = [
        LayerSpec(
            attention=attention,
            feed_forward=feed_forward,
            norm=norm,
            norm_place=NormPlace.AROUND if has_output_norms else NormPlace.BEFORE,
            residual_multiplier=config.get("residual_multiplier", 1.0),
            names=names,
        )
        for attention in attentions
    ]
    numbers = {
        "embedding_scale": config.get("embedding_multiplier", 1.0),
        "logits_scale": 1.0 / config.get("logits_scaling", 1.0),
    }
    return decoder_of(config, layers, norm, scales_virtual_tokens=True, **numbers | others)
