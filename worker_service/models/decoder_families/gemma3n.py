"""Gemma 3n (text): several residual streams, layers that share keys and values, embeddings of each
layer, and gates of which a few numbers count."""

import math
from collections.abc import Sequence
from typing import Any

import torch

from worker_service.errors import UnsupportedModel
from worker_service.models.decoder.altup import AltUpSpec
from worker_service.models.decoder.per_layer import PerLayerSpec
from worker_service.models.decoder.specs import DecoderSettings, LayerSpec, NormPlace
from worker_service.models.decoder_families.common import (
    SLIDING,
    Config,
    attention_of,
    biases_of,
    by_lines,
    decoder_of,
    every,
    head_dim_of,
    layer_types,
    rotaries_by_type,
)
from worker_service.models.decoder_families.gemma import GELU, NAMES_AROUND, THETAS
from worker_service.models.decoder_families.gemma4 import PER_LAYER, SHARES, shared_sources
from worker_service.models.feed_forward.mlp import MLPSpec
from worker_service.models.layers.norms import NormSpec

_NAMES = NAMES_AROUND | PER_LAYER | by_lines("altup altup laurel")


def gemma3n_settings(config: Config) -> DecoderSettings:
    """The text model of Gemma 3n."""
    norm = NormSpec(eps=config.get("rms_norm_eps", 1e-6))
    kinds = layer_types(config, every(config, 5))
    head_dim, window = head_dim_of(config, 256), config.get("sliding_window", 512)
    rotaries = rotaries_by_type(config, head_dim, THETAS)
    activation = config.get("hidden_activation", GELU)
    per_layer, altup = _per_layer(config, norm, activation), _altup(config, norm)
    default = [0.95] * 10 + [0.0] * (len(kinds) - 10) if len(kinds) > 10 else 0.0
    of_layers = zip(
        kinds,
        shared_sources(config, kinds, default=15),
        _by_layer(config, "intermediate_size", 16384),
        _by_layer(config, "activation_sparsity_pattern", default),
        strict=True,
    )
    layers = [
        LayerSpec(
            attention=attention_of(
                config,
                head_dim,
                rotaries[kind],
                scale=1.0,
                window=window if kind == SLIDING else None,
                head_norm=norm,
                norms_values=True,
                source=source,
                **biases_of(config),
            ),
            feed_forward=MLPSpec(
                inner_size=size, activation=activation, gate_deviations=_deviations(share)
            ),
            norm=norm,
            norm_place=NormPlace.AROUND,
            names=_NAMES if source is None else _NAMES | SHARES,
            per_layer=per_layer,
            altup=altup,
        )
        for kind, source, size, share in of_layers
    ]
    return decoder_of(
        config,
        layers,
        norm,
        max_model_len=config["max_position_embeddings"],
        tie_word_embeddings=config.get("tie_word_embeddings", True),
        embedding_scale=config["hidden_size"] ** 0.5,
        logits_soft_cap=config.get("final_logit_softcapping", 30.0),
        per_layer=per_layer,
        altup=altup,
    )


def _by_layer(config: Config, key: str, default: Any) -> Sequence[Any]:
    """The number of each layer. Raises UnsupportedModel for another count of them."""
    found, num_layers = config.get(key), config["num_hidden_layers"]
    found = default if found is None else found
    found = found if isinstance(found, Sequence) else [found] * num_layers
    if len(found) != num_layers:
        raise UnsupportedModel(
            f"config.json: {key}: expected a number for each of {num_layers} layers, got {found}"
        )
    return found


def _deviations(share: float) -> float | None:
    """Standard deviations above which the numbers of a gate count. share: of those below them in a
    normal distribution, in float32 as in `transformers`."""
    return torch.erfinv(torch.tensor(2 * share - 1)).item() * math.sqrt(2) if share > 0 else None


def _altup(config: Config, norm: NormSpec) -> AltUpSpec:
    num_streams, active = config.get("altup_num_inputs", 4), config.get("altup_active_idx", 0)
    if not 0 <= active < num_streams:
        raise UnsupportedModel(
            f"config.json: altup_active_idx: expected one of {num_streams} streams, got {active}"
        )
    has_scale, rank = config.get("altup_correct_scale", True), config.get("laurel_rank", 64)
    return AltUpSpec(
        num_streams=num_streams, active=active, has_scale=has_scale, laurel_rank=rank, eps=norm.eps
    )


def _per_layer(config: Config, norm: NormSpec, activation: str) -> PerLayerSpec:
    vocab_size, size = config["vocab_size"], config.get("hidden_size_per_layer_input", 256)
    stored = config.get("vocab_size_per_layer_input", vocab_size)
    if type(stored) is int and stored > vocab_size:
        raise UnsupportedModel(
            f"config.json: vocab_size_per_layer_input: expected at most {vocab_size}, got {stored}"
        )
    sizes = {"size": size, "vocab_size": vocab_size, "table_size": stored}
    return PerLayerSpec(activation=activation, eps=norm.eps, **sizes)
