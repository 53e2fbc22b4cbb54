"""A model's layers through `torch.compile`."""

from torch import nn

from worker_service.errors import InvalidOption
from worker_service.models.interface import Model


def compile_layers(model: Model, backend: str = "inductor") -> None:
    """Have each layer compiled at its first call, for any number of rows.

    Layers one by one, and not the model: they are alike, so they share what is compiled. Raises
    InvalidOption for a model that is not in our own code.
    """
    layers = getattr(model, "layers", None)
    if not isinstance(layers, nn.ModuleList):
        raise InvalidOption(f"compile: {model.architecture} has no layers of ours to compile")
    for layer in layers:
        layer.compile(dynamic=True, backend=backend)
