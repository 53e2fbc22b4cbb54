"""Embeddings of each layer: what a token adds to the residual stream behind every layer."""

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from pagewire_kernels.batch import StepBatch
from pagewire_kernels.quantized_weight import QuantizedWeight
from pagewire_kernels.reference.backend import LayerKernels
from pagewire_kernels.select import Kernels
from worker_service.distributed.layout import Shard
from worker_service.models.interface import ModelContext, WeightTarget
from worker_service.models.layers.activations import ACTIVATIONS
from worker_service.models.layers.norms import RMSNorm, norm_targets
from worker_service.models.layers.rotary import RotaryTable
from worker_service.models.linear.linear import Linear
from worker_service.models.linear.vocabulary import VocabEmbedding


@dataclass(frozen=True, kw_only=True, slots=True)
class PerLayerSpec:
    """Embeddings that each layer has of its own."""

    size: int
    """Of the embedding of one layer."""

    vocab_size: int
    table_size: int
    """Tokens in the checkpoint's table. The embedding of further ones is that of the first."""

    activation: str
    """Of the gate, its name in `config.json`."""

    eps: float
    """Of the norms."""


class _Table(VocabEmbedding):
    """A table that lacks the last tokens. One rank has copies of the first row for them; several
    look up the first one instead."""

    def __init__(
        self, spec: PerLayerSpec, width: int, context: ModelContext, kernels: LayerKernels
    ) -> None:
        self._num_stored = spec.table_size
        self._copies = context.communicator.layout.tensor_parallel_size == 1
        num_rows = spec.vocab_size if self._copies else spec.table_size
        super().__init__(num_rows, width, context, kernels)
        self.can_adapt = spec.table_size == spec.vocab_size

    def table_target(self, name: str) -> WeightTarget:
        target = super().table_target(name)
        if not self._copies:
            return target
        rows = target.target[: self._num_stored]
        return replace(target, target=rows, shard=Shard.full(self._num_stored))

    def _keep(self, part: QuantizedWeight) -> None:
        if num_further := self.shard.size - self._num_stored if self._copies else 0:
            rows = torch.arange(self._num_stored), torch.zeros(num_further, dtype=torch.int64)
            part = part.rows(torch.cat(rows))
        super()._keep(part)

    def pack(self) -> None:
        if self._copies and self.weight is not None:
            self.weight[self._num_stored :] = self.weight[0]
        super().pack()

    def forward(self, token_ids: Tensor) -> Tensor:
        if not self._copies:
            token_ids = torch.where(token_ids < self._num_stored, token_ids, 0)
        return super().forward(token_ids)


class PerLayerEmbeddings(nn.Module):
    """The inputs of all layers beside the residual stream: a table's rows by token, and a product
    of the token's embedding, which is normed layer by layer."""

    def __init__(
        self,
        spec: PerLayerSpec,
        num_layers: int,
        hidden_size: int,
        rotary: RotaryTable,
        context: ModelContext,
        kernels: LayerKernels,
    ) -> None:
        """rotary: of all positions."""
        super().__init__()
        self._shape, self._kernels = (num_layers, spec.size), kernels
        width = num_layers * spec.size
        self.table = _Table(spec, width, context, kernels)
        full, width_of = Shard.full(hidden_size), [Shard.full(width)]
        self.projection = Linear(full, width_of, bias=False, context=context)
        self.norm = RMSNorm(spec.size, spec.eps, context, kernels)
        self._table_scale = torch.tensor(spec.size**0.5, dtype=context.dtype).item()
        self._projection_scale = hidden_size**-0.5
        self._unrotated = rotary.identity

    def forward(self, token_ids: Tensor, embedded: Tensor, positions: Tensor) -> Tensor:
        """embedded: [num_tokens, hidden_size]. Returns [num_tokens, num_layers * size]."""
        rows = self._kernels.scale(self.projection(embedded), self._projection_scale)
        heads = rows.unflatten(1, self._shape)
        # The norm of heads before RoPE, which rotates nothing here.
        self._kernels.rotate(
            heads,
            heads[:, :0],
            positions,
            *self._unrotated,
            query_norm=self.norm.weight,
            eps=self.norm.eps,
        )
        rows = self._kernels.add(
            rows, self._kernels.scale(self.table(token_ids), self._table_scale)
        )
        return self._kernels.scale(rows, 2**-0.5)

    def weight_targets(self) -> Iterator[WeightTarget]:
        """Destinations of the checkpoint's tensors."""
        yield self.table.table_target("model.embed_tokens_per_layer.weight")
        yield from self.projection.targets("model.per_layer_model_projection")
        yield from norm_targets("model.per_layer_projection_norm", self.norm)


class LayerEmbeddings(nn.Module):
    """The embeddings of a stage's layers in the present step. The first stage computes those of all
    layers; each one sends those of later layers on, beside the residual stream."""

    def __init__(
        self,
        spec: PerLayerSpec,
        num_layers: int,
        layers: range,
        hidden_size: int,
        rotary: RotaryTable,
        context: ModelContext,
        kernels: Kernels,
    ) -> None:
        """layers: those of this stage; others: as of `PerLayerEmbeddings`."""
        super().__init__()
        layout = context.communicator.layout
        self._size, self._width = spec.size, len(layers) * spec.size
        self._is_last = layout.is_last_stage
        self.all: PerLayerEmbeddings | None = None
        if layout.is_first_stage:
            self.all = PerLayerEmbeddings(
                spec, num_layers, hidden_size, rotary, context, kernels.layers
            )
        self.received_width = (num_layers - layers.start) * spec.size
        """Columns of those of this stage's layers and later ones."""
        self._present: Tensor | None = None
        """[num_tokens, received_width]."""

    def begin(self, residual: Tensor, batch: StepBatch) -> Tensor:
        """Compute them from the input of the first layer, or take them from what was received.
        Returns the residual stream."""
        if self.all is not None:
            self._present = self.all(batch.token_ids, residual, batch.positions)
            return residual
        residual, self._present = residual.tensor_split([-self.received_width], dim=1)
        return residual

    def of_layer(self, index: int) -> Tensor:
        """[num_tokens, size]. index: of the layer in this stage."""
        assert self._present is not None, "begin() comes first"
        return self._present[:, index * self._size : (index + 1) * self._size]

    def end(self, x: Tensor) -> Tensor:
        """What a stage with this output sends."""
        assert self._present is not None, "begin() comes first"
        present, self._present = self._present, None
        return x if self._is_last else torch.cat([x, present[:, self._width :]], dim=1)

    def weight_targets(self) -> Iterator[WeightTarget]:
        """Destinations of the checkpoint's tensors."""
        if self.all is not None:
            yield from self.all.weight_targets()


class KeptEmbedding(nn.Module):
    """The input of the first layer in the present step, which all layers get. Each stage sends it
    on, beside the residual stream. Used as `LayerEmbeddings` is."""

    def __init__(self, hidden_size: int, context: ModelContext, kernels: Kernels) -> None:
        super().__init__()
        layout = context.communicator.layout
        self._is_first, self._is_last = layout.is_first_stage, layout.is_last_stage
        self.received_width, self._kernels = hidden_size, kernels.layers
        self._present: Tensor | None = None

    def begin(self, residual: Tensor, batch: StepBatch) -> Tensor:
        """Copy the input of the first layer, or take it from what was received. Returns the
        residual stream."""
        if self._is_first:
            self._present = self._kernels.copy(residual)
            return residual
        residual, self._present = residual.tensor_split([-self.received_width], dim=1)
        return residual

    def of_layer(self, index: int) -> Tensor:
        """[num_tokens, hidden_size]."""
        assert self._present is not None, "begin() comes first"
        return self._present

    def end(self, x: Tensor) -> Tensor:
        """What a stage with this output sends."""
        assert self._present is not None, "begin() comes first"
        present, self._present = self._present, None
        return x if self._is_last else torch.cat([x, present], dim=1)

    def weight_targets(self) -> Iterator[WeightTarget]:
        """None."""
        return iter(())


class PerLayerGate(nn.Module):
    """What a layer adds to the residual stream for its embedding: a gated product."""

    def __init__(
        self, spec: PerLayerSpec, hidden_size: int, context: ModelContext, kernels: LayerKernels
    ) -> None:
        super().__init__()
        size, hidden = Shard.full(spec.size), Shard.full(hidden_size)
        self.gate = Linear(hidden, [size], bias=False, context=context)
        self.projection = Linear(size, [hidden], bias=False, context=context)
        self.norm = RMSNorm(hidden_size, spec.eps, context, kernels)
        self._activation, self._kernels = ACTIVATIONS[spec.activation], kernels

    def forward(self, residual: Tensor, embedding: Tensor) -> Tensor:
        """residual: [num_tokens, hidden_size]; embedding: [num_tokens, size], the layer's. Returns
        what is added to the former."""
        gate = self._kernels.activate(self.gate(residual), self._activation)
        y: Tensor = self.norm(self.projection(self._kernels.multiply(gate, embedding)))
        return y


class LayerScalar(nn.Module):
    """The factor of a layer's output. Implements `linear.Packable`."""

    weight: Tensor | None

    def __init__(self, context: ModelContext, kernels: LayerKernels) -> None:
        super().__init__()
        self.weight = context.empty(1)
        self._factor, self._kernels = 1.0, kernels

    def targets(self, *names: str, transposed: bool = False) -> Iterator[WeightTarget]:
        """Destination of the tensor with this name."""
        assert self.weight is not None
        (name,) = names
        yield WeightTarget(name, self.weight)

    def pack(self) -> None:
        """Read the factor, unless it is read already."""
        if self.weight is not None:
            self._factor, self.weight = self.weight.item(), None

    def forward(self, x: Tensor) -> Tensor:
        """x: [num_tokens, size], which is overwritten and returned."""
        return x if self._factor == 1.0 else self._kernels.scale(x, self._factor)
