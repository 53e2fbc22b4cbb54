"""Native models by the name of their architecture."""

from collections.abc import Callable, Mapping
from typing import Any

from pagewire_kernels.select import Kernels
from worker_service.errors import BadCheckpoint, InvalidOption, UnsupportedModel
from worker_service.models.gpt import GPT2Model, OPTModel, gpt2_settings, opt_settings
from worker_service.models.interface import ModelContext
from worker_service.models.layers import ACTIVATIONS
from worker_service.models.llama import LlamaModel, llama_settings
from worker_service.models.native import ModelSettings, NativeModel
from worker_service.models.pooling import facts_of

ReadSettings = Callable[[Mapping[str, Any]], ModelSettings | None]
"""Reads settings from the content of `config.json`; None for an unsupported variant."""

NATIVE_MODELS: dict[str, tuple[ReadSettings, type[NativeModel]]] = {
    "LlamaForCausalLM": (llama_settings, LlamaModel),
    "MistralForCausalLM": (llama_settings, LlamaModel),
    "Qwen2ForCausalLM": (llama_settings, LlamaModel),
    "Qwen3ForCausalLM": (llama_settings, LlamaModel),
    "OPTForCausalLM": (opt_settings, OPTModel),
    "GPT2LMHeadModel": (gpt2_settings, GPT2Model),
}
"""Native models by the class name in `config.json`."""


def native_settings(config: Mapping[str, Any]) -> ModelSettings | None:
    """The settings of a native model; None if there is none for it.

    config: content of `config.json`. Raises BadCheckpoint if a key is missing.
    """
    architecture = (config.get("architectures") or [""])[0]
    if architecture not in NATIVE_MODELS:
        return None
    read_settings, _ = NATIVE_MODELS[architecture]
    try:
        settings = read_settings(config)
    except KeyError as error:
        raise BadCheckpoint(f"config.json: {architecture} needs the key {error}") from error
    if config.get("is_causal", True) is False:
        raise UnsupportedModel(
            "config.json: is_causal: expected true, since only decoders are supported, got false"
        )
    if settings is None or settings.activation not in ACTIVATIONS:
        return None
    return settings


_OTHER_SETTINGS = (
    *("attention_multiplier", "embedding_multiplier", "residual_multiplier", "logits_scaling"),
    *("logit_scale", "attn_logit_softcapping", "final_logit_softcapping", "query_pre_attn_scalar"),
    *("clip_qkv", "use_qk_norm", "alibi", "no_rope_layers", "attention_chunk_size", "num_experts"),
    *("num_local_experts", "parallel_attn", "use_parallel_residual", "num_kv_shared_layers"),
    *("sliding_window", "layer_types", "auto_map"),
)
"""Settings of other models, or of models' own code, that change what a model computes."""

_READ_SETTINGS = {
    "MistralForCausalLM": ("sliding_window",),
    "Qwen2ForCausalLM": ("sliding_window", "layer_types"),
    "Qwen3ForCausalLM": ("sliding_window", "layer_types"),
}
"""Those of `_OTHER_SETTINGS` that a native model has."""


def ignored_settings(config: Mapping[str, Any]) -> dict[str, Any]:
    """Settings in `config.json` that would change what a model computes, but that the model of this
    name does not have, here and in `transformers`. config: as for `native_settings`."""
    read = _READ_SETTINGS.get(config["architectures"][0], ())
    found = {key: config.get(key) for key in _OTHER_SETTINGS if key not in read}
    if set(config.get("layer_types") or ()) <= {"full_attention"}:
        found.pop("layer_types", None)
    if "AutoModelForCausalLM" not in (config.get("auto_map") or ()):
        found.pop("auto_map")
    return {key: value for key, value in found.items() if value and value != 1}


def build_native_model(
    config: Mapping[str, Any],
    max_model_len: int | None,
    context: ModelContext,
    kernels: Kernels,
) -> NativeModel | None:
    """Build a native model, whose weights are filled later; None if there is none for it.

    config: content of `config.json`; max_model_len: None for the model's own limit. Raises
    BadCheckpoint if a key is missing, InvalidOption if `max_model_len` exceeds the limit.
    """
    settings = native_settings(config)
    if settings is None:
        return None
    _, model = NATIVE_MODELS[config["architectures"][0]]
    length = limit_model_len(max_model_len, settings.max_model_len)
    built = model(settings, length, context, kernels)
    built.pooling = facts_of(config, settings.hidden_size, model.default_pooling)
    return built


def limit_model_len(requested: int | None, limit: int) -> int:
    """Return the requested length, or the model's own limit. Raises InvalidOption beyond it."""
    if requested is not None and requested > limit:
        raise InvalidOption(f"max_model_len: the model's limit is {limit}, got {requested}")
    return requested or limit
