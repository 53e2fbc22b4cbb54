"""Interfaces: attention over the paged KV cache, and the row-wise kernels of a layer.

`Abilities` describes the features of an attention backend, `AttentionNeeds` the requirements of a
model."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from pagewire_kernels.batch import AttentionMetadata


class LayerKernels(Protocol):
    """Row-wise operations. Weights, biases and tables have the dtype and device of the rows.

    Rows have a dense last axis and otherwise arbitrary strides. `activation` is one of
    `reference.ACTIVATIONS`.
    """

    name: str

    def embed(self, table: Tensor, token_ids: Tensor) -> Tensor:
        """Gather rows of a table. table: [vocab_size, size]; token_ids: int64 [num_rows].

        Returns a new tensor [num_rows, size].
        """
        ...

    def copy(self, x: Tensor) -> Tensor:
        """Copy the rows of x, [num_tokens, size], which are overwritten later."""
        ...

    def rms_norm(
        self, x: Tensor, weight: Tensor, eps: float, residual: Tensor | None = None
    ) -> Tensor:
        """x / rms(x) * weight over the last axis (Zhang and Sennrich 2019).

        With a residual, x is first added to it, in place and rounded to its dtype, and the sum is
        normalized. x, residual: [num_tokens, size]; weight: [size]. Returns a new tensor
        [num_tokens, size].
        """
        ...

    def layer_norm(
        self,
        x: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        eps: float,
        residual: Tensor | None = None,
    ) -> Tensor:
        """(x - mean) / deviation * weight + bias over the last axis; `residual` as in `rms_norm`.

        x, residual: [num_tokens, size]; weight, bias: [size], both or neither. Returns a new tensor
        [num_tokens, size].
        """
        ...

    def activate(self, x: Tensor, activation: str) -> Tensor:
        """activation(x). x: [num_tokens, size], contiguous; it may be overwritten.

        Returns [num_tokens, size], which may be x.
        """
        ...

    def act_and_mul(self, gate_up: Tensor, activation: str) -> Tensor:
        """activation(gate) * up, where `gate_up` holds gate, then up, on its last axis.

        gate_up: [num_tokens, 2 * size]. Returns a new tensor [num_tokens, size].
        """
        ...

    def rotate_and_write_kv(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_cache: Tensor,
        value_cache: Tensor,
        slot_mapping: Tensor,
        positions: Tensor,
        cos: Tensor,
        sin: Tensor,
        *,
        query_norm: Tensor | None = None,
        key_norm: Tensor | None = None,
        eps: float = 1e-6,
        key_scale: float = 1.0,
        value_scale: float = 1.0,
    ) -> None:
        """Apply RoPE to `query` in place; write RoPE'd keys and raw values to the KV cache.

        query: [num_tokens, num_heads, head_dim]; key, value: [num_tokens, num_kv_heads, head_dim];
        key is undefined afterwards. key_cache, value_cache: a layer's views, [num_blocks,
        block_size, num_kv_heads, head_dim], of the dtype of the rows, or float8_e4m3fn, for which
        keys and values are divided by their scale, or int8, whose last axis has
        `stored_head_size` elements. slot_mapping: int64 [num_tokens]; a negative slot is not
        written. positions: int64 [num_tokens], rows of the tables cos and sin, [num_positions,
        rotary_dim // 2]: the first half of a head's first rotary_dim elements is rotated against
        the second (Su et al. 2021). query_norm, key_norm: [head_dim], weights of an RMS norm of
        each head before RoPE (Qwen3), or None; eps: of these norms.
        """
        ...


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

    sliding_window: bool = False
    soft_cap: bool = False
    sinks: bool = False
    alibi: bool = False

    batch_invariant: bool = False
    """Whether the result of a row must be bitwise independent of its batch."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Abilities:
    """The features that a backend supports."""

    dtypes: tuple[torch.dtype, ...] = FLOATS
    fp8_cache: bool = False
    int8_cache: bool = False
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
            yield f"does not compute in {_name(needs.dtype)}"
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
    "sliding_window": "has no sliding window",
    "soft_cap": "has no soft cap",
    "sinks": "has no attention sinks",
    "alibi": "has no ALiBi biases",
    "batch_invariant": "is not batch-invariant",
}


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


class AttentionBackend(Protocol):
    """Writes to and attends over a paged KV cache. Arguments are those of the functions of the same
    names in `pagewire_kernels.reference`.

    The last block of a cache is the *null block*: it is in no table, and zero. Keys and values that
    no row sees may be anything, NaN included, and blocks before a window may have been released: a
    backend whose kernel reads them reads the null block instead.
    """

    @property
    def name(self) -> str:
        """The backend's name in `--attention-backend`."""
        ...

    @property
    def abilities(self) -> Abilities:
        """Supported features; a call that needs others raises ValueError or TypeError."""
        ...

    def write_kv(
        self,
        key: Tensor,
        value: Tensor,
        key_cache: Tensor,
        value_cache: Tensor,
        slot_mapping: Tensor,
        *,
        key_scale: float = 1.0,
        value_scale: float = 1.0,
    ) -> None:
        """Store each row's key and value in its slot."""
        ...

    def paged_attention(
        self,
        query: Tensor,
        key_cache: Tensor,
        value_cache: Tensor,
        metadata: AttentionMetadata,
        *,
        scale: float,
        sliding_window: int | None = None,
        soft_cap: float | None = None,
        sinks: Tensor | None = None,
        alibi_slopes: Tensor | None = None,
        key_scale: float = 1.0,
        value_scale: float = 1.0,
    ) -> Tensor:
        """Causal attention of flattened query rows over their sequences' cached blocks."""
        ...


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
