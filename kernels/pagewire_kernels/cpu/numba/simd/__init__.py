"""Vectors of sixteen float32 for numba: every operation and its order spelled out.

numba's loops are vectorised by LLVM as it sees fit, so the order of a sum may depend on where in a
loop a number stands. The attention kernel promises one order for each row, so it is written with
these vectors instead: a fused multiply-add is one, and a sum over lanes is always the same tree.
LLVM splits them on machines with narrower registers; the results stay the same.

    llvm.py     LLVM's types and a few instruction sequences
    vectors.py  arithmetic
    tiles.py    several vectors at once
    memory.py   loading and storing, by address
"""

from pagewire_kernels.cpu.numba.simd.llvm import CHUNKS, LANES
from pagewire_kernels.cpu.numba.simd.memory import (
    bfloat16,
    copy_bytes,
    fetch_add,
    float16,
    float32,
    load,
    load_int32,
    load_int64,
    load_scalar,
    store,
)
from pagewire_kernels.cpu.numba.simd.tiles import (
    load_chunks,
    products,
    store_chunks,
    sum_products,
    tile_multiply_add,
)
from pagewire_kernels.cpu.numba.simd.vectors import (
    add,
    broadcast,
    divide,
    exp,
    first_lane,
    keep_lanes,
    max_lanes,
    multiply,
    multiply_add,
    subtract,
    sum_lanes,
    zeros,
)

__all__ = [
    "CHUNKS",
    "LANES",
    "add",
    "bfloat16",
    "broadcast",
    "copy_bytes",
    "divide",
    "exp",
    "fetch_add",
    "first_lane",
    "float16",
    "float32",
    "keep_lanes",
    "load",
    "load_chunks",
    "load_int32",
    "load_int64",
    "load_scalar",
    "max_lanes",
    "multiply",
    "multiply_add",
    "products",
    "store",
    "store_chunks",
    "subtract",
    "sum_lanes",
    "sum_products",
    "tile_multiply_add",
    "zeros",
]
