"""Torch functions that a `transformers` model calls, replaced to be batch-invariant.

On CPUs `linear` chooses its kernel by the number of rows, and `silu`, `sigmoid` and `gelu` compute
the remainder of their vector loops by another formula (see `pagewire_kernels.reference.layers`).
Linear modules and experts are replaced by packed ones (`packed.py`); `InvariantOps` replaces the
functions that a model calls, such as a router's product, and reads rows of packed embeddings. On
GPUs only linear layers are replaced.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from pagewire_kernels.reference import activate
from worker_service.models.linear import PackedWeight, can_pack, pack
from worker_service.models.transformers_backend.packed import Tables


class InvariantOps(TorchFunctionMode):
    """Within it, these functions compute each row in one order, whatever the other rows are."""

    def __init__(self, device_type: str, tables: Tables | None = None) -> None:
        super().__init__()
        self._tables = tables or {}
        self._packed: dict[Tensor, PackedWeight] = {}  # by the parameter itself
        self._functions: dict[Any, Callable[..., Tensor]] = {nn.functional.linear: _triton_linear}
        if device_type == "cpu":
            self._functions = {
                nn.functional.linear: self._packed_linear,
                nn.functional.embedding: self._embedding,
                nn.functional.silu: _silu,
                nn.functional.gelu: _gelu,
                torch.sigmoid: _sigmoid,
                Tensor.sigmoid: _sigmoid,
            }

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        return self._functions.get(func, func)(*args, **(kwargs or {}))

    def _packed_linear(self, input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """Packed if the weight is a parameter; that of a view could not be kept."""
        packable = isinstance(weight, nn.Parameter) and can_pack(weight.dtype, weight.device)
        if not packable or input.dtype != weight.dtype:
            return nn.functional.linear(input, weight, bias)
        if weight not in self._packed:
            self._packed[weight] = pack(weight.detach())
        rows = input.reshape(-1, weight.shape[1])
        output = self._packed[weight].apply(rows, bias)
        return output.view(*input.shape[:-1], weight.shape[0])

    def _embedding(self, input: Tensor, weight: Tensor, *others: Any, **options: Any) -> Tensor:
        table = self._tables.get(weight)
        if table is None:
            return nn.functional.embedding(input, weight, *others, **options)
        return table.gather(input.flatten()).view(*input.shape, -1)


def _triton_linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    from pagewire_kernels.triton import linear  # triton is loaded only where it is used

    rows = linear(input.reshape(-1, weight.shape[1]), weight, bias)
    return rows.view(*input.shape[:-1], weight.shape[0])


def _silu(input: Tensor, inplace: bool = False) -> Tensor:
    return activate(input, "silu")


def _gelu(input: Tensor, approximate: str = "none") -> Tensor:
    return activate(input, "gelu_tanh" if approximate == "tanh" else "gelu")


def _sigmoid(input: Tensor) -> Tensor:
    wide = input.float()
    return torch.exp(-wide).add_(1).reciprocal_().to(input.dtype)
