"""Alternating updates (AltUp, Baykal et al. 2023): a residual stream that is several times as wide
as the rows of layers. A layer predicts all of its parts, the streams, from each other, computes one
of them, and corrects all by what it has computed."""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from torch import Tensor, nn

from pagewire_kernels.reference.backend import LayerKernels
from worker_service.distributed.layout import Shard
from worker_service.models.interface import ModelContext, WeightTarget
from worker_service.models.layers.norms import RMSNorm, norm_targets
from worker_service.models.linear.linear import Linear


@dataclass(frozen=True, kw_only=True, slots=True)
class AltUpSpec:
    """Streams of the residual stream, and what layers with them have besides."""

    num_streams: int
    active: int
    """The stream that layers compute."""

    has_scale: bool
    """Whether the embedding of a layer is gated by the active stream times a vector."""

    laurel_rank: int
    """Of the product that is added to the output of attention (Laurel)."""

    eps: float
    """Of the norms."""


class AltUp(nn.Module):
    """The streams of a layer, and its Laurel."""

    def __init__(
        self, spec: AltUpSpec, size: int, context: ModelContext, kernels: LayerKernels
    ) -> None:
        super().__init__()
        in_full, n = replace(context, quantization=None), spec.num_streams

        def linear(inputs: int, outputs: int, of: ModelContext = in_full) -> Linear:
            return Linear(Shard.full(inputs), [Shard.full(outputs)], bias=False, context=of)

        self.router_norm = RMSNorm(size, spec.eps, context, kernels)
        self.router, self.prediction, self.correction = (
            linear(size, n),
            linear(n, n * n),
            linear(n, n),
        )
        self.laurel_left = linear(size, spec.laurel_rank, context)
        self.laurel_right = linear(spec.laurel_rank, size, context)
        self.laurel_norm = RMSNorm(size, spec.eps, context, kernels)
        self.scale = context.empty(size) if spec.has_scale else None
        self._active, self._size, self._kernels = spec.active, size, kernels

    def targets(self, *names: str, transposed: bool = False) -> Iterator[WeightTarget]:
        """Destinations of the tensors of the two modules with these names."""
        altup, laurel = names
        yield from norm_targets(f"{altup}.router_norm", self.router_norm)
        yield from self.router.targets(f"{altup}.modality_router")
        yield from self.prediction.targets(f"{altup}.prediction_coefs")
        yield from self.correction.targets(f"{altup}.correction_coefs")
        if self.scale is not None:
            yield WeightTarget(f"{altup}.correct_output_scale", self.scale)
        yield from self.laurel_left.targets(f"{laurel}.linear_left")
        yield from self.laurel_right.targets(f"{laurel}.linear_right")
        yield from norm_targets(f"{laurel}.post_laurel_norm", self.laurel_norm)

    def predict(self, streams: Tensor) -> Tensor:
        """The streams with a sum of all added to each: [num_tokens, num_streams * size]."""
        factors = self.prediction(self._route(self.active_of(streams)))
        return self._kernels.mix_streams(streams, factors)

    def active_of(self, streams: Tensor) -> Tensor:
        """A view of the stream that the layer computes: [num_tokens, size]."""
        return streams.split(self._size, dim=1)[self._active]

    def join(self, attended: Tensor, active: Tensor, normed: Tensor) -> Tensor:
        """Add the active stream and Laurel's product of its norm to the output of attention, which
        is overwritten and returned: [num_tokens, size] each."""
        kernels = self._kernels
        product = self.laurel_norm(self.laurel_right(self.laurel_left(normed)))
        summed = kernels.add(kernels.add(attended, active), kernels.add(product, normed))
        return kernels.scale(summed, 2**-0.5)

    def correct(self, streams: Tensor, x: Tensor) -> Tensor:
        """Correct the streams in place by what the active one has become, x: [num_tokens, size].
        Returns the rows that gate the layer's embedding."""
        factors = self.correction(self._route(x))
        self._kernels.correct_streams(streams, x, factors, self._active)
        active = self.active_of(streams)
        if self.scale is None:
            return active
        return self._kernels.multiply(self._kernels.copy(active), self.scale.expand_as(active))

    def add_to_others(self, streams: Tensor, x: Tensor) -> None:
        """Add rows to all streams except the first: [num_tokens, size]."""
        for stream in streams.split(self._size, dim=1)[1:]:
            self._kernels.add(stream, x)

    def _route(self, x: Tensor) -> Tensor:
        rows = self._kernels.scale(self.router_norm(x), 1 / self._size)
        return self._kernels.soft_cap(self.router(rows), 1.0)


class Streams(nn.Module):
    """Makes the streams of embeddings, and rows for the LM head of the streams."""

    def __init__(
        self, spec: AltUpSpec, size: int, context: ModelContext, kernels: LayerKernels
    ) -> None:
        super().__init__()
        layout, full, others = context.communicator.layout, Shard.full(size), spec.num_streams - 1
        counts = others * layout.is_first_stage, others * layout.is_last_stage
        self.expansions, self.reductions = (
            nn.ModuleList(Linear(full, [full], bias=False, context=context) for _ in range(count))
            for count in counts
        )
        self._kernels = kernels
        self._size = size

    def weight_targets(self) -> Iterator[WeightTarget]:
        """Destinations of the checkpoint's tensors."""
        named = ("projections", self.expansions), ("unembed_projections", self.reductions)
        for name, products in named:
            for index, product in enumerate(products):
                assert isinstance(product, Linear)
                yield from product.targets(f"model.altup_{name}.{index}")

    def expand(self, x: Tensor) -> Tensor:
        """x: [num_tokens, size]; returns [num_tokens, num_streams * size]."""
        match = self._kernels.match_rms
        return self._kernels.concatenate(
            [x, *(match(product(x), x) for product in self.expansions)]
        )

    def reduce(self, streams: Tensor) -> Tensor:
        """The mean of the streams, each as large as the first, which is overwritten."""
        first, *others = streams.split(self._size, dim=1)
        products = zip(self.reductions, others, strict=True)
        for matched in [self._kernels.match_rms(linear(x), first) for linear, x in products]:
            self._kernels.add(first, matched)
        return self._kernels.scale(first, 1 / (1 + len(others)))
