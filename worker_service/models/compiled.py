"""A model's layers through `torch.compile`."""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from worker_service.errors import InvalidOption
from worker_service.models.interface import Model


def compile_layers(
    model: Model, device: torch.device, backend: str | Callable[..., Any] = "inductor"
) -> None:
    """Have each layer compiled at its first call, for any number of rows.

    Layers one by one, and not the model: they are alike, so they share what is compiled. Raises
    InvalidOption for a model that is not in our own code, and on a CPU, whose kernels take
    addresses where the compiler has none.
    """
    if device.type == "cpu":
        raise InvalidOption("compile: expected a GPU, got a CPU")
    layers = getattr(model, "layers", None)
    if not isinstance(layers, nn.ModuleList):
        raise InvalidOption(f"compile: {model.architecture} has no layers of ours to compile")
    for layer in layers:
        layer.compile(dynamic=True, backend=backend)
