"""Multilayer perceptrons."""

from dataclasses import dataclass

from torch import Tensor, nn

from pagewire_kernels.reference import Gate
from pagewire_kernels.reference.backend import LayerKernels
from pagewire_kernels.select import Kernels
from worker_service.distributed.layout import Layout, Shard, consecutive
from worker_service.errors import UnsupportedModel
from worker_service.models.interface import ModelContext
from worker_service.models.layers.activations import ACTIVATIONS, Xielu
from worker_service.models.linear.linear import GatedLinear, Linear, RowParallelLinear


@dataclass(frozen=True, kw_only=True, slots=True)
class MLPSpec:
    """A multilayer perceptron: two linear layers around an activation, the first of which may be
    multiplied by the activation of a third, the gate. Implements `FeedForwardSpec`."""

    inner_size: int
    activation: str | None
    """None: xIELU, which has no gate."""

    is_gated: bool = True
    bias: bool = False
    is_fused: bool = False
    """Whether one tensor has the rows of the gate, then those of the layer that it multiplies."""

    gate_scale: float = 1.0
    """The factor of a gate before its activation."""

    gate_deviations: float | None = None
    """Standard deviations from its mean beyond which a gate's numbers count, from there on; None:
    all count."""

    output_scale: float = 1.0
    gate: Gate | None = None
    """How the gate acts; None: as the activation says, without a limit."""

    def __post_init__(self) -> None:
        if self.activation is None and self.is_gated:
            raise UnsupportedModel("config.json: expected the name of an activation, got none")

    def require_shards(self, layout: Layout) -> None:
        """Raise InvalidOption unless the ranks can share the columns."""
        layout.even_shard(self.inner_size, "columns of the MLP")

    def build(self, size: int, context: ModelContext, kernels: Kernels) -> "MLP":
        """The MLP of rows of this size."""
        return MLP(self, size, context, kernels)


def gate_and_up(
    size: int,
    inner: Shard,
    activation: str | None,
    kernels: LayerKernels,
    *,
    is_fused: bool,
    bias: bool,
    context: ModelContext,
) -> Linear:
    """The layer of gate and up. activation: what it also applies to the gate before it multiplies
    both; None: its output is gate, then up. is_fused: as in `MLPSpec`."""
    outputs = consecutive([inner] * 2) if is_fused else [inner] * 2
    sources = [0] * 2 if is_fused else None
    if activation is None:
        return Linear(Shard.full(size), outputs, bias=bias, context=context, sources=sources)
    return GatedLinear(
        size, outputs, activation, kernels, bias=bias, context=context, sources=sources
    )


class MLP(nn.Module):
    """See `MLPSpec`."""

    def __init__(self, spec: MLPSpec, size: int, context: ModelContext, kernels: Kernels) -> None:
        super().__init__()
        s, layout = spec, context.communicator.layout
        inner = layout.even_shard(s.inner_size, "columns of the MLP")
        activation = None if s.activation is None else ACTIVATIONS[s.activation]
        self._activation, self._kernels = activation, kernels.layers
        self._is_gated, self._inner_size = s.is_gated, inner.size
        self._gate_scale, self._output_scale = s.gate_scale, s.output_scale
        self._gate_deviations, self._communicator = s.gate_deviations, context.communicator
        self._gate = s.gate
        self.xielu = Xielu(context, kernels.layers) if activation is None else None
        self.up: Linear
        if s.is_gated:
            assert activation is not None, "xIELU has no gate"
            is_plain = s.gate_scale == 1.0 and s.gate_deviations is None and s.gate is None
            self.up = gate_and_up(
                size,
                inner,
                activation if is_plain else None,
                kernels.layers,
                is_fused=s.is_fused,
                bias=s.bias,
                context=context,
            )
        else:
            self.up = Linear(Shard.full(size), [inner], bias=s.bias, context=context)
        self.down = RowParallelLinear(inner, size, bias=s.bias, context=context)

    def forward(self, x: Tensor) -> Tensor:
        """x: [num_tokens, size]; returns the same shape."""
        x = self.up(x)
        if self.xielu is not None:
            x = self.xielu(x)
        elif self._gate is not None:
            x = self._kernels.apply_gate(x, self._gate)
        elif self._activation is not None and not self._is_gated:
            x = self._kernels.activate(x, self._activation)
        elif self._activation is not None and not isinstance(self.up, GatedLinear):
            gate = x[:, : self._inner_size]
            if self._gate_scale != 1.0:
                self._kernels.scale(gate, self._gate_scale)
            if self._gate_deviations is not None:
                self._sparsify(gate, self._gate_deviations)
            x = self._kernels.act_and_mul(x, self._activation)
        y: Tensor = self.down(x)
        return y if self._output_scale == 1.0 else self._kernels.scale(y, self._output_scale)

    def _sparsify(self, gate: Tensor, num_deviations: float) -> None:
        """See `reference.sparsify`; mean and deviation are those of the columns of all ranks."""
        num_ranks = self._communicator.layout.tensor_parallel_size
        if num_ranks == 1:
            self._kernels.sparsify(gate, num_deviations)
            return
        wide = gate.float()
        mean = self._communicator.sum(wide.mean(1, keepdim=True)) / num_ranks
        squares = (wide - mean).square().mean(1, keepdim=True)
        deviation = (self._communicator.sum(squares) / num_ranks).sqrt()
        gate.copy_((wide - (mean + deviation * num_deviations)).clamp_(min=0))
