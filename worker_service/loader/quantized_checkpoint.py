"""Quantized checkpoints, presented under the names that their dense weights would have.

A quantized layer is stored as several tensors: codes, scales, zero points, and so on. Here they are
one, `….weight`, that is dequantised when it is read, or given as a `QuantizedWeight`. Which layers
are quantized is decided by the tensors that are there, so that lists of ignored modules are not
needed. What headers and `quantization_config` show to be wrong is refused before a weight is read.
"""

import re
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from worker_service.errors import BadCheckpoint, UnsupportedModel
from worker_service.loader.quantized_formats import (
    FLOATS,
    Awq,
    Gptq,
    GptqV2,
    Scheme,
    Shape,
    StoredTensor,
    StoredWeight,
)
from worker_service.models.quantized_weight import QuantizedWeight

Formats = Mapping[str, type[StoredWeight]]

_FORMATS: Mapping[str, Formats] = {
    "awq": {"gemm": Awq},
    "gptq": {"gptq": Gptq, "gptq_v2": GptqV2},
}
"""By `quant_method`, then by the method's own names of its formats."""

Pattern = re.Pattern[str]
Schemes = tuple[tuple[Pattern, Scheme], ...]
"""The first holds whose pattern matches the beginning of a module's name."""


class _Settings:
    """Reads `quantization_config`, or an object in it; UnsupportedModel names the field."""

    def __init__(self, place: str, values: Any) -> None:
        self._place = place
        if not isinstance(values, Mapping):
            raise UnsupportedModel(f"{place}: expected an object, got {values!r}")
        self._values: Mapping[str, Any] = values

    def one_of(self, keys: str, allowed: Collection[Any], default: Any = None) -> Any:
        """The value of the first of the keys that is there; it must be an allowed one."""
        key, value = self._first(keys, default)
        value = value.lower() if isinstance(value, str) else value
        if type(value) not in (int, str) or value not in allowed:
            raise self.fault(key, f"expected {' or '.join(map(str, allowed))}", value)
        return value

    def group_size(self, keys: str, default: int | None = None) -> int:
        """-1: all inputs."""
        key, value = self._first(keys, default)
        if type(value) is not int or (value < 1 and value != -1):
            raise self.fault(key, "expected a positive number, or -1 for all inputs", value)
        return value

    def inner(self, key: str) -> dict[str, "_Settings"]:
        """The objects within an object."""
        place = f"{self._place}.{key}"
        values = _Settings(place, self._values.get(key) or {})._values
        return {name: _Settings(f"{place}.{name}", value) for name, value in values.items()}

    def merged(self, other: "_Settings") -> "_Settings":
        """With the fields of another object, which take precedence."""
        return _Settings(other._place, {**self._values, **other._values})

    def pattern(self, text: str) -> Pattern:
        """A regular expression."""
        try:
            return re.compile(text)
        except re.error as error:
            message = f"{self._place}: {text!r} is no regular expression: {error}"
            raise UnsupportedModel(message) from error

    def fault(self, key: str, expected: str, value: Any) -> UnsupportedModel:
        """To be raised about a field."""
        return UnsupportedModel(f"{self._place}.{key}: {expected}, got {value!r}")

    def _first(self, keys: str, default: Any) -> tuple[str, Any]:
        """Of several names that a field has, separated by spaces."""
        names = keys.split()
        key = next((key for key in names if self._values.get(key) is not None), names[0])
        value = self._values.get(key)
        return key, default if value is None else value


def read_schemes(config_file: Path, hf_config: Mapping[str, Any]) -> Schemes:
    """How the weights of a checkpoint are quantized; empty if they are not.

    Raises UnsupportedModel, naming the field and what is known.
    """
    values = hf_config.get("quantization_config")
    if values is None:
        return ()
    settings = _Settings(f"{config_file}: quantization_config", values)
    if values.get("kv_cache_scheme") and not values.get("config_groups"):
        return ()
    method = settings.one_of("quant_method", _FORMATS)
    return tuple(_READERS[method](settings, _FORMATS[method]))


def _awq_schemes(settings: _Settings, formats: Formats) -> Iterator[tuple[Pattern, Scheme]]:
    name = settings.one_of("version format", formats, "gemm")
    bits = settings.one_of("bits w_bit", [4], 4)
    size = settings.group_size("group_size q_group_size", 128)
    yield settings.pattern(""), Scheme(format=formats[name], bits=bits, block=(1, size))


def _gptq_schemes(settings: _Settings, formats: Formats) -> Iterator[tuple[Pattern, Scheme]]:
    """`dynamic` has settings of some modules by pattern; `-:` begins those of modules that are not
    quantized, `+:` may begin others."""
    parts = settings.inner("dynamic")
    chosen = {key: settings.merged(part) for key, part in parts.items() if key[:2] != "-:"}
    for key, part in {**chosen, "": settings}.items():
        name = part.one_of("checkpoint_format format", formats, "gptq")
        bits, size = part.one_of("bits", [4, 8]), part.group_size("group_size")
        pattern = settings.pattern(key.removeprefix("+:"))
        yield pattern, Scheme(format=formats[name], bits=bits, block=(1, size))


_READERS = {"awq": _awq_schemes, "gptq": _gptq_schemes}


def describe(file: Path, tensors: Any) -> Iterator[StoredTensor]:
    """The tensors of an open file."""
    for name in tensors.keys():  # noqa: SIM118 (no mapping)
        part = tensors.get_slice(name)
        yield StoredTensor(name, file, part.get_shape(), part.get_dtype())


def find_weights(schemes: Schemes, stored: Mapping[str, StoredTensor]) -> dict[str, StoredWeight]:
    """The quantized weights among the tensors of a checkpoint, by the name of the dense weight.

    Raises BadCheckpoint or UnsupportedModel, naming file and tensor, if one's parts do not fit, and
    BadCheckpoint if there is none.
    """
    codes = {"weight"}.union(kind.codes for kinds in _FORMATS.values() for kind in kinds.values())
    weights = {}
    for name, tensor in stored.items():
        module, _, suffix = name.rpartition(".")
        if suffix not in codes or (suffix == "weight" and tensor.type in (*FLOATS, "F64")):
            continue
        scheme = next((found for pattern, found in schemes if pattern.match(module)), None)
        if scheme is None or scheme.format.codes != suffix:
            raise BadCheckpoint(
                f"{tensor.file}: {name} is stored as {tensor.type}, which quantization_config does"
                " not describe"
            )
        weights[f"{module}.weight"] = scheme.format(module, scheme, stored)
    if not weights:
        wanted = sorted({f"*.{scheme.format.codes}" for _, scheme in schemes})
        raise BadCheckpoint(
            "config.json has a quantization_config, but no tensor is quantized: expected"
            f" {' or '.join(wanted)}"
        )
    return weights


def dense_names(
    stored: Mapping[str, StoredTensor], weights: Mapping[str, StoredWeight]
) -> dict[str, Path]:
    """The file of each dense tensor; a quantized one's is that of its codes.

    Raises BadCheckpoint if a weight is there in both forms.
    """
    hidden = {part.name for weight in weights.values() for part in weight.parts.values()}
    files = {name: tensor.file for name, tensor in stored.items() if name not in hidden}
    for name, weight in weights.items():
        if name in files:
            raise BadCheckpoint(f"{files[name]}: {name} is there twice: dense, and quantized")
        files[name] = weight.file
    return files


class QuantizedTensors:
    """The tensors of an open file under the names of dense ones, as `safe_open` gives them."""

    def __init__(
        self,
        file: Path,
        tensors: Any,
        weights: Mapping[str, StoredWeight],
        open_file: Callable[[Path], AbstractContextManager[Any]],
    ) -> None:
        """tensors: the open file; open_file: opens another one that has some parts."""
        self._file = file
        self._tensors = tensors
        self._weights = weights
        self._open = open_file

    def keys(self) -> list[str]:
        """Dense names of all tensors."""
        hidden = {part.name for weight in self._weights.values() for part in weight.parts.values()}
        plain = [name for name in self._tensors.keys() if name not in hidden]  # noqa: SIM118
        return plain + [name for name, weight in self._weights.items() if weight.file == self._file]

    def get_slice(self, name: str) -> Any:
        """A tensor that is read once it is indexed."""
        if name not in self._weights:
            return self._tensors.get_slice(name)
        return _Slice(self, name, self._weights[name].shape)

    def get_tensor(self, name: str) -> Tensor:
        """A tensor; a quantized one is dequantised to float32."""
        found = self._read(name)
        return found.dequantize() if isinstance(found, QuantizedWeight) else found

    def get_quantized(self, name: str) -> QuantizedWeight | None:
        """A quantized weight without rounding; None if it is dense, or can only be dequantised."""
        found = self._read(name) if name in self._weights else None
        return found if isinstance(found, QuantizedWeight) and found.group_size > 1 else None

    def _read(self, name: str) -> QuantizedWeight | Tensor:
        if name in self._weights:
            return self._weights[name].read(lambda suffix: self._part(name, suffix))
        tensor: Tensor = self._tensors.get_tensor(name)
        return tensor

    def _part(self, name: str, suffix: str) -> Any:
        part = self._weights[name].parts.get(suffix)
        if part is None or part.file == self._file:
            return part and self._tensors.get_tensor(part.name)
        with self._open(part.file) as tensors:
            return tensors.get_tensor(part.name)


@dataclass(frozen=True, slots=True)
class _Slice:
    tensors: QuantizedTensors
    name: str
    shape: Shape

    def get_shape(self) -> Shape:
        return self.shape

    def __getitem__(self, index: Any) -> Tensor:
        return self.tensors.get_tensor(self.name)[index]
