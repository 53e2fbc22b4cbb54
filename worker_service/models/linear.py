"""Linear layers: plain on GPUs, prepacked for oneDNN on CPUs.

oneDNN lays a weight out for the machine's vector units once, after loading, which makes products
of few rows two to three times as fast. It also makes them batch-invariant: a row's result is
bitwise the same for any number of rows from two on (measured with torch 2.13 from 1 to 4096 rows;
torch's own `linear` chooses its kernel, and with it the order of sums, by the number of rows). A
single row takes another path, so it is computed twice.

For each number of rows oneDNN makes a kernel and keeps the last thousand: some milliseconds and
some hundred kilobytes each, which prompts of every length would cost again and again. So large
numbers of rows are rounded up to few.
"""

import torch
from torch import Tensor, nn

MIN_PACKED_ROWS = 2
"""Fewer rows are padded up to this."""

MAX_EXACT_ROWS = 64
"""More rows are padded up to a number of four significant bits: by an eighth at most."""


def num_padded_rows(num_rows: int) -> int:
    """With how many rows a product of `num_rows` is computed."""
    if num_rows <= MAX_EXACT_ROWS:
        return max(num_rows, MIN_PACKED_ROWS)
    step = 1 << ((num_rows - 1).bit_length() - 4)
    return -(-num_rows // step) * step


class PackedWeight:
    """A weight in oneDNN's layout."""

    def __init__(self, weight: Tensor) -> None:
        self._packed = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), 64)

    def apply(self, rows: Tensor, bias: Tensor | None) -> Tensor:
        """rows: [num_rows, in_features]; returns [num_rows, out_features]."""
        num_rows = rows.shape[0]
        num_more = num_padded_rows(num_rows) - num_rows
        if num_more == 0:
            return self._multiply(rows, bias)
        return self._multiply(torch.cat([rows, rows[:num_more]]), bias)[:num_rows]

    def _multiply(self, rows: Tensor, bias: Tensor | None) -> Tensor:
        return torch.ops.mkldnn._linear_pointwise(rows, self._packed, bias, "none", [], "")


def can_pack(dtype: torch.dtype, device: torch.device) -> bool:
    """Whether this machine has a packed product for `dtype`."""
    if device.type != "cpu" or not torch.backends.mkldnn.is_available():
        return False
    if dtype == torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    if dtype == torch.float16:
        return bool(torch.ops.mkldnn._is_mkldnn_fp16_supported())
    return dtype == torch.float32


class Linear(nn.Module):
    """y = x W^T + b. The weight may be a stack of several, one after the other."""

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        bias: bool,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        super().__init__()
        self.weight: Tensor | None = torch.empty(
            out_features, in_features, dtype=dtype, device=device
        )
        self.bias = torch.empty(out_features, dtype=dtype, device=device) if bias else None
        self._packed: PackedWeight | None = None

    def pack(self) -> None:
        """Lay the weight out for this machine, once it is loaded; the original is freed."""
        if self.weight is not None and can_pack(self.weight.dtype, self.weight.device):
            self._packed = PackedWeight(self.weight)
            self.weight = None

    def forward(self, rows: Tensor) -> Tensor:
        """rows: [num_rows, in_features]; returns [num_rows, out_features]."""
        return self.multiply(rows, self.bias)

    def multiply(self, rows: Tensor, bias: Tensor | None) -> Tensor:
        """As `forward`, with another bias."""
        if self._packed is not None:
            return self._packed.apply(rows, bias)
        assert self.weight is not None
        return nn.functional.linear(rows, self.weight, bias)


class TiedLinear(Linear):
    """A head without weights of its own: it multiplies by the token embedding.

    The embedding itself is still needed as it is, to look tokens up; packing makes a second copy.
    """

    def __init__(self, embedding: Tensor) -> None:
        nn.Module.__init__(self)
        self.weight = embedding
        self.bias = None
        self._packed = None
