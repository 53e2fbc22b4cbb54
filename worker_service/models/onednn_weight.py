"""A weight in oneDNN's layout.

Its products are two to three times as fast as torch's own for few rows, and batch-invariant: a
row's result is bitwise the same for any number of rows from two on (measured with torch 2.13 from 1
to 4096 rows; torch's own `linear` chooses its kernel, and with it the order of sums, by the number
of rows). A single row takes another path, so it is computed twice.

For each number of rows oneDNN makes a kernel and keeps the last thousand: some milliseconds and
some hundred kilobytes each, which prompts of every length would cost again and again. So large
numbers of rows are rounded up to few.
"""

import torch
from torch import Tensor

MIN_ROWS = 2
"""Fewer rows are padded up to this."""

MAX_EXACT_ROWS = 64
"""More rows are padded up to a number of four significant bits: by an eighth at most."""


def num_padded_rows(num_rows: int) -> int:
    """With how many rows a product of `num_rows` is computed."""
    if num_rows <= MAX_EXACT_ROWS:
        return max(num_rows, MIN_ROWS)
    step = 1 << ((num_rows - 1).bit_length() - 4)
    return -(-num_rows // step) * step


class OneDNNWeight:
    """A packed weight of float32, bfloat16 or float16; see `packed_weight.PackedWeight`."""

    def __init__(self, weight: Tensor) -> None:
        self.out_features, self.in_features = weight.shape
        self._packed = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), 64)

    @staticmethod
    def can_pack(dtype: torch.dtype) -> bool:
        """Whether oneDNN has such products on this machine."""
        if not torch.backends.mkldnn.is_available():
            return False
        if dtype == torch.bfloat16:
            return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
        if dtype == torch.float16:
            return bool(torch.ops.mkldnn._is_mkldnn_fp16_supported())
        return dtype == torch.float32

    def apply(
        self, rows: Tensor, bias: Tensor | None = None, *, output_dtype: torch.dtype | None = None
    ) -> Tensor:
        """rows: [num_rows, in_features]; returns [num_rows, out_features]."""
        num_rows = rows.shape[0]
        num_more = num_padded_rows(num_rows) - num_rows
        if num_more:
            rows = torch.cat([rows, rows[:num_more]])
        product = torch.ops.mkldnn._linear_pointwise(rows, self._packed, bias, "none", [], "")
        return product[:num_rows].to(output_dtype or product.dtype)
