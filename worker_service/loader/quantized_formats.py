"""The tensors that make up a quantized weight, format by format.

A weight is checked against file headers when it is found, and converted to a `QuantizedWeight` when
it is read. Codes of 4 bits are packed into 32-bit words, the first in the lowest bits, unless a
format says otherwise.
"""

import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from math import gcd, isfinite, prod
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor

from pagewire_kernels.quantized_weight import SIGNED_TABLE, Int8Activations, QuantizedWeight
from worker_service.errors import BadCheckpoint, UnsupportedModel

Shape = list[int]
Types = tuple[str, ...]
"""The dtypes that a stored tensor may have, as safetensors names them."""

Read = Callable[[str], Any]
"""Reads one of a weight's tensors, by suffix, in its expected shape; None if it is missing."""

FLOATS = ("F16", "BF16", "F32")
_INTEGERS = ("I32", "I64")

_ACTIVATION_SCALES = {"input_scale", "input_zero_point", "activation_scale"}

FACTS = (".weight_shape", ".bitsandbytes__nf4", ".bitsandbytes__fp4")
"""Suffixes of small tensors that must be read before shapes can be checked."""


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor as described by the header of its file."""

    name: str
    file: Path
    shape: Shape
    type: str

    fact: Tensor | None = None
    """Its content, if its name ends with one of `FACTS`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Scheme:
    """How some of the weights are quantized."""

    format: "type[StoredWeight]"
    bits: int = 8
    block: tuple[int, int] = (1, -1)
    """Numbers of output and input features that share a scale; -1: all."""

    one_scale: bool = False
    """Whether a single scale may be stored for all blocks."""

    more: tuple[str, ...] = ()
    """Suffixes of tensors that are required in addition to those of the format."""

    because: str = ""
    """The setting that requires them, for error messages."""

    activations: Int8Activations | None = None
    """How inputs are quantized; a static scale is stored as a tensor."""

    @property
    def label(self) -> str:
        """Format, bits and quantized activations, for the log."""
        kind = f"{self.format.__name__.lower()} of {self.bits} bits"
        return kind if self.activations is None else f"{kind} with 8-bit activations"


class StoredWeight(ABC):
    """The tensors of one quantized weight.

    A tensor is named by its suffix: its name without the module's name and a dot.
    """

    codes: ClassVar[str]
    """The suffix of the tensor that holds the codes."""

    required: ClassVar[Mapping[str, Types]]
    """The dtypes of the required tensors, by suffix."""

    optional: ClassVar[Mapping[str, Types]] = {}
    """The dtypes of the optional tensors, by suffix."""

    def __init__(self, module: str, scheme: Scheme, stored: Mapping[str, StoredTensor]) -> None:
        """module: its name; stored: all tensors of the checkpoint, by name.

        Raises BadCheckpoint or UnsupportedModel if tensors are missing or have other shapes or
        dtypes than the scheme requires.
        """
        self.name = f"{module}.weight"
        self.scheme = scheme
        self.file = stored[f"{module}.{self.codes}"].file
        known = {**self.required, **self.optional}
        found = {suffix: stored.get(f"{module}.{suffix}") for suffix in known}
        required = [*self.required, *scheme.more]
        missing = [f"{module}.{suffix}" for suffix in required if found[suffix] is None]
        if missing:
            raise self._fault(
                f"{self.name} is quantized{scheme.because}; missing tensors: {', '.join(missing)}"
            )
        self.parts = {suffix: part for suffix, part in found.items() if part is not None}
        self.shapes = self._shapes()
        """Expected shapes of the parts; dimensions of size 1 are not compared."""
        self.shape = self.shapes.pop("weight.dense")
        """[out_features, in_features]"""
        for suffix, part in self.parts.items():
            if _significant(part.shape) != _significant(self.shapes[suffix]):
                raise self._fault(f"{part.name} is {part.shape}, expected {self.shapes[suffix]}")
            if part.type not in known[suffix]:
                types = " or ".join(known[suffix])
                raise self._fault(f"{part.name} is stored as {part.type}, expected {types}")

    @property
    def unused(self) -> list[str]:
        """Names of tensors that hold scales of activations, which are not quantized."""
        scales = _ACTIVATION_SCALES - set(self.scheme.more)
        return [part.name for suffix, part in self.parts.items() if suffix in scales]

    @abstractmethod
    def _shapes(self) -> dict[str, Shape]:
        """Expected shapes of the parts and of `weight.dense`."""

    @abstractmethod
    def read(self, read: Read) -> QuantizedWeight:
        """Read the weight. Raises BadCheckpoint if its numbers are invalid."""

    def _fault(self, message: str) -> BadCheckpoint:
        return BadCheckpoint(f"{self.file}: {message}")

    def _matrix(self) -> tuple[int, int]:
        """The shape of the tensor of codes, which must have two dimensions."""
        part = self.parts[self.codes]
        if len(part.shape) != 2 or 0 in part.shape:
            raise self._fault(f"{part.name} is {part.shape}, expected a matrix")
        return part.shape[0], part.shape[1]

    def _num_groups(self, in_features: int) -> int:
        size = in_features if self.scheme.block[1] == -1 else self.scheme.block[1]
        if in_features % size:
            raise UnsupportedModel(
                f"{self.file}: {self.name}: expected a multiple of the group size {size} as input"
                f" features, got {in_features}"
            )
        return in_features // size

    def _scales(self, read: Read, suffix: str) -> Tensor:
        """Read scales in float32. Raises BadCheckpoint if one is infinite or NaN."""
        scales: Tensor = read(suffix).float()
        is_finite = scales.isfinite()
        if not is_finite.all():
            found = scales[~is_finite][0]
            raise self._fault(f"{self.parts[suffix].name}: expected finite numbers, got {found:g}")
        return scales


@dataclass(frozen=True, slots=True)
class LazyTensor:
    """A tensor that is read when it is indexed, with the methods of a slice of `safe_open`."""

    read: Callable[[], Tensor]
    """Reads the whole tensor, dequantized."""

    shape: Shape
    is_quantized: bool
    type: str

    def get_shape(self) -> Shape:
        """The shape of the tensor."""
        return self.shape

    def get_dtype(self) -> str:
        """The format in which it is stored."""
        return self.type

    def __getitem__(self, index: Any) -> Tensor:
        return self.read()[index]


def _significant(shape: Shape) -> Shape:
    return [size for size in shape if size != 1]


def unpack(words: Tensor, bits: int) -> Tensor:
    """Unpack codes of 4 or 8 bits, of which the first is in a word's lowest bits.

    words: [rows, num_words], of 32 bits or of bytes. Returns uint8 [rows, num_bytes * 8 / bits].
    """
    packed = words.contiguous().view(torch.uint8)
    return packed if bits == 8 else torch.stack((packed & 15, packed >> 4), dim=2).flatten(1)


class _Integers(StoredWeight):
    """Integer codes with scales and zero points."""

    def _weight(
        self, codes: Tensor, scales: Tensor, zeros: Tensor | None, group_of: Tensor | None = None
    ) -> QuantizedWeight:
        """Assemble a weight.

        codes: uint8 [out_features, in_features]; scales, zeros: [out_features, groups]; zeros may
        be None if all are the middle code; group_of: the group of each input feature, or None if
        groups are consecutive. If they are not, columns are sorted by group; if groups differ in
        size, each input feature becomes a group of its own.
        """
        order = None
        middle = 1 << (self.scheme.bits - 1)
        offsets = None
        if zeros is not None and (zeros != middle).any():
            offsets = (middle - zeros.float()) * scales
        if group_of is not None:
            num_groups, group_of = scales.shape[1], group_of.long()
            least, most = int(group_of.min()), int(group_of.max())
            if not 0 <= least <= most < num_groups:
                raise self._fault(
                    f"{self.name}: g_idx: expected groups 0 to {num_groups - 1}, got {least} to"
                    f" {most}"
                )
            in_order = torch.arange(num_groups).repeat_interleave(codes.shape[1] // num_groups)
            if group_of.sort().values.equal(in_order):
                order = None if group_of.equal(in_order) else group_of.argsort(stable=True)
                codes = codes if order is None else codes[:, order]
            else:
                scales = scales[:, group_of]
                offsets = None if offsets is None else offsets[:, group_of]
        table: tuple[int, ...] | None = SIGNED_TABLE
        if self.scheme.bits == 8:
            codes, table = codes ^ middle, None
        return QuantizedWeight(
            codes=codes, scales=scales, offsets=offsets, table=table, order=order
        )


class Awq(_Integers):
    """AWQ: codes are packed along the output features, in an interleaved order within a word."""

    codes = "qweight"
    required: ClassVar = {"qweight": ("I32",), "scales": FLOATS, "qzeros": ("I32",)}
    _ORDER = (0, 4, 1, 5, 2, 6, 3, 7)

    def _shapes(self) -> dict[str, Shape]:
        in_features, words = self._matrix()
        groups, out_features = self._num_groups(in_features), words * 8
        return {
            "weight.dense": [out_features, in_features],
            "qweight": [in_features, words],
            "scales": [groups, out_features],
            "qzeros": [groups, words],
        }

    def read(self, read: Read) -> QuantizedWeight:
        codes, zeros = self._columns(read("qweight")), self._columns(read("qzeros"))
        return self._weight(codes, self._scales(read, "scales").t().contiguous(), zeros)

    def _columns(self, words: Tensor) -> Tensor:
        packed = unpack(words, 4).unflatten(1, (-1, 8))
        return packed[:, :, self._ORDER].flatten(1).t().contiguous()


class GptqV2(_Integers):
    """GPTQ: codes are packed along the input features, zero points along the output features."""

    codes = "qweight"
    required: ClassVar = {"qweight": ("I32",), "scales": FLOATS, "qzeros": ("I32",)}
    optional: ClassVar = {"g_idx": _INTEGERS}
    _ONES: ClassVar = {4: 0, 8: 0}
    """What is added to words of zero points, by bits."""

    def _shapes(self) -> dict[str, Shape]:
        rows, out_features = self._matrix()
        in_features, words = rows * 32 // self.scheme.bits, out_features * self.scheme.bits / 32
        if words != int(words):
            raise UnsupportedModel(
                f"{self.file}: {self.name}: expected a multiple of {32 // self.scheme.bits} as"
                f" output features, whose zero points fill whole 32-bit words, got {out_features}"
            )
        groups = self._num_groups(in_features)
        return {
            "weight.dense": [out_features, in_features],
            "qweight": [rows, out_features],
            "scales": [groups, out_features],
            "qzeros": [groups, int(words)],
            "g_idx": [in_features],
        }

    def read(self, read: Read) -> QuantizedWeight:
        bits = self.scheme.bits
        codes = unpack(read("qweight").t(), bits)
        zeros = unpack(read("qzeros") + self._ONES[bits], bits).t().contiguous()
        scales = self._scales(read, "scales").t().contiguous()
        return self._weight(codes, scales, zeros, read("g_idx"))


class Gptq(GptqV2):
    """The first GPTQ format, which stores each zero point minus one. The subtraction was done on
    whole words, so it is undone on whole words."""

    _ONES: ClassVar = {4: 0x11111111, 8: 0x01010101}


_IN_ORDER = -1
"""Each group in `weight_g_idx`, as earlier versions of compressed-tensors say `in order`."""


class _Compressed(_Integers):
    """Integer formats of compressed-tensors: codes and zero points are stored minus the middle."""

    def _scale_shape(self, out_features: int, in_features: int) -> Shape:
        rows = 1 if self.scheme.block[0] == -1 else out_features
        return [rows, self._num_groups(in_features)]

    def _finish(self, read: Read, codes: Tensor) -> QuantizedWeight:
        scales = self._scales(read, "weight_scale").expand(self.shape[0], -1)
        zeros = read("weight_zero_point")
        if zeros is not None and zeros.dtype == torch.int32:
            zeros = unpack(zeros.t(), self.scheme.bits)[:, : self.shape[0]].t()
        elif zeros is not None:
            zeros = zeros.float() + (1 << (self.scheme.bits - 1))
        group_of = read("weight_g_idx")
        if group_of is not None and (group_of == _IN_ORDER).all():
            group_of = None
        return self._weight(codes, scales.contiguous(), zeros, group_of)


class Packed(_Compressed):
    """`pack-quantized`: codes are packed along the input features, zero points along the output
    features; the last word of each may be partly used."""

    codes = "weight_packed"
    required: ClassVar = {
        "weight_packed": ("I32",),
        "weight_scale": FLOATS,
        "weight_shape": _INTEGERS,
    }
    optional: ClassVar = {"weight_zero_point": ("I32", "I8"), "weight_g_idx": _INTEGERS}

    def _shapes(self) -> dict[str, Shape]:
        stored = self.parts["weight_shape"]
        shape = [] if stored.fact is None else stored.fact.flatten().tolist()
        if stored.type not in _INTEGERS or len(shape) != 2 or min(shape) < 1:
            raise self._fault(f"{stored.name}: expected two positive numbers, got {shape}")
        out_features, in_features = shape
        scales = self._scale_shape(out_features, in_features)
        zeros = self.parts.get("weight_zero_point")
        is_packed = zeros is not None and zeros.type == "I32"
        return {
            "weight.dense": shape,
            "weight_packed": [out_features, self._num_words(in_features)],
            "weight_scale": scales,
            "weight_shape": [2],
            "weight_zero_point": [self._num_words(out_features), scales[1]]
            if is_packed
            else scales,
            "weight_g_idx": [in_features],
        }

    def _num_words(self, num_codes: int) -> int:
        return -(-num_codes * self.scheme.bits // 32)

    def read(self, read: Read) -> QuantizedWeight:
        codes = unpack(read("weight_packed"), self.scheme.bits)
        return self._finish(read, codes[:, : self.shape[1]].contiguous())


class Int8(_Compressed):
    """`int-quantized`: weights are bytes, and activations may be quantized to bytes (W8A8)."""

    codes = "weight"
    required: ClassVar = {"weight": ("I8",), "weight_scale": FLOATS}
    optional: ClassVar = {
        "weight_zero_point": ("I8",),
        "weight_g_idx": _INTEGERS,
        "input_scale": FLOATS,
        "input_zero_point": ("I8",),
    }

    def _shapes(self) -> dict[str, Shape]:
        out_features, in_features = self._matrix()
        scales = self._scale_shape(out_features, in_features)
        return {
            "weight.dense": [out_features, in_features],
            "weight": [out_features, in_features],
            "weight_scale": scales,
            "weight_zero_point": scales,
            "weight_g_idx": [in_features],
            "input_scale": [1],
            "input_zero_point": [1],
        }

    def read(self, read: Read) -> QuantizedWeight:
        weight = self._finish(read, read("weight").view(torch.uint8) ^ 128)
        activations = self.scheme.activations
        if activations is not None and "input_scale" in self.scheme.more:
            scale, zero = float(self._scales(read, "input_scale")), read("input_zero_point")
            if scale <= 0:
                name = self.parts["input_scale"].name
                raise self._fault(f"{name}: expected a positive number, got {scale}")
            zero_point = 0 if zero is None else int(zero)
            activations = replace(activations, scale=scale, zero_point=zero_point)
        return replace(weight, activations=activations)


_FP8_NAN = 0x7F
"""The bits of NaN in float8_e4m3fn, without the sign."""


class Fp8(StoredWeight):
    """float8_e4m3fn with scales per block, group, output feature or tensor.

    Scales of activations are ignored: activations are not quantized, which is more precise.
    """

    codes = "weight"
    required: ClassVar = {"weight": ("F8_E4M3",)}
    optional: ClassVar = {
        "weight_scale": (*FLOATS, "F8_E8M0"),
        "weight_scale_inv": (*FLOATS, "F8_E8M0"),
        "input_scale": FLOATS,
        "activation_scale": FLOATS,
    }

    def _shapes(self) -> dict[str, Shape]:
        shape = list(self._matrix())
        found = [name for name in ("weight_scale", "weight_scale_inv") if name in self.parts]
        if len(found) != 1:
            raise self._fault(f"{self.name} is quantized: expected one *.weight_scale tensor")
        self._scale = found[0]
        stored = self.parts[self._scale].shape
        is_single = self.scheme.one_scale and _significant(stored) == []
        rows, columns = (-1, -1) if is_single else self.scheme.block
        self._block = (shape[0] if rows == -1 else rows, shape[1] if columns == -1 else columns)
        if rows == 1:
            self._num_groups(shape[1])
        self._grid = [-(-size // block) for size, block in zip(shape, self._block, strict=True)]
        return {
            "weight.dense": shape,
            "weight": shape,
            self._scale: self._grid,
            "input_scale": [1],
            "activation_scale": [1],
        }

    def read(self, read: Read) -> QuantizedWeight:
        (out_features, in_features), (rows, columns) = self.shape, self._block
        size = gcd(columns, in_features)  # the last block may be smaller
        scales = self._scales(read, self._scale).repeat_interleave(rows, 0)[:out_features]
        scales = scales.repeat_interleave(columns // size, 1)[:, : in_features // size]
        codes = read("weight").view(torch.uint8)
        if (codes & _FP8_NAN == _FP8_NAN).any():
            raise self._fault(f"{self.name}: expected finite numbers, got NaN")
        return QuantizedWeight(codes=codes, scales=scales.contiguous(), is_float=True)


class Nf4(StoredWeight):
    """NF4 of bitsandbytes: 4-bit indices into a table, the first of two in the upper half of a
    byte; a scale for each block of consecutive numbers, which may be quantized itself (nested)."""

    codes = "weight"
    _STATE = "weight.quant_state.bitsandbytes__nf4"
    _PARTS: ClassVar = {
        "weight": ("U8",),
        "weight.absmax": ("F32", "U8"),
        "weight.quant_map": ("F32",),
    }
    required: ClassVar = {**_PARTS, _STATE: ("U8",)}
    optional: ClassVar = {"weight.nested_absmax": ("F32",), "weight.nested_quant_map": ("F32",)}

    def _shapes(self) -> dict[str, Shape]:
        part = self.parts[self._STATE]
        try:
            state = json.loads(bytes([] if part.fact is None else part.fact.tolist()))
            shape, self._block = [*map(int, state["shape"])], int(state["blocksize"])
            self._is_nested = self.parts["weight.absmax"].type == "U8"
            nested_block = int(state["nested_blocksize"]) if self._is_nested else 1
            self._offset = float(state["nested_offset"]) if self._is_nested else 0.0
        except (ValueError, TypeError, LookupError, OverflowError, RecursionError) as error:
            raise self._fault(f"{part.name} cannot be read: {error!r}") from error
        sizes = (*shape, self._block, nested_block)
        if len(shape) != 2 or min(sizes) < 1 or not isfinite(self._offset):
            raise self._fault(
                f"{part.name}: expected a shape of two positive sizes, positive block sizes and a"
                " finite nested_offset"
            )
        if self._is_nested and not self.optional.keys() <= self.parts.keys():
            raise self._fault(
                f"{self.name} has quantized scales; missing tensors: weight.nested_absmax or"
                " weight.nested_quant_map"
            )
        count = shape[0] * shape[1]
        self._block = min(self._block, count)
        num_blocks = -(-count // self._block)
        self._nested_block = min(nested_block, num_blocks)
        return {
            "weight.dense": shape,
            "weight": [-(-count // 2)],
            "weight.absmax": [num_blocks],
            "weight.quant_map": [16],
            self._STATE: part.shape,
            "weight.nested_absmax": [-(-num_blocks // self._nested_block)],
            "weight.nested_quant_map": [256],
        }

    def read(self, read: Read) -> QuantizedWeight:
        scales = self._scales(read, "weight.absmax").flatten()
        if self._is_nested:
            values = self._scales(read, "weight.nested_quant_map")[scales.int()]
            nested = self._scales(read, "weight.nested_absmax").repeat_interleave(
                self._nested_block
            )
            scales = values * nested[: len(values)] + self._offset
        out_features, in_features = self.shape
        packed = read("weight").flatten()
        codes = torch.stack((packed >> 4, packed & 15), dim=1).flatten()[: prod(self.shape)]
        size = gcd(self._block, in_features)  # blocks may extend over the ends of rows
        num_groups = in_features // size
        scales = scales.repeat_interleave(self._block // size)[: out_features * num_groups]
        return QuantizedWeight(
            codes=codes.view(self.shape),
            scales=scales.view(out_features, num_groups),
            table=tuple(self._scales(read, "weight.quant_map").flatten().tolist()),
            is_float=True,
        )


class Fp4(Nf4):
    """FP4 of bitsandbytes, which differs in the table."""

    _STATE = "weight.quant_state.bitsandbytes__fp4"
    required: ClassVar = {**Nf4._PARTS, _STATE: ("U8",)}
