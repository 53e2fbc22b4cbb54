"""Argument checks of the kernels' launchers."""

import torch
from torch import Tensor

from pagewire_kernels.batch import AttentionMetadata
from pagewire_kernels.interface import Abilities, CacheScales, are_scaled, stored_head_size

DTYPES = {torch.float32: "float32", torch.bfloat16: "bfloat16"}
"""Dtypes of rows and dense weights, with their names in kernels."""

ABILITIES = Abilities(
    dtypes=tuple(DTYPES), int8_cache=True, batch_invariant=True, default_block_size=64
)
"""Blocks of 64 tokens are read a third faster from memory than blocks of 16, which are scattered;
larger blocks are no faster."""


def require(condition: bool, expected: str) -> None:
    """Raise ValueError unless the condition holds: kernels read raw pointers without any check.

    An `assert` would not suffice, since `python -O` removes it.
    """
    if not condition:
        raise ValueError(f"a CPU kernel requires {expected}")


def check_cache(key_cache: Tensor, value_cache: Tensor, rows: Tensor, scales: CacheScales) -> None:
    """Raise TypeError or ValueError for layouts that the kernels do not support, and for the scales
    of an fp8 cache, which CPUs cannot convert efficiently.

    key_cache, value_cache: [num_blocks, block_size, num_kv_heads, stored head size]; rows: queries
    or keys, [num_tokens, num_heads, head_dim].
    """
    if are_scaled(scales):
        raise ValueError("attention backend 'cpu' does not support scaled caches")
    if rows.dtype not in DTYPES or key_cache.dtype not in (rows.dtype, torch.int8):
        raise TypeError(
            f"expected a cache of the dtype of the rows or int8, got {key_cache.dtype} for rows of"
            f" {rows.dtype}"
        )
    if key_cache.stride() != value_cache.stride() or key_cache.shape != value_cache.shape:
        raise ValueError("expected key and value caches of equal shapes and strides")
    num_heads, size = key_cache.shape[2:]
    if key_cache.stride(3) != 1 or (num_heads > 1 and key_cache.stride(2) != size):
        raise ValueError("expected a cache in which the heads of a token are contiguous")
    if stored_head_size(rows.shape[2], key_cache.dtype) != size or rows.shape[1] % num_heads:
        raise ValueError(
            f"expected rows with a multiple of {num_heads} heads that fit {size} stored elements,"
            f" got shape {tuple(rows.shape)}"
        )


def check_packed(query: Tensor, key: Tensor, value: Tensor, metadata: AttentionMetadata) -> None:
    """Raise TypeError or ValueError for rows of whole texts that the kernels do not support: key
    and value [num_tokens, num_kv_heads, head_dim], of equal strides and with dense heads."""
    if query.dtype not in DTYPES or not query.dtype == key.dtype == value.dtype:
        raise TypeError(
            f"expected rows of one dtype, float32 or bfloat16, got {query.dtype},"
            f" {key.dtype} and {value.dtype}"
        )
    (num_rows, num_heads, head_dim), num_kv_heads = query.shape, key.shape[1]
    require(key.shape == value.shape == (num_rows, num_kv_heads, head_dim), "rows of one shape")
    require(num_heads % num_kv_heads == 0, "a multiple of the key heads as query heads")


def check_bias(bias: Tensor, num_heads: int, longest: int) -> None:
    """Raise ValueError unless this is a bias by distance for texts of up to `longest` rows."""
    require(bias.dtype == torch.float32 and bias.is_contiguous(), "a dense float32 bias")
    (rows, width), least = bias.shape, 2 * longest - 1
    require(
        rows == num_heads and width % 2 == 1 and width >= least,
        f"a bias of shape [{num_heads}, 2 * n - 1] with at least {least} columns, got"
        f" {list(bias.shape)}",
    )


def kernel_over(cache: Tensor, name: str) -> str:
    """The name of the kernel for this cache: for int8, or for the dtype of the rows."""
    return f"{name}_int8" if cache.dtype == torch.int8 else name


def with_dense_heads(rows: Tensor) -> Tensor:
    """The rows with the heads of each row contiguous in memory, copied if necessary."""
    dense = rows.stride(2) == 1 and (rows.shape[1] == 1 or rows.stride(1) == rows.shape[2])
    return rows if dense else rows.contiguous()
