"""Interface of attention over the paged KV cache, and keywords of kernels.

`Abilities` describes the features of an attention backend, `AttentionNeeds` the requirements of a
model."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple, Protocol, Required, TypedDict, Unpack

import torch
from torch import Tensor

from pagewire_kernels.batch import AttentionMetadata


class CacheScales(TypedDict, total=False):
    """By what keys and values are divided when they are written to an fp8 cache; 1 by default."""

    key_scale: float
    value_scale: float


def are_scaled(options: CacheScales) -> bool:
    """Whether keys or values are scaled."""
    return options.get("key_scale", 1.0) != 1.0 or options.get("value_scale", 1.0) != 1.0


class HeadNorms(TypedDict, total=False):
    """Keywords of `rotate`: weights of an RMS norm of each head before RoPE, [head_dim], if the
    model has them (Qwen3)."""

    query_norm: Tensor | None
    key_norm: Tensor | None
    eps: float
    """Of these norms; 1e-6 by default."""


class RotaryOptions(CacheScales, HeadNorms, total=False):
    """Keywords of `rotate_and_write_kv`."""


class AttentionOptions(CacheScales, total=False):
    """Keywords of `paged_attention`; see `reference.paged_attention`."""

    scale: Required[float]
    sliding_window: int | None
    soft_cap: float | None
    sinks: Tensor | None
    alibi_slopes: Tensor | None
    value_dim: int | None


class PackedOptions(TypedDict, total=False):
    """Keywords of `packed_attention`; see `reference.packed_attention`."""

    scale: Required[float]
    window: int | None
    bias: Tensor | None


FP8 = torch.float8_e4m3fn
FLOATS = (torch.float32, torch.bfloat16, torch.float16)

SCALE_BYTES = 4
"""Bytes of the scale, a float32, that follows the codes of each head in an int8 cache."""


def stored_head_size(head_dim: int, cache_dtype: torch.dtype) -> int:
    """The number of elements that one head of a token occupies in a cache of this dtype."""
    return head_dim + SCALE_BYTES if cache_dtype == torch.int8 else head_dim


@dataclass(frozen=True, kw_only=True, slots=True)
class AttentionNeeds:
    """The requirements of a model and its KV cache."""

    dtype: torch.dtype
    """Dtype of queries, and of new keys and values."""

    head_dim: int

    cache_dtype: torch.dtype | None = None
    """`float8_e4m3fn`, `int8`, or None for the dtype of the keys."""

    block_size: int | None = None
    """Tokens per block; None for the backend's default."""

    chunks: bool = False
    sliding_window: bool = False
    soft_cap: bool = False
    sinks: bool = False
    alibi: bool = False

    packed: bool = False
    """Whether it attends over whole texts without a cache."""

    batch_invariant: bool = False
    """Whether the result of a row must be bitwise independent of its batch."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Abilities:
    """The features that a backend supports."""

    dtypes: tuple[torch.dtype, ...] = FLOATS
    fp8_cache: bool = False
    int8_cache: bool = False
    chunks: bool = True
    sliding_window: bool = True
    soft_cap: bool = True
    sinks: bool = True
    alibi: bool = True
    batch_invariant: bool = False
    cuda_graphs: bool = True
    """Whether batches can be captured in CUDA graphs; not if the backend waits for the device."""

    max_head_dim: int | None = None
    head_dim_multiple: int = 1

    block_multiple: int = 1
    """Tokens per block must be a multiple of this."""

    default_block_size: int = 16
    """Tokens per block unless configured."""

    def obstacles(self, needs: AttentionNeeds) -> Iterator[str]:
        """Yield the reasons why this backend cannot serve a model, if any."""
        if needs.dtype not in self.dtypes:
            yield f"does not compute in {str(needs.dtype).removeprefix('torch.')}"
        if needs.cache_dtype == FP8 and not self.fp8_cache:
            yield "has no fp8 cache (--kv-cache-dtype)"
        if needs.cache_dtype == torch.int8 and not self.int8_cache:
            yield "has no int8 cache (--kv-cache-dtype)"
        if self.max_head_dim is not None and needs.head_dim > self.max_head_dim:
            yield f"takes heads of at most {self.max_head_dim} elements, not {needs.head_dim}"
        if needs.head_dim % self.head_dim_multiple:
            multiple = self.head_dim_multiple
            yield f"takes heads of a multiple of {multiple} elements, not {needs.head_dim}"
        if needs.block_size is not None and needs.block_size % self.block_multiple:
            multiple, got = self.block_multiple, needs.block_size
            yield f"takes blocks of a multiple of {multiple} tokens (--block-size), not {got}"
        for feature, name in _FEATURES.items():
            if getattr(needs, feature) and not getattr(self, feature):
                yield name


_FEATURES = {
    "chunks": "has blocks that are too large for chunked attention",
    "sliding_window": "has no sliding window",
    "soft_cap": "has no soft cap",
    "sinks": "has no attention sinks",
    "alibi": "has no ALiBi biases",
    "batch_invariant": "is not batch-invariant",
}


class AttentionBackend(Protocol):
    """Writes to and attends over a paged KV cache, or attends without one. Arguments are those of
    the functions of the same names in `pagewire_kernels.reference`.

    The last block of a cache is the *null block*: it is in no table, and zero. Keys and values that
    no row sees may be anything, NaN included, and blocks before a window may have been released: a
    backend whose kernel reads them reads the null block instead.
    """

    @property
    def name(self) -> str:
        """The backend's name in `--attention-backend`."""

    @property
    def abilities(self) -> Abilities:
        """Supported features; a call that needs others raises ValueError or TypeError."""

    def write_kv(
        self,
        key: Tensor,
        value: Tensor,
        key_cache: Tensor,
        value_cache: Tensor,
        slot_mapping: Tensor,
        **scales: Unpack[CacheScales],
    ) -> None:
        """Store each row's key and value in its slot."""

    def paged_attention(
        self,
        query: Tensor,
        key_cache: Tensor,
        value_cache: Tensor,
        metadata: AttentionMetadata,
        **options: Unpack[AttentionOptions],
    ) -> Tensor:
        """Causal attention of flattened query rows over their sequences' cached blocks."""

    def packed_attention(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        metadata: AttentionMetadata,
        **options: Unpack[PackedOptions],
    ) -> Tensor:
        """Attention over all rows of whole texts, without a cache."""


class HeadOutput(NamedTuple):
    """Output of the LM head, for the rows that sample."""

    logits: Tensor
    """float32 [num_sampled, vocab_size]."""

    best: Tensor
    """int64 [num_sampled]: column of each row's largest logit, the lowest among equals."""

    largest: Tensor
    """float32 [num_sampled]: the largest logit; NaN, with an arbitrary column, if the row has a
    NaN."""


class Computed(NamedTuple):
    """Hidden states, and the LM head's output for some of them."""

    hidden: Tensor
    """[num_tokens, hidden_size]."""

    head: HeadOutput | None = None
    """None if the LM head is not part of the program."""

    captured: tuple[Tensor, ...] = ()
    """[num_tokens, hidden_size] each: captured hidden states between layers, for a draft head."""
