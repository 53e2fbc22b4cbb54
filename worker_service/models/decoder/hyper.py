"""Hyper-connections (Zhu et al. 2025), with or without a product that mixes streams with each
other, then with a nearly doubly stochastic matrix (Xie et al. 2026): a residual stream that is
several times as wide as the rows of layers. Each part of a layer reads a weighted sum of its parts,
the streams, and its output is added to each of them, times a weight. Weights are gates, which
depend on all streams of the row."""

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

    num_divisions: int = 0
    """Of the matrix that mixes streams by the sums of its columns; 0: streams are not mixed. The
    offset is then not that of gates of outputs."""

    has_head: bool = True
    """Whether the LM head has gates, too; otherwise it reads the mean of the streams."""

    def counts(self, *, has_output: bool) -> list[int]:
        """Numbers of gates of each kind."""
        return [
            *[self.num_streams] * (1 + has_output),
            *[self.num_streams**2] * (has_output and self.num_divisions > 0),
        ]


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
        self._counts, num_streams = spec.counts(has_output=has_output), spec.num_streams
        in_full, num_gates = replace(context, quantization=None), sum(self._counts)
        self.product = float_linear(num_streams * size, num_gates, in_full, kernels)
        self.product.can_adapt = False  # its weight belongs to no module of `transformers`
        self.weight = torch.empty(len(self._counts), dtype=torch.float32, device=context.device)
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
            counts = torch.tensor(self._counts, device=self.weight.device)
            self._numbers[0] = self.weight.repeat_interleave(counts)
            self.weight = None

    def read(self, streams: Tensor) -> tuple[Tensor, Tensor]:
        """The weighted sum of the streams, [num_tokens, size], and the gates of what is added to
        them, with the matrix that mixes them, if there is one: float32 [num_tokens, columns].
        streams: [num_tokens, num_streams * size]."""
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
            num_divisions=s.num_divisions,
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
        if context.communicator.layout.is_last_stage and spec.has_head:
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
        """The weighted sum of the streams, or their mean: [num_tokens, size]."""
        if self.connection is not None:
            x, _ = self.connection.read(streams)
            return x
        first, *others = streams.chunk(self._num_streams, dim=1)
        total = self._kernels.copy(first)
        for stream in others:
            total = self._kernels.add(total, stream)
        return self._kernels.scale(total, 1 / self._num_streams)
