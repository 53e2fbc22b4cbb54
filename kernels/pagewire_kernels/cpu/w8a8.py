"""Activations quantized to 8 bits, for products with 8-bit weights; see src/w8a8.cpp."""

import torch
from torch import Tensor

from pagewire_kernels.cpu import threads
from pagewire_kernels.cpu.checks import DTYPES
from pagewire_kernels.cpu.native_library import Library, NativeStruct
from pagewire_kernels.cpu.program import count_address, launch, new_rows
from pagewire_kernels.cpu.tasks import fields_of, rows_of
from pagewire_kernels.quantized_weight import Int8Activations, QuantizedWeight

_HEADER_BYTES, _MOST_LANES = 64, 16
_MAX_INPUTS = 1 << 16
"""Sums of more products may overflow 32 bits."""


class QuantizeRowsTask(NativeStruct):
    """`QuantizeRowsTask` of src/w8a8.cpp."""

    _fields_ = fields_of(
        "next_item num_rows x x_stride y y_stride size is_symmetric has_vnni", "scale zero_point"
    )


def can_multiply_quantized_rows(weight: QuantizedWeight) -> bool:
    """Whether the kernels multiply 8-bit activations by this weight, which needs one scale per
    output."""
    has_one_scale = weight.scales.shape[1] == 1 and weight.units is None and weight.offsets is None
    is_plain = not weight.is_float and weight.order is None
    return has_one_scale and is_plain and weight.shape[1] <= _MAX_INPUTS


def has_vnni(library: Library) -> bool:
    """Whether the kernels may use the processor's AVX512-VNNI instruction for these products."""
    has_avx512 = library.instruction_set == "amx" or library.instruction_set.startswith("avx512")
    return has_avx512 and torch.cpu._is_vnni_supported()


def quantize_rows(library: Library, rows: Tensor, activations: Int8Activations) -> Tensor:
    """Quantize activations to the layout of the product kernels.

    rows: float32 or bfloat16 [num_rows, size], with a dense last axis. Returns uint8 [num_rows,
    ...], of which each row has a header and then its codes.
    """
    num_rows, size = rows.shape
    vnni = has_vnni(library)
    number_bytes = 1 if vnni or library.instruction_set == "neon" else 2
    num_bytes = -(-size // _MOST_LANES) * _MOST_LANES * number_bytes
    y = new_rows(num_rows, _HEADER_BYTES + num_bytes, torch.uint8)
    task = QuantizeRowsTask(
        num_rows=count_address(num_rows),
        **rows_of(x=rows, y=y),
        size=size,
        is_symmetric=activations.symmetric,
        has_vnni=vnni,
        scale=activations.scale or 0.0,
        zero_point=activations.zero_point,
    )
    kernel = library.kernel(f"quantize_rows_{DTYPES[rows.dtype]}")
    launch(kernel, task, threads.count_for(rows.numel()))
    return y
