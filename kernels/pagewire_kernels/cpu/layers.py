"""Launchers of src/take.cpp, src/norm.cpp, src/activation.cpp and src/rotate.cpp.

They raise ValueError for tensors of unsupported dtypes, shapes or strides.
"""

import ctypes
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from pagewire_kernels import reference
from pagewire_kernels.cpu.checks import kernel_over, require
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
)
from pagewire_kernels.interface import stored_head_size


class Largest(NamedTuple):
    """The largest number of each row."""

    places: Tensor
    """int64 [num_rows]: its column, the lowest among equals."""

    values: Tensor
    """float32 [num_rows]; NaN, with an arbitrary column, if the row has a NaN."""


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


def find_largest(library: Library, x: Tensor) -> Largest:
    """Find the largest entry of each row. x: float32 [num_rows, size], with a dense last axis."""
    require(x.dtype == torch.float32, "float32 rows")
    require(x.stride(1) == 1, "rows with a dense last axis")
    num_rows, size = x.shape
    places = new_tensor((num_rows,), torch.int64)
    values = new_tensor((num_rows,), torch.float32)
    task = LargestTask(
        num_rows=count_address(num_rows),
        x=x.data_ptr(),
        x_stride=x.stride(0),
        size=size,
        place=places.data_ptr(),
        value=values.data_ptr(),
    )
    launch(library.kernel("largest"), task, 1)
    return Largest(places, values)


DTYPES = {torch.float32: "float32", torch.bfloat16: "bfloat16"}
"""Dtypes that rows may have, with their names in kernels."""

MAX_HEAD_DIM = 1024

_SERIAL_NUMBERS = 1 << 14
"""Fewer numbers are computed before other threads have woken up, and use one thread."""


class NativeLayerKernels:
    """Layer kernels in C++, for rows of float32 or bfloat16. Implements `LayerKernels`."""

    name = "native"

    def __init__(self, library: Library) -> None:
        self._library = library

    def embed(self, table: Tensor, token_ids: Tensor) -> Tensor:
        """Gather rows of a table, with zeros for token ids out of range."""
        require(token_ids.dtype == torch.int64, "int64 token ids")
        token_ids = token_ids.contiguous()
        num_rows = token_ids.shape[0]
        batch = batch_of(num_rows, token_ids=token_ids)
        return take(self._library, table, num_rows, batch, "num_rows", "token_ids")

    def copy(self, x: Tensor) -> Tensor:
        """Copy the rows."""
        y, task = _take_task(x, x.shape[0])
        numbers = np.arange(x.shape[0], dtype=np.int64)
        indices = ctypes.c_int64(numbers.ctypes.data)
        task.num_rows, task.indices = count_address(x.shape[0]), ctypes.addressof(indices)
        task.kept_alive = numbers, indices
        num_threads = torch.get_num_threads() if x.numel() > _SERIAL_NUMBERS else 1
        launch(self._library.kernel("take"), task, num_threads)
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
        require(_is_vector(weight, size, x.dtype), "a dense weight of the rows' size and dtype")
        require(_is_vector(bias, size, x.dtype), "a dense bias of the rows' size and dtype")
        require(
            residual is None or _is_rows(residual, num_rows, x.dtype),
            "a residual of as many rows, of the same dtype, with a dense last axis",
        )
        y = new_rows(num_rows, size, x.dtype)
        task = NormTask(
            num_rows=count_address(num_rows),
            x=x.data_ptr(),
            x_stride=x.stride(0),
            residual=address(residual),
            residual_stride=0 if residual is None else residual.stride(0),
            weight=address(weight),
            bias=address(bias),
            y=y.data_ptr(),
            y_stride=y.stride(0),
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
            x=x.data_ptr(),
            x_stride=x.stride(0),
            y=y.data_ptr(),
            y_stride=y.stride(0),
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
        *,
        query_norm: Tensor | None = None,
        key_norm: Tensor | None = None,
        eps: float = 1e-6,
        key_scale: float = 1.0,
        value_scale: float = 1.0,
    ) -> None:
        """Apply norms and RoPE to `query` in place; write normed and RoPE'd keys, and raw values,
        to the cache.

        The cache has the dtype of the rows or is int8, so scales are ignored.
        """
        num_rows, num_heads, head_dim = query.shape
        dtype, num_kv_heads = query.dtype, key.shape[1]
        require(head_dim <= MAX_HEAD_DIM, f"heads of at most {MAX_HEAD_DIM} elements")
        require(
            all(_is_rows(rows, num_rows, dtype) for rows in (query, key, value)),
            "query, key and value of as many rows, of one dtype, with a dense last axis",
        )
        require(
            key_cache.stride() == value_cache.stride()
            and all(_is_cache(cache, key) for cache in (key_cache, value_cache)),
            "key and value caches of one layout that fits the keys",
        )
        require(
            all(_is_table(table, cos.shape, dtype) for table in (cos, sin)),
            "dense cos and sin tables of one shape and the rows' dtype",
        )
        require(
            all(_is_vector(norm, head_dim, dtype) for norm in (query_norm, key_norm)),
            "dense norm weights of a head's size and dtype",
        )
        require(
            all(_is_vector(vector, num_rows, torch.int64) for vector in (slot_mapping, positions)),
            "a dense int64 slot and position for each row",
        )
        batch = batch_of(num_rows, positions=positions, slot_mapping=slot_mapping)
        task = RotateTask(
            batch=ctypes.addressof(batch),
            query=query.data_ptr(),
            key=key.data_ptr(),
            value=value.data_ptr(),
            query_stride=query.stride(0),
            query_head_stride=query.stride(1),
            key_stride=key.stride(0),
            key_head_stride=key.stride(1),
            value_stride=value.stride(0),
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
            query_norm=address(query_norm),
            key_norm=address(key_norm),
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            half=cos.shape[1],
            eps=eps,
        )
        num_numbers = num_rows * (num_heads + 2 * num_kv_heads) * head_dim
        self._launch(kernel_over(key_cache, "rotate_and_write"), task, dtype, num_numbers)

    def _launch(
        self, name: str, task: ctypes.Structure, dtype: torch.dtype, num_numbers: int
    ) -> None:
        kernel = self._library.kernel(f"{name}_{DTYPES[dtype]}")
        num_threads = torch.get_num_threads() if num_numbers > _SERIAL_NUMBERS else 1
        launch(kernel, task, num_threads)


def _is_rows(rows: Tensor, num_rows: int, dtype: torch.dtype) -> bool:
    return rows.dtype == dtype and rows.shape[0] == num_rows and rows.stride(-1) == 1


def _is_vector(vector: Tensor | None, size: int, dtype: torch.dtype) -> bool:
    if vector is None:
        return True
    return vector.dtype == dtype and vector.shape == (size,) and vector.is_contiguous()


def _is_table(table: Tensor, shape: torch.Size, dtype: torch.dtype) -> bool:
    return table.dtype == dtype and table.shape == shape and table.is_contiguous()


def _is_cache(cache: Tensor, rows: Tensor) -> bool:
    heads = (rows.shape[1], stored_head_size(rows.shape[2], cache.dtype))
    is_known = cache.dtype in (rows.dtype, torch.int8)
    return is_known and cache.shape[2:] == heads and cache.stride(3) == 1
