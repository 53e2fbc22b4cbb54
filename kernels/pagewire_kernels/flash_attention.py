"""FlashAttention over the paged cache, through whichever package is installed.

The layer views of a block-major cache, `[num_blocks, block_size, num_kv_heads, head_dim]`, have the
layout that these packages expect of a paged cache, so nothing is copied."""

import inspect
import logging
import sys
from collections.abc import Callable, Iterator
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple, Protocol, Unpack

import torch
from torch import Tensor

from pagewire_kernels.batch import AttentionMetadata
from pagewire_kernels.interface import (
    Abilities,
    AttentionOptions,
    CacheScales,
    PackedOptions,
    are_scaled,
)

logger = logging.getLogger(__name__)


PAGE_TOKENS = 256
"""FlashAttention 2 requires a multiple of this as tokens per block."""

_abilities = partial(
    Abilities,
    dtypes=(torch.bfloat16, torch.float16),
    sinks=False,
    max_head_dim=256,
    head_dim_multiple=8,
)
_abilities_of_pages = partial(
    _abilities, block_multiple=PAGE_TOKENS, default_block_size=PAGE_TOKENS, chunks=False
)


class Attend(NamedTuple):
    """The arguments of `reference.paged_attention`, those that at least one package supports."""

    query: Tensor
    key_cache: Tensor
    value_cache: Tensor
    metadata: AttentionMetadata
    tables: Tensor
    """The block tables, with the null block in place of blocks before the window."""

    options: AttentionOptions

    def window(self, unbounded: tuple[int, int] = (-1, -1)) -> tuple[int, int]:
        """The keys before and after a query's own that it sees. unbounded: without a window."""
        window = self.options.get("sliding_window")
        return unbounded if window is None else (window - 1, 0)

    def keywords(self, *more: str) -> dict[str, Any]:
        """Keywords of the packages' functions: those that all have, and `more`."""
        slopes = self.options.get("alibi_slopes")
        extra = {
            "alibi_slopes": None if slopes is None else slopes.float(),
            "block_table": self.tables,
        }
        return {
            "softmax_scale": self.options["scale"],
            "causal": True,
            "window_size": self.window(),
            "softcap": self.options.get("soft_cap") or 0.0,
            **{name: extra[name] for name in more},
        }


class AttendTexts(NamedTuple):
    """The arguments of `reference.packed_attention`, without a bias."""

    query: Tensor
    key: Tensor
    value: Tensor
    metadata: AttentionMetadata
    scale: float
    window: int

    def keywords(self) -> dict[str, Any]:
        """Keywords that the packages' functions for ragged queries have in common."""
        starts, longest = self.metadata.query_start, self.metadata.max_query_len
        return {
            "cu_seqlens_q": starts,
            "cu_seqlens_k": starts,
            "max_seqlen_q": longest,
            "max_seqlen_k": longest,
            "softmax_scale": self.scale,
            "causal": False,
            "window_size": (self.window, self.window),
        }


class FlashCall(Protocol):
    """The attention function of one package."""

    version: str
    """Package and version, for the log."""

    abilities: Abilities

    def __call__(self, attend: Attend) -> Tensor:
        """Compute attention. Returns query's shape and dtype."""

    def attend_texts(self, attend: AttendTexts) -> Tensor:
        """Compute attention of whole texts without a cache."""


class FlashAttention3:
    """Package `flash_attn_interface` (Shah et al. 2024), for compute capability 9.

    Its function for a KV cache accepts ragged queries, so it computes both decodes and prefills.
    """

    version = "flash-attn 3"
    abilities = _abilities(alibi=False)

    def __init__(self, varlen: Callable[..., Tensor], with_kvcache: Callable[..., Tensor]) -> None:
        self._varlen = varlen
        self._with_kvcache = with_kvcache

    def attend_texts(self, attend: AttendTexts) -> Tensor:
        return self._varlen(*attend[:3], **attend.keywords())

    def __call__(self, attend: Attend) -> Tensor:
        return self._with_kvcache(
            *attend[:3],
            cache_seqlens=attend.metadata.context_lens,
            page_table=attend.tables,
            cu_seqlens_q=attend.metadata.query_start,
            max_seqlen_q=attend.metadata.max_query_len,
            **attend.keywords(),
        )


class FlashAttention2:
    """Package `flash_attn` (Dao 2023), with blocks of a multiple of 256 tokens.

    Decodes use its function for a KV cache, which splits long contexts. Its function for ragged
    queries takes cumulative context lengths, which are computed in each call, so that they are part
    of a captured graph.
    """

    version = "flash-attn 2"
    abilities = _abilities_of_pages()

    def __init__(self, varlen: Callable[..., Tensor], with_kvcache: Callable[..., Tensor]) -> None:
        self._varlen = varlen
        self._with_kvcache = with_kvcache

    def attend_texts(self, attend: AttendTexts) -> Tensor:
        return self._varlen(*attend[:3], **attend.keywords())

    def __call__(self, attend: Attend) -> Tensor:
        query, *caches = attend[:3]
        metadata, lengths = attend.metadata, attend.metadata.context_lens
        shared = attend.keywords("alibi_slopes", "block_table")
        if metadata.max_query_len == 1 and len(query) == len(lengths):
            rows = query.unsqueeze(1)
            return self._with_kvcache(rows, *caches, cache_seqlens=lengths, **shared).squeeze(1)
        key_start = torch.nn.functional.pad(lengths.cumsum(0, dtype=torch.int32), (1, 0))
        longest = metadata.max_query_len, metadata.max_context_len
        return self._varlen(query, *caches, metadata.query_start, key_start, *longest, **shared)


class VllmFlashAttention:
    """FlashAttention 2 or 3 as vLLM ships it, in its own wheel or as package `vllm_flash_attn`.

    One function computes ragged queries over blocks of a multiple of 16 tokens, for both versions,
    and takes context lengths as they are.
    """

    def __init__(self, varlen: Callable[..., Tensor], fa_version: int) -> None:
        self.version = f"vllm flash-attn {fa_version}"
        self.abilities = _abilities(alibi=fa_version == 2, block_multiple=16)
        self._varlen = varlen
        self._fa_version = fa_version

    def attend_texts(self, attend: AttendTexts) -> Tensor:
        return self._varlen(*attend[:3], fa_version=self._fa_version, **attend.keywords())

    def __call__(self, attend: Attend) -> Tensor:
        return self._varlen(
            *attend[:3],
            max_seqlen_q=attend.metadata.max_query_len,
            cu_seqlens_q=attend.metadata.query_start,
            max_seqlen_k=attend.metadata.max_context_len,
            seqused_k=attend.metadata.context_lens,
            fa_version=self._fa_version,
            **attend.keywords("alibi_slopes", "block_table"),
        )


class TorchVarlen:
    """`torch.nn.attention.varlen.varlen_attn`, which supports block tables from torch 2.12 on.

    By default it runs FlashAttention 2, hence the block size.
    """

    version = f"torch {torch.__version__}"
    abilities = _abilities_of_pages(soft_cap=False, alibi=False)

    def __init__(self, varlen: Callable[..., Tensor]) -> None:
        self._varlen = varlen

    def attend_texts(self, attend: AttendTexts) -> Tensor:
        starts, longest = attend.metadata.query_start, attend.metadata.max_query_len
        return self._varlen(
            *attend[:3],
            *(starts, starts, longest, longest),
            scale=attend.scale,
            window_size=(attend.window, attend.window),
            enable_gqa=attend.query.shape[1] != attend.key.shape[1],
        )

    def __call__(self, attend: Attend) -> Tensor:
        metadata = attend.metadata
        return self._varlen(
            *attend[:3],
            metadata.query_start,
            None,
            metadata.max_query_len,
            metadata.max_context_len,
            scale=attend.options["scale"],
            window_size=attend.window(unbounded=(-1, 0)),
            enable_gqa=attend.query.shape[1] != attend.key_cache.shape[2],
            seqused_k=metadata.context_lens,
            block_table=attend.tables,
        )


def installed_calls(device: torch.device) -> Iterator[FlashCall]:
    """Yield the attention functions available on this machine, fastest first. A package is imported
    only when its function is reached."""
    capability = torch.cuda.get_device_capability(device) if device.type == "cuda" else (0, 0)
    if capability[0] == 9 and (package := import_if_whole("flash_attn_interface")):
        yield FlashAttention3(package.flash_attn_varlen_func, package.flash_attn_with_kvcache)
    if capability >= (8, 0):
        yield from vllm_calls(import_vllm_flash_attn(), is_hopper=capability[0] == 9)
    if capability >= (8, 0) and (package := import_if_whole("flash_attn")):
        yield FlashAttention2(package.flash_attn_varlen_func, package.flash_attn_with_kvcache)
    if capability >= (8, 0) and torch_has_block_tables():
        yield TorchVarlen(import_module("torch.nn.attention.varlen").varlen_attn)


def vllm_calls(interface: Any | None, *, is_hopper: bool) -> Iterator[FlashCall]:
    """Yield the versions that vLLM's module, if installed, has been built with, fastest first."""
    varlen = getattr(interface, "flash_attn_varlen_func", None)
    if varlen is None:
        return
    if not {"seqused_k", "block_table", "fa_version"} <= {*inspect.signature(varlen).parameters}:
        logger.warning("vllm_flash_attn is too old: it has no context lengths beside block tables")
        return
    if is_hopper and getattr(interface, "FA3_AVAILABLE", False):
        yield VllmFlashAttention(varlen, 3)
    if getattr(interface, "FA2_AVAILABLE", False):
        yield VllmFlashAttention(varlen, 2)


_INTERFACE = "flash_attn_interface"


def import_vllm_flash_attn() -> Any | None:
    """Import the FlashAttention of vLLM's wheel, or else of package `vllm_flash_attn`; None if
    neither is installed, or if it was built for another version of torch.

    Importing `vllm.vllm_flash_attn` would import all of vLLM, which takes many seconds and changes
    the process's settings, so its folder is imported as a package of another name.
    """
    found = find_spec("vllm")  # does not import it
    for root in (found and found.submodule_search_locations) or ():
        folder = Path(root) / "vllm_flash_attn"
        if (folder / f"{_INTERFACE}.py").exists():
            package = ModuleType("pagewire_vllm_flash_attn")
            package.__path__ = [str(folder)]
            sys.modules[package.__name__] = package
            return import_if_whole(f"{package.__name__}.{_INTERFACE}")
    package_spec = find_spec("vllm_flash_attn")
    return import_if_whole(f"vllm_flash_attn.{_INTERFACE}") if package_spec else None


def import_if_whole(name: str) -> Any | None:
    """Import a package; None if it is not installed, or was built for another version of torch."""
    spec = find_spec(name)
    if spec is None or spec.origin is None:  # only a namespace, as flash-attn 4 leaves `flash_attn`
        return None
    try:
        return import_module(name)
    except (ImportError, OSError) as error:
        logger.warning("package cannot be imported name=%s error=%s", name, error)
        return None


def torch_has_block_tables() -> bool:
    """Whether torch's own function supports block tables."""
    return tuple(int(part) for part in torch.__version__.split(".")[:2]) >= (2, 12)


class FlashBackend:
    """The `flash` attention backend: FlashAttention through one of its packages."""

    name = "flash"

    def __init__(
        self, call: FlashCall, write: Callable[..., None], attend_biased: Callable[..., Tensor]
    ) -> None:
        """write: writes to the cache, as `reference.write_kv`; attend_biased: attends over whole
        texts with a bias, which no package has, as `reference.packed_attention`."""
        self.abilities, self.version = call.abilities, call.version
        self._call = call
        self._write = write
        self._attend_biased = attend_biased

    def write_kv(
        self,
        key: Tensor,
        value: Tensor,
        key_cache: Tensor,
        value_cache: Tensor,
        slot_mapping: Tensor,
        **scales: Unpack[CacheScales],
    ) -> None:
        """Store each row's key and value in its slot; as `reference.write_kv`."""
        _refuse(are_scaled(scales), "scaled caches")
        self._write(key, value, key_cache, value_cache, slot_mapping)

    def paged_attention(
        self,
        query: Tensor,
        key_cache: Tensor,
        value_cache: Tensor,
        metadata: AttentionMetadata,
        **options: Unpack[AttentionOptions],
    ) -> Tensor:
        """Causal attention of flattened query rows; as `reference.paged_attention`."""
        able, block_size = self.abilities, key_cache.shape[1]
        _refuse(options.get("sinks") is not None, "attention sinks")
        _refuse(options.get("alibi_slopes") is not None and not able.alibi, "ALiBi biases")
        _refuse(options.get("soft_cap") is not None and not able.soft_cap, "a soft cap")
        _refuse(are_scaled(options), "scaled caches")
        _refuse(query.dtype != key_cache.dtype, f"a cache of {key_cache.dtype}")
        _refuse(block_size % able.block_multiple != 0, f"blocks of {block_size} tokens")
        query = query if query.stride(-1) == 1 else query.contiguous()
        tables = _readable_tables(metadata, key_cache, options.get("sliding_window"))
        return self._call(Attend(query, key_cache, value_cache, metadata, tables, options))

    def packed_attention(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        metadata: AttentionMetadata,
        **options: Unpack[PackedOptions],
    ) -> Tensor:
        """Attention over all rows of whole texts; as `reference.packed_attention`."""
        if options.get("bias") is not None:
            return self._attend_biased(query, key, value, metadata, **options)
        window = options.get("window")
        window = -1 if window is None else window
        attend = AttendTexts(query, key, value, metadata, options["scale"], window)
        return self._call.attend_texts(attend)


def _readable_tables(metadata: AttentionMetadata, cache: Tensor, window: int | None) -> Tensor:
    """The block tables of a step, with the null block in place of those before the window, which
    may have been released: tiles that straddle the edge of the window are read from their start,
    and values are multiplied by weights of zero. Computed once for all layers of a window."""
    if window is None:
        return metadata.block_tables
    num_blocks, block_size = cache.shape[:2]
    key = "readable tables", window, block_size, num_blocks
    if key not in metadata.plans:
        first_rows = metadata.context_lens - metadata.query_start.diff()
        first_blocks = (first_rows - window + 1).div(block_size, rounding_mode="floor")
        tables = metadata.block_tables
        columns = torch.arange(tables.shape[1], dtype=torch.int32, device=tables.device)
        is_readable = columns >= first_blocks[:, None]
        metadata.plans[key] = tables.where(is_readable, num_blocks - 1)
    readable: Tensor = metadata.plans[key]
    return readable


def _refuse(condition: bool, feature: str) -> None:
    if condition:
        raise ValueError(f"attention backend 'flash' does not support {feature}")
