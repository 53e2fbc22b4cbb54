"""Layers through `torch.compile`."""

import pytest
import torch
from torch import Tensor, nn

from tests.support.counting_model import CountingModel
from worker_service.errors import InvalidOption
from worker_service.runner.model_options import compile_layers


class Layer(nn.Module):
    """As simple as can be."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3, 3))

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(x @ self.weight)


class Stack(CountingModel):
    """A model with layers."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(Layer() for _ in range(2))

    def through(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


@pytest.mark.filterwarnings("ignore")  # of torch's own making, on its first compilation
def test_every_layer_is_compiled_and_computes_the_same() -> None:
    seen = []

    def backend(graph: torch.fx.GraphModule, example_inputs: list[Tensor]) -> object:
        seen.append(graph)
        return graph.forward

    plain, compiled = Stack(), Stack()
    compile_layers(compiled, torch.device("cuda"), backend)
    for num_rows in (2, 5):
        rows = torch.randn(num_rows, 3)
        assert torch.equal(compiled.through(rows), plain.through(rows))
    assert seen


def test_a_model_that_is_not_ours_is_refused() -> None:
    with pytest.raises(InvalidOption, match="no layers of ours"):
        compile_layers(CountingModel(), torch.device("cuda"))


def test_a_cpu_is_refused() -> None:
    with pytest.raises(InvalidOption, match="expected a GPU"):
        compile_layers(Stack(), torch.device("cpu"))
