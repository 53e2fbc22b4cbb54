"""LLVM's types, and the few instruction sequences that several operations need."""

from typing import Any

from llvmlite import ir
from numba.core import cgutils

LANES = 16
"""Numbers in a vector."""

CHUNKS = 4
"""Vectors in a tile of neighbouring chunks."""

FLOAT = ir.FloatType()
INT = ir.IntType(32)
FLOATS = ir.VectorType(FLOAT, LANES)
INTS = ir.VectorType(INT, LANES)
SHORTS = ir.VectorType(ir.IntType(16), LANES)
HALVES = ir.VectorType(ir.HalfType(), LANES)


def splat(value: Any) -> ir.Constant:
    """A constant vector with `value` in all lanes."""
    if isinstance(value, float):
        return ir.Constant(FLOATS, [ir.Constant(FLOAT, value)] * LANES)
    return ir.Constant(INTS, [ir.Constant(INT, value)] * LANES)


def lane_numbers(numbers: Any) -> ir.Constant:
    """A constant vector of integers, such as a shuffle's order."""
    return ir.Constant(INTS, [ir.Constant(INT, number) for number in numbers])


def in_all_lanes(builder: Any, scalar: Any, vector_type: ir.VectorType) -> Any:
    """A vector with a scalar that is known only when running in all lanes."""
    undefined = ir.Constant(vector_type, ir.Undefined)
    lane = builder.insert_element(undefined, scalar, ir.Constant(INT, 0))
    return builder.shuffle_vector(lane, undefined, splat(0))


def fma(builder: Any, a: Any, b: Any, c: Any) -> Any:
    """a * b + c, rounded once."""
    signature = ir.FunctionType(FLOATS, [FLOATS] * 3)
    function = cgutils.get_or_insert_function(builder.module, signature, f"llvm.fma.v{LANES}f32")
    return builder.call(function, [a, b, c])


def pointer_to(builder: Any, address: Any, kind: Any) -> Any:
    """An address as a pointer to something of an LLVM type."""
    return builder.inttoptr(address, kind.as_pointer())
