"""Linear layers: packed on CPUs (see `packed_weight`); plain on GPUs, or in a fixed order."""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from pagewire_kernels.cpu.native import NativeGatedWeight
from pagewire_kernels.layer_kernels import LayerKernels
from worker_service.models.packed_weight import PackedWeight, can_pack, pack, pack_gated


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
        self.packed: PackedWeight | None = None

    def pack(self) -> None:
        """Lay the weight out for this machine, once it is loaded; the original is freed."""
        if self.weight is not None and can_pack(self.weight.dtype, self.weight.device):
            self.packed = pack(self.weight)
            self.weight = None

    def fix_order(self) -> None:
        """On a GPU: sum each row's products in one order, however many rows there are."""
        from pagewire_kernels.gpu import InvariantWeight  # triton is loaded only where it is used

        assert self.weight is not None
        self.packed = InvariantWeight(self.weight)

    def forward(self, rows: Tensor) -> Tensor:
        """rows: [num_rows, in_features]; returns [num_rows, out_features]."""
        return self.multiply(rows, self.bias)

    def multiply(
        self, rows: Tensor, bias: Tensor | None, output_dtype: torch.dtype | None = None
    ) -> Tensor:
        """As `forward`, with another bias; output_dtype: the weight's, or float32."""
        if self.packed is not None:
            return self.packed.apply(rows, bias, output_dtype=output_dtype)
        assert self.weight is not None
        product = nn.functional.linear(rows, self.weight, bias)
        return product if output_dtype is None else product.to(output_dtype)


class GatedLinear(Linear):
    """activation(x G^T + b) * (x U^T + c), where the weight is G, then U."""

    def __init__(
        self,
        in_features: int,
        size: int,
        activation: str,
        kernels: LayerKernels,
        *,
        bias: bool,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        """size: outputs of G, of U, and of the layer."""
        super().__init__(in_features, 2 * size, bias=bias, dtype=dtype, device=device)
        self._activation = activation
        self._kernels = kernels
        self._gated: NativeGatedWeight | None = None

    def pack(self) -> None:
        if self.weight is not None:
            self._gated = pack_gated(self.weight, self._activation)
        if self._gated is not None:
            self.weight = None
        else:
            super().pack()

    def forward(self, rows: Tensor) -> Tensor:
        """rows: [num_rows, in_features]; returns [num_rows, size]."""
        if self._gated is not None:
            return self._gated.apply(rows, self.bias)
        return self._kernels.act_and_mul(super().forward(rows), self._activation)


class TiedLinear(Linear):
    """A head without weights of its own: it multiplies by the token embedding."""

    def __init__(self, embedding: Tensor, on_packed: Callable[[PackedWeight], None]) -> None:
        """on_packed: is told of the packed embedding, so that it need not be there twice."""
        nn.Module.__init__(self)
        self.weight = embedding
        self.bias = None
        self.packed = None
        self._on_packed = on_packed

    def pack(self) -> None:
        super().pack()
        if self.packed is not None:
            self._on_packed(self.packed)
