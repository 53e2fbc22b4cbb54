"""Quantized checkpoints, read under the names that their dense weights would have.

A quantized layer is stored as several tensors: codes, scales, zero points, and so on. Here they are
one tensor, `….weight`, which is dequantized when it is read, or read as a `QuantizedWeight`. The
tensors in the files decide which layers are quantized, so that lists of ignored modules are not
needed. Errors in headers and in `quantization_config` are reported before a weight is read.
"""

import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Any

from pagewire_kernels.quantized_weight import Int8Activations
from worker_service.errors import BadCheckpoint, UnsupportedModel
from worker_service.gguf.header import is_gguf
from worker_service.loader.files.json_files import read_json
from worker_service.loader.quantized.formats import (
    FORMATS,
    FP8,
    INT8,
    MXFP4,
    PACKED,
    Format,
    Scheme,
    StoredWeight,
)
from worker_service.loader.tensors import FLOATS, CheckpointTensor, ExpertTensor, StoredTensor

Formats = Mapping[str, Format]
Pattern = re.Pattern[str]
Schemes = tuple[tuple[Pattern, Scheme], ...]
"""The first scheme whose pattern matches the beginning of a module's name applies to it."""


class _Settings:
    """Reads `quantization_config`, or an object in it. All methods raise UnsupportedModel, naming
    the field, for values that are not supported."""

    def __init__(self, place: str, values: Any) -> None:
        self.place = place
        if not isinstance(values, Mapping):
            raise UnsupportedModel(f"{place}: expected an object, got {values!r}")
        self.values: Mapping[str, Any] = values

    def get(self, keys: str, default: Any = None) -> tuple[str, Any]:
        """Key and value of the first of `keys`, separated by spaces, that is set."""
        names = keys.split()
        key = next((key for key in names if self.values.get(key) is not None), names[0])
        value = self.values.get(key)
        return key, default if value is None else value

    def one_of(self, keys: str, allowed: Collection[Any], default: Any = None) -> Any:
        """A value that must be one of `allowed`."""
        key, value = self.get(keys, default)
        value = value.lower() if isinstance(value, str) else value
        if not any(type(value) is type(known) and value == known for known in allowed):
            raise self._fault(key, f"expected {' or '.join(map(str, allowed))}", value)
        return value

    def group_size(self, keys: str, default: int | None = None) -> int:
        """A number of input features that share a scale; -1: all."""
        key, value = self.get(keys, default)
        if type(value) is not int or (value < 1 and value != -1):
            raise self._fault(
                key, "expected a positive number, or -1 for all input features", value
            )
        return value

    def block(self, key: str) -> tuple[int, int]:
        """Numbers of output and input features that share a scale."""
        _, value = self.get(key)
        if (
            not isinstance(value, list)
            or len(value) != 2
            or not all(type(size) is int and size > 0 for size in value)
        ):
            raise self._fault(key, "expected two positive numbers", value)
        return value[0], value[1]

    def object(self, key: str) -> "_Settings":
        """An object; an empty one if it is not set."""
        return _Settings(f"{self.place}.{key}", self.get(key, {})[1])

    def objects(self) -> dict[str, "_Settings"]:
        """All values, which must be objects, by key."""
        return {name: self.object(name) for name in self.values}

    def merged(self, other: "_Settings") -> "_Settings":
        """These settings updated with those of `other`."""
        return _Settings(other.place, {**self.values, **other.values})

    def refuse(self, key: str, why: str) -> None:
        """Raise UnsupportedModel if the value is set and not empty."""
        if self.values.get(key):
            raise self._fault(key, f"expected none: {why}", self.values[key])

    def pattern(self, text: Any) -> Pattern:
        """Compile a regular expression."""
        try:
            return re.compile(text)
        except (re.error, TypeError) as error:
            message = f"{self.place}: expected a regular expression, got {text!r}: {error}"
            raise UnsupportedModel(message) from error

    def _fault(self, key: str, expected: str, value: Any) -> UnsupportedModel:
        return UnsupportedModel(f"{self.place}.{key}: {expected}, got {value!r}")


def read_schemes(config_file: Path, hf_config: Mapping[str, Any]) -> Schemes:
    """Return how the weights of a checkpoint are quantized; empty if they are not.

    config_file: for error messages; hf_config: content of `config.json`. Raises UnsupportedModel,
    naming the field and the supported values.
    """
    place, values = _find_settings(config_file, hf_config)
    if values is None:
        return ()
    settings = _Settings(place, values)
    is_compressed = values.get("quant_method") in (None, "compressed-tensors")
    if is_compressed and values.get("kv_cache_scheme") and not values.get("config_groups"):
        return ()
    method = settings.one_of("quant_method", FORMATS)
    return tuple(_READERS[method](settings, FORMATS[method]))


def quantization_method(model_dir: Path, hf_config: Mapping[str, Any]) -> str | None:
    """The `quant_method` of a checkpoint, or `gguf`; None if it is not quantized by any."""
    if is_gguf(model_dir):
        return "gguf"
    _, values = _find_settings(model_dir / "config.json", hf_config)
    return None if values is None else values.get("quant_method") or "compressed-tensors"


def _find_settings(config_file: Path, hf_config: Mapping[str, Any]) -> tuple[str, Any]:
    """Return (where the settings are, the settings, or None).

    The first versions of compressed-tensors call them `compression_config`; those of ModelOpt are
    in a file of their own, as they still are beside its newer `quantization_config`.
    """
    for key in ("quantization_config", "compression_config"):
        if hf_config.get(key) is not None:
            return f"{config_file}: {key}", hf_config[key]
    file = config_file.with_name("hf_quant_config.json")
    if not file.is_file():
        return str(config_file), None
    settings = _Settings(str(file), read_json(file)).object("quantization")
    return settings.place, {**settings.values, "quant_method": "modelopt"}


def _awq_schemes(settings: _Settings, formats: Formats) -> Iterator[tuple[Pattern, Scheme]]:
    name = settings.one_of("version format", formats, "gemm")
    bits = settings.one_of("bits w_bit", [4], 4)
    size = settings.group_size("group_size q_group_size", 128)
    yield settings.pattern(""), Scheme(format=formats[name], bits=bits, block=(1, size))


def _gptq_schemes(settings: _Settings, formats: Formats) -> Iterator[tuple[Pattern, Scheme]]:
    """`dynamic` maps patterns of module names to settings. Patterns with the prefix `-:` name
    modules that are not quantized; other patterns may have the prefix `+:`."""
    parts = settings.object("dynamic").objects()
    chosen = {key: settings.merged(part) for key, part in parts.items() if key[:2] != "-:"}
    for key, part in {**chosen, "": settings}.items():
        name = part.one_of("checkpoint_format format", formats, "gptq")
        bits, size = part.one_of("bits", [4, 8]), part.group_size("group_size")
        pattern = settings.pattern(key.removeprefix("+:"))
        scheme = Scheme(format=formats[name], bits=bits, block=(1, size))
        in_order = not part.one_of("desc_act", [True, False], False) or size == -1
        yield pattern, scheme if in_order else _with_order(scheme, "g_idx", "desc_act")


def _with_order(scheme: Scheme, suffix: str, setting: str) -> Scheme:
    """Require the tensor of each input feature's group, which `setting` says are scattered."""
    return replace(scheme, more=(*scheme.more, suffix), because=f" with {setting}")


def _compressed_schemes(settings: _Settings, formats: Formats) -> Iterator[tuple[Pattern, Scheme]]:
    """Targets are names of modules, regular expressions with the prefix `re:`, or names of classes,
    in this order of precedence."""
    settings.object("transform_config").refuse("config_groups", "transforms are not applied")
    settings.object("sparsity_config").one_of("format", ["dense"], "dense")
    found: list[tuple[int, Pattern, Scheme]] = []
    for group in settings.object("config_groups").objects().values():
        scheme = _compressed_scheme(settings, group, formats)
        _, targets = group.get("targets", ["Linear"])
        for target in targets if isinstance(targets, list) else [targets]:
            text = str(target)
            if text.startswith("re:"):
                found.append((1, group.pattern(text.removeprefix("re:")), scheme))
            elif text.isidentifier() and text[0].isupper():
                found.append((2, group.pattern(""), scheme))
            else:
                found.append((0, group.pattern(f"{re.escape(text)}$"), scheme))
    for _, pattern, scheme in sorted(found, key=lambda entry: entry[0]):
        yield pattern, scheme


def _compressed_scheme(settings: _Settings, group: _Settings, formats: Formats) -> Scheme:
    weights, inputs = group.object("weights"), None
    kind = weights.one_of("type", ["int", "float"], "int")
    # `naive-quantized` stores the same tensors as `int-quantized` or `float-quantized`.
    names = {name: name for name in formats}
    names["naive-quantized"] = f"{kind}-quantized"
    overall = settings.get("format")[1]
    name = names[group.one_of("format", names, overall)]
    weights.one_of("type", ["float" if formats[name] is FP8 else "int"], "int")
    if formats[name] is INT8 and group.get("input_activations")[1]:
        inputs = group.object("input_activations")
    elif kind == "int":
        group.refuse("input_activations", "activations are not quantized with this format")
    group.refuse("output_activations", "activations are not quantized, only weights")
    bits = weights.one_of("num_bits", [4, 8] if formats[name] is PACKED else [8], 8)
    _, size = weights.get("group_size")
    inferred = "tensor" if size is None else "channel" if size == -1 else "group"
    strategies = (
        ["tensor", "channel"] + ["group"] * (inputs is None) + ["block"] * (kind == "float")
    )
    strategy = weights.one_of("strategy", strategies, inferred)
    block = {"tensor": (-1, -1), "channel": (1, -1)}.get(strategy)
    if strategy == "group":
        block = (1, weights.group_size("group_size"))
    symmetric = weights.one_of("symmetric", [True, False] if inputs is None else [True], True)
    scheme = Scheme(
        format=formats[name],
        bits=bits,
        block=block or weights.block("block_structure"),
        more=("weight_zero_point",) if kind == "int" and not symmetric else (),
    )
    orders = (None, False, True, "group", "weight", "dynamic", "static")
    actorder = weights.one_of("actorder", orders)
    if strategy == "group" and actorder in (True, "group", "dynamic"):
        scheme = _with_order(scheme, "weight_g_idx", f"actorder {actorder}")
    return scheme if inputs is None else _with_quantized_inputs(scheme, inputs)


def _with_quantized_inputs(scheme: Scheme, inputs: _Settings) -> Scheme:
    """Add the quantization of activations: a dynamic scale per token, or one stored scale. A
    dynamic scale of all tokens would make a sequence's results depend on the batch."""
    inputs.one_of("type", ["int"], "int")
    inputs.one_of("num_bits", [8], 8)
    is_dynamic = inputs.one_of("dynamic", [True, False], False)
    inputs.one_of("strategy", ["token"] if is_dynamic else ["tensor"], "tensor")
    symmetric = inputs.one_of("symmetric", [True, False], True)
    more = () if is_dynamic else ("input_scale", *["input_zero_point"] * (not symmetric))
    return replace(scheme, more=more, activations=Int8Activations(symmetric=symmetric))


def _fp8_schemes(settings: _Settings, formats: Formats) -> Iterator[tuple[Pattern, Scheme]]:
    name = settings.one_of("fmt", formats, "e4m3")
    has_blocks = settings.get("weight_block_size")[1] is not None
    block = settings.block("weight_block_size") if has_blocks else (1, -1)
    yield settings.pattern(""), Scheme(format=formats[name], block=block, one_scale=not has_blocks)


def _modelopt_schemes(settings: _Settings, formats: Formats) -> Iterator[tuple[Pattern, Scheme]]:
    """Without `quant_algo`, at most the KV cache is quantized."""
    if settings.get("quant_algo")[1] is not None:
        name = settings.one_of("quant_algo", formats)
        block = (128, 128) if name == "fp8_pb_wo" else (1, -1)
        scheme = Scheme(format=formats[name], block=block, one_scale=name == "fp8")
        yield settings.pattern(""), scheme


def _mxfp4_schemes(settings: _Settings, formats: Formats) -> Iterator[tuple[Pattern, Scheme]]:
    yield settings.pattern(""), Scheme(format=formats["mxfp4"], bits=4, block=(1, 32))


def _bitsandbytes_schemes(
    settings: _Settings, formats: Formats
) -> Iterator[tuple[Pattern, Scheme]]:
    settings.one_of("load_in_4bit", [True], False)
    name = settings.one_of("bnb_4bit_quant_type", formats, "fp4")
    settings.one_of("bnb_4bit_quant_storage", ["uint8"], "uint8")
    yield settings.pattern(""), Scheme(format=formats[name], bits=4)


_READERS = {
    "awq": _awq_schemes,
    "gptq": _gptq_schemes,
    "compressed-tensors": _compressed_schemes,
    "fp8": _fp8_schemes,
    "modelopt": _modelopt_schemes,
    "mxfp4": _mxfp4_schemes,
    "bitsandbytes": _bitsandbytes_schemes,
}


def with_quantized_weights(
    schemes: Schemes, stored: Mapping[str, StoredTensor]
) -> dict[str, CheckpointTensor]:
    """Return the tensors of a checkpoint under dense names.

    schemes: not empty; stored: all tensors by name. Raises BadCheckpoint or UnsupportedModel,
    naming file and tensor, if the tensors of a weight do not fit its scheme, and BadCheckpoint if
    no weight is quantized, or one is stored both dense and quantized.
    """
    if any(scheme.format is MXFP4 for _, scheme in schemes):
        stored = {tensor.name: tensor for tensor in _separate_experts(stored)}
    weights = list(_find_weights(schemes, stored))
    if not weights:
        wanted = sorted({f"*.{scheme.format.codes}" for _, scheme in schemes})
        raise BadCheckpoint(
            "config.json has a quantization_config, but no tensor is quantized: expected"
            f" {' or '.join(wanted)}"
        )
    parts = {part.name for weight in weights for part in weight.parts.values()}
    tensors: dict[str, CheckpointTensor] = {
        name: tensor for name, tensor in stored.items() if tensor.name not in parts
    }
    for weight in weights:
        if weight.name in tensors:
            raise BadCheckpoint(
                f"{tensors[weight.name].file}: {weight.name} is stored both dense and quantized"
            )
        tensors[weight.name] = weight
    return tensors


def _separate_experts(stored: Mapping[str, StoredTensor]) -> Iterator[StoredTensor]:
    """The tensors of a checkpoint in MXFP4, in which blocks, [num_experts, out_features, groups,
    16], and scales, [num_experts, out_features, groups], are of all experts: here each expert has
    tensors. Raises BadCheckpoint for other shapes."""
    for name, tensor in stored.items():
        found = re.fullmatch(r"(.*)\.(\w+)_(blocks|scales)", name)
        if found is None:
            yield tensor
            continue
        experts, part, suffix = found.groups()
        num_dims = 4 if suffix == "blocks" else 3
        if len(tensor.shape) != num_dims or 0 in tensor.shape:
            raise BadCheckpoint(
                f"{tensor.file}: {name} is {tensor.shape}, expected {num_dims} dimensions"
            )
        num_experts, num_rows, *others = tensor.shape
        for i in range(num_experts):
            yield ExpertTensor(
                name=f"{experts}.{i}.{part}.{suffix}",
                stored_name=tensor.stored_name,
                file=tensor.file,
                files=tensor.files,
                shape=[num_rows, prod(others)],
                type=tensor.type,
                expert=i,
            )


def _find_weights(schemes: Schemes, stored: Mapping[str, StoredTensor]) -> Iterator[StoredWeight]:
    codes = {"weight"}.union(form.codes for forms in FORMATS.values() for form in forms.values())
    for name, tensor in stored.items():
        module, _, suffix = name.rpartition(".")
        if suffix not in codes or (suffix == "weight" and tensor.type in (*FLOATS, "F64")):
            continue
        names = (module, tensor.stored_name.rpartition(".")[0])  # of a multimodal model, others
        matching = (found for pattern, found in schemes if any(map(pattern.match, names)))
        scheme = next(matching, None)
        if scheme is None or scheme.format.codes != suffix:
            raise BadCheckpoint(
                f"{tensor.file}: {name} is stored as {tensor.type}, which quantization_config does"
                " not describe"
            )
        yield scheme.format.weight(module, scheme, stored)
