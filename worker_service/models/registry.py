"""From an architecture's name to a model."""

from collections.abc import Callable, Mapping
from typing import Any

from pagewire_kernels.select import Kernels
from worker_service.errors import BadCheckpoint, InvalidOption
from worker_service.models.gpt2 import GPT2Model, gpt2_settings
from worker_service.models.interface import ModelContext
from worker_service.models.layers import ACTIVATIONS
from worker_service.models.llama import LlamaModel, llama_settings
from worker_service.models.native import NativeModel
from worker_service.models.opt import OPTModel, opt_settings
from worker_service.models.rotary import SCALING_TYPES

Builder = Callable[[Mapping[str, Any], int | None, ModelContext, Kernels], NativeModel | None]


def build_native_model(
    config: Mapping[str, Any],
    max_model_len: int | None,
    context: ModelContext,
    kernels: Kernels,
) -> NativeModel | None:
    """A model in our own code with weights yet to be filled in; None if there is none for it.

    config: the content of `config.json`. max_model_len: None takes the model's own limit.
    """
    architecture = (config.get("architectures") or [""])[0]
    builder = NATIVE_MODELS.get(architecture)
    if builder is None:
        return None
    try:
        return builder(config, max_model_len, context, kernels)
    except KeyError as error:
        raise BadCheckpoint(f"config.json: {architecture} needs the key {error}") from error


def limit_model_len(asked: int | None, limit: int) -> int:
    """The length to serve: as asked for, or the model's own limit."""
    if asked is not None and asked > limit:
        raise InvalidOption(f"max_model_len: the model's limit is {limit}, got {asked}")
    return asked or limit


def _build_llama(
    config: Mapping[str, Any],
    max_model_len: int | None,
    context: ModelContext,
    kernels: Kernels,
) -> NativeModel | None:
    settings = llama_settings(config)
    known = settings.activation in ACTIVATIONS and settings.rotary.scaling_type in SCALING_TYPES
    if not known or settings.rotary.parameters.get("partial_rotary_factor", 1.0) != 1.0:
        return None
    length = limit_model_len(max_model_len, settings.rotary.max_model_len())
    return LlamaModel(settings, length, context, kernels)


def _build_opt(
    config: Mapping[str, Any],
    max_model_len: int | None,
    context: ModelContext,
    kernels: Kernels,
) -> NativeModel | None:
    settings = opt_settings(config)
    if settings.activation not in ACTIVATIONS:
        return None
    length = limit_model_len(max_model_len, settings.max_positions)
    return OPTModel(settings, length, context, kernels)


def _build_gpt2(
    config: Mapping[str, Any],
    max_model_len: int | None,
    context: ModelContext,
    kernels: Kernels,
) -> NativeModel | None:
    settings = gpt2_settings(config)
    if settings.activation not in ACTIVATIONS:
        return None
    length = limit_model_len(max_model_len, settings.max_positions)
    return GPT2Model(settings, length, context, kernels)


NATIVE_MODELS: dict[str, Builder] = {
    "LlamaForCausalLM": _build_llama,
    "MistralForCausalLM": _build_llama,
    "Qwen2ForCausalLM": _build_llama,
    "Qwen3ForCausalLM": _build_llama,
    "OPTForCausalLM": _build_opt,
    "GPT2LMHeadModel": _build_gpt2,
}
"""By the class name in `config.json`. A builder returns None for a variant it does not know; it is
then served as every other model is."""
