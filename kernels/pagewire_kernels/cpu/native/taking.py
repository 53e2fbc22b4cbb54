"""What a program does before the layers and after them: rows by index, and the largest of a row."""

import ctypes
from typing import NamedTuple

import torch
from torch import Tensor

from pagewire_kernels.cpu.native.compiled import Library
from pagewire_kernels.cpu.native.layer_structs import LargestTask, TakeTask
from pagewire_kernels.cpu.native.program import count_address, launch, new_rows, new_tensor
from pagewire_kernels.cpu.native.structs import Batch


class Largest(NamedTuple):
    """Each row's largest number, for [num_rows] rows."""

    places: Tensor
    """int64: the first column of those that have it."""

    values: Tensor
    """float32; NaN if there is one in the row, whose place is then not meant."""


def take(
    library: Library, table: Tensor, num_rows: int, batch: Batch, count: str, indices: str
) -> Tensor:
    """Rows of a table, [num_rows, size], by the batch's fields of these names.

    Indices that the table does not have give zeros.
    """
    assert table.stride(1) == 1
    size, item = table.shape[1], table.element_size()
    y = new_rows(num_rows, size, table.dtype)
    task = TakeTask(
        num_rows=ctypes.addressof(batch) + getattr(Batch, count).offset,
        indices=ctypes.addressof(batch) + getattr(Batch, indices).offset,
        table=table.data_ptr(),
        table_row_bytes=table.stride(0) * item,
        y=y.data_ptr(),
        y_row_bytes=y.stride(0) * item,
        row_bytes=size * item,
        table_rows=table.shape[0],
    )
    launch(library.kernel("take"), task, 1)
    return y


def find_largest(library: Library, x: Tensor) -> Largest:
    """Of each row of x, float32 [num_rows, size], with a dense last axis."""
    assert x.dtype == torch.float32
    assert x.stride(1) == 1
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
