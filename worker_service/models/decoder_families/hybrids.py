"""Hybrids of attention and Mamba: Granite 4, Bamba, Falcon-H1, Nemotron-H and Jamba."""

from collections.abc import Mapping, Sequence
from typing import Any

from worker_service.errors import UnsupportedModel
from worker_service.models.decoder.specs import DecoderSettings, LayerSpec
from worker_service.models.decoder_families.common import (
    FULL,
    NAMES,
    Config,
    NotNative,
    attention_of,
    biases_of,
    by_lines,
    decoder_of,
    gated_mlp,
    grouped,
    head_dim_of,
    mixture_of,
    require,
    rotary_of,
    with_keys,
)
from worker_service.models.decoder_families.granite import (
    EXPERT_NAMES,
    SHARED_NAMES,
    granite_experts,
)
from worker_service.models.decoder_families.mamba import (
    MAMBA1_NAMES,
    MAMBA2_NAMES,
    as_mixer,
    mamba1_of,
    mamba2_of,
)
from worker_service.models.decoder_families.mixtures import MIXTRAL_NAMES
from worker_service.models.feed_forward.experts import ExpertsSpec, ExpertStorage, SharedSpec
from worker_service.models.feed_forward.mlp import MLPSpec
from worker_service.models.layers.norms import NormSpec
from worker_service.models.mixers.mamba import Mamba2Spec, ParallelMixerSpec

_MAMBA = "linear_attention"
"""In `layer_types`."""

_OTHER_TYPES = {"mamba": _MAMBA, "attention": FULL}
"""In older checkpoints."""

_ATTENTION_NAMES = {path: NAMES[path] for path in ("attention.qkv", "attention.output")}

_NORM_NAMES = {path: NAMES[path] for path in ("attention_norm", "feed_forward_norm")}

_MLP_NAMES = by_lines("""
attention_norm     input_layernorm
feed_forward_norm  pre_ff_layernorm
feed_forward.up    feed_forward.gate_proj feed_forward.up_proj
feed_forward.down  feed_forward.down_proj
""")

_GRANITE_MLP_NAMES = _NORM_NAMES | by_lines("""
feed_forward.up    shared_mlp.input_linear
feed_forward.down  shared_mlp.output_linear
""")

_GRANITE_EXPERT_NAMES = _NORM_NAMES | EXPERT_NAMES | SHARED_NAMES

_SEPARATE_MLP = "shared_mlp.gate_proj shared_mlp.up_proj"
_GRANITE_SEPARATE_NAMES = {
    "feed_forward.up": _SEPARATE_MLP,
    "feed_forward.down": "shared_mlp.down_proj",
}
_GRANITE_SEPARATE_EXPERT_NAMES = {
    "feed_forward.router": MIXTRAL_NAMES["feed_forward.router"],
    "feed_forward.experts": MIXTRAL_NAMES["feed_forward.experts"],
    "feed_forward.shared.up": _SEPARATE_MLP,
    "feed_forward.shared.down": "shared_mlp.down_proj",
}
"""Where each projection has a module."""

_NEMOTRON_EXPERT_NAMES = by_lines("""
feed_forward_norm         norm
feed_forward.router       mixer.gate
feed_forward.correction   mixer.gate.e_score_correction_bias
feed_forward.experts      mixer.experts.*.up_proj mixer.experts.*.down_proj
feed_forward.shared.up    mixer.shared_experts.up_proj
feed_forward.shared.down  mixer.shared_experts.down_proj
""")

_NEMOTRON_LATENT_NAMES = {
    "feed_forward.latents.up": "mixer.fc1_latent_proj",
    "feed_forward.latents.down": "mixer.fc2_latent_proj",
}

_JAMBA_NORM_NAMES = by_lines("""
attention.time_step_norm  mamba.dt_layernorm
attention.write_norm      mamba.b_layernorm
attention.read_norm       mamba.c_layernorm
""")

_JAMBA_EXPERT_NAMES = by_lines("""
attention_norm        input_layernorm
feed_forward_norm     pre_ff_layernorm
feed_forward.router   feed_forward.router
""") | {
    "feed_forward.experts": " ".join(
        f"feed_forward.experts.*.{name}_proj" for name in ("gate", "up", "down")
    )
}


def _kinds(config: Config, kinds: Sequence[str], *allowed: str) -> list[str]:
    """The type of each layer. Raises UnsupportedModel for other types, or another number."""
    found = [_OTHER_TYPES.get(kind, kind) for kind in kinds]
    num_layers = config.get("num_hidden_layers") or len(found)
    if len(found) != num_layers or not set(found) <= set(allowed):
        raise UnsupportedModel(
            f"config.json: layer_types: expected {' or '.join(allowed)} for each of {num_layers}"
            f" layers, got {', '.join(map(str, kinds))}"
        )
    return found


def _mamba2(config: Config, norm: NormSpec | None, **others: Any) -> Mamba2Spec:
    """Mamba-2 with the keys of Bamba. others: further fields, or other values."""
    num_heads, inner = config.get("mamba_n_heads", 128), others.pop("num_channels", None)
    inner = inner or int(config.get("mamba_expand", 2) * config["hidden_size"])
    head_dim = config.get("mamba_d_head", "auto")
    head_dim = inner // num_heads if head_dim == "auto" else head_dim
    if head_dim * num_heads != inner:
        raise UnsupportedModel(
            f"config.json: mamba_d_head: expected {inner} elements in {num_heads} heads, got heads"
            f" of {head_dim}"
        )
    bias = bool(config.get("mamba_proj_bias", False))
    fields = {
        "num_heads": num_heads,
        "head_dim": head_dim,
        "num_groups": config.get("mamba_n_groups", 1),
        "state_size": config.get("mamba_d_state", 256),
        "width": config.get("mamba_d_conv", 4),
        "convolution_bias": bool(config.get("mamba_conv_bias", True)),
        "bias": bias,
        "output_bias": bias,
        "norm": norm,
    }
    return mamba2_of(config, **fields | others)


def granite_hybrid_settings(config: Config) -> DecoderSettings:
    """Granite 4: Granite, where most layers have Mamba-2 in place of attention, and experts beside
    an MLP that all rows have, or that MLP alone. Modules are separate in GGUF files."""
    is_separate = config.get("has_separate_modules", False)
    norm, head_dim = NormSpec(eps=config.get("rms_norm_eps", 1e-6)), head_dim_of(config)
    position = config.get("position_embedding_type")
    if position not in (None, "rope", "nope"):
        raise UnsupportedModel(
            f"config.json: position_embedding_type: expected rope or nope, got {position}"
        )
    attention = attention_of(
        config,
        head_dim,
        rotary_of(config, head_dim) if position == "rope" else None,
        scale=config.get("attention_multiplier", 1.0),
        **biases_of(config),
    )
    shared_size = config.get("shared_intermediate_size", 1024)
    feed_forward: MLPSpec | ExpertsSpec
    if config.get("num_local_experts", 8):
        names = _GRANITE_EXPERT_NAMES | (_GRANITE_SEPARATE_EXPERT_NAMES if is_separate else {})
        feed_forward = granite_experts(
            config,
            ExpertStorage.SEPARATE if is_separate else ExpertStorage.STACK,
            SharedSpec(inner_size=shared_size, is_fused=not is_separate),
        )
    else:
        names = _GRANITE_MLP_NAMES | (_GRANITE_SEPARATE_NAMES if is_separate else {})
        activation = config.get("hidden_act", "silu")
        feed_forward = MLPSpec(
            inner_size=shared_size, activation=activation, is_fused=not is_separate
        )
    kinds = config.get("layer_types") or config.get("layers_block_type")
    kinds = kinds or [_MAMBA] * config["num_hidden_layers"]
    mamba = _mamba2(config, norm)
    layers = [
        LayerSpec(
            attention=attention if kind == FULL else mamba,
            feed_forward=feed_forward,
            norm=norm,
            names=names | (_ATTENTION_NAMES if kind == FULL else MAMBA2_NAMES),
            residual_multiplier=config.get("residual_multiplier", 1.0),
        )
        for kind in _kinds(config, kinds, _MAMBA, FULL)
    ]
    return decoder_of(
        with_keys(config, {}, max_position_embeddings=2048),
        layers,
        norm,
        embedding_scale=config.get("embedding_multiplier", 1.0),
        scales_virtual_tokens=True,
        logits_scale=1.0 / config.get("logits_scaling", 1.0),
    )


def bamba_settings(config: Config) -> DecoderSettings:
    """Bamba: Llama, where most layers have Mamba-2 in place of attention, and heads of the others
    are rotated in part."""
    config = with_keys(config, {}, max_position_embeddings=262144, num_key_value_heads=8)
    norm, head_dim = NormSpec(eps=config.get("rms_norm_eps", 1e-5)), head_dim_of(config)
    full = config.get("attn_layer_indices") or ()
    attention = attention_of(
        config,
        head_dim,
        rotary_of(config, head_dim, partial=0.5),
        **biases_of(config),
    )
    mamba = _mamba2(config, norm)
    layers = [
        LayerSpec(
            attention=attention if i in full else mamba,
            feed_forward=gated_mlp(config),
            norm=norm,
            names=_MLP_NAMES | (_ATTENTION_NAMES if i in full else MAMBA2_NAMES),
        )
        for i in range(config["num_hidden_layers"])
    ]
    return decoder_of(config, layers, norm)


def falcon_h1_settings(config: Config) -> DecoderSettings:
    """Falcon-H1: attention and Mamba-2 side by side in each layer, and multipliers everywhere."""
    config = with_keys(config, {}, max_position_embeddings=8192, num_key_value_heads=8)
    norm, head_dim = NormSpec(eps=config.get("rms_norm_eps", 1e-5)), head_dim_of(config)
    attention = attention_of(
        config,
        head_dim,
        rotary_of(config, head_dim),
        scale=head_dim**-0.5 * config.get("key_multiplier", 1.0),
        **biases_of(config),
    )
    has_norm = bool(config.get("mamba_rms_norm", False))
    mamba = _mamba2(
        config,
        norm if has_norm else None,
        num_channels=config.get("mamba_d_ssm", 1024),
        output_bias=bool(config.get("projectors_bias", False)),
        gates_first=not config.get("mamba_norm_before_gate", True),
        input_scale=config.get("ssm_in_multiplier", 1.0),
        input_scales=_multipliers(config, "ssm_multipliers", 5),
        output_scale=config.get("ssm_out_multiplier", 1.0),
    )
    mixer = ParallelMixerSpec(
        attention=attention,
        mamba=mamba,
        input_scale=config.get("attention_in_multiplier", 1.0),
        output_scale=config.get("attention_out_multiplier", 1.0),
    )
    gate_scale, down_scale = _multipliers(config, "mlp_multipliers", 2)
    mlp = gated_mlp(config, gate_scale=gate_scale, output_scale=down_scale)
    of_mixer = _within("attention", _ATTENTION_NAMES) | _within("mamba", MAMBA2_NAMES)
    if not has_norm:
        del of_mixer["attention.mamba.norm"]
    layer = LayerSpec(attention=mixer, feed_forward=mlp, norm=norm, names=_MLP_NAMES | of_mixer)
    return decoder_of(
        config,
        [layer] * config["num_hidden_layers"],
        norm,
        embedding_scale=config.get("embedding_multiplier", 1.0),
        scales_virtual_tokens=None,  # PEFT embeds all tokens of a prompt without the factor
        logits_scale=config.get("lm_head_multiplier", 1.0),
    )


def _multipliers(config: Config, key: str, count: int) -> tuple[float, ...]:
    """The multipliers of a key. Raises UnsupportedModel for another number of them."""
    found = config.get(key) or [1.0] * count
    if len(found) != count:
        raise UnsupportedModel(f"config.json: {key}: expected {count} numbers, got {len(found)}")
    return tuple(map(float, found))


def _within(part: str, names: Mapping[str, str]) -> dict[str, str]:
    """Names of an attribute of `attention`."""
    return {path.replace("attention.", f"attention.{part}.", 1): n for path, n in names.items()}


def nemotron_h_settings(config: Config) -> DecoderSettings:
    """Nemotron-H: layers of one part, Mamba-2, attention without RoPE, or an MLP or experts without
    gates.

    Time steps are at least `time_step_limit` says, as where the models were trained. `transformers`
    raises those of prompts to `time_step_min`, but not those of decoded tokens.
    """
    config = with_keys(config, {}, max_position_embeddings=4096, num_key_value_heads=8)
    letters = {"M": _MAMBA, "*": FULL, "-": "mlp", "E": "moe"}
    pattern = config.get("hybrid_override_pattern") or ""
    kinds = config.get("layers_block_type") or config.get("layer_types")
    kinds = _kinds(
        config, kinds or [letters.get(letter, letter) for letter in pattern], *letters.values()
    )
    if config.get("sliding_window"):
        raise NotNative("sliding_window")
    norm = NormSpec(eps=config.get("layer_norm_epsilon", 1e-5))
    require(config, "mamba_hidden_act", "silu")
    bias = bool(config.get("use_bias", False))
    mamba = mamba2_of(
        config,
        num_heads=config.get("mamba_num_heads", 128),
        head_dim=config.get("mamba_head_dim", 64),
        num_groups=config.get("n_groups", 8),
        state_size=config.get("ssm_state_size", 128),
        width=config.get("conv_kernel", 4),
        convolution_bias=bool(config.get("use_conv_bias", True)),
        bias=bias,
        output_bias=bias,
        norm=norm,
    )
    mlp = MLPSpec(
        inner_size=config["intermediate_size"],
        activation=config.get("mlp_hidden_act", "relu2"),
        is_gated=False,
        bias=bool(config.get("mlp_bias", False)),
    )
    of_attention = by_lines("""
    attention_norm    norm
    attention.qkv     mixer.q_proj mixer.k_proj mixer.v_proj
    attention.output  mixer.o_proj
    """)
    of_mlp = by_lines("""
    feed_forward_norm  norm
    feed_forward.up    mixer.up_proj
    feed_forward.down  mixer.down_proj
    """)
    layers = {
        _MAMBA: LayerSpec(
            attention=mamba, feed_forward=None, norm=norm, names=as_mixer(MAMBA2_NAMES)
        ),
        FULL: LayerSpec(
            attention=attention_of(config, config.get("head_dim", 128), None),
            feed_forward=None,
            norm=norm,
            names=of_attention,
        ),
        "mlp": LayerSpec(attention=None, feed_forward=mlp, norm=norm, names=of_mlp),
    }
    if "moe" in kinds:
        experts = _nemotron_experts(config)
        names = _NEMOTRON_EXPERT_NAMES
        if experts.latent_size is not None:
            names = names | _NEMOTRON_LATENT_NAMES
        layers["moe"] = LayerSpec(attention=None, feed_forward=experts, norm=norm, names=names)
    stack = [layers[kind] for kind in kinds]
    return decoder_of(config, stack, norm, ignores_further_layers=True)


def _nemotron_experts(config: Config) -> ExpertsSpec:
    """Experts that are chosen as in DeepSeek-V3."""
    if config.get("mlp_bias"):
        raise NotNative("mlp_bias with experts")
    return mixture_of(
        config,
        num_experts=config.get("n_routed_experts", 8),
        num_chosen=config.get("num_experts_per_tok", 2),
        **grouped(config),
        inner_size=config.get("moe_intermediate_size", 7688),
        activation=config.get("mlp_hidden_act", "relu2"),
        is_gated=False,
        latent_size=config.get("moe_latent_size"),
        shared=SharedSpec(inner_size=config.get("moe_shared_expert_intermediate_size", 7688)),
        corrects=True,
        has_float_router=True,
    )


def jamba_settings(config: Config) -> DecoderSettings:
    """Jamba: Mamba with norms before its recurrence, attention without RoPE in some layers, and
    experts in some."""
    config = with_keys(config, {}, max_position_embeddings=262144, num_key_value_heads=8)
    norm, activation = NormSpec(eps=config.get("rms_norm_eps", 1e-6)), config.get("hidden_act")
    mamba = mamba1_of(
        config,
        state_size=config.get("mamba_d_state", 16),
        time_step_rank=config.get("mamba_dt_rank", "auto"),
        width=config.get("mamba_d_conv", 4),
        expand=config.get("mamba_expand", 2),
        convolution_bias=bool(config.get("mamba_conv_bias", True)),
        bias=bool(config.get("mamba_proj_bias", False)),
        norm=norm,
    )
    attention = attention_of(config, head_dim_of(config), None)
    num_experts = config.get("num_experts", 16)
    experts = mixture_of(
        config,
        num_experts=num_experts,
        num_chosen=config.get("num_experts_per_tok", 2),
        inner_size=config["intermediate_size"],
        activation=activation or "silu",
    )

    def layer(index: int) -> LayerSpec:
        period, offset = config.get("attn_layer_period", 8), config.get("attn_layer_offset", 4)
        is_attention = index % period == offset
        period, offset = config.get("expert_layer_period", 2), config.get("expert_layer_offset", 1)
        has_experts = num_experts > 1 and index % period == offset
        names = _JAMBA_EXPERT_NAMES if has_experts else _MLP_NAMES
        of_mamba = MAMBA1_NAMES | _JAMBA_NORM_NAMES
        return LayerSpec(
            attention=attention if is_attention else mamba,
            feed_forward=experts if has_experts else gated_mlp(config, bias=False),
            norm=norm,
            names=names | (_ATTENTION_NAMES if is_attention else of_mamba),
        )

    layers = [layer(i) for i in range(config["num_hidden_layers"])]
    return decoder_of(config, layers, norm)
