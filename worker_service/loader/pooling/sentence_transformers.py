"""The files of sentence-transformers: `modules.json`, and what the modules that it lists store.

Modules are a transformer, then usually a pooling, dense layers and a normalization. What a module
computes that is not known here is an error that names it, since vectors would be others.
"""

import logging
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from worker_service.errors import BadCheckpoint, UnsupportedModel
from worker_service.gguf.header import is_gguf
from worker_service.loader.files.assets import transformer_settings
from worker_service.loader.files.config import MAX_SIZE
from worker_service.loader.files.json_files import read_json, read_json_list
from worker_service.loader.gguf.encoders import DENSE_LAYERS
from worker_service.loader.gguf.file import open_gguf
from worker_service.models.pooling import ACTIVATIONS, class_name, label_activation
from worker_service.plan import PoolingType
from worker_service.pooling_facts import PoolingFacts, Similarity

logger = logging.getLogger(__name__)

MODULES = "modules.json"
_SETTINGS = "config_sentence_transformers.json"
_TOKENIZER = "tokenizer_config.json"

_MODES = {"cls": PoolingType.CLS, "mean": PoolingType.MEAN, "lasttoken": PoolingType.LAST}
"""By the name of a mode of pooling."""
_MODE_PREFIX = "pooling_mode_"

_SIMILARITIES = {kind.name.lower().replace("_", ""): kind for kind in Similarity}

_PROMPT_KEYS = {"query_prefix": "query", "document_prefix": "document"}
"""PyLate's prefixes, by the names of prompts."""
_PYLATE_KEYS = {
    *("query_length", "document_length", "do_query_expansion", "attend_to_expansion_tokens"),
    "skiplist_words",
}
_OTHER_KEYS = {
    *("__version__", "model_type", "prompts", "default_prompt_name", "similarity_fn_name"),
    "activation_fn",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class DenseSettings:
    """A dense layer: its folder and its shape."""

    file: Path
    """The file of its tensors: safetensors, or the GGUF file of the model."""
    name: str = "linear"
    """Of the layer in that file."""
    in_features: int
    out_features: int
    bias: bool
    activation: str
    """One of `ACTIVATIONS`."""


def read_modules(
    model_dir: Path, facts: PoolingFacts
) -> tuple[PoolingFacts, tuple[DenseSettings, ...]]:
    """What the files of a model say beyond `facts`, those of its configuration; its dense layers.

    Raises UnsupportedModel or BadCheckpoint, naming the file and the key.
    """
    if is_gguf(model_dir):
        return _with_layers_of_gguf(model_dir, facts)
    file = model_dir / MODULES
    if not file.is_file():
        return facts, ()
    if facts.labels:  # a CrossEncoder
        return _with_settings(facts, model_dir), ()
    # Without a pooling every token has a vector, as in PyLate's models, which normalize them.
    facts = replace(facts, default_type=PoolingType.ALL, normalize=False)
    layers: list[DenseSettings] = []
    is_pooled = False
    for module in read_json_list(file):
        kind, folder = class_name(str(module.get("type"))), model_dir / str(module.get("path"))
        facts = replace(facts, normalize=False) if kind == "Dense" else facts
        if kind == "Pooling":
            is_pooled = True
            facts = replace(facts, default_type=_pooling_type(folder, model_dir))
        elif kind == "Dense":
            layers.append(_dense(folder, layers[-1].out_features if layers else facts.vector_size))
        elif kind == "Normalize":
            facts = replace(facts, normalize=True)
        elif kind not in ("Transformer", "Dropout"):
            raise UnsupportedModel(
                f"{file}: expected modules Transformer, Pooling, Dense, Normalize and Dropout, got"
                f" {module.get('type')}"
            )
    facts = replace(facts, vector_size=layers[-1].out_features if layers else facts.vector_size)
    if not is_pooled:
        facts = replace(facts, normalize=True, similarity=Similarity.MAX_SIM)
    return _with_settings(facts, model_dir), tuple(layers)


def _with_layers_of_gguf(
    file: Path, facts: PoolingFacts
) -> tuple[PoolingFacts, tuple[DenseSettings, ...]]:
    """The dense layers, without biases and activations, that llama.cpp's converter adds to a file
    with `--sentence-transformers-dense-modules`."""
    tensors, layers, size = open_gguf(file).tensors, [], facts.vector_size
    for name in DENSE_LAYERS if size else ():
        if (weight := tensors.get(f"{name}.weight")) is None:
            continue
        if len(weight.shape) != 2 or weight.shape[1] != size:
            raise BadCheckpoint(
                f"{file}: {name}.weight: expected {size} columns, got {weight.shape}"
            )
        layer = DenseSettings(
            file=file,
            name=name,
            in_features=size,
            out_features=weight.shape[0],
            bias=False,
            activation="Identity",
        )
        layers.append(layer)
        size = layer.out_features
    return replace(facts, vector_size=size), tuple(layers)


def _pooling_type(folder: Path, model_dir: Path) -> PoolingType:
    file = folder / "config.json"
    config = read_json(file)
    found = config.get("pooling_mode")  # newer versions name it, older ones have a flag for each
    modes = list(map(str, found)) if isinstance(found, list) else [str(found)] if found else []
    for key, value in config.items():
        if key.startswith(_MODE_PREFIX) and value:
            mode = key.removeprefix(_MODE_PREFIX)
            modes.append(mode.removesuffix("_token").removesuffix("_tokens"))
    if len(modes) != 1 or modes[0] not in _MODES:
        raise UnsupportedModel(
            f"{file}: expected one mode of pooling of {', '.join(_MODES)}, got"
            f" {' and '.join(modes) or 'none'}"
        )
    kind = _MODES[modes[0]]
    leaves_prompts_out = config.get("include_prompt", True) is False and kind is PoolingType.MEAN
    if leaves_prompts_out and any(_prompts(model_dir).values()):
        raise UnsupportedModel(
            f"{file}: include_prompt: expected true, since the tokens of prompts are pooled"
            " with those of texts, got false"
        )
    return kind


def _dense(folder: Path, num_inputs: int) -> DenseSettings:
    file = folder / "config.json"
    config = read_json(file)
    activation = class_name(str(config.get("activation_function") or "torch.nn.Tanh"))
    if activation not in ACTIVATIONS:
        raise UnsupportedModel(
            f"{file}: activation_function: expected one of {', '.join(ACTIVATIONS)}, got"
            f" {config['activation_function']}"
        )
    if config.get("use_residual"):
        raise UnsupportedModel(f"{file}: use_residual: expected false, got true")
    if config.get("in_features") != num_inputs:
        got = config.get("in_features")
        raise BadCheckpoint(f"{file}: in_features: expected {num_inputs}, got {got}")
    size = config.get("out_features")
    if type(size) is not int or not 0 < size < MAX_SIZE:
        raise BadCheckpoint(f"{file}: out_features: expected a positive number, got {size!r}")
    return DenseSettings(
        file=folder / "model.safetensors",
        in_features=num_inputs,
        out_features=size,
        bias=bool(config.get("bias", True)),
        activation=activation,
    )


def _settings(model_dir: Path) -> dict[str, Any]:
    file = model_dir / _SETTINGS
    return read_json(file) if file.is_file() else {}


def _prompts(model_dir: Path) -> dict[str, str]:
    """The texts of prompts by their names. Raises BadCheckpoint."""
    settings, file = _settings(model_dir), model_dir / _SETTINGS
    prompts = settings.get("prompts") or {}
    if not isinstance(prompts, dict):
        raise BadCheckpoint(f"{file}: prompts: expected an object, got {prompts!r}")
    prompts = {name: text for name, text in prompts.items() if text is not None}
    prompts |= {name: settings[key] for key, name in _PROMPT_KEYS.items() if settings.get(key)}
    for name, text in prompts.items():
        if not isinstance(text, str):
            raise BadCheckpoint(f"{file}: the prompt {name}: expected a text, got {text!r}")
    return prompts


def _with_settings(facts: PoolingFacts, model_dir: Path) -> PoolingFacts:
    """With prompts, similarity, the activation of labels, and the length of texts."""
    file, settings = model_dir / _SETTINGS, _settings(model_dir)
    prompts = _prompts(model_dir)
    default = settings.get("default_prompt_name")
    if default is not None and default not in [*prompts]:
        known = ", ".join(prompts) or "null"
        raise BadCheckpoint(f"{file}: default_prompt_name: expected one of {known}, got {default}")
    similarity = settings.get("similarity_fn_name")
    if similarity is not None:
        kind = _SIMILARITIES.get(str(similarity).lower().replace("_", ""))
        if kind is None:
            raise UnsupportedModel(
                f"{file}: similarity_fn_name: expected one of {', '.join(_SIMILARITIES)}, got"
                f" {similarity}"
            )
        facts = replace(facts, similarity=kind)
    if activation := settings.get("activation_fn"):
        activation = label_activation(f"{file}: activation_fn", activation)
        facts = replace(facts, label_activation=activation)
    for key in settings.keys() - _OTHER_KEYS - _PROMPT_KEYS.keys():
        if settings[key] or key not in _PYLATE_KEYS:
            logger.warning("%s: %s is not used: %s", file, key, settings[key])
    key, length = "max_seq_length", transformer_settings(model_dir).get("max_seq_length")
    if not length and (tokenizer := model_dir / _TOKENIZER).is_file():  # as newer versions store it
        key, length = "model_max_length", read_json(tokenizer).get("model_max_length")
    if type(length or 0) not in (int, float) or (length or 0) < 0:
        raise BadCheckpoint(f"{model_dir}: {key}: expected a number of tokens, got {length!r}")
    return replace(
        facts,
        prompts=tuple(prompts.items()),
        default_prompt_name=default,
        max_text_tokens=int(length or 0),
    )
