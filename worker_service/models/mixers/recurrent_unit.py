"""The recurrent part of Griffin (De et al. 2024): a convolution and a gated linear recurrent unit,
multiplied by an activation of the row.

The state of a sequence is the last inputs of the convolution, in the dtype of activations, and one
number of each channel, in float32.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from worker_service.distributed.layout import Layout, Shard
from worker_service.models.interface import ModelContext, WeightTarget
from worker_service.models.kv_cache_spec import LayerState
from worker_service.models.layers.activations import ACTIVATIONS
from worker_service.models.linear.heads import HeadsProduct
from worker_service.models.linear.linear import Linear, RowParallelLinear
from worker_service.models.mixers.convolution import (
    CausalConvolution,
    convolution_state,
    units_of_channels,
)
from worker_service.models.mixers.mamba import Decay
from worker_service.models.native import LayerInputs, MixerPlace


def _rates(parameters: Tensor) -> Tensor:
    """The lowest logarithms of decays."""
    return -8.0 * nn.functional.softplus(parameters)


@dataclass(frozen=True, kw_only=True, slots=True)
class RecurrentUnitSpec:
    """A convolution, a recurrence and a gate. Implements `decoder.MixerSpec`.

    Attributes of `RecurrentUnit` with tensors, for `LayerSpec.names`: `gate`, `inputs`,
    `convolution`, `gates`, `decay`, `output`.
    """

    num_channels: int
    num_blocks: int
    """Of consecutive channels, of which the gates of the recurrence are products."""

    width: int
    """Of the convolution."""

    activation: str
    """Of the gate of the output."""

    rotary: None = None

    def require_shards(self, layout: Layout) -> None:
        """Raise InvalidOption unless the ranks can share the blocks."""
        self.blocks(layout)

    def blocks(self, layout: Layout) -> Shard:
        """The blocks of this rank."""
        return layout.even_shard(self.num_blocks, "blocks of the recurrence")

    def channels(self, layout: Layout) -> Shard:
        """The channels of this rank."""
        return self.blocks(layout).times(self.num_channels // self.num_blocks)

    def kept(self, context: ModelContext, max_model_len: int) -> tuple[LayerState, ...]:
        """See `decoder.MixerSpec`."""
        channels = self.channels(context.communicator.layout).size
        convolution = convolution_state(channels, self.width, context.dtype)
        return (LayerState(arrays=(convolution, units_of_channels(channels, 1, torch.float32))),)

    def build(self, place: MixerPlace) -> "RecurrentUnit":
        """See `decoder.MixerSpec`."""
        return RecurrentUnit(self, place)


class Gates(nn.Module):
    """The gates of inputs and of decays, which are products of blocks of channels. Implements
    `linear.Packable`."""

    weight: Tensor | None
    """Of both, [2, num_blocks, block_size, block_size], the last axis that of results; None once
    they are packed."""

    def __init__(self, spec: RecurrentUnitSpec, context: ModelContext) -> None:
        super().__init__()
        layout = context.communicator.layout
        self._blocks, self._size = spec.blocks(layout), spec.num_channels // spec.num_blocks
        self.weight = context.empty_weight(2, self._blocks.size, self._size, self._size)
        shape, device = (2, self._blocks.size * self._size), context.device
        self.biases = torch.empty(shape, dtype=torch.float32, device=device)
        """[2, num_channels]."""
        self._gates: list[HeadsProduct] = []
        self._context = context

    def targets(self, *names: str, transposed: bool = False) -> Iterator[WeightTarget]:
        """Destinations of the tensors of the module with this name."""
        assert self.weight is not None
        (name,), shape = names, (self._blocks.size, self._size)
        kinds = ("input", "recurrent")
        for kind, weight, bias in zip(kinds, self.weight, self.biases, strict=True):
            yield WeightTarget(f"{name}.{kind}_gate_weight", weight, shard=self._blocks)
            yield WeightTarget(f"{name}.{kind}_gate_bias", bias.view(shape), shard=self._blocks)

    def pack(self) -> None:
        """Pack the weights for this machine, unless they are packed already."""
        if self.weight is not None:
            self._gates = [HeadsProduct(weight.mT, self._context) for weight in self.weight]
            self.weight = None

    def forward(self, x: Tensor) -> list[Tensor]:
        """Both gates without biases. x: [num_tokens, num_channels]; returns two of this shape."""
        blocks = x.unflatten(1, (-1, self._size))
        return [gate.apply(blocks).flatten(1) for gate in self._gates]


class RecurrentUnit(nn.Module):
    """See `RecurrentUnitSpec`. Each rank has some blocks of channels."""

    def __init__(self, spec: RecurrentUnitSpec, place: MixerPlace) -> None:
        super().__init__()
        context, kernels = place.context, place.kernels.layers
        channels, rows = spec.channels(context.communicator.layout), Shard.full(place.inputs)
        self.gate = Linear(rows, [channels], bias=True, context=context)
        self.inputs = Linear(rows, [channels], bias=True, context=context)
        self.convolution = CausalConvolution(
            [channels], spec.width, bias=True, context=context, kernels=kernels
        )
        self.gates = Gates(spec, context)
        self.decay = Decay(channels, context, function=_rates)
        self.output = RowParallelLinear(channels, place.size, bias=True, context=context)
        self._activation, self._kernels = ACTIVATIONS[spec.activation], kernels

    def forward(self, x: Tensor, inputs: LayerInputs) -> Tensor:
        """x: [num_tokens, inputs]; returns [num_tokens, size]."""
        units, states = inputs.states
        gate = self._kernels.activate(self.gate(x), self._activation)
        x = self.convolution(self.inputs(x), units, inputs.metadata)
        input_gate, decay_gate = self.gates(x)
        input_bias, decay_bias = self.gates.biases
        y = self._kernels.rglru_scan(
            x,
            input_gate,
            decay_gate,
            input_bias,
            decay_bias,
            self.decay.numbers,
            states,
            inputs.metadata,
        )
        return self.output(self._kernels.multiply(y, gate))
