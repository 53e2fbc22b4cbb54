"""The interface of models, the context in which they are built, and targets of their weights."""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from pagewire_kernels.batch import RowAdapters, StepBatch
from pagewire_kernels.interface import Computed
from pagewire_kernels.quantized_weight import QuantizedWeight
from worker_service.distributed.communicator import Communicator
from worker_service.distributed.layout import Layout, Shard
from worker_service.models.kv_cache_spec import KVCacheSpec
from worker_service.plan import PoolingHead
from worker_service.pooling_facts import PoolingFacts


class Model(Protocol):
    """A decoder-only language model over a paged KV cache."""

    kv_cache_spec: KVCacheSpec
    architecture: str
    vocab_size: int
    max_model_len: int
    num_parameters: int

    def forward(self, batch: StepBatch) -> torch.Tensor:
        """Compute the last hidden states of all rows, and write their KV to the cache. Returns
        [num_tokens, hidden_size], which the next call may overwrite."""
        ...

    def compute_logits(
        self, hidden_states: torch.Tensor, adapters: RowAdapters = ()
    ) -> torch.Tensor:
        """Compute the logits of some rows.

        hidden_states: [num_rows, hidden_size]; adapters: of these rows, which the last forward pass
        had. Returns float32 [num_rows, vocab_size].
        """
        ...


@runtime_checkable
class ComputesLogits(Protocol):
    """A model that can compute logits in its forward pass."""

    def forward_to_logits(self, batch: StepBatch) -> Computed:
        """As `Model.forward`, with the logits of `batch.sampled` if the recorded program includes
        the LM head."""
        ...


@runtime_checkable
class Pools(Protocol):
    """A model whose last hidden states become vectors, or logits of labels.

    The runner chooses hidden states, or averages them, and calls `pool`; it shortens and normalizes
    what that returns.
    """

    pooling: PoolingFacts
    """What it makes according to its own configuration. The loader adds what the files of
    sentence-transformers and options say."""

    def pool(self, pooled: torch.Tensor, head: PoolingHead) -> torch.Tensor:
        """Compute what follows the pooling: with UNSPECIFIED a vector, with CLASSIFIER the logits
        of `pooling.labels`, of which there are some.

        pooled: float32 [n, hidden_size], last hidden states after the final norm, or means of them.
        Returns float32 [n, size]. A row has the same bits whatever the other rows are.
        """
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelContext:
    """Dtype and device of weights, activations and KV, and the ranks that share them."""

    dtype: torch.dtype
    device: torch.device

    cache_dtype: torch.dtype | None = None
    """Dtype of the KV cache; None: `dtype`."""

    batch_invariant: bool = False
    """Whether a row must have the same bits in any batch on GPUs, too."""

    quantization: str | None = None
    """The format to which dense weights of linear layers are quantized, as `quantize` names it;
    None: they are not."""

    generates: bool = True
    """Whether logits of tokens are needed; a model without them needs no LM head."""

    packs_with_triton: bool = False
    """Whether quantized weights stay packed on a GPU, for the Triton kernels. Their dense forms are
    then allocated on the host, where memory is not committed until it is written to."""

    dequantized: Counter[str] = field(default_factory=Counter)
    """Bytes of quantized weights that had to be dequantized, by reason; updated while loading."""

    communicator: Communicator = field(default_factory=lambda: Communicator(Layout()))

    @property
    def needs_fixed_products(self) -> bool:
        """Whether linear layers need the batch-invariant Triton kernel."""
        return self.batch_invariant and self.device.type == "cuda"

    @property
    def kv_dtype(self) -> torch.dtype:
        """Dtype of the KV cache."""
        return self.dtype if self.cache_dtype is None else self.cache_dtype

    def empty(self, *shape: int) -> Tensor:
        """Return an uninitialized tensor of this dtype on this device."""
        return torch.empty(*shape, dtype=self.dtype, device=self.device)

    def empty_weight(self, *shape: int) -> Tensor:
        """Return an uninitialized weight, which is packed for this device once it is filled."""
        device = torch.device("cpu") if self.packs_with_triton else self.device
        return torch.empty(*shape, dtype=self.dtype, device=device)


@dataclass(frozen=True, slots=True)
class WeightTarget:
    """Destination of a checkpoint's tensor or of a part of it, often a view of a stacked tensor."""

    name: str
    """Canonical name of the checkpoint's tensor. Several targets may be parts of one tensor."""

    target: Tensor
    """The tensor that is filled, of the shape of the part."""

    axis: int = 0
    shard: Shard | None = None
    """The part of the checkpoint's tensor along `axis`; None: all of it."""

    keep: Callable[[QuantizedWeight], None] | None = None
    """Called with the part, instead of filling `target`, if it is quantized in the checkpoint or
    was quantized while it was read; None: it must be dequantized."""

    rounding: str | None = None
    """The format to which a dense tensor is quantized, as `quantize` names it; None: it is not."""

    order: Tensor | None = None
    """int64 [rows]: for each row of `target`, that of the part; None: they have the same order."""

    @property
    def source_shape(self) -> list[int]:
        """Expected shape of the checkpoint's tensor."""
        shape = list(self.target.shape)
        if self.shard is not None:
            shape[self.axis] = self.shard.total
        return shape

    @property
    def source_index(self) -> tuple[slice, ...]:
        """Index of the part in the checkpoint's tensor."""
        if self.shard is None:
            return ()
        part = slice(self.shard.start, self.shard.start + self.shard.size)
        return (slice(None),) * self.axis + (part,)

    def part_of(self, weight: QuantizedWeight) -> QuantizedWeight:
        """The part of the checkpoint's quantized weight, in the order of `target`."""
        if self.shard is not None:
            start, stop = self.shard.start, self.shard.start + self.shard.size
            rows = slice(start, stop)
            weight = weight.columns(start, stop) if self.axis else weight.rows(rows)
        return weight if self.order is None else weight.rows(self.order)

    def arranged(self, part: Tensor) -> Tensor:
        """The part of a dense tensor in the order of `target`."""
        return part if self.order is None else part[self.order]
