"""Evaluation of a model in float64, also where its code asks for float32."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode


class Float64(TorchFunctionMode):
    """Computes in float64 what functions are called to compute in float32. Parameters and buffers
    are not converted."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if func is Tensor.float:
            return args[0].double()
        named = {name: _doubled(value) for name, value in (kwargs or {}).items()}
        return func(*map(_doubled, args), **named)


def _doubled(argument: Any) -> Any:
    return torch.float64 if argument is torch.float32 else argument
