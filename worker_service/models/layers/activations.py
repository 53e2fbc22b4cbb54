"""Activations, by their names in `config.json`, and one with parameters."""

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from pagewire_kernels.reference.backend import LayerKernels
from worker_service.models.interface import ModelContext, WeightTarget


class Xielu(nn.Module):
    """The activation xIELU, whose parameters are those of a layer. Implements `linear.Packable`."""

    weight: Tensor | None
    """float32 [4], as the checkpoint stores them; None once they are packed."""

    def __init__(self, context: ModelContext, kernels: LayerKernels) -> None:
        super().__init__()
        self.weight = torch.empty(4, dtype=torch.float32, device=context.device)
        self._numbers = torch.empty_like(self.weight)
        self._kernels = kernels

    def targets(self, *names: str, transposed: bool = False) -> Iterator[WeightTarget]:
        """Destinations of the tensors of the module with this name."""
        assert self.weight is not None
        (name,) = names
        positive, negative, beta, epsilon = self.weight.unsqueeze(1)
        yield WeightTarget(f"{name}.alpha_p", positive)
        yield WeightTarget(f"{name}.alpha_n", negative)
        yield WeightTarget(f"{name}.beta", beta[0])
        yield WeightTarget(f"{name}.eps", epsilon[0])

    def pack(self) -> None:
        """Compute the parameters of `reference.xielu`, unless they are computed already."""
        if self.weight is not None:
            positive, negative = nn.functional.softplus(self.weight[:2])
            _, _, beta, epsilon = self.weight
            self._numbers.copy_(torch.stack([positive, beta + negative, beta, epsilon]))
            self.weight = None

    def forward(self, x: Tensor) -> Tensor:
        """x: [num_tokens, size], which is overwritten and returned."""
        return self._kernels.xielu(x, self._numbers)


ACTIVATIONS = {
    "silu": "silu",
    "swish": "silu",
    "relu": "relu",
    "relu2": "relu2",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
}
"""Names of activations in `pagewire_kernels.reference`, by their names in `config.json`."""
