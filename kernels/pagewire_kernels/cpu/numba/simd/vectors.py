"""Vectors of sixteen float32: arithmetic, lane by lane and over lanes."""

from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic, models, register_model

from pagewire_kernels.cpu.numba.simd.llvm import (
    FLOATS,
    INT,
    INTS,
    LANES,
    fma,
    in_all_lanes,
    lane_numbers,
    splat,
)


class VectorType(types.Type):
    """numba's type of a vector."""

    def __init__(self) -> None:
        super().__init__(name=f"float32x{LANES}")


@register_model(VectorType)
class _VectorModel(models.PrimitiveModel):
    def __init__(self, dmm: Any, fe_type: Any) -> None:
        super().__init__(dmm, fe_type, FLOATS)


vector = VectorType()


@intrinsic
def zeros(typingctx: Any) -> Any:
    """A vector of zeros."""
    return vector(), lambda context, builder, signature, args: splat(0.0)


@intrinsic
def broadcast(typingctx: Any, value: Any) -> Any:
    """A vector with `value` in all lanes."""

    def build(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return in_all_lanes(builder, args[0], FLOATS)

    return vector(types.float32), build


@intrinsic
def add(typingctx: Any, a: Any, b: Any) -> Any:
    """a + b, lane by lane."""

    def build(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.fadd(*args)

    return vector(vector, vector), build


@intrinsic
def subtract(typingctx: Any, a: Any, b: Any) -> Any:
    """a - b, lane by lane."""

    def build(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.fsub(*args)

    return vector(vector, vector), build


@intrinsic
def multiply(typingctx: Any, a: Any, b: Any) -> Any:
    """a * b, lane by lane."""

    def build(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.fmul(*args)

    return vector(vector, vector), build


@intrinsic
def divide(typingctx: Any, a: Any, b: Any) -> Any:
    """a / b, lane by lane."""

    def build(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.fdiv(*args)

    return vector(vector, vector), build


@intrinsic
def multiply_add(typingctx: Any, a: Any, b: Any, c: Any) -> Any:
    """a * b + c, rounded once."""

    def build(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return fma(builder, *args)

    return vector(vector, vector, vector), build


def _reduce(builder: Any, value: Any, combine: Any) -> Any:
    """Lane 0 after combining halves: 16, 8, 4, 2, 1."""
    width = LANES // 2
    while width:
        order = [(lane + width) % LANES for lane in range(LANES)]
        moved = builder.shuffle_vector(value, value, lane_numbers(order))
        value = combine(value, moved)
        width //= 2
    return builder.extract_element(value, ir.Constant(INT, 0))


@intrinsic
def sum_lanes(typingctx: Any, value: Any) -> Any:
    """The sum of all lanes, added as a tree of halves."""

    def build(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return _reduce(builder, args[0], builder.fadd)

    return types.float32(vector), build


@intrinsic
def max_lanes(typingctx: Any, value: Any) -> Any:
    """The greatest of all lanes."""

    def build(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        def greater(a: Any, b: Any) -> Any:
            return builder.select(builder.fcmp_ordered(">", a, b), a, b)

        return _reduce(builder, args[0], greater)

    return types.float32(vector), build


@intrinsic
def first_lane(typingctx: Any, value: Any) -> Any:
    """Lane 0."""

    def build(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.extract_element(args[0], ir.Constant(INT, 0))

    return types.float32(vector), build


@intrinsic
def keep_lanes(typingctx: Any, value: Any, first: Any, end: Any, otherwise: Any) -> Any:
    """Lanes `first` to `end - 1` of `value`, and `otherwise` in the rest."""

    def build(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        value, first, end, otherwise = args
        lanes = lane_numbers(range(LANES))
        first, end = (
            in_all_lanes(builder, builder.trunc(number, INT), INTS) for number in (first, end)
        )
        kept = builder.and_(
            builder.icmp_signed(">=", lanes, first),
            builder.icmp_signed("<", lanes, end),
        )
        return builder.select(kept, value, in_all_lanes(builder, otherwise, FLOATS))

    return vector(vector, types.int64, types.int64, types.float32), build


# e^x = 2^n * e^r with |r| <= ln(2) / 2; e^r by the polynomial of Cephes' expf, within 2 ulp.
_EXP_LOWEST = -87.33654022216797
_EXP_HIGHEST = 88.37625885009766
_LOG2_E = 1.4426950216293335
_LN2_HIGH = 0.693359375
_LN2_LOW = -0.00021219444170128554
_EXP_POLYNOMIAL = (
    0.00019875691214110702,
    0.001398199936375022,
    0.008333452045917511,
    0.04166579619050026,
    0.1666666567325592,
    0.5,
)
_ROUNDER = 12582912.0
"""1.5 * 2^23: adding it to a small float leaves its nearest integer in the low bits."""


@intrinsic
def exp(typingctx: Any, value: Any) -> Any:
    """e to the power of each lane; clamped to finite results, NaN stays NaN."""

    def build(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        (x,) = args
        low, high = splat(_EXP_LOWEST), splat(_EXP_HIGHEST)
        x = builder.select(builder.fcmp_ordered("<", x, low), low, x)
        x = builder.select(builder.fcmp_ordered(">", x, high), high, x)
        rounded = fma(builder, x, splat(_LOG2_E), splat(_ROUNDER))
        n = builder.fsub(rounded, splat(_ROUNDER))
        r = fma(builder, n, splat(-_LN2_HIGH), x)
        r = fma(builder, n, splat(-_LN2_LOW), r)
        y = splat(_EXP_POLYNOMIAL[0])
        for coefficient in _EXP_POLYNOMIAL[1:]:
            y = fma(builder, y, r, splat(coefficient))
        y = fma(builder, y, builder.fmul(r, r), builder.fadd(r, splat(1.0)))
        exponent = builder.add(builder.bitcast(rounded, INTS), splat(127))
        power = builder.bitcast(builder.shl(exponent, splat(23)), FLOATS)
        return builder.fmul(y, power)

    return vector(vector), build
