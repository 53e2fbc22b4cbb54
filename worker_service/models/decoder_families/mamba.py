"""Mamba, Falcon-Mamba and Mamba-2: layers of one part, a selective state space."""

from math import ceil
from typing import Any

from worker_service.errors import UnsupportedModel
from worker_service.models.decoder.specs import DecoderSettings, LayerSpec
from worker_service.models.decoder_families.common import (
    Config,
    by_lines,
    decoder_of,
    require,
    with_keys,
)
from worker_service.models.layers.norms import NormSpec
from worker_service.models.mixers.mamba import Mamba1Spec, Mamba2Spec

MAMBA1_NAMES = by_lines("""
attention.inputs          mamba.in_proj
attention.convolution     mamba.conv1d
attention.selection       mamba.x_proj
attention.time_step       mamba.dt_proj
attention.time_step_bias  mamba.dt_proj.bias
attention.decay           mamba.A_log
attention.skip            mamba.D
attention.output          mamba.out_proj
""")

MAMBA2_NAMES = by_lines("""
attention.inputs          mamba.in_proj
attention.convolution     mamba.conv1d
attention.time_step_bias  mamba.dt_bias
attention.decay           mamba.A_log
attention.skip            mamba.D
attention.norm            mamba.norm.weight
attention.output          mamba.out_proj
""")

_UNBOUNDED = 1 << 20
"""Positions of models that keep nothing but a state."""


def as_mixer(names: dict[str, str]) -> dict[str, str]:
    """Names of the part of a layer of one part."""
    mixer = {path: name.replace("mamba.", "mixer.", 1) for path, name in names.items()}
    return mixer | {"attention_norm": "norm"}


def mamba_settings(config: Config) -> DecoderSettings:
    """Mamba, and Falcon-Mamba, which has norms without weights before the recurrence."""
    is_falcon = config["architectures"][0] == "FalconMambaForCausalLM"
    config = with_keys(config, {}, hidden_size=768, num_hidden_layers=32, vocab_size=50280)
    norm = NormSpec(eps=config.get("mixer_rms_eps", 1e-6)) if is_falcon else None
    part = mamba1_of(
        config,
        num_channels=config.get("intermediate_size"),
        state_size=config.get("state_size", 16),
        time_step_rank=config.get("time_step_rank", "auto"),
        width=config.get("conv_kernel", 4),
        expand=config.get("expand", 2),
        convolution_bias=bool(config.get("use_conv_bias", True)),
        bias=bool(config.get("use_bias", False)),
        norm=norm,
        has_norm_weights=False,
    )
    return _decoder(config, part, as_mixer(MAMBA1_NAMES), is_tied=True)


def mamba2_settings(config: Config) -> DecoderSettings:
    """Mamba-2."""
    config = with_keys(config, {}, hidden_size=4096, num_hidden_layers=64, vocab_size=32768)
    bias, norm = bool(config.get("use_bias", False)), config.get("layer_norm_epsilon", 1e-5)
    part = mamba2_of(
        config,
        num_heads=config.get("num_heads", 128),
        head_dim=config.get("head_dim", 64),
        num_groups=config.get("n_groups", 8),
        state_size=config.get("state_size", 128),
        width=config.get("conv_kernel", 4),
        convolution_bias=bool(config.get("use_conv_bias", True)),
        bias=bias,
        output_bias=bias,
        norm=NormSpec(eps=norm),
    )
    return _decoder(config, part, as_mixer(MAMBA2_NAMES), is_tied=False)


def _decoder(
    config: Config, part: Mamba1Spec | Mamba2Spec, names: dict[str, str], *, is_tied: bool
) -> DecoderSettings:
    norm = NormSpec(eps=config.get("layer_norm_epsilon", 1e-5))
    layer = LayerSpec(attention=part, feed_forward=None, norm=norm, names=names)
    return decoder_of(
        config,
        [layer] * config["num_hidden_layers"],
        norm,
        max_model_len=config.get("max_position_embeddings") or _UNBOUNDED,
        tie_word_embeddings=bool(config.get("tie_word_embeddings", is_tied)),
    )


def mamba1_of(
    config: Config,
    *,
    time_step_rank: int | str,
    expand: float,
    num_channels: int | None = None,
    **fields: Any,
) -> Mamba1Spec:
    """Mamba of the hidden size. time_step_rank: "auto" for a 16th of the hidden size;
    num_channels: None for `expand` times the hidden size."""
    require(config, "hidden_act", "silu")
    size = config["hidden_size"]
    rank = ceil(size / 16) if time_step_rank == "auto" else time_step_rank
    channels = num_channels or int(expand * size)
    return Mamba1Spec(num_channels=channels, time_step_rank=int(rank), **fields)


def mamba2_of(config: Config, **fields: Any) -> Mamba2Spec:
    """Mamba-2 with `time_step_limit`. Raises UnsupportedModel for limits that are not two numbers,
    and for other groups than divide the heads."""
    require(config, "hidden_act", "silu")
    limits = [float(limit) for limit in config.get("time_step_limit") or (0.0, float("inf"))]
    if len(limits) != 2 or not 0 <= limits[0] <= limits[1]:
        raise UnsupportedModel(
            f"config.json: time_step_limit: expected two ascending numbers of at least 0, got"
            f" {limits}"
        )
    num_heads, num_groups = fields["num_heads"], fields["num_groups"]
    if num_heads % num_groups:
        raise UnsupportedModel(
            f"config.json: Mamba's groups: expected a divisor of {num_heads} heads, got"
            f" {num_groups}"
        )
    return Mamba2Spec(time_step_limits=(limits[0], limits[1]), **fields)
