"""RMS norms whose rows are multiplied by gates of their own."""

from dataclasses import replace

from torch import Tensor

from pagewire_kernels.reference.backend import LayerKernels
from worker_service.distributed.layout import Shard
from worker_service.models.interface import ModelContext
from worker_service.models.layers.norms import NormSpec, RMSNorm
from worker_service.models.linear.linear import Linear


class GatedRMSNorm(RMSNorm):
    """y * sigmoid(wide(silu(narrow(y)))), where y is the RMS norm of the row (A.X-K2). Every rank
    has both weights in full, which are not rounded.

    Attributes with tensors, for `LayerSpec.names`, beside the norm's own path: `narrow`, `wide`.
    """

    def __init__(
        self, spec: NormSpec, size: int, context: ModelContext, kernels: LayerKernels
    ) -> None:
        super().__init__(size, spec.eps, context, kernels, spec.offset)
        assert spec.gate_rank is not None, "the layer's names have gates"
        full, rank = Shard.full(size), Shard.full(spec.gate_rank)
        in_full = replace(context, quantization=None)
        self.narrow = Linear(full, [rank], bias=False, context=in_full)
        self.wide = Linear(rank, [full], bias=False, context=in_full)

    def forward(self, residual: Tensor, x: Tensor | None = None) -> Tensor:
        """As `RMSNorm.forward`."""
        y = super().forward(residual, x)
        gates = self.wide(self._kernels.activate(self.narrow(y), "silu"))
        return self._kernels.multiply_sigmoid(y, gates)
