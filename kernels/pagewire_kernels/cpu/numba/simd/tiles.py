"""Tiles: several vectors held in registers at once.

One kind has sixteen vectors: the products of one row with sixteen keys, not yet summed over lanes.
The other has four: neighbouring chunks of one row's output.
"""

from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic, models, register_model

from pagewire_kernels.cpu.numba.simd.llvm import (
    CHUNKS,
    FLOATS,
    LANES,
    fma,
    lane_numbers,
    pointer_to,
    splat,
)
from pagewire_kernels.cpu.numba.simd.vectors import vector


class TileType(types.Type):
    """numba's type of a tile of `size` vectors."""

    def __init__(self, size: int) -> None:
        self.size = size
        super().__init__(name=f"float32x{LANES}x{size}")


@register_model(TileType)
class _TileModel(models.PrimitiveModel):
    def __init__(self, dmm: Any, fe_type: Any) -> None:
        super().__init__(dmm, fe_type, ir.ArrayType(FLOATS, fe_type.size))


_PRODUCTS = TileType(LANES)
_CHUNKS = TileType(CHUNKS)


def _build_tile(builder: Any, vectors: list[Any]) -> Any:
    tile = ir.Constant(ir.ArrayType(FLOATS, len(vectors)), ir.Undefined)
    for j, value in enumerate(vectors):
        tile = builder.insert_value(tile, value, j)
    return tile


@intrinsic
def products(typingctx: Any) -> Any:
    """A tile of sixteen vectors of zeros."""
    return _PRODUCTS(), lambda context, builder, signature, args: _build_tile(
        builder, [splat(0.0)] * LANES
    )


@intrinsic
def load_chunks(typingctx: Any, address: Any, factor: Any) -> Any:
    """A tile of four vectors of float32 from `address`, each multiplied by `factor`."""

    def build(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        address, factor = args
        vectors = [
            builder.load(pointer_to(builder, _offset(builder, address, j), FLOATS), align=4)
            for j in range(CHUNKS)
        ]
        return _build_tile(builder, [builder.fmul(value, factor) for value in vectors])

    return _CHUNKS(types.int64, vector), build


@intrinsic
def store_chunks(typingctx: Any, address: Any, tile: Any) -> Any:
    """Write a tile of four vectors to `address`."""

    def build(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        address, tile = args
        for j in range(CHUNKS):
            pointer = pointer_to(builder, _offset(builder, address, j), FLOATS)
            builder.store(builder.extract_value(tile, j), pointer, align=4)

    return types.void(types.int64, _CHUNKS), build


def _offset(builder: Any, address: Any, chunk: int) -> Any:
    return builder.add(address, ir.Constant(ir.IntType(64), 4 * LANES * chunk))


@intrinsic
def tile_multiply_add(typingctx: Any, tile: Any, a: Any, address: Any, stride: Any) -> Any:
    """Add to vector j of a tile the product of `a` and the float32 at `address + j * stride`."""

    def build(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        value, a, address, stride = args
        vectors = []
        for j in range(tile.size):
            b = builder.load(pointer_to(builder, address, FLOATS), align=4)
            vectors.append(fma(builder, a, b, builder.extract_value(value, j)))
            address = builder.add(address, stride)
        return _build_tile(builder, vectors)

    return tile(tile, vector, types.int64, types.int64), build


@intrinsic
def sum_products(typingctx: Any, tile: Any) -> Any:
    """The sum of the lanes of each of sixteen vectors, in one vector.

    Two vectors become one by adding one's halves to the other's, then quarters, and so on: four
    rounds leave one vector whose lane j is vector j's sum, added as a tree.
    """

    def build(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        vectors = [builder.extract_value(args[0], j) for j in range(LANES)]
        width = LANES // 2
        while width:
            half = len(vectors) // 2
            vectors = [_fold(builder, vectors[j], vectors[j + half], width) for j in range(half)]
            width //= 2
        return vectors[0]

    return vector(_PRODUCTS), build


def _fold(builder: Any, a: Any, b: Any, width: int) -> Any:
    """In each run of 2 * width lanes: a's halves added in the lower half, b's in the upper one."""
    kept, moved = [], []
    for lane in range(LANES):
        upper = lane & width
        source = LANES if upper else 0  # shuffles count b's lanes from LANES on
        kept.append(source + (lane & ~width))
        moved.append(source + (lane | width))
    orders = (lane_numbers(kept), lane_numbers(moved))
    return builder.fadd(*(builder.shuffle_vector(a, b, order) for order in orders))
