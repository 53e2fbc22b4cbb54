"""What the attention interface cannot carry, or paged attention cannot do: refused by name."""

import sys
from collections.abc import Iterator
from typing import Any

from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from worker_service.errors import UnsupportedModel

_ALIBI_TYPES = ("bloom", "mpt")
_LAYER_TYPES = ("full_attention", "sliding_attention", "attention")
_LAYER_TYPE_NAMES = {
    "chunked_attention": "chunked attention",
    "linear_attention": "linear attention or a state space",
    "mamba": "state-space layers",
    "mamba2": "state-space layers",
    "recurrent": "recurrent layers",
    "conv": "convolution layers",
}


def refuse_by_config(architecture: str, config: Any) -> None:
    """Raise UnsupportedModel if the configuration tells of a feature we do not have.

    architecture: the class name in `config.json`; config: its `transformers` configuration.
    """
    for feature in _features(architecture, config):
        raise UnsupportedModel(f"{architecture} cannot be served: {feature}")


def _features(architecture: str, config: Any) -> Iterator[str]:
    if getattr(config, "is_encoder_decoder", False):
        yield "it is an encoder-decoder model; only decoder-only models are"
    if architecture.endswith("ForConditionalGeneration"):
        yield "it is a multimodal model; only text models are"
    if config.model_type in _ALIBI_TYPES or getattr(config, "alibi", False):
        yield "it uses ALiBi position biases"
    if architecture not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values() and not _is_remote(config):
        yield "transformers has no causal language model of this name"
    yield from _layer_features(config)
    for parameters in _rope_parameters(config):
        if parameters.get("rope_type") == "dynamic":
            yield "its dynamic rotary scaling depends on what else is in the batch"
    if getattr(config, "num_kv_shared_layers", 0):
        yield "its layers share keys and values with each other"


def _layer_features(config: Any) -> Iterator[str]:
    for kind in getattr(config, "layer_types", None) or ():
        if kind not in _LAYER_TYPES:
            yield f"it has {_LAYER_TYPE_NAMES.get(kind, f'layers of type {kind}')}"
    if getattr(config, "attention_chunk_size", None):
        yield "it has chunked attention"


def _rope_parameters(config: Any) -> list[dict[str, Any]]:
    """The rotary settings, of which some models have one set per type of layer."""
    parameters = getattr(config, "rope_parameters", None) or {}
    nested = [value for value in parameters.values() if isinstance(value, dict)]
    return nested or [parameters]


def _is_remote(config: Any) -> bool:
    return not type(config).__module__.startswith("transformers.")


def refuse_by_class(model_class: type) -> None:
    """Raise UnsupportedModel if a model's code does not attend through the interface."""
    name = model_class.__name__
    if getattr(model_class, "_is_stateful", False):
        raise UnsupportedModel(f"{name} cannot be served: it keeps a recurrent state")
    module = sys.modules[model_class.__module__]
    if not hasattr(module, "ALL_ATTENTION_FUNCTIONS"):
        raise UnsupportedModel(
            f"{name} cannot be served: its code does not use transformers' attention interface"
        )
