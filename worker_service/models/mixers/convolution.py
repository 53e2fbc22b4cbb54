"""Causal convolutions: each channel of a row is a weighted sum of those of the last rows of its
sequence. The state of a sequence is its last inputs.

`ShortConvolutionSpec` is the part of LFM2 (Liquid AI 2025): a convolution between two gates.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from pagewire_kernels.batch import AttentionMetadata, StateUnits
from pagewire_kernels.reference.backend import LayerKernels
from pagewire_kernels.reference.states import MAX_CONVOLUTION_WIDTH
from worker_service.distributed.layout import Layout, Shard, consecutive
from worker_service.errors import UnsupportedModel
from worker_service.models.interface import ModelContext, WeightTarget
from worker_service.models.kv_cache_spec import LayerState, StateArray
from worker_service.models.linear.linear import Linear, RowParallelLinear
from worker_service.models.native import LayerInputs, MixerPlace

_UNIT_CHANNELS = 16
"""Channels of a unit are a multiple of this, unless all channels are one unit."""

_MAX_UNIT_BYTES = 1 << 15


def convolution_state(num_channels: int, width: int, dtype: torch.dtype) -> StateArray:
    """The inputs that a convolution keeps: of each channel the last ones, all but one of which the
    next row needs.

    num_channels: of this rank; width: rows that a sum extends over; dtype: of the inputs. Raises
    UnsupportedModel for a width that the kernels do not have.
    """
    if not 2 <= width <= MAX_CONVOLUTION_WIDTH:
        expected = f"2 to {MAX_CONVOLUTION_WIDTH}"
        raise UnsupportedModel(
            f"config.json: width of convolutions: expected {expected}, got {width}"
        )
    return units_of_channels(num_channels, width - 1, dtype)


def units_of_channels(num_channels: int, height: int, dtype: torch.dtype) -> StateArray:
    """Numbers of channels, `height` of each, in units of some channels."""
    num_units, size = 1, height * dtype.itemsize
    while num_channels // num_units * size > _MAX_UNIT_BYTES:
        if num_channels % (2 * num_units * _UNIT_CHANNELS):
            break
        num_units *= 2
    return StateArray(num_units=num_units, shape=(height, num_channels // num_units), dtype=dtype)


class CausalConvolution:
    """A convolution of each channel. Implements `native.HasTargets`."""

    def __init__(
        self,
        channels: Sequence[Shard],
        width: int,
        *,
        bias: bool,
        context: ModelContext,
        kernels: LayerKernels,
        activation: str | None = None,
    ) -> None:
        """channels: this rank's, in parts of one tensor of the checkpoint, or of a tensor each;
        activation: of the sums; None: there is none."""
        num_channels = sum(part.size for part in channels)
        dtype, device = torch.float32, context.device
        self.weight = torch.empty(width, num_channels, dtype=dtype, device=device)
        self.bias = torch.empty(num_channels, dtype=dtype, device=device) if bias else None
        self._channels, self._kernels = channels, kernels
        self._activation = activation

    def __call__(self, x: Tensor, units: StateUnits, metadata: AttentionMetadata) -> Tensor:
        """x: [num_tokens, num_channels]; units: of `convolution_state`; returns a new tensor of the
        same shape."""
        return self._kernels.causal_convolution(
            x, self.weight, self.bias, units, metadata, self._activation
        )

    def targets(self, *names: str, transposed: bool = False) -> Iterator[WeightTarget]:
        """Destinations of the tensors of the module with this name, or of a module for each part of
        the channels, whose weights are stored as [num_channels, 1, width]."""
        stored_in = names * len(self._channels) if len(names) == 1 else names
        sizes = [part.size for part in self._channels]
        stored = self.weight.t().unsqueeze(1).split(sizes)
        for name, shard, part in zip(stored_in, self._channels, stored, strict=True):
            yield WeightTarget(f"{name}.weight", part, shard=shard)
        if self.bias is not None:
            parts = self.bias.split(sizes)
            for name, shard, part in zip(stored_in, self._channels, parts, strict=True):
                yield WeightTarget(f"{name}.bias", part, shard=shard)


@dataclass(frozen=True, kw_only=True, slots=True)
class ShortConvolutionSpec:
    """A convolution between two gates, in place of attention. Implements `decoder.MixerSpec`.

    Attributes of `ShortConvolution` with tensors, for `LayerSpec.names`: `inputs` (the gate of the
    convolution's inputs, that of its outputs, then its inputs), `convolution`, `output`.
    """

    num_channels: int
    width: int
    """Rows that a sum extends over, the present one included."""

    bias: bool = False
    rotary: None = None
    """Nothing is rotated."""

    def require_shards(self, layout: Layout) -> None:
        """Raise InvalidOption unless the ranks can share the channels."""
        self.channels(layout)

    def channels(self, layout: Layout) -> Shard:
        """The channels of this rank."""
        return layout.even_shard(self.num_channels, "channels of the convolution")

    def kept(self, context: ModelContext, max_model_len: int) -> tuple[LayerState, ...]:
        """The convolution's inputs."""
        channels = self.channels(context.communicator.layout).size
        return (LayerState(arrays=(convolution_state(channels, self.width, context.dtype),)),)

    def build(self, place: MixerPlace) -> "ShortConvolution":
        """See `decoder.MixerSpec`."""
        return ShortConvolution(self, place)


class ShortConvolution(nn.Module):
    """See `ShortConvolutionSpec`. Each rank has some channels."""

    def __init__(self, spec: ShortConvolutionSpec, place: MixerPlace) -> None:
        super().__init__()
        context, kernels = place.context, place.kernels.layers
        channels = spec.channels(context.communicator.layout)
        self.inputs = Linear(
            Shard.full(place.inputs),
            consecutive([channels] * 3),
            bias=spec.bias,
            context=context,
            sources=[0] * 3,
        )
        self.convolution = CausalConvolution(
            [channels], spec.width, bias=spec.bias, context=context, kernels=kernels
        )
        self.output = RowParallelLinear(channels, place.size, bias=spec.bias, context=context)
        self._kernels = kernels

    def forward(self, x: Tensor, inputs: LayerInputs) -> Tensor:
        """x: [num_tokens, inputs]; returns [num_tokens, size]."""
        multiply, (units,) = self._kernels.multiply, inputs.states
        input_gate, output_gate, x = self.inputs(x).chunk(3, dim=1)
        x = self.convolution(multiply(x, input_gate), units, inputs.metadata)
        return self.output(multiply(x, output_gate))
