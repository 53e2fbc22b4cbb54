"""Hyper-connections (Zhu et al. 2025), without the product that mixes streams with each other: a
residual stream that is several times as wide as the rows of layers. Each part of a layer reads a
weighted sum of its parts, the streams, and its output is added to each of them, times a weight.
Weights are gates, which depend on all streams of the row."""

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from pagewire_kernels.reference.backend import LayerKernels
from worker_service.models.interface import ModelContext, WeightTarget
from worker_service.models.linear.linear import float_linear


@dataclass(frozen=True, kw_only=True, slots=True)
class HyperConnectionsSpec:
    """Streams of the residual stream, and how they are weighted."""

    num_streams: int
    magnitude: float
    """The factor of the gates of outputs."""

    offset: float
    """What is added to all gates."""

    eps: float
    """Added to the mean square of a row."""


class HyperConnection(nn.Module):
    """The gates of a part of a layer, or of the LM head, which adds nothing to the streams. Their
    weights are float32, and every rank has them in full. Implements `linear.Packable`."""

    weight: Tensor | None
    """The factors of products of gates that are read, and of those that are added to."""

    def __init__(
        self,
        spec: HyperConnectionsSpec,
        size: int,
        context: ModelContext,
        kernels: LayerKernels,
        *,
        has_output: bool = True,
    ) -> None:
        super().__init__()
        kinds, num_streams = 1 + has_output, spec.num_streams
        in_full, num_gates = replace(context, quantization=None), kinds * num_streams
        self.product = float_linear(num_streams * size, num_gates, in_full, kernels)
        self.product.can_adapt = False  # its weight belongs to no module of `transformers`
        self.weight = torch.empty(kinds, dtype=torch.float32, device=context.device)
        self._numbers = torch.empty(2, num_gates, dtype=torch.float32, device=context.device)
        self._spec, self._kernels = spec, kernels

    def targets(self, *names: str, transposed: bool = False) -> Iterator[WeightTarget]:
        """Destinations of three tensors: the weight of the product, biases of gates, and factors
        of the products of each kind."""
        assert self.weight is not None
        assert self.product.weight is not None
        weight, biases, factors = names
        yield WeightTarget(weight, self.product.weight)
        yield WeightTarget(biases, self._numbers[1])
        yield WeightTarget(factors, self.weight)

    def pack(self) -> None:
        """Repeat the factor of each kind for its gates, unless that has been done."""
        if self.weight is not None:
            self._numbers[0] = self.weight.repeat_interleave(self._spec.num_streams)
            self.weight = None

    def read(self, streams: Tensor) -> tuple[Tensor, Tensor]:
        """The weighted sum of the streams, [num_tokens, size], and the gates of what is added to
        them: float32 [num_tokens, num_streams]. streams: [num_tokens, num_streams * size]."""
        s = self._spec
        gates = self.product.multiply(streams, None, torch.float32)
        x = self._kernels.read_streams(
            streams,
            gates,
            self._numbers,
            s.num_streams,
            eps=s.eps,
            offset=s.offset,
            magnitude=s.magnitude,
        )
        return x, gates[:, s.num_streams :]

    def write(self, streams: Tensor, x: Tensor, gates: Tensor) -> None:
        """Add the output of the part, [num_tokens, size], to the streams in place, by the gates of
        `read`."""
        self._kernels.write_streams(streams, x, gates)


class HyperStreams(nn.Module):
    """Makes the streams of embeddings, and rows for the LM head of the streams, as `altup.Streams`
    does."""

    def __init__(
        self, spec: HyperConnectionsSpec, size: int, context: ModelContext, kernels: LayerKernels
    ) -> None:
        super().__init__()
        self._num_streams, self._kernels = spec.num_streams, kernels
        self.connection: HyperConnection | None = None
        if context.communicator.layout.is_last_stage:
            self.connection = HyperConnection(spec, size, context, kernels, has_output=False)

    def weight_targets(self) -> Iterator[WeightTarget]:
        """Destinations of the checkpoint's tensors."""
        if self.connection is not None:
            names = (f"model.hc_head.hc_{part}" for part in ("fn", "base", "scale"))
            yield from self.connection.targets(*names)

    def expand(self, x: Tensor) -> Tensor:
        """The same row in each stream. x: [num_tokens, size]; returns [num_tokens, num_streams *
        size]."""
        return self._kernels.concatenate([x] * self._num_streams)

    def reduce(self, streams: Tensor) -> Tensor:
        """The weighted sum of the streams: [num_tokens, size]."""
        assert self.connection is not None, "this stage has the LM head"
        x, _ = self.connection.read(streams)
        return x
