"""Checks of the inputs of the CPU's attention backends."""

import torch
from torch import Tensor

from pagewire_kernels.interface import Abilities, stored_head_size

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
ABILITIES = Abilities(
    devices=("cpu",), dtypes=DTYPES, int8_cache=True, batch_invariant=True, default_block_size=64
)
"""Memory gives keys and values of 64 tokens that lie together a third faster than those of 16 here
and there; larger blocks gain nothing more."""


def require(condition: bool, expected: str) -> None:
    """Raise ValueError unless the condition holds: kernels read raw pointers, and check nothing.

    An `assert` would not do, since `python -O` removes it.
    """
    if not condition:
        raise ValueError(f"a CPU kernel requires {expected}")


def check_cache(key_cache: Tensor, value_cache: Tensor, rows: Tensor) -> None:
    """Refuse what the kernels would misread."""
    if rows.dtype not in DTYPES or key_cache.dtype not in (rows.dtype, torch.int8):
        raise TypeError(f"rows are {rows.dtype}, the cache is {key_cache.dtype}")
    if key_cache.stride() != value_cache.stride() or key_cache.shape != value_cache.shape:
        raise ValueError("key and value cache differ in layout")
    num_heads, size = key_cache.shape[2:]
    if key_cache.stride(3) != 1 or (num_heads > 1 and key_cache.stride(2) != size):
        raise ValueError("a token's heads do not lie one after the other in the cache")
    if stored_head_size(rows.shape[2], key_cache.dtype) != size or rows.shape[1] % num_heads:
        raise ValueError(f"rows of shape {tuple(rows.shape)} do not fit the cache")


def refuse_scales(key_scale: float, value_scale: float) -> None:
    """Scales are those of fp8, which CPUs have no fast way to read."""
    if key_scale != 1.0 or value_scale != 1.0:
        raise ValueError("the cpu backend has no scaled caches")


def kernel_over(cache: Tensor, name: str) -> str:
    """The kernel called `name` of those for this cache: of int8, or of the rows' dtype."""
    return f"{name}_int8" if cache.dtype == torch.int8 else name


def with_dense_heads(rows: Tensor) -> Tensor:
    """The same rows, each one's heads one after the other in memory."""
    dense = rows.stride(2) == 1 and (rows.shape[1] == 1 or rows.stride(1) == rows.shape[2])
    return rows if dense else rows.contiguous()
