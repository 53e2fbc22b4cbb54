"""Calls of paged FlashAttention, one class per package.

Each takes query rows, layer views of the cache and a step's metadata. All of them align the causal
mask with the end of the context, as we do: the last query row sees every key. Their window counts
the keys before a row's own, so that ours of `w` positions is `(w - 1, 0)` there. Entries of a block
table beyond a sequence's last block are never looked at.
"""

import logging
from collections.abc import Callable, Iterator
from importlib import import_module
from importlib.util import find_spec
from typing import Any, Protocol

import torch
from torch import Tensor

from pagewire_kernels.backends.abilities import Abilities
from pagewire_kernels.batch import AttentionMetadata

logger = logging.getLogger(__name__)

HALVES = (torch.bfloat16, torch.float16)
PAGE_TOKENS = 256
"""Tokens per block that FlashAttention 2 takes, or a multiple."""


class FlashCall(Protocol):
    """One package's attention function."""

    version: str
    """The package, for the log."""

    abilities: Abilities

    def __call__(
        self,
        query: Tensor,
        key_cache: Tensor,
        value_cache: Tensor,
        metadata: AttentionMetadata,
        *,
        scale: float,
        sliding_window: int | None,
        soft_cap: float | None,
        alibi_slopes: Tensor | None,
    ) -> Tensor:
        """Attention rows, [num_tokens, num_heads, head_dim]."""
        ...


class FlashAttention3:
    """Package `flash_attn_interface` (Shah et al. 2024), for compute capability 9.

    Its function for a cache takes ragged queries too, so one call serves decode and prefill.
    """

    version = "flash-attn 3"
    abilities = Abilities(
        devices=("cuda",),
        dtypes=HALVES,
        sinks=False,
        alibi=False,
        max_head_dim=256,
        head_dim_multiple=8,
    )

    def __init__(self, with_kvcache: Callable[..., Any]) -> None:
        self._with_kvcache = with_kvcache

    def __call__(
        self,
        query: Tensor,
        key_cache: Tensor,
        value_cache: Tensor,
        metadata: AttentionMetadata,
        *,
        scale: float,
        sliding_window: int | None,
        soft_cap: float | None,
        alibi_slopes: Tensor | None,
    ) -> Tensor:
        output: Tensor = self._with_kvcache(
            query,
            key_cache,
            value_cache,
            cache_seqlens=metadata.context_lens,
            page_table=metadata.block_tables,
            cu_seqlens_q=metadata.query_start,
            max_seqlen_q=metadata.max_query_len,
            softmax_scale=scale,
            causal=True,
            window_size=_window(sliding_window, unbounded=(-1, -1)),
            softcap=soft_cap or 0.0,
        )
        return output


class FlashAttention2:
    """Package `flash_attn` (Dao 2023); blocks of 256 tokens or a multiple.

    Decodes go through its function for a cache, which splits long contexts and takes lengths as
    they are; its function for ragged queries wants them as running sums, made anew in each call so
    that a captured graph makes them too.
    """

    version = "flash-attn 2"
    abilities = Abilities(
        devices=("cuda",),
        dtypes=HALVES,
        sinks=False,
        max_head_dim=256,
        head_dim_multiple=8,
        block_multiple=PAGE_TOKENS,
        default_block_size=PAGE_TOKENS,
    )

    def __init__(self, varlen: Callable[..., Any], with_kvcache: Callable[..., Any]) -> None:
        self._varlen = varlen
        self._with_kvcache = with_kvcache

    def __call__(
        self,
        query: Tensor,
        key_cache: Tensor,
        value_cache: Tensor,
        metadata: AttentionMetadata,
        *,
        scale: float,
        sliding_window: int | None,
        soft_cap: float | None,
        alibi_slopes: Tensor | None,
    ) -> Tensor:
        shared = {
            "softmax_scale": scale,
            "causal": True,
            "window_size": _window(sliding_window, unbounded=(-1, -1)),
            "softcap": soft_cap or 0.0,
            "alibi_slopes": None if alibi_slopes is None else alibi_slopes.float(),
            "block_table": metadata.block_tables,
        }
        lengths = metadata.context_lens
        output: Tensor
        if metadata.max_query_len == 1 and len(query) == len(lengths):
            output = self._with_kvcache(
                query.unsqueeze(1), key_cache, value_cache, cache_seqlens=lengths, **shared
            )
            return output.squeeze(1)
        output = self._varlen(
            query,
            key_cache,
            value_cache,
            metadata.query_start,
            torch.nn.functional.pad(lengths.cumsum(0, dtype=torch.int32), (1, 0)),
            metadata.max_query_len,
            metadata.max_context_len,
            **shared,
        )
        return output


class TorchVarlen:
    """`torch.nn.attention.varlen.varlen_attn`, with a block table from torch 2.12 on.

    What computes it is FlashAttention 2, unless torch was told to use another: hence its blocks.
    """

    version = f"torch {torch.__version__}"
    abilities = Abilities(
        devices=("cuda",),
        dtypes=HALVES,
        soft_cap=False,
        sinks=False,
        alibi=False,
        max_head_dim=256,
        head_dim_multiple=8,
        block_multiple=PAGE_TOKENS,
        default_block_size=PAGE_TOKENS,
    )

    def __init__(self, varlen: Callable[..., Any]) -> None:
        self._varlen = varlen

    def __call__(
        self,
        query: Tensor,
        key_cache: Tensor,
        value_cache: Tensor,
        metadata: AttentionMetadata,
        *,
        scale: float,
        sliding_window: int | None,
        soft_cap: float | None,
        alibi_slopes: Tensor | None,
    ) -> Tensor:
        output: Tensor = self._varlen(
            query,
            key_cache,
            value_cache,
            metadata.query_start,
            None,
            metadata.max_query_len,
            metadata.max_context_len,
            scale=scale,
            window_size=_window(sliding_window, unbounded=(-1, 0)),
            enable_gqa=query.shape[1] != key_cache.shape[2],
            seqused_k=metadata.context_lens,
            block_table=metadata.block_tables,
        )
        return output


def installed_calls(device: torch.device) -> Iterator[FlashCall]:
    """Those that this machine has, the fastest first; imports a package only when asked for it."""
    capability = torch.cuda.get_device_capability(device) if device.type == "cuda" else (0, 0)
    if capability[0] == 9 and (package := import_if_whole("flash_attn_interface")):
        yield FlashAttention3(package.flash_attn_with_kvcache)
    if capability >= (8, 0) and (package := import_if_whole("flash_attn")):
        yield FlashAttention2(package.flash_attn_varlen_func, package.flash_attn_with_kvcache)
    if capability >= (8, 0) and torch_has_block_tables():
        yield TorchVarlen(import_module("torch.nn.attention.varlen").varlen_attn)


def import_if_whole(name: str) -> Any | None:
    """A package, or None where it is not installed, or was built for another torch."""
    if find_spec(name) is None:
        return None
    try:
        return import_module(name)
    except (ImportError, OSError) as error:
        logger.warning("package cannot be imported name=%s error=%s", name, error)
        return None


def torch_has_block_tables() -> bool:
    """Whether torch's own function takes a block table."""
    return tuple(int(part) for part in torch.__version__.split(".")[:2]) >= (2, 12)


def _window(sliding_window: int | None, unbounded: tuple[int, int]) -> tuple[int, int]:
    return unbounded if sliding_window is None else (sliding_window - 1, 0)
