"""Memory by address: sixteen numbers of one of three kinds, single ones, plain bytes.

Addresses are int64, so that a kernel needs no array objects.
"""

from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic, models, register_model

from pagewire_kernels.cpu.numba.simd.llvm import (
    FLOAT,
    FLOATS,
    HALVES,
    INT,
    INTS,
    SHORTS,
    pointer_to,
    splat,
)
from pagewire_kernels.cpu.numba.simd.vectors import vector


class ElementType(types.Type):
    """Type of a mark that says how numbers lie in memory; the mark itself has no content."""

    def __init__(self, name: str) -> None:
        super().__init__(name=name)


register_model(ElementType)(models.OpaqueModel)

_FLOAT32, _BFLOAT16, _FLOAT16 = (ElementType(n) for n in ("float32", "bfloat16", "float16"))


def _mark(element: ElementType) -> Any:
    def build(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return context.get_dummy_value()

    return element(), build


@intrinsic
def float32(typingctx: Any) -> Any:
    """The mark of float32."""
    return _mark(_FLOAT32)


@intrinsic
def bfloat16(typingctx: Any) -> Any:
    """The mark of bfloat16: the upper half of a float32."""
    return _mark(_BFLOAT16)


@intrinsic
def float16(typingctx: Any) -> Any:
    """The mark of float16."""
    return _mark(_FLOAT16)


@intrinsic
def load(typingctx: Any, element: Any, address: Any) -> Any:
    """Sixteen numbers of the kind marked, from `address`."""

    def build(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        if element == _FLOAT32:
            return builder.load(pointer_to(builder, args[1], FLOATS), align=4)
        if element == _FLOAT16:
            halves = builder.load(pointer_to(builder, args[1], HALVES), align=2)
            return builder.fpext(halves, FLOATS)
        shorts = builder.load(pointer_to(builder, args[1], SHORTS), align=2)
        return builder.bitcast(builder.shl(builder.zext(shorts, INTS), splat(16)), FLOATS)

    return vector(element, types.int64), build


@intrinsic
def store(typingctx: Any, element: Any, address: Any, value: Any) -> Any:
    """Write sixteen numbers of the kind marked to `address`, rounded to nearest even."""

    def build(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        _, address, value = args
        if element == _FLOAT32:
            builder.store(value, pointer_to(builder, address, FLOATS), align=4)
        elif element == _FLOAT16:
            halves = builder.fptrunc(value, HALVES)
            builder.store(halves, pointer_to(builder, address, HALVES), align=2)
        else:
            shorts = _round_to_bfloat16(builder, value)
            builder.store(shorts, pointer_to(builder, address, SHORTS), align=2)

    return types.void(element, types.int64, vector), build


def _round_to_bfloat16(builder: Any, value: Any) -> Any:
    """The upper halves, rounded; NaN stays NaN."""
    bits = builder.bitcast(value, INTS)
    odd = builder.and_(builder.lshr(bits, splat(16)), splat(1))
    rounded = builder.add(bits, builder.add(odd, splat(0x7FFF)))
    is_nan = builder.fcmp_unordered("uno", value, value)
    bits = builder.select(is_nan, splat(0x7FC00000), rounded)
    return builder.trunc(builder.lshr(bits, splat(16)), SHORTS)


@intrinsic
def load_scalar(typingctx: Any, address: Any) -> Any:
    """The float32 at `address`."""

    def build(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.load(pointer_to(builder, args[0], FLOAT), align=4)

    return types.float32(types.int64), build


@intrinsic
def load_int32(typingctx: Any, address: Any) -> Any:
    """The int32 at `address`, as int64."""

    def build(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        number = builder.load(pointer_to(builder, args[0], INT), align=4)
        return builder.sext(number, ir.IntType(64))

    return types.int64(types.int64), build


@intrinsic
def load_int64(typingctx: Any, address: Any) -> Any:
    """The int64 at `address`."""

    def build(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.load(pointer_to(builder, args[0], ir.IntType(64)), align=8)

    return types.int64(types.int64), build


@intrinsic
def copy_bytes(typingctx: Any, target: Any, source: Any, size: Any) -> Any:
    """Copy `size` bytes between addresses that do not overlap."""

    def build(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        byte = ir.IntType(8)
        to, source = (pointer_to(builder, address, byte) for address in args[:2])
        cgutils.raw_memcpy(builder, to, source, args[2], 1)

    return types.void(types.int64, types.int64, types.int64), build


@intrinsic
def fetch_add(typingctx: Any, address: Any, amount: Any) -> Any:
    """Add `amount` to the int64 at `address` in one indivisible step; returns what was there."""

    def build(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        pointer = pointer_to(builder, args[0], ir.IntType(64))
        return builder.atomic_rmw("add", pointer, args[1], "monotonic")

    return types.int64(types.int64, types.int64), build
