"""Loading through `transformers`; models with features that paged attention lacks are refused."""

import copy
import logging
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, TypeAlias

import torch
import transformers
from torch import nn
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    PreTrainedConfig,
)
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_MASKED_LM_MAPPING_NAMES,
)
from transformers.utils import logging as transformers_logging

from pagewire_kernels.select import Kernels
from worker_service.errors import BadCheckpoint, InvalidOption, UnsupportedModel
from worker_service.models.encoders.families import FAMILIES
from worker_service.models.interface import ModelContext
from worker_service.models.layers.rotary import RotarySettings
from worker_service.models.registry import limit_model_len
from worker_service.models.transformers_backend.model import (
    NAME,
    AttentionState,
    TransformersModel,
    attach,
)
from worker_service.models.transformers_backend.packed import Packing, Read

logger = logging.getLogger(__name__)


_ALIBI_TYPES = ("bloom", "mpt")
_ENCODER_TYPES = (*MODEL_FOR_MASKED_LM_MAPPING_NAMES, "bert-generation")
"""Types of models that are text encoders unless `is_decoder` says otherwise."""

_LAYER_TYPES = ("full_attention", "sliding_attention", "attention")
_LAYER_TYPE_NAMES = {
    "linear_attention": "linear attention or a state space",
    "mamba": "state-space layers",
    "mamba2": "state-space layers",
    "recurrent": "recurrent layers",
    "conv": "convolution layers",
    "indexed_attention": "sparse attention, whose tokens an indexer chooses",
    "minimax_m3_sparse": "sparse attention, whose blocks an indexer chooses",
    "compressed_sparse_attention": "sparse attention over compressed keys and values",
    "heavily_compressed_attention": "attention over compressed keys and values",
}


_NEEDED_SIZES = ("vocab_size", "hidden_size", "num_hidden_layers")
"""Sizes that every configuration of a single decoder has, under these names or others."""

_HARMLESS = re.compile(r"inv_freq$|position_ids$|(cos|sin)_cached$|masked_bias$")
"""Tensors that models compute themselves."""

_MAX_NAMES = 8
"""Maximum number of tensors named in the log."""


def generator_of(architecture: str) -> tuple[str, str] | None:
    """The generator with the layers of a decoder without an LM head, such as Gemma3ForCausalLM of
    Gemma3TextModel, and the name of the decoder in it; None if the library has none."""
    name = architecture.removesuffix("Model")
    generator = name.removesuffix("Text") + "ForCausalLM"
    if name == architecture or generator not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values():
        return None
    return generator, getattr(transformers, generator).base_model_prefix


def refuse_by_config(architecture: str, config: Any) -> None:
    """Raise UnsupportedModel if the configuration has an unsupported feature.

    architecture: the class name in `config.json`; config: its `transformers` configuration.
    """
    for feature in _features(architecture, config):
        raise UnsupportedModel(f"{architecture} cannot be served: {feature}")


def _features(architecture: str, config: Any) -> Iterator[str]:
    if getattr(config, "is_encoder_decoder", False):
        yield "it is an encoder-decoder model; only decoder-only models are"
    if architecture.endswith("ForConditionalGeneration"):
        text = config.get_text_config().model_type
        yield f"it is a multimodal model, whose text model, {text}, cannot be served alone"
    has_generator = architecture in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values()
    is_encoder = config.model_type in _ENCODER_TYPES
    if is_encoder and not getattr(config, "is_decoder", has_generator):
        yield f"it is a text encoder; supported families of these are {', '.join(FAMILIES)}"
    if not getattr(config, "is_causal", True):
        yield "its attention is not causal (is_causal in config.json is false)"
    if config.model_type in _ALIBI_TYPES or getattr(config, "alibi", False):
        yield "it uses ALiBi position biases"
    is_remote = not type(config).__module__.startswith("transformers.")
    if architecture.endswith("Classification"):
        yield "labels are computed of encoders, and of decoders, that have our own layers"
    if not has_generator and not is_remote:
        yield "transformers has no causal language model of this name"
    if has_generator and not is_remote and type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        yield f"transformers builds no causal language model of a {config.model_type} alone"
    yield from _layer_features(config)
    for parameters in _rope_parameters(config):
        if parameters.get("rope_type") == "dynamic":
            yield "its dynamic rotary scaling depends on what else is in the batch"
    if getattr(config, "num_kv_shared_layers", 0):
        yield "its layers share keys and values with each other"
    for size in _NEEDED_SIZES:
        if not hasattr(config.get_text_config(), size):
            yield f"its configuration has no {size}, since it is not one decoder"


def _layer_features(config: Any) -> Iterator[str]:
    for kind in getattr(config, "layer_types", None) or ():
        if kind not in _LAYER_TYPES:
            yield f"it has {_LAYER_TYPE_NAMES.get(kind, f'layers of type {kind}')}"


def _rope_parameters(config: Any) -> list[dict[str, Any]]:
    """The rotary settings; some models have a set for each type of layer."""
    parameters = getattr(config, "rope_parameters", None) or {}
    nested = [value for value in parameters.values() if isinstance(value, dict)]
    return nested or [parameters]


def refuse_by_class(model_class: type) -> None:
    """Raise UnsupportedModel if a model's code bypasses the attention interface."""
    name = model_class.__name__
    if getattr(model_class, "_is_stateful", False):
        raise UnsupportedModel(f"{name} cannot be served: it keeps a recurrent state")
    module = sys.modules[model_class.__module__]
    if not hasattr(module, "ALL_ATTENTION_FUNCTIONS"):
        raise UnsupportedModel(
            f"{name} cannot be served: its code does not use transformers' attention interface"
        )


_PINNED = "pinned"
"""No type that `transformers` knows, so that no forward pass updates the factors."""


def pin_long_rotary(model: Any, config: Any, max_model_len: int) -> None:
    """Choose LongRoPE's factors once: the long ones if sequences may exceed the trained length.

    `transformers` chooses at each forward pass by the longest sequence in the batch, which would
    make one request's tokens depend on another's, and discards a sequence's cache when it grows
    past the trained length. Limit `max_model_len` to that length for the short factors.
    """
    for module in model.modules():
        rope_type = getattr(module, "rope_type", None)
        if rope_type == "longrope":
            _pin(module, config, config.rope_parameters, max_model_len)
            module.rope_type = _PINNED
        elif isinstance(rope_type, dict):
            for layer_type in (key for key, value in rope_type.items() if value == "longrope"):
                parameters = config.rope_parameters[layer_type]
                _pin(module, config, parameters, max_model_len, layer_type)
                rope_type[layer_type] = _PINNED


def _pin(
    module: Any, config: Any, parameters: Any, max_model_len: int, layer_type: str | None = None
) -> None:
    """layer_type: that of the layers whose factors these are; None: all layers have the same."""
    trained = int(parameters["original_max_position_embeddings"])
    initialise, prefix = ROPE_INIT_FUNCTIONS["longrope"], f"{layer_type}_" if layer_type else ""
    place = getattr(module, f"{prefix}inv_freq").device
    inv_freq, scaling = initialise(config, place, seq_len=max_model_len, layer_type=layer_type)
    setattr(module, f"{prefix}inv_freq", inv_freq)
    setattr(module, f"{prefix}attention_scaling", scaling)
    kind = "long" if max_model_len > trained else "short"
    logger.info("rotary factors chosen kind=%s trained_length=%d", kind, trained)


_DUMMY_RANGE = 0.05

EditConfig: TypeAlias = Callable[[Mapping[str, Any]], dict[str, Any]]


def build_transformers_model(
    model_dir: Path,
    hf_config: Mapping[str, Any],
    *,
    max_model_len: int | None,
    context: ModelContext,
    kernels: Kernels,
    dummy_weights: bool,
    trust_remote_code: bool,
    tensors: Mapping[str, Any],
    source: Path,
    reader: Callable[[Mapping[str, str]], AbstractContextManager[Read]],
    edit_config: EditConfig | None = None,
) -> TransformersModel:
    """Build the model in `model_dir` through `transformers`.

    hf_config: content of `config.json`; max_model_len: None for the model's own limit; tensors: of
    the checkpoint by name, read when they are indexed; source: their file or folder, named in
    errors; reader: opens the checkpoint for reading one tensor at a time, given the formats to
    which tensors will be quantized, by name; edit_config: replaces keys of `config.json`, as was
    done in `hf_config`.

    Raises UnsupportedModel, naming the feature, if paged attention does not support it;
    BadCheckpoint or InvalidOption.
    """
    architecture = hf_config["architectures"][0]
    config = _read_config(model_dir, hf_config, edit_config, trust_remote_code)
    refuse_by_config(architecture, config)
    state = AttentionState(kernels)
    attach(nn.Module(), state)  # registers the function's name, which loading looks up
    outline = _outline(config, trust_remote_code)
    refuse_by_class(type(outline))
    text_config = config.get_text_config()
    length = _model_len(max_model_len, text_config)
    packing = Packing(outline, context)
    try:
        if dummy_weights:
            causal_lm = _make_dummy(config, context, trust_remote_code)
        else:
            causal_lm = _load(type(outline), source, config, context, packing, tensors)
    except KeyError as error:
        if error.args != (NAME,):
            raise
        raise UnsupportedModel(
            f"{architecture} cannot be served: its code has a table of attention classes in place"
            " of transformers' attention interface"
        ) from error
    causal_lm = causal_lm.eval().to(context.device)
    with reader(packing.roundings()) as read:
        packing.fill(causal_lm, read)
    pin_long_rotary(causal_lm, text_config, length)
    num_parameters = sum(parameter.numel() for parameter in outline.parameters())
    return TransformersModel(
        causal_lm, state, architecture, length, context, num_parameters, packing.tables
    )


def _read_config(
    model_dir: Path,
    hf_config: Mapping[str, Any],
    edit_config: EditConfig | None,
    trust_remote_code: bool,
) -> Any:
    try:
        if model_dir.is_file():  # a GGUF file, which `hf_config` was read from
            config = AutoConfig.for_model(**copy.deepcopy(dict(hf_config)))
        else:
            config = _read_file(model_dir, edit_config, trust_remote_code)
            if hf_config["architectures"] != config.architectures:  # of a multimodal model
                config = config.get_text_config()
                config.architectures = hf_config["architectures"]
                config.tie_word_embeddings = hf_config["tie_word_embeddings"]
    except (ValueError, OSError, TypeError, KeyError) as error:
        reason = str(error).strip().splitlines()[0]
        raise UnsupportedModel(
            f"{hf_config['architectures'][0]} cannot be served: transformers does not know it:"
            f" {reason}"
        ) from error
    except Exception as error:  # the library's own for values of another kind, by field
        raise BadCheckpoint(f"config.json: {' '.join(str(error).split())}") from error
    if hasattr(config, "quantization_config"):  # the tensors are dequantized by our loader
        del config.quantization_config
    return config


def _read_file(model_dir: Path, edit: EditConfig | None, trust_remote_code: bool) -> Any:
    if edit is None:
        return AutoConfig.from_pretrained(model_dir, trust_remote_code=trust_remote_code)
    stored, _ = PreTrainedConfig.get_config_dict(model_dir)
    if trust_remote_code and "auto_map" in stored:
        raise InvalidOption("hf_overrides: expected none for a configuration that is code")
    return AutoConfig.for_model(**edit(stored))


def _model_len(requested: int | None, config: Any) -> int:
    limit = getattr(config, "max_position_embeddings", None)
    if limit is None:
        if requested is None:
            raise InvalidOption("max_model_len: config.json has no limit, so one must be given")
        return requested
    parameters = getattr(config, "rope_parameters", None) or {}
    described = {"max_position_embeddings": limit, "rope_parameters": parameters}
    return limit_model_len(requested, RotarySettings.from_config(described, 0).max_model_len())


def _load(
    model_class: Any,
    source: Path,
    config: Any,
    context: ModelContext,
    packing: Packing,
    tensors: Mapping[str, Any],
) -> Any:
    """Load the model without the weights that `packing` takes."""
    remaining = packing.plan(tensors, source)

    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        model_class.__init__(self, *args, **kwargs)
        packing.remove_weights(self)

    members = {"__init__": __init__, "__module__": model_class.__module__}
    packing_class: Any = type(model_class.__name__, (model_class,), members)
    transformers_logging.disable_progress_bar()
    try:
        causal_lm, info = packing_class.from_pretrained(
            None,
            state_dict=remaining,
            config=config,
            dtype=context.dtype,
            attn_implementation=NAME,
            use_safetensors=True,
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # they are reported below, by name
        )
    except (RuntimeError, OSError) as error:
        raise BadCheckpoint(f"{source} cannot be loaded: {error}") from error
    # GPTQ tools add all-zero biases to layers without one.
    biases = {name for name in tensors if name.endswith(".bias")}
    unexpected = [
        name
        for name in info["unexpected_keys"]
        if not name.startswith("mtp.") and (name not in biases or tensors[name][...].any())
    ]
    # Only generation needs what is beside the decoder, the LM head.
    needed = "" if context.generates else f"{causal_lm.base_model_prefix}."
    faults = {
        "missing tensors": [name for name in info["missing_keys"] if name.startswith(needed)],
        "unexpected tensors": unexpected,
        "misshapen tensors": info["mismatched_keys"],
    }
    found = [
        f"{kind}: {', '.join(sorted(map(str, names)))}" for kind, names in faults.items() if names
    ]
    if found:
        raise BadCheckpoint(
            f"{source}: weights do not fit {type(causal_lm).__name__}: {'; '.join(found)}"
        )
    unused = [name for name in packing.unused - biases if not _HARMLESS.search(name)]
    if unused:  # those that the model's class makes the library ignore
        first = ", ".join(sorted(unused)[:_MAX_NAMES])
        logger.warning("tensors not used num=%d names=%s", len(unused), first)
    return causal_lm


def _make_dummy(config: Any, context: ModelContext, trust_remote_code: bool) -> Any:
    """Build the model with small random weights, the same in every run."""
    causal_lm = AutoModelForCausalLM.from_config(
        config, dtype=context.dtype, attn_implementation=NAME, trust_remote_code=trust_remote_code
    )
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in causal_lm.parameters():
            if parameter.dim() > 1:
                values = torch.empty(parameter.shape)
                parameter.copy_(values.uniform_(-_DUMMY_RANGE, _DUMMY_RANGE, generator=generator))
    return causal_lm


def _outline(config: Any, trust_remote_code: bool) -> Any:
    """Build the model on the meta device."""
    try:
        with torch.device("meta"):
            return AutoModelForCausalLM.from_config(config, trust_remote_code=trust_remote_code)
    except Exception as error:  # whatever a model's own code makes of its configuration
        raise UnsupportedModel(
            f"{config.architectures[0]} cannot be served: transformers cannot build it:"
            f" {type(error).__name__}: {error}"
        ) from error
