"""RMS norms and layer norms of rows."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from pagewire_kernels.reference.backend import LayerKernels
from pagewire_kernels.select import Kernels
from worker_service.distributed.communicator import Communicator
from worker_service.distributed.layout import Shard
from worker_service.models.interface import ModelContext, WeightTarget


class RMSNorm(nn.Module):
    """x / rms(x) * (offset + weight) * scale over the last axis (Zhang and Sennrich 2019).

    With an offset, the sum is kept in float32: rounded to bfloat16, it would lose most of a weight.
    So is the product with a scale, which is rounded only with the rows.
    """

    def __init__(
        self,
        size: int,
        eps: float,
        context: ModelContext,
        kernels: LayerKernels,
        offset: float = 0.0,
        affine: bool = True,
        shard: Shard | None = None,
        scale: float = 1.0,
        order: Tensor | None = None,
    ) -> None:
        """affine: whether the checkpoint has a weight; otherwise that is 1. shard: the columns of
        this rank, as many as `size`; None: all. See `norm_shards`. order: int64 [size], the place
        of each column in the checkpoint's weight; None: the same."""
        super().__init__()
        self.shard, self.order = shard, order
        self.weight, self.affine = context.empty(size), affine
        if not affine:
            self.weight.fill_(1)
        if offset or scale != 1.0:
            self.weight = self.weight.float()
        self.eps = eps
        self._offset, self._scale = offset, scale
        self._kernels = kernels

    def forward(self, residual: Tensor, x: Tensor | None = None) -> Tensor:
        """Add x, if given, to the residual stream in place. Returns the norm of the sum."""
        if x is None:
            return self._kernels.rms_norm(residual, self.weight, self.eps)
        return self._kernels.rms_norm(x, self.weight, self.eps, residual)

    def add_offset(self) -> None:
        """Add the offset to the weight, which is loaded, and multiply the sum by the scale."""
        self.weight += self._offset
        self.weight *= self._scale
        self._offset, self._scale = 0.0, 1.0


def norm_shards(
    parts: Sequence[Tensor], norms: Sequence[RMSNorm], communicator: Communicator
) -> list[Tensor]:
    """The RMS norms of rows of which each rank has some columns, the same number on all: the sums
    of squares are added over the ranks, in their order on CPUs. Columns that several ranks have
    count as often, in both the sum and the number. parts: of each norm, [num_rows, its size]."""
    wide = [part.float() for part in parts]
    squares = torch.cat([part.square().sum(1, keepdim=True) for part in wide], dim=1)
    sums, num_ranks = communicator.sum(squares), communicator.layout.tensor_parallel_size
    normed = []
    for i, (part, norm) in enumerate(zip(wide, norms, strict=True)):
        mean = sums[:, i, None] / (num_ranks * part.shape[1])
        factor = 1.0 / (mean + norm.eps).sqrt()
        normed.append((part * factor * norm.weight.float()).to(parts[i].dtype))
    return normed


class LayerNorm(nn.Module):
    """(x - mean) / deviation * (offset + weight) + bias over the last axis; see `RMSNorm`."""

    def __init__(
        self,
        size: int,
        eps: float,
        context: ModelContext,
        kernels: LayerKernels,
        affine: bool = True,
        has_bias: bool = True,
        offset: float = 0.0,
    ) -> None:
        super().__init__()
        self.weight = context.empty(size) if affine else None
        if self.weight is not None and offset:
            self.weight = self.weight.float()
        self._offset = offset
        self.bias = context.empty(size) if affine and has_bias else None
        self._eps = eps
        # The Triton kernel has both weight and bias, or neither.
        no_bias = context.empty(size).zero_() if affine and context.device.type == "cuda" else None
        self._no_bias = no_bias if self.bias is None else None
        self._kernels = kernels

    def forward(self, residual: Tensor, x: Tensor | None = None) -> Tensor:
        """Add x, if given, to the residual stream in place. Returns the norm of the sum."""
        bias = self._no_bias if self.bias is None else self.bias
        if x is None:
            return self._kernels.layer_norm(residual, self.weight, bias, self._eps)
        return self._kernels.layer_norm(x, self.weight, bias, self._eps, residual)

    def add_offset(self) -> None:
        """Add the offset to the weight, which is loaded."""
        if self.weight is not None:
            self.weight += self._offset
        self._offset = 0.0


def norm_targets(name: str, norm: RMSNorm | LayerNorm) -> Iterator[WeightTarget]:
    """Destinations of the checkpoint's tensors of the norm called `name`."""
    if norm.weight is not None and (isinstance(norm, LayerNorm) or norm.affine):
        of_rms = (norm.shard, norm.order) if isinstance(norm, RMSNorm) else (None, None)
        shard, order = of_rms
        yield WeightTarget(f"{name}.weight", norm.weight, shard=shard, order=order)
    if isinstance(norm, LayerNorm) and norm.bias is not None:
        yield WeightTarget(f"{name}.bias", norm.bias)


@dataclass(frozen=True, kw_only=True, slots=True)
class NormSpec:
    """An RMS norm, or a layer norm."""

    eps: float
    is_rms: bool = True
    affine: bool = True
    """Whether there is a weight, and possibly a bias."""

    bias: bool = True
    """Whether a layer norm has a bias."""

    offset: float = 0.0
    """What is added to the weight."""

    gate_rank: int | None = None
    """Elements of what gates of rows are products of, where a layer's norm has gates."""

    def build(self, size: int, context: ModelContext, kernels: Kernels) -> RMSNorm | LayerNorm:
        """The norm of rows of this size."""
        if self.is_rms:
            return RMSNorm(size, self.eps, context, kernels.layers, self.offset, affine=self.affine)
        return LayerNorm(
            size, self.eps, context, kernels.layers, self.affine, self.bias, self.offset
        )
