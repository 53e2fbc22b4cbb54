"""What all native models share: embedding of weights' names, loading and packing."""

import re
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn

from pagewire_kernels.batch import AttentionMetadata
from pagewire_kernels.interface import Computed
from pagewire_kernels.select import ForwardFn, Kernels
from worker_service.distributed.communicator import Communicator
from worker_service.distributed.layout import Shard
from worker_service.models.interface import KVCacheSpec, ModelContext
from worker_service.models.layers import PagedAttention
from worker_service.models.linear import Linear, VocabEmbedding, VocabHead

KV_SCALE_NAMES = r".*\.self_attn\.(?:[kv]_proj\.)?[kv]_scale"
"""Canonical names of the scales of keys and values in an fp8 cache, one number each."""


@dataclass(frozen=True, slots=True)
class WeightTarget:
    """Where a checkpoint's tensor, or a part of it, goes: often a view of a larger, stacked one."""

    name: str
    """As in the checkpoint, in the model's canonical form. Several targets may share a tensor."""

    target: Tensor
    """Of the part's shape."""

    axis: int = 0
    shard: Shard | None = None
    """Which part of the checkpoint's tensor along `axis` it is; None: all of it."""

    @property
    def source_shape(self) -> list[int]:
        """Of the checkpoint's tensor."""
        shape = list(self.target.shape)
        if self.shard is not None:
            shape[self.axis] = self.shard.total
        return shape

    @property
    def source_index(self) -> tuple[slice, ...]:
        """Where the part is in the checkpoint's tensor."""
        if self.shard is None:
            return ()
        part = slice(self.shard.start, self.shard.start + self.shard.size)
        return (slice(None),) * self.axis + (part,)


class NativeModel(nn.Module, ABC):
    """A model in our own code. A subclass fills in the attributes and the abstract methods.

    A rank of a group builds its stage's layers only, and of each its own share.
    """

    optional_names: ClassVar[re.Pattern[str]] = re.compile(r"lm_head\.weight")
    """Canonical names that a checkpoint may hold without a target for them, such as that of
    a head that is tied to the embedding."""

    kv_cache_spec: KVCacheSpec
    architecture: str
    vocab_size: int
    max_model_len: int
    num_parameters: int
    """Numbers in the checkpoint, a tied one counted once; of all ranks together. Known once loading
    is finished."""

    communicator: Communicator
    embedding: VocabEmbedding | None
    """None on later stages."""

    head: VocabHead | None
    """None on earlier stages."""

    def __init__(self, hidden_size: int, context: ModelContext, kernels: Kernels) -> None:
        super().__init__()
        self.communicator = context.communicator
        alone = context.communicator.layout.world_size == 1
        self._run: ForwardFn | None = None
        if alone:
            self._run = kernels.prepare(self.embed, self.run_layers, self._apply_head)
        self._needs_fixed_products = context.needs_fixed_products
        self._hidden_like = torch.empty(hidden_size, **context.as_kwargs())

    @abstractmethod
    def weight_targets(self) -> Iterator[WeightTarget]:
        """Where each tensor of a checkpoint goes; every target must be filled."""

    def kv_scale_holders(self) -> Iterator[tuple[str, PagedAttention]]:
        """(canonical name, the layer's attention) of the layers here whose keys and values a
        checkpoint may hold scales for."""
        return iter(())

    @abstractmethod
    def canonical_name(self, name: str) -> str:
        """The name a target has for what a checkpoint calls `name`."""

    @abstractmethod
    def embed(self, token_ids: Tensor, positions: Tensor) -> Tensor:
        """What the first layer takes, [num_tokens, hidden_size]."""

    @abstractmethod
    def run_layers(
        self, residual: Tensor, positions: Tensor, kv_cache: Tensor, metadata: AttentionMetadata
    ) -> Tensor:
        """Through this rank's layers, to what `end_stage` gives.

        residual: [num_tokens, hidden_size], the residual stream, which is overwritten.
        """

    @abstractmethod
    def finish(self, residual: Tensor, x: Tensor | None) -> Tensor:
        """What the head takes, from the residual stream and what is yet to be added to it."""

    def end_stage(self, residual: Tensor, x: Tensor | None) -> Tensor:
        """What the head takes, or the next stage: [num_tokens, hidden_size]."""
        if self.communicator.layout.is_last_stage:
            return self.finish(residual, x)
        return residual if x is None else residual.add_(x)

    def forward(
        self,
        token_ids: Tensor,
        positions: Tensor,
        kv_cache: Tensor,
        metadata: AttentionMetadata,
    ) -> Tensor:
        """Last hidden states of all rows, [num_tokens, hidden_size]; see `interface.Model`.

        Of several stages each computes its layers, takes what the one before has, and hands on.
        """
        return self.forward_to_logits(token_ids, positions, kv_cache, metadata, None).hidden

    @torch.inference_mode()
    def forward_to_logits(
        self,
        token_ids: Tensor,
        positions: Tensor,
        kv_cache: Tensor,
        metadata: AttentionMetadata,
        sampled: Tensor | None,
    ) -> Computed:
        """As `forward`; and of the rows `sampled`, int64 [num_sampled], also logits where these are
        a part of the same program."""
        if self._run is not None:
            return self._run(token_ids, positions, kv_cache, metadata, sampled)
        layout = self.communicator.layout
        if layout.is_first_stage:
            x = self.embed(token_ids, positions)
        else:
            x = self.communicator.receive(token_ids, positions, like=self._hidden_like)
        x = self.run_layers(x, positions, kv_cache, metadata)
        if not layout.is_last_stage:
            self.communicator.send_on(x)
        return Computed(x)

    @torch.inference_mode()
    def compute_logits(self, hidden_states: Tensor) -> Tensor:
        """Logits of chosen rows: float32 [num_rows, vocab_size].

        A stage without the head returns the hidden states, for trial runs to compare.
        """
        if self.head is None:
            return hidden_states.float()
        return self._apply_head(hidden_states)

    def _apply_head(self, hidden_states: Tensor) -> Tensor:
        assert self.head is not None
        return self.head(hidden_states)

    def finish_loading(self) -> None:
        """Lay the weights out for the device. To be called once, with all targets filled."""
        for module in self.modules():
            if isinstance(module, Linear):
                module.pack()
                if self._needs_fixed_products:
                    module.fix_order()


def linear_targets(name: str, linear: Linear) -> Iterator[WeightTarget]:
    """Targets of a linear layer that the checkpoint holds as one."""
    assert linear.weight is not None
    yield WeightTarget(f"{name}.weight", linear.weight)
    if linear.bias is not None:
        yield WeightTarget(f"{name}.bias", linear.bias)


def column_targets(names: list[str], linear: Linear, shards: list[Shard]) -> Iterator[WeightTarget]:
    """Targets of several linear layers that we compute as one; `shards` are of their outputs."""
    assert linear.weight is not None
    sizes = [shard.size for shard in shards]
    for name, part, shard in zip(names, linear.weight.split(sizes), shards, strict=True):
        yield WeightTarget(f"{name}.weight", part, shard=shard)
    if linear.bias is not None:
        for name, part, shard in zip(names, linear.bias.split(sizes), shards, strict=True):
            yield WeightTarget(f"{name}.bias", part, shard=shard)


def row_targets(name: str, linear: Linear, shard: Shard) -> Iterator[WeightTarget]:
    """Targets of a linear layer of which each rank has a shard of the inputs."""
    assert linear.weight is not None
    yield WeightTarget(f"{name}.weight", linear.weight, axis=1, shard=shard)
    if linear.bias is not None:
        yield WeightTarget(f"{name}.bias", linear.bias)


def vocab_targets(
    model: NativeModel, embedding_name: str, head_name: str, *, tied: bool
) -> Iterator[WeightTarget]:
    """Targets of embedding and head; a tied head of a later stage takes the embedding's numbers."""
    if model.embedding is not None:
        shard, weight = model.embedding.shard, model.embedding.weight
        assert weight is not None
        yield WeightTarget(embedding_name, weight[: shard.size], shard=shard)
    if model.head is not None and not (tied and model.embedding is not None):
        shard, weight = model.head.shard, model.head.linear.weight
        assert weight is not None
        name = embedding_name if tied else head_name
        yield WeightTarget(name, weight[: shard.size], shard=shard)


def norm_targets(name: str, norm: nn.Module) -> Iterator[WeightTarget]:
    """Targets of an RMSNorm or a LayerNorm."""
    for part in ("weight", "bias"):
        tensor = getattr(norm, part, None)
        if tensor is not None:
            yield WeightTarget(f"{name}.{part}", tensor)
