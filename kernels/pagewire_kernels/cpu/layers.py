"""Launchers of src/take.cpp, src/norm.cpp, src/activation.cpp and src/rotate.cpp.

They raise ValueError for tensors of unsupported dtypes, shapes or strides.
"""

import ctypes
from typing import Unpack

import numpy as np
import torch
from torch import Tensor

from pagewire_kernels import reference
from pagewire_kernels.cpu import threads
from pagewire_kernels.cpu.checks import DTYPES, kernel_over, require
from pagewire_kernels.cpu.native_library import Library
from pagewire_kernels.cpu.program import batch_of, count_address, launch, new_rows, new_tensor
from pagewire_kernels.cpu.tasks import (
    ActivationTask,
    Batch,
    LargestTask,
    NormTask,
    RotateTask,
    TakeTask,
    address,
    rows_of,
)
from pagewire_kernels.interface import RotaryOptions, stored_head_size


def take(
    library: Library, table: Tensor, num_rows: int, batch: Batch, count: str, indices: str
) -> Tensor:
    """Gather rows of a table by indices in the batch.

    table: [n, size]; num_rows: maximum number of indices; count, indices: names of the fields of
    `Batch` that hold their number and address. Returns [num_rows, size], with zeros for indices out
    of range.
    """
    y, task = _take_task(table, num_rows)
    task.num_rows = ctypes.addressof(batch) + getattr(Batch, count).offset
    task.indices = ctypes.addressof(batch) + getattr(Batch, indices).offset
    launch(library.kernel("take"), task, 1)
    return y


def _take_task(table: Tensor, num_rows: int) -> tuple[Tensor, TakeTask]:
    """Return the tensor that is filled, and a task that lacks the number of rows and indices."""
    require(table.stride(1) == 1, "a table with a dense last axis")
    size, item = table.shape[1], table.element_size()
    y = new_rows(num_rows, size, table.dtype)
    task = TakeTask(
        table=table.data_ptr(),
        table_row_bytes=table.stride(0) * item,
        y=y.data_ptr(),
        y_row_bytes=y.stride(0) * item,
        row_bytes=size * item,
        table_rows=table.shape[0],
    )
    return y, task


def find_largest(library: Library, x: Tensor) -> tuple[Tensor, Tensor]:
    """Find the largest number of each row. x: float32 [num_rows, size], with a dense last axis.

    Returns its column, the lowest among equals, int64 [num_rows], and the number, float32
    [num_rows]: NaN, with an arbitrary column, if the row has a NaN.
    """
    require(x.dtype == torch.float32, "float32 rows")
    require(x.stride(1) == 1, "rows with a dense last axis")
    num_rows, size = x.shape
    places = new_tensor((num_rows,), torch.int64)
    values = new_tensor((num_rows,), torch.float32)
    task = LargestTask(
        num_rows=count_address(num_rows),
        **rows_of(x=x),
        size=size,
        place=places.data_ptr(),
        value=values.data_ptr(),
    )
    launch(library.kernel("largest"), task, 1)
    return places, values


MAX_HEAD_DIM = 1024


class NativeLayerKernels:
    """Layer kernels in C++, for rows of float32 or bfloat16. Implements `LayerKernels`."""

    name = "native"

    def __init__(self, library: Library) -> None:
        self._library = library

    rotate = staticmethod(reference.rotate)
    sum_rows = staticmethod(reference.sum_rows)

    def embed(self, table: Tensor, indices: Tensor, sums: Tensor | None = None) -> Tensor:
        """Gather rows of a table, with zeros for indices out of range."""
        require(indices.dtype == torch.int64, "int64 indices")
        indices = indices.contiguous()
        num_rows = indices.shape[0]
        batch = batch_of(num_rows, token_ids=indices)
        rows = take(self._library, table, num_rows, batch, "num_rows", "token_ids")
        return rows if sums is None else sums.add_(rows)

    def copy(self, x: Tensor) -> Tensor:
        """Copy the rows."""
        y, task = _take_task(x, x.shape[0])
        numbers = np.arange(x.shape[0], dtype=np.int64)
        indices = ctypes.c_int64(numbers.ctypes.data)
        task.num_rows, task.indices = count_address(x.shape[0]), ctypes.addressof(indices)
        task.kept_alive = numbers, indices
        launch(self._library.kernel("take"), task, threads.count_for(x.numel()))
        return y

    def rms_norm(
        self, x: Tensor, weight: Tensor, eps: float, residual: Tensor | None = None
    ) -> Tensor:
        """x / rms(x) * weight, after adding x to the residual if given."""
        return self._norm("rms_norm", x, weight, None, eps, residual)

    def layer_norm(
        self,
        x: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        eps: float,
        residual: Tensor | None = None,
    ) -> Tensor:
        """(x - mean) / deviation * weight + bias; `residual` as in `rms_norm`."""
        return self._norm("layer_norm", x, weight, bias, eps, residual)

    def _norm(
        self,
        name: str,
        x: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        eps: float,
        residual: Tensor | None,
    ) -> Tensor:
        num_rows, size = x.shape
        require(_is_rows(x, num_rows, x.dtype), "rows with a dense last axis")
        require(_is_dense(weight, (size,), x.dtype), "a dense weight of the rows' size and dtype")
        require(_is_dense(bias, (size,), x.dtype), "a dense bias of the rows' size and dtype")
        require(
            residual is None or _is_rows(residual, num_rows, x.dtype),
            "a residual of as many rows, of the same dtype, with a dense last axis",
        )
        y = new_rows(num_rows, size, x.dtype)
        task = NormTask(
            num_rows=count_address(num_rows),
            **rows_of(x=x, residual=residual, y=y),
            weight=address(weight),
            bias=address(bias),
            size=size,
            eps=eps,
        )
        self._launch(name, task, x.dtype, num_rows * size)
        return y

    def activate(self, x: Tensor, activation: str) -> Tensor:
        """activation(x), in place."""
        self._activate("activate", x, x, activation)
        return x

    def act_and_mul(self, gate_up: Tensor, activation: str) -> Tensor:
        """activation(gate) * up, where `gate_up` holds gate, then up."""
        num_rows, width = gate_up.shape
        require(width % 2 == 0, "an even number of columns: gate and up are of one size")
        y = new_rows(num_rows, width // 2, gate_up.dtype)
        self._activate("act_and_mul", gate_up, y, activation)
        return y

    def _activate(self, name: str, x: Tensor, y: Tensor, activation: str) -> None:
        num_rows, size = y.shape
        require(_is_rows(x, num_rows, y.dtype), "rows of the output's dtype with a dense last axis")
        task = ActivationTask(
            num_rows=count_address(num_rows),
            **rows_of(x=x, y=y),
            size=size,
            activation=reference.ACTIVATIONS.index(activation),
        )
        self._launch(name, task, x.dtype, y.numel())

    def rotate_and_write_kv(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_cache: Tensor,
        value_cache: Tensor,
        slot_mapping: Tensor,
        positions: Tensor,
        cos: Tensor,
        sin: Tensor,
        **options: Unpack[RotaryOptions],
    ) -> None:
        """Apply norms and RoPE to `query` in place; write normed and RoPE'd keys, and raw values,
        to the cache.

        The cache has the dtype of the rows or is int8, so scales are ignored.
        """
        (num_rows, num_heads, head_dim), num_kv_heads = query.shape, key.shape[1]
        dtype, tables, caches = query.dtype, (cos, sin), (key_cache, value_cache)
        norms = options.get("query_norm"), options.get("key_norm")
        require(head_dim <= MAX_HEAD_DIM, f"heads of at most {MAX_HEAD_DIM} elements")
        require(
            all(_is_rows(rows, num_rows, dtype) for rows in (query, key, value)),
            "query, key and value of as many rows, of one dtype, with a dense last axis",
        )
        require(
            key_cache.stride() == value_cache.stride()
            and all(_is_cache(cache, key) for cache in caches),
            "key and value caches of one layout that fits the keys",
        )
        require(
            all(_is_dense(table, cos.shape, dtype) for table in tables),
            "dense cos and sin tables of one shape and the rows' dtype",
        )
        require(
            all(_is_dense(norm, (head_dim,), dtype) for norm in norms),
            "dense norm weights of a head's size and dtype",
        )
        require(
            all(
                _is_dense(column, (num_rows,), torch.int64) for column in (slot_mapping, positions)
            ),
            "a dense int64 slot and position for each row",
        )
        batch = batch_of(num_rows, positions=positions, slot_mapping=slot_mapping)
        task = RotateTask(
            batch=ctypes.addressof(batch),
            **rows_of(query=query, key=key, value=value),
            query_head_stride=query.stride(1),
            key_head_stride=key.stride(1),
            value_head_stride=value.stride(1),
            key_cache=key_cache.data_ptr(),
            value_cache=value_cache.data_ptr(),
            block_stride=key_cache.stride(0),
            slot_stride=key_cache.stride(1),
            cache_head_stride=key_cache.stride(2),
            block_size=key_cache.shape[1],
            cos=cos.data_ptr(),
            sin=sin.data_ptr(),
            table_stride=cos.shape[1],
            query_norm=address(norms[0]),
            key_norm=address(norms[1]),
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            half=cos.shape[1],
            eps=options.get("eps", 1e-6),
        )
        num_numbers = num_rows * (num_heads + 2 * num_kv_heads) * head_dim
        self._launch(kernel_over(key_cache, "rotate_and_write"), task, dtype, num_numbers)

    def _launch(
        self, name: str, task: ctypes.Structure, dtype: torch.dtype, num_numbers: int
    ) -> None:
        kernel = self._library.kernel(f"{name}_{DTYPES[dtype]}")
        launch(kernel, task, threads.count_for(num_numbers))


def _is_rows(rows: Tensor, num_rows: int, dtype: torch.dtype) -> bool:
    return rows.dtype == dtype and rows.shape[0] == num_rows and rows.stride(-1) == 1


def _is_dense(tensor: Tensor | None, shape: tuple[int, ...], dtype: torch.dtype) -> bool:
    if tensor is None:
        return True
    return tensor.dtype == dtype and tensor.shape == shape and tensor.is_contiguous()


def _is_cache(cache: Tensor, rows: Tensor) -> bool:
    heads = (rows.shape[1], stored_head_size(rows.shape[2], cache.dtype))
    is_known = cache.dtype in (rows.dtype, torch.int8)
    return is_known and cache.shape[2:] == heads and cache.stride(3) == 1
