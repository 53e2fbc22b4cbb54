"""The few torch functions whose results depend on the batch, replaced while a model runs.

On CPUs `linear` chooses its kernel by the number of rows, and `silu`, `sigmoid` and `gelu` compute
what their vector loops leave over by another formula (see `pagewire_kernels.reference.layers`).
Linear modules are replaced for good by `packing`; this catches what a model calls as a function,
such as a router's product. On GPUs it is the linear layers alone.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from pagewire_kernels.reference import activate
from worker_service.models.packed_weight import PackedWeight, can_pack, pack


class InvariantOps(TorchFunctionMode):
    """Within it, those functions are computed row by row in one order."""

    def __init__(self) -> None:
        super().__init__()
        self._packed: dict[Tensor, PackedWeight] = {}  # by the parameter itself
        self._functions: dict[Any, Callable[..., Tensor]] = {
            nn.functional.linear: self._linear,
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

    def _linear(self, input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """Packed where the weight is a parameter; that of a view could not be kept."""
        packable = isinstance(weight, nn.Parameter) and can_pack(weight.dtype, weight.device)
        if not packable or input.dtype != weight.dtype:
            return nn.functional.linear(input, weight, bias)
        if weight not in self._packed:
            self._packed[weight] = pack(weight.detach())
        rows = input.reshape(-1, weight.shape[1])
        output = self._packed[weight].apply(rows, bias)
        return output.view(*input.shape[:-1], weight.shape[0])


class FixedProducts(TorchFunctionMode):
    """Within it, a GPU's linear layers sum each row's products in one order."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        replaced = _fixed_linear if func is nn.functional.linear else func
        return replaced(*args, **(kwargs or {}))


def _fixed_linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    from pagewire_kernels.gpu import linear  # triton is loaded only where it is used

    rows = linear(input.reshape(-1, weight.shape[1]), weight, bias)
    return rows.view(*input.shape[:-1], weight.shape[0])


def _silu(input: Tensor, inplace: bool = False) -> Tensor:
    return activate(input, "silu")


def _gelu(input: Tensor, approximate: str = "none") -> Tensor:
    return activate(input, "gelu_tanh" if approximate == "tanh" else "gelu")


def _sigmoid(input: Tensor) -> Tensor:
    wide = input.float()
    return torch.exp(-wide).add_(1).reciprocal_().to(input.dtype)
