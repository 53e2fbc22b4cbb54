"""An MLP and experts in one layer, both of which get the residual stream."""

from collections.abc import Iterator
from dataclasses import dataclass

from torch import Tensor, nn

from pagewire_kernels.reference.backend import LayerKernels
from pagewire_kernels.select import Kernels
from worker_service.distributed.layout import Layout
from worker_service.models.feed_forward.experts import ExpertsSpec
from worker_service.models.feed_forward.mlp import MLPSpec
from worker_service.models.interface import ModelContext, WeightTarget
from worker_service.models.layers.norms import NormSpec, RMSNorm


@dataclass(frozen=True, kw_only=True, slots=True)
class DenseAndExpertsSpec:
    """The sum of an MLP and of experts, each with norms of its inputs and of its output. Implements
    `decoder.FeedForwardSpec`; the layer's norm must not precede it.

    Attributes of `DenseAndExperts` with tensors: `dense_norm`, `dense`, `dense_output_norm`,
    `router_norm`, `experts_norm`, `experts` and `experts_output_norm`.
    """

    dense: MLPSpec
    experts: ExpertsSpec
    norm: NormSpec

    @property
    def activation(self) -> str | None:
        """That of both."""
        return self.dense.activation

    def require_shards(self, layout: Layout) -> None:
        """Raise InvalidOption unless the ranks can share the columns."""
        self.dense.require_shards(layout)
        self.experts.require_shards(layout)

    def build(self, size: int, context: ModelContext, kernels: Kernels) -> "DenseAndExperts":
        """The part for rows of this size."""
        return DenseAndExperts(self, size, context, kernels)


class DenseAndExperts(nn.Module):
    """See `DenseAndExpertsSpec`."""

    def __init__(
        self, spec: DenseAndExpertsSpec, size: int, context: ModelContext, kernels: Kernels
    ) -> None:
        super().__init__()
        self.dense = spec.dense.build(size, context, kernels)
        self.experts = spec.experts.build(size, context, kernels)
        self.dense_norm, self.dense_output_norm, self.experts_norm, self.experts_output_norm = (
            spec.norm.build(size, context, kernels) for _ in range(4)
        )
        self.router_norm = ScaledNorm(size, spec.norm.eps, context, kernels.layers)
        self._kernels = kernels.layers

    def forward(self, residual: Tensor) -> Tensor:
        """residual: [num_tokens, size], which stays as it is; returns the same shape."""
        dense: Tensor = self.dense_output_norm(self.dense(self.dense_norm(residual)))
        chosen = self.experts(self.experts_norm(residual), self.router_norm(residual))
        return self._kernels.add(dense, self.experts_output_norm(chosen))


class ScaledNorm(nn.Module):
    """The norm of a router's rows, which are then divided by the root of their size. The checkpoint
    has its weight under a name of its own."""

    def __init__(self, size: int, eps: float, context: ModelContext, kernels: LayerKernels) -> None:
        super().__init__()
        self.norm = RMSNorm(size, eps, context, kernels)
        self._factor, self._kernels = size**-0.5, kernels

    def targets(self, *names: str, transposed: bool = False) -> Iterator[WeightTarget]:
        """Destination of the tensor with this name."""
        (name,) = names
        yield WeightTarget(name, self.norm.weight)

    def forward(self, x: Tensor) -> Tensor:
        """x: [num_tokens, size]; returns the same shape."""
        return self._kernels.scale(self.norm(x), self._factor)
