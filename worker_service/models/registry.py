"""Native models by the name of their architecture."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass, replace
from typing import Any, get_args

from pagewire_kernels.select import Kernels
from worker_service.errors import BadCheckpoint, InvalidOption, UnsupportedModel
from worker_service.models.decoder.model import DecoderModel
from worker_service.models.decoder_families import DECODERS
from worker_service.models.decoder_families.common import NotNative
from worker_service.models.encoders.encoder import EncoderModel
from worker_service.models.encoders.families import ENCODERS, encoder_settings
from worker_service.models.interface import ModelContext
from worker_service.models.layers.activations import ACTIVATIONS
from worker_service.models.layers.rotary import MAX_POSITIONS
from worker_service.models.native import ModelSettings, NativeModel
from worker_service.models.pooling import facts_of
from worker_service.pooling_facts import PoolingFacts

ReadSettings = Callable[[Mapping[str, Any]], ModelSettings]
"""Reads settings from the content of `config.json`. Raises NotNative for a variant that the layers
do not compute."""

NATIVE_MODELS: dict[str, tuple[ReadSettings, type[NativeModel]]] = {
    **{name: (read, DecoderModel) for name, read in DECODERS.items()},
    **dict.fromkeys(ENCODERS, (encoder_settings, EncoderModel)),
}
"""Native models by the class name in `config.json`."""


_GENERATORS = ("ForCausalLM", "LMHeadModel", "ForConditionalGeneration", "GenerationDecoder")
"""Ends of the names of architectures that generate."""

_POOLERS = ("ForSequenceClassification", "ForTokenClassification", "Model")
"""Ends of the names of architectures of the same layers that do not."""

_WITH_CLASSIFIER = ("Bloom", "Falcon", "GPT2", "GPTNeoX", "Mpt")
"""Families whose classifiers of tokens have a `classifier`, where others have a `score`."""

STORED_NAME = "stored_architecture"
"""The key of the class name in `config.json`, where that of the generator replaced it."""


def stored_name(config: Mapping[str, Any]) -> str:
    """The class name in `config.json`."""
    return str(config.get(STORED_NAME) or config["architectures"][0])


def generates(config: Mapping[str, Any]) -> bool:
    """Whether a model with this configuration generates tokens."""
    is_remote = "AutoModelForCausalLM" in (config.get("auto_map") or ())
    return is_remote or stored_name(config).endswith(_GENERATORS)


def with_generator(config: dict[str, Any]) -> dict[str, Any]:
    """The configuration with the name of the native generator that has the same layers, if it names
    a decoder without an LM head; other configurations are returned unchanged."""
    name = stored_name(config)
    for end in _POOLERS if name not in NATIVE_MODELS else ():
        for generator in _GENERATORS[:2]:
            native = name.removesuffix(end).removesuffix("Text") + generator
            if name.endswith(end) and native in NATIVE_MODELS:
                return {**config, "architectures": [native], STORED_NAME: name}
    return config


def native_settings(config: Mapping[str, Any]) -> ModelSettings | None:
    """The settings of a native model; None if there is none for it.

    config: content of `config.json`. Raises BadCheckpoint if a key is missing.
    """
    try:
        return _settings_of(config)
    except NotNative:
        return None


def variant_of(config: Mapping[str, Any]) -> str | None:
    """What the layers of a native model do not compute of a configuration; None if no native model
    has its class name. To be called where `native_settings` returned None."""
    try:
        _settings_of(config)
    except NotNative as variant:
        return str(variant)
    return None


def _settings_of(config: Mapping[str, Any]) -> ModelSettings | None:
    """As `native_settings`. Raises NotNative for a variant that the layers do not compute."""
    architecture = (config.get("architectures") or [""])[0]
    if architecture not in NATIVE_MODELS:
        return None
    read_settings, model = NATIVE_MODELS[architecture]
    keys = _Keys(config)
    try:
        settings = read_settings(keys)
    except KeyError as error:
        raise BadCheckpoint(f"config.json: {architecture} needs the key {error}") from error
    except (TypeError, ValueError, ArithmeticError, AttributeError, IndexError) as error:
        raise BadCheckpoint(
            f"config.json: {architecture}: a value cannot be used: {error}{_zeros(keys, error)}"
        ) from error
    _require_numbers(settings)
    if model.generates and config.get("is_causal", True) is False:
        raise UnsupportedModel(
            "config.json: is_causal: expected true, since only decoders are supported, got false"
        )
    if others := settings.activations - ACTIVATIONS.keys():
        raise NotNative(f"activation {', '.join(sorted(others))}")
    if not model.generates:
        return settings
    of_tokens = ("classifier_from_token", "is_original_qwen3_reranker")
    if any(map(config.get, of_tokens)):  # its labels are rows of the LM head
        return settings
    labels, name = pooling_facts(config, PoolingFacts()).labels, stored_name(config)
    labels_tokens = name.endswith("ForTokenClassification")
    has_classifier = labels_tokens and name.startswith(_WITH_CLASSIFIER)
    return replace(
        settings,
        num_labels=len(labels),
        label_layer="classifier" if has_classifier else "score",
        has_label_bias=labels_tokens,
    )


def _zeros(keys: "_Keys", error: Exception) -> str:
    """The keys that were read whose numbers are 0, of an error of arithmetic."""
    if not isinstance(error, ArithmeticError):
        return ""
    values = {key: keys.get(key) for key in sorted(keys.read)}
    found = [key for key, value in values.items() if type(value) is int and value == 0]
    return f"; 0 are: {', '.join(found)}" if found else ""


_SIZES = (
    "_size",
    "head_dim",
    "num_heads",
    "_kv_heads",
    "_key_heads",
    "_value_heads",
    "num_channels",
    "key_dim",
    "value_dim",
)
"""Ends of the names of fields that are sizes of tensors."""


def _require_numbers(settings: Any, place: str = "") -> None:
    """Raise BadCheckpoint if a field of settings, or of a part of them, that is a number or names
    an activation has another value, which `config.json` gives it, or is a size below 1."""
    for field in fields(settings):
        value, name = getattr(settings, field.name), f"{place}{field.name}"
        kinds = get_args(field.type) or (field.type,)
        if is_dataclass(value):
            _require_numbers(value, f"{name}.")
        elif field.name == "activation" and not isinstance(value, str | None):
            raise BadCheckpoint(f"config.json: {name}: expected a name, got {value!r}")
        elif isinstance(value, tuple):
            for part in {id(part): part for part in value if is_dataclass(part)}.values():
                _require_numbers(part, f"{name}.")
        elif {int, float} & {*kinds}:
            _require_number(value, name, kinds)


def _require_number(value: Any, name: str, kinds: Sequence[Any]) -> None:
    allowed = (*kinds, int) if float in kinds else kinds
    if type(value) not in allowed or value != value:  # NaN
        raise BadCheckpoint(f"config.json: {name}: expected a number, got {value!r}")
    if name.endswith(_SIZES) and value is not None and value < 1:
        raise BadCheckpoint(f"config.json: {name}: expected at least 1, got {value}")


def pooling_facts(
    config: Mapping[str, Any], default: PoolingFacts, hidden_size: int = 0
) -> PoolingFacts:
    """What a model pools according to its `config.json`; see `facts_of`."""
    return facts_of(stored_name(config), config, hidden_size, default)


_OTHER_SETTINGS = (
    *("attention_multiplier", "embedding_multiplier", "residual_multiplier", "logits_scaling"),
    *("logit_scale", "attn_logit_softcapping", "final_logit_softcapping", "query_pre_attn_scalar"),
    *("clip_qkv", "use_qk_norm", "alibi", "no_rope_layers", "attention_chunk_size", "num_experts"),
    *("num_local_experts", "parallel_attn", "use_parallel_residual", "num_kv_shared_layers"),
    *("sliding_window", "layer_types", "auto_map"),
)
"""Settings of other models, or of models' own code, that change what a model computes."""


class _Keys(Mapping[str, Any]):
    """A configuration that records the keys that are read."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        self._config = config
        self.read: set[str] = set()

    def __getitem__(self, key: str) -> Any:
        self.read.add(key)
        return self._config[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._config)

    def __len__(self) -> int:
        return len(self._config)


def ignored_settings(config: Mapping[str, Any]) -> dict[str, Any]:
    """Settings in `config.json` that would change what a model computes, but that the model of this
    name does not have, here and in `transformers`. config: as for `native_settings`."""
    keys = _Keys(config)
    native_settings(keys)
    found = {key: config.get(key) for key in _OTHER_SETTINGS if key not in keys.read}
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
    built.architecture = stored_name(config)
    built.pooling = pooling_facts(config, built.default_pooling, settings.hidden_size)
    return built


def limit_model_len(requested: int | None, limit: int) -> int:
    """Return the requested length, or the model's own limit. Raises InvalidOption beyond it, and
    for a length whose positions cannot be computed."""
    if requested is not None and requested > limit:
        raise InvalidOption(f"max_model_len: the model's limit is {limit}, got {requested}")
    length = requested or limit
    if length > MAX_POSITIONS:
        source = "" if requested else ", the model's own limit; set a lower one"
        raise InvalidOption(
            f"max_model_len: expected at most {MAX_POSITIONS}, got {length}{source}"
        )
    return length
