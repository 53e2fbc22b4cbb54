"""The tensors that make up a quantized weight: a table of formats, and how they are read.

A weight is checked against file headers when it is found, and converted to a `QuantizedWeight` when
it is read.
"""

import json
from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from math import gcd, isfinite
from typing import NamedTuple

import torch
from torch import Tensor

from pagewire_kernels.quantized_weight import (
    SIGNED_TABLE,
    UNSIGNED_TABLE,
    Int8Activations,
    QuantizedWeight,
)
from worker_service.errors import BadCheckpoint, UnsupportedModel
from worker_service.loader.tensors import FLOATS, CheckpointTensor, Index, Shape, StoredTensor

_SCALES = ("scales", "weight_scale", "weight_scale_inv")
_ZEROS = {"qzeros", "weight_zero_point"}
_GROUPS = {"g_idx", "weight_g_idx"}
_ACTIVATION_SCALES = {"input_scale", "input_zero_point", "activation_scale"}
"""Suffixes of the tensors with the same role in several formats."""

_WORD_BITS = {"I32": 32, "U8": 8}
"""Bits of the words into which codes are packed, by the type of the tensor."""


class Part(NamedTuple):
    """One of the tensors of a quantized weight."""

    types: tuple[str, ...]
    """The dtypes that it may have, as safetensors names them."""

    dims: list[str]
    """Its shape: numbers, or names of the weight's sizes. `out` and `in` are features; `rows` and
    `groups` are blocks of them that share a scale. `*` marks the dimension along which codes are
    packed into words, the first in the lowest bits, if the type is one of words. Dimensions of size
    1 are not compared. Empty: any shape."""

    is_optional: bool


@dataclass(frozen=True)
class Format:
    """A format of quantized weights. Tensors are named by their suffix: their name without the
    module's name and a dot."""

    name: str
    weight: "type[StoredWeight]"
    """Reads the weights."""

    nibbles: tuple[int, ...] | None = None
    """The places of codes of 4 bits among the first ones; None: they are in order."""

    adds_one_to_zeros: bool = False
    """Whether zero points are stored minus one."""

    @cached_property
    def parts(self) -> dict[str, Part]:
        """All tensors, by suffix."""
        return _parts_of(self.name)

    @property
    def codes(self) -> str:
        """The suffix of the tensor of codes."""
        return next(iter(self.parts))


@dataclass(frozen=True, kw_only=True, slots=True)
class Scheme:
    """How some of the weights are quantized."""

    format: Format
    bits: int = 8
    block: tuple[int, int] = (1, -1)
    """Numbers of output and input features that share a scale; -1: all."""

    one_scale: bool = False
    """Whether a single scale may be stored for all blocks."""

    more: tuple[str, ...] = ()
    """Suffixes of optional tensors that are required."""

    because: str = ""
    """The setting that requires them, for error messages."""

    activations: Int8Activations | None = None
    """How inputs are quantized; a static scale is stored as a tensor."""

    @property
    def label(self) -> str:
        """Format, bits and quantized activations, for the log."""
        kind = f"{self.format.name} of {self.bits} bits"
        return kind if self.activations is None else f"{kind} with 8-bit activations"


class StoredWeight(CheckpointTensor):
    """The tensors of one quantized weight, which is read as one tensor."""

    def __init__(self, module: str, scheme: Scheme, stored: Mapping[str, StoredTensor]) -> None:
        """module: its name; stored: all tensors of the checkpoint, by name.

        Raises BadCheckpoint or UnsupportedModel if tensors are missing or have other shapes or
        dtypes than the scheme requires.
        """
        form = scheme.format
        self.name, self.scheme, self.type = f"{module}.weight", scheme, scheme.label
        codes = stored[f"{module}.{form.codes}"]
        self.file, self.files = codes.file, codes.files
        found = {suffix: stored.get(f"{module}.{suffix}") for suffix in form.parts}
        missing = [
            f"{module}.{suffix}"
            for suffix, part in form.parts.items()
            if found[suffix] is None and (suffix in scheme.more or not part.is_optional)
        ]
        if missing:
            raise self.fault(
                f"{self.name} is quantized{scheme.because}; missing tensors: {', '.join(missing)}"
            )
        self.parts = {suffix: part for suffix, part in found.items() if part is not None}
        for suffix, tensor in self.parts.items():
            if tensor.type not in (types := form.parts[suffix].types):
                raise self.fault(
                    f"{tensor.name} is stored as {tensor.type}, expected {' or '.join(types)}"
                )
        self._sizes = self._find_sizes()
        self.shape = [self._sizes["out"], self._sizes["in"]]
        self._shapes = {suffix: self._expected_shape(suffix) for suffix in self.parts}
        for suffix, tensor in self.parts.items():
            if _significant(tensor.shape) != _significant(self._shapes[suffix]):
                raise self.fault(
                    f"{tensor.name} is {tensor.shape}, expected {self._shapes[suffix]}"
                )

    @property
    def is_quantized(self) -> bool:
        """Whether this is a quantized matrix."""
        return True

    @property
    def unused(self) -> list[str]:
        """Names of tensors that hold scales of activations, which are not quantized."""
        scales = _ACTIVATION_SCALES - set(self.scheme.more)
        return [part.name for suffix, part in self.parts.items() if suffix in scales]

    def __getitem__(self, index: Index) -> Tensor:
        """Read the weight, dequantized to float32. Raises UnsupportedModel if its scheme quantizes
        activations, too."""
        found = self._read()
        if found.activations is not None:
            raise UnsupportedModel(
                f"{self.file}: {self.name}: expected no input_activations in quantization_config:"
                " no kernel for this layer supports 8-bit activations"
            )
        return found.dequantize()[index]

    def quantized(self) -> QuantizedWeight | None:
        """Read the weight without dequantizing it; None if each input has a scale."""
        found = self._read()
        return found if found.group_size > 1 else None

    @abstractmethod
    def _read(self) -> QuantizedWeight:
        """Read the weight. Raises BadCheckpoint if its numbers are invalid."""

    def _find_sizes(self) -> dict[str, int]:
        """The sizes that `Part.dims` names, from the shape of the codes or, of a format that has
        it, from the tensor `weight_shape`."""
        codes = self.parts[self.scheme.format.codes]
        if len(codes.shape) != 2 or 0 in codes.shape:
            raise self.fault(f"{codes.name} is {codes.shape}, expected a matrix")
        if (stored := self.parts.get("weight_shape")) is not None:
            shape = stored[...].flatten().tolist()
            if len(shape) != 2 or min(shape) < 1:
                raise self.fault(f"{stored.name}: expected two positive numbers, got {shape}")
            sizes = dict(zip(("out", "in"), shape, strict=True))
        else:
            sizes = {}
            dims = self.scheme.format.parts[self.scheme.format.codes].dims
            for dim, size in zip(dims, codes.shape, strict=True):
                word = _WORD_BITS.get(codes.type) if dim.endswith("*") else None
                sizes[dim.rstrip("*")] = size * word // self.scheme.bits if word else size
        features = sizes["out"], sizes["in"]
        blocks = zip(features, self._block(), strict=True)
        block = [size if number == -1 else number for size, number in blocks]
        if block[0] == 1 and features[1] % block[1]:
            raise UnsupportedModel(
                f"{self.file}: {self.name}: expected a multiple of the group size {block[1]} as"
                f" input features, got {features[1]}"
            )
        rows, groups = (-(-size // number) for size, number in zip(features, block, strict=True))
        return {**sizes, "rows": rows, "groups": groups, "row": block[0], "group": block[1]}

    def _block(self) -> tuple[int, int]:
        """As `Scheme.block`."""
        is_single = _significant(self.parts[self._scale].shape) == []
        return (-1, -1) if self.scheme.one_scale and is_single else self.scheme.block

    def _expected_shape(self, suffix: str) -> Shape:
        tensor, shape = self.parts[suffix], []
        for dim in self.scheme.format.parts[suffix].dims:
            size = int(dim) if dim.isdecimal() else self._sizes[dim.rstrip("*")]
            word = _WORD_BITS.get(tensor.type) if dim.endswith("*") else None
            shape.append(-(-size * self.scheme.bits // word) if word else size)
        return shape or tensor.shape

    @property
    def _scale(self) -> str:
        """The suffix of the tensor of scales. Raises BadCheckpoint unless there is one."""
        found = [suffix for suffix in _SCALES if suffix in self.parts]
        if len(found) != 1:
            raise self.fault(f"{self.name} is quantized: expected one *.weight_scale tensor")
        return found[0]

    def part(self, suffix: str) -> Tensor:
        """Read one of the tensors: unpacked, and with outputs in rows."""
        stored, dims = self.parts[suffix], self.scheme.format.parts[suffix].dims
        numbers = stored[...].reshape(self._shapes[suffix])
        packed = [axis for axis, dim in enumerate(dims) if dim.endswith("*")]
        if packed and stored.type in _WORD_BITS:
            if suffix in _ZEROS and self.scheme.format.adds_one_to_zeros:
                numbers = numbers + _ONES[self.scheme.bits]
            size = self._sizes[dims[packed[0]].rstrip("*")]
            words = numbers.movedim(packed[0], -1)
            numbers = self._unpack(words)[..., :size].movedim(-1, packed[0])
        return numbers.t() if len(dims) == 2 and dims[1][:3] in ("out", "row") else numbers

    def _unpack(self, words: Tensor) -> Tensor:
        """Unpack the codes of words along the last dimension, to uint8."""
        # Flat first: a single word is contiguous whatever its strides, which the view needs.
        packed = words.reshape(-1).view(torch.uint8).view(*words.shape[:-1], -1)
        order = self.scheme.format.nibbles
        if self.scheme.bits == 8:
            return packed
        codes = torch.stack((packed & 15, packed >> 4), dim=-1).flatten(-2)
        if order is None:
            return codes
        runs = codes.unflatten(-1, (-1, len(order)))  # indexing them by `order` is ten times slower
        return torch.stack([runs[..., place] for place in order], dim=-1).flatten(-2)

    def floats(self, suffix: str) -> Tensor:
        """Read a tensor in float32. Raises BadCheckpoint if a number is infinite or NaN."""
        numbers = self.part(suffix).float()
        if not (is_finite := numbers.isfinite()).all():
            name, found = self.parts[suffix].name, numbers[~is_finite][0]
            raise self.fault(f"{name}: expected finite numbers, got {found:g}")
        return numbers

    def scales(self) -> Tensor:
        """Read the scales: float32 [out_features, num_groups]."""
        return self.by_group(self.floats(self._scale))

    def by_group(self, blocks: Tensor) -> Tensor:
        """Repeat the numbers of blocks for each output: [rows, groups] to [out_features,
        num_groups], where groups are smaller if the last block is."""
        out_features, in_features = self.shape
        size = gcd(self._sizes["group"], in_features)
        numbers = blocks.repeat_interleave(self._sizes["row"], 0)[:out_features]
        numbers = numbers.repeat_interleave(self._sizes["group"] // size, 1)
        return numbers[:, : in_features // size].contiguous()

    def fault(self, message: str) -> BadCheckpoint:
        """The error that names this weight's file."""
        return BadCheckpoint(f"{self.file}: {message}")


def _significant(shape: Shape) -> Shape:
    return [size for size in shape if size != 1]


_IN_ORDER = -1
"""Each group in `weight_g_idx`, as earlier versions of compressed-tensors say `in order`."""

_ONES = {4: 0x11111111, 8: 0x01010101}
"""What is added to words of zero points that are stored minus one, by bits: the subtraction was
done on whole words."""


class _Integers(StoredWeight):
    """Integer codes with scales and zero points."""

    def _read(self) -> QuantizedWeight:
        scales, middle, offsets = self.scales(), 1 << (self.scheme.bits - 1), None
        for suffix in self.parts.keys() & _ZEROS:
            zeros = self._unsigned(suffix)
            if (zeros != middle).any():
                offsets = (middle - self.by_group(zeros).float()) * scales
        codes = self._unsigned(self.scheme.format.codes)
        weight = QuantizedWeight(
            codes=(codes if self.scheme.bits == 4 else codes ^ middle).contiguous(),
            scales=scales,
            offsets=offsets,
            table=SIGNED_TABLE if self.scheme.bits == 4 else None,
            activations=self._activations(),
        )
        for suffix in self.parts.keys() & _GROUPS:
            groups = self.part(suffix).long()
            if (groups != _IN_ORDER).any():
                return self._regrouped(weight, groups)
        return weight

    def _unsigned(self, suffix: str) -> Tensor:
        """Read codes or zero points as uint8; signed ones are stored minus the middle."""
        numbers = self.part(suffix)
        if numbers.dtype != torch.int8:
            return numbers
        return numbers.view(torch.uint8) + (1 << (self.scheme.bits - 1))

    def _regrouped(self, weight: QuantizedWeight, group_of: Tensor) -> QuantizedWeight:
        """Apply the group of each input feature. Columns are sorted by group; if groups differ in
        size, each input feature becomes a group of its own."""
        num_groups = weight.scales.shape[1]
        first, last = int(group_of.min()), int(group_of.max())
        if not 0 <= first <= last < num_groups:
            raise self.fault(
                f"{self.name}: g_idx: expected groups 0 to {num_groups - 1}, got {first} to {last}"
            )
        in_order = torch.arange(num_groups).repeat_interleave(len(group_of) // num_groups)
        if group_of.equal(in_order):
            return weight
        if group_of.sort().values.equal(in_order):
            order = group_of.argsort(stable=True)
            return replace(weight, codes=weight.codes[:, order], order=order)
        offsets = None if weight.offsets is None else weight.offsets[:, group_of]
        return replace(weight, scales=weight.scales[:, group_of], offsets=offsets)

    def _activations(self) -> Int8Activations | None:
        found = self.scheme.activations
        if found is None or "input_scale" not in self.scheme.more:
            return found
        scale = float(self.floats("input_scale"))
        if scale <= 0:
            name = self.parts["input_scale"].name
            raise self.fault(f"{name}: expected a positive number, got {scale}")
        zero = "input_zero_point"
        zero_point = int(self.part(zero)) if zero in self.parts else 0
        return replace(found, scale=scale, zero_point=zero_point)


_FP8_NAN = 0x7F
"""The bits of NaN in float8_e4m3fn, without the sign."""


class _Fp8(StoredWeight):
    """float8_e4m3fn with scales per block, group, output feature or tensor.

    Scales of activations are ignored: activations are not quantized, which is more precise.
    """

    def _read(self) -> QuantizedWeight:
        scales = self.scales()
        codes = self.parts["weight"][...].view(torch.uint8)
        if (codes & _FP8_NAN == _FP8_NAN).any():
            raise self.fault(f"{self.name}: expected finite numbers, got NaN")
        return QuantizedWeight(codes=codes, scales=scales, is_float=True)


class _BitsAndBytes(StoredWeight):
    """NF4 and FP4 of bitsandbytes: indices into a table, the first of two in the upper half of a
    byte; a scale for each block of consecutive numbers, which may be quantized itself (nested)."""

    def _find_sizes(self) -> dict[str, int]:
        state = next(part for suffix, part in self.parts.items() if "quant_state" in suffix)
        self._is_nested = self.parts["weight.absmax"].type == "U8"
        try:
            values = json.loads(bytes(state[...].flatten().tolist()))
            shape, block = [*map(int, values["shape"])], int(values["blocksize"])
            nested_block = int(values["nested_blocksize"]) if self._is_nested else 1
            self._offset = float(values["nested_offset"]) if self._is_nested else 0.0
        except (ValueError, TypeError, LookupError, OverflowError, RecursionError) as error:
            raise self.fault(f"{state.name} cannot be read: {error!r}") from error
        if len(shape) != 2 or min(*shape, block, nested_block) < 1 or not isfinite(self._offset):
            raise self.fault(
                f"{state.name}: expected a shape of two positive sizes, positive block sizes and a"
                " finite nested_offset"
            )
        names = ("weight.nested_absmax", "weight.nested_quant_map")
        if self._is_nested and not self.parts.keys() >= {*names}:
            raise self.fault(
                f"{self.name} has quantized scales; missing tensors: {' or '.join(names)}"
            )
        count = shape[0] * shape[1]
        self._group = min(block, count)
        num_blocks = -(-count // self._group)
        self._nested_block = min(nested_block, num_blocks)
        return {
            "out": shape[0],
            "in": shape[1],
            "numbers": count,
            "blocks": num_blocks,
            "nested_blocks": -(-num_blocks // self._nested_block),
        }

    def _read(self) -> QuantizedWeight:
        scales = self.floats("weight.absmax")
        if self._is_nested:
            values = self.floats("weight.nested_quant_map")[scales.int()]
            nested = self.floats("weight.nested_absmax")
            scales = values * nested.repeat_interleave(self._nested_block)[: len(values)]
            scales = scales + self._offset
        out_features, in_features = self.shape
        size = gcd(self._group, in_features)  # blocks may extend over the ends of rows
        num_groups = in_features // size
        scales = scales.repeat_interleave(self._group // size)[: out_features * num_groups]
        return QuantizedWeight(
            codes=self.part("weight").view(self.shape),
            scales=scales.view(out_features, num_groups),
            table=tuple(self.floats("weight.quant_map").tolist()),
            is_float=True,
        )


_MXFP4_SIZES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_MXFP4_TABLE = (*_MXFP4_SIZES, *(-size for size in _MXFP4_SIZES))
"""The numbers of e2m1, of which the upper bit is the sign."""


class _Mxfp4(StoredWeight):
    """Floats of 4 bits, e2m1, with scales that are powers of two, e8m0 (OCP Microscaling)."""

    def _read(self) -> QuantizedWeight:
        exponents = self.part("scales").int()
        if exponents.eq(255).any():  # other ones are the exponents of float32, subnormal for 0
            raise self.fault(f"{self.parts['scales'].name}: expected numbers, got NaN")
        return QuantizedWeight(
            codes=self.part("blocks"),
            scales=torch.where(exponents > 0, exponents << 23, 1 << 22).int().view(torch.float32),
            table=_MXFP4_TABLE,
            is_float=True,
        )


class StoredRounded(StoredWeight):
    """Weights of `--quantization-cache`: codes of 8 bits, floats in F8_E4M3, or of 4 bits."""

    def _read(self) -> QuantizedWeight:
        codes = self.part("codes")
        return QuantizedWeight(
            codes=codes.view(torch.uint8),
            scales=self.scales(),
            offsets=self.floats("offsets") if "offsets" in self.parts else None,
            table=UNSIGNED_TABLE if self.scheme.bits == 4 else None,
            is_float=codes.dtype == torch.float8_e4m3fn,
            activations=self.scheme.activations,
        )


_TABLE = """
awq          qweight                              I32            in out*
awq          scales                               FLOAT          groups rows
awq          qzeros                               I32            groups rows*
gptq,gptqv2  qweight                              I32            in* out
gptq,gptqv2  scales                               FLOAT          groups rows
gptq,gptqv2  qzeros                               I32            groups rows*
gptq,gptqv2  g_idx?                               I32,I64        in
packed       weight_packed                        I32            out in*
packed       weight_scale                         FLOAT          rows groups
packed       weight_shape                         I32,I64        2
packed       weight_zero_point?                   I32,I8         rows* groups
packed       weight_g_idx?                        I32,I64        in
int8         weight                               I8             out in
int8         weight_scale                         FLOAT          rows groups
int8         weight_zero_point?                   I8             rows groups
int8         weight_g_idx?                        I32,I64        in
int8         input_scale?                         FLOAT          1
int8         input_zero_point?                    I8             1
fp8          weight                               F8_E4M3        out in
fp8          weight_scale?                        FLOAT,F8_E8M0  rows groups
fp8          weight_scale_inv?                    FLOAT,F8_E8M0  rows groups
fp8          input_scale?                         FLOAT          1
fp8          activation_scale?                    FLOAT          1
mxfp4        blocks                               U8             out in*
mxfp4        scales                               U8             rows groups
nf4,fp4      weight                               U8             numbers*
nf4,fp4      weight.absmax                        F32,U8         blocks
nf4,fp4      weight.quant_map                     F32            16
nf4          weight.quant_state.bitsandbytes__nf4 U8
fp4          weight.quant_state.bitsandbytes__fp4 U8
nf4,fp4      weight.nested_absmax?                F32            nested_blocks
nf4,fp4      weight.nested_quant_map?             F32            256
rounded      codes                                U8,F8_E4M3     out in*
rounded      scales                               F16            rows groups
rounded      offsets?                             F16            rows groups
"""
"""The tensors of each format, first that of the codes: names of formats, suffix (`?`: optional),
dtypes (`FLOAT`: any of `FLOATS`), and dimensions as in `Part.dims`."""


def _parts_of(name: str) -> dict[str, Part]:
    table = _TABLE.replace("FLOAT", ",".join(FLOATS))
    rows = [line.split() for line in table.strip().splitlines()]
    return {
        suffix.removesuffix("?"): Part(tuple(types.split(",")), dims, suffix.endswith("?"))
        for names, suffix, types, *dims in rows
        if name in names.split(",")
    }


AWQ = Format("awq", _Integers, nibbles=(0, 4, 1, 5, 2, 6, 3, 7))
GPTQ = Format("gptq", _Integers, adds_one_to_zeros=True)
GPTQ_V2 = Format("gptqv2", _Integers)
PACKED = Format("packed", _Integers)
INT8 = Format("int8", _Integers)
FP8 = Format("fp8", _Fp8)
NF4 = Format("nf4", _BitsAndBytes, nibbles=(1, 0))
FP4 = Format("fp4", _BitsAndBytes, nibbles=(1, 0))
MXFP4 = Format("mxfp4", _Mxfp4)
ROUNDED = Format("rounded", StoredRounded)

FORMATS: Mapping[str, Mapping[str, Format]] = {
    "awq": {"gemm": AWQ},
    "gptq": {"gptq": GPTQ, "gptq_v2": GPTQ_V2},
    "compressed-tensors": {"pack-quantized": PACKED, "int-quantized": INT8, "float-quantized": FP8},
    "fp8": {"e4m3": FP8},
    "modelopt": {"fp8": FP8, "fp8_per_channel_per_token": FP8, "fp8_pb_wo": FP8},
    "mxfp4": {"mxfp4": MXFP4},
    "bitsandbytes": {"nf4": NF4, "fp4": FP4},
}
"""By `quant_method`, then by the method's own name of the format."""
