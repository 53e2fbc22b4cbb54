"""Argument checks: a kernel would silently misread tensors of other dtypes, shapes or strides."""

from collections.abc import Sequence

import torch
from torch import Tensor

from pagewire_kernels.interface import FP8

FP8_MAX = 448.0
"""The largest finite number of `float8_e4m3fn`."""


def expect(condition: bool, message: str) -> None:
    """Raise ValueError with the message unless the condition holds."""
    if not condition:
        raise ValueError(message)


def expect_dtype(name: str, tensor: Tensor, *dtypes: torch.dtype) -> None:
    """Raise TypeError unless the tensor has one of the dtypes."""
    if tensor.dtype not in dtypes:
        expected = " or ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
        raise TypeError(f"{name}: expected {expected}, got {tensor.dtype}")


def expect_rows(name: str, tensor: Tensor, *shape: int | None) -> None:
    """Raise ValueError unless the tensor has this shape (None: any size) and a dense last axis."""
    got = tensor.shape
    fits = len(shape) == len(got)
    if fits:
        for wanted, size in zip(shape, got, strict=True):
            fits = fits and (wanted is None or wanted == size)
    if not fits:
        listed = ", ".join("*" if size is None else str(size) for size in shape)
        raise ValueError(f"{name}: expected shape [{listed}], got {list(got)}")
    if tensor.stride(-1) != 1:
        raise ValueError(f"{name}: expected a dense last axis, got {tensor.stride()}")


def dense(rows: Tensor) -> Tensor:
    """The rows with a dense last axis, copied if necessary."""
    return rows if rows.stride(-1) == 1 else rows.contiguous()


Expected = tuple[str, Tensor | None, Sequence[torch.dtype], Sequence[int | None]]
"""Name of an argument, its tensor or None, allowed dtypes, and shape (None: any size)."""


def expect_tensors(*expected: Expected) -> None:
    """Raise TypeError or ValueError unless all tensors have one of their dtypes, their shape and a
    dense last axis. Absent tensors are None."""
    for name, tensor, dtypes, shape in expected:
        if tensor is not None:
            expect_dtype(name, tensor, *dtypes)
            expect_rows(name, tensor, *shape)


def expect_cache(key_cache: Tensor, value_cache: Tensor, dtype: torch.dtype) -> None:
    """Raise TypeError or ValueError unless these are two layer views of one block-major cache, of
    this dtype or fp8, which requires compute capability 8.9."""
    expect_dtype("key_cache", key_cache, dtype, FP8)
    expect_dtype("value_cache", value_cache, key_cache.dtype)
    expect_rows("key_cache", key_cache, None, None, None, None)
    expect_rows("value_cache", value_cache, *key_cache.shape)
    expect(
        key_cache.stride() == value_cache.stride(),
        f"value_cache: expected strides {key_cache.stride()}, as of key_cache, got"
        f" {value_cache.stride()}",
    )
    if key_cache.dtype == FP8 and key_cache.is_cuda:
        capability = torch.cuda.get_device_capability(key_cache.device)
        expect(
            capability >= (8, 9), f"fp8 cache: expected compute capability 8.9, got {capability}"
        )
