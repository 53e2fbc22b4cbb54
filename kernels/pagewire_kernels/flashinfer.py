"""FlashInfer (Ye et al. 2025) over the paged cache: the `flashinfer` attention backend.

FlashInfer divides a batch among programs on the host: its wrappers `plan` a batch by its lengths,
once for all layers, and `run` each layer. A plan is copied to the device from pinned memory of the
wrapper, so the next plan of the same wrapper waits until that copy is done: the host may be one
step ahead of the device, not more.

Decodes are one wrapper, other sequences another. A captured graph of decodes has a wrapper of its
own with fixed buffers, and is planned again before every replay; it computes the list of pages,
which only the device knows. Mixed batches are computed eagerly.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from pagewire_kernels.batch import AttentionMetadata, HostLengths
from pagewire_kernels.flash_attention import HALVES, import_if_whole
from pagewire_kernels.interface import FP8, Abilities

WORKSPACE_BYTES = 128 * 2**20
"""For partial results of contexts that are split; the size that FlashInfer recommends."""

PLAN_BYTES = 8 * 2**20
"""Of a plan on the device; the size that FlashInfer's wrappers allocate."""


class Wrappers(Protocol):
    """The classes of package `flashinfer` that are used."""

    BatchDecodeWithPagedKVCacheWrapper: Callable[..., Any]
    BatchPrefillWithPagedKVCacheWrapper: Callable[..., Any]


def installed_flashinfer(device: torch.device) -> Wrappers | None:
    """The package, if it is installed and supports the device."""
    if torch.cuda.get_device_capability(device) < (8, 0):
        return None
    package: Wrappers | None = import_if_whole("flashinfer")
    return package


class _Layout(NamedTuple):
    """The layers that share a plan."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    block_size: int
    dtype: torch.dtype
    cache_dtype: torch.dtype
    scale: float
    sliding_window: int | None
    soft_cap: float | None

    def options(self) -> dict[str, Any]:
        """The arguments of `plan` that both wrappers take."""
        window = self.sliding_window
        return {
            "window_left": -1 if window is None else window - 1,
            "logits_soft_cap": self.soft_cap,
            "sm_scale": self.scale,
            "q_data_type": self.dtype,
            "kv_data_type": self.cache_dtype,
        }

    def sizes(self) -> tuple[int, int, int, int]:
        """The positional arguments of `plan` after those of the batch."""
        return self.num_heads, self.num_kv_heads, self.head_dim, self.block_size


class _Pages(NamedTuple):
    """The pages of some sequences in FlashInfer's format, int32."""

    start: Tensor
    """[num_seqs + 1]: where each sequence's pages begin in the list of all; on the host."""

    last_page_len: Tensor
    """[num_seqs]: tokens in the last page; on the host."""

    @classmethod
    def of(cls, context_lens: Tensor, block_size: int) -> "_Pages":
        """Of these lengths; padding, which has none, has one token in page 0."""
        lengths = context_lens.clamp_min(1)
        counts = torch.div(lengths + (block_size - 1), block_size, rounding_mode="floor")
        start = torch.nn.functional.pad(counts.cumsum(0, dtype=torch.int32), (1, 0))
        return cls(start, lengths - (counts - 1) * block_size)


def list_pages(block_tables: Tensor, start: Tensor, pages: Tensor) -> None:
    """Write the pages of all sequences to one list, without waiting for the device.

    block_tables: int32 [num_seqs, max_blocks]; start: int32 [num_seqs + 1], as `_Pages.start`, on
    the device; pages: int32 [num_seqs * max_blocks + 1], whose last element is left undefined.
    """
    column = torch.arange(block_tables.shape[1], dtype=torch.int32, device=start.device)
    place = start[:-1, None] + column
    place = torch.where(place < start[1:, None], place, len(pages) - 1)
    pages.scatter_(0, place.flatten().long(), block_tables.clamp_min(0).flatten())


class _Planned:
    """A wrapper, whose plans are not made before the copy of the last one is done."""

    def __init__(self, wrapper: Any, device: torch.device) -> None:
        self.wrapper = wrapper
        self._copied = torch.cuda.Event() if device.type == "cuda" else None

    def plan(self, *arguments: Any, **options: Any) -> None:
        """Plan a batch."""
        if self._copied is not None:
            self._copied.synchronize()  # returns at once before the first plan
        self.wrapper.plan(*arguments, **options)
        if self._copied is not None:
            self._copied.record()


@dataclass(slots=True)
class _Batch:
    """The wrappers of eager batches, and the batch that they have planned."""

    decode: _Planned
    prefill: _Planned
    metadata: AttentionMetadata | None = None
    num_decodes: int = 0


class _Graph:
    """The wrapper of a captured batch of decodes; called before every replay."""

    def __init__(self, planned: _Planned, start: Tensor, pages: Tensor, layout: _Layout) -> None:
        self.wrapper = planned.wrapper
        self.start = start
        self.pages = pages
        self._planned = planned
        self._layout = layout

    def __call__(self, lengths: HostLengths) -> None:
        """Plan a batch, padded to the size of the graph."""
        found = _Pages.of(lengths.context_lens, self._layout.block_size)
        # The graph lists the pages itself, so there is nothing to copy to the wrapper's list.
        self._planned.plan(
            found.start,
            self.pages[:0],
            found.last_page_len,
            *self._layout.sizes(),
            **self._layout.options(),
        )


class FlashInferBackend:
    """Attention through FlashInfer's wrappers for decodes and prefills.

    Rows depend on their batch, because the average number of rows decides the size of tiles.
    """

    name = "flashinfer"

    abilities = Abilities(
        dtypes=HALVES,
        fp8_cache=True,
        mixed_graphs=False,
        sinks=False,
        alibi=False,
        head_dims=(64, 128, 256),
    )

    def __init__(self, package: Wrappers, write: Callable[..., None]) -> None:
        """write: writes to the cache; as `reference.write_kv`."""
        self._package = package
        self.write_kv = write
        self._workspace: Tensor | None = None
        self._batches: dict[_Layout, _Batch] = {}
        self._graph_plans: dict[_Layout, Tensor] = {}
        """What all graphs of a layout use, one after another."""
        self._graph_pages: Tensor | None = None

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
        """Causal attention of flattened query rows; as `reference.paged_attention`."""
        for feature, given in (("attention sinks", sinks), ("ALiBi biases", alibi_slopes)):
            if given is not None:
                raise ValueError(f"attention backend 'flashinfer' does not support {feature}")
        query = query if query.stride(-1) == 1 else query.contiguous()
        output = torch.empty_like(query, memory_format=torch.contiguous_format)
        if len(query) == 0:
            return output
        layout = _Layout(
            num_heads=query.shape[1],
            num_kv_heads=key_cache.shape[2],
            head_dim=query.shape[2],
            block_size=key_cache.shape[1],
            dtype=query.dtype,
            cache_dtype=key_cache.dtype,
            scale=scale,
            sliding_window=sliding_window,
            soft_cap=soft_cap,
        )
        is_fp8 = key_cache.dtype == FP8
        scales = {"k_scale": key_scale, "v_scale": value_scale} if is_fp8 else {}
        caches = key_cache, value_cache
        if metadata.device_num_decodes is not None:
            raise ValueError(
                "attention backend 'flashinfer' does not support captured mixed batches"
            )
        if metadata.before_replay is not None:
            wrapper = self._captured(layout, metadata, metadata.before_replay)
            wrapper.run(query, caches, out=output, **scales)
            return output
        batch = self._planned(layout, metadata)
        count = batch.num_decodes
        if count:
            batch.decode.wrapper.run(query[:count], caches, out=output[:count], **scales)
        if count < len(query):
            batch.prefill.wrapper.run(query[count:], caches, out=output[count:], **scales)
        return output

    def _decode_wrapper(self, device: torch.device, **options: Any) -> _Planned:
        # Of the kernels for decodes, those with tensor cores are at least as fast on every GPU that
        # is supported, and take any number of query heads per KV head.
        wrapper = self._package.BatchDecodeWithPagedKVCacheWrapper(
            self._workspace_on(device), "NHD", use_tensor_cores=True, backend="fa2", **options
        )
        return _Planned(wrapper, device)

    def _workspace_on(self, device: torch.device) -> Tensor:
        if self._workspace is None:
            self._workspace = torch.zeros(WORKSPACE_BYTES, dtype=torch.uint8, device=device)
        return self._workspace

    def _planned(self, layout: _Layout, metadata: AttentionMetadata) -> _Batch:
        """The wrappers of a layout, which have planned this batch."""
        device = metadata.context_lens.device
        batch = self._batches.get(layout)
        if batch is None:
            prefill = self._package.BatchPrefillWithPagedKVCacheWrapper(
                self._workspace_on(device),
                "NHD",
                # Version 3 of its kernels multiplies fp8 keys only by fp8 queries.
                backend="fa2" if layout.cache_dtype == FP8 else "auto",
            )
            batch = _Batch(self._decode_wrapper(device), _Planned(prefill, device))
            self._batches[layout] = batch
        if batch.metadata is metadata:
            return batch
        starts, lengths = metadata.host_lengths or HostLengths(
            metadata.query_start.cpu(), metadata.context_lens.cpu()
        )
        count = len(lengths) if metadata.max_query_len == 1 else metadata.num_decodes
        tables = metadata.block_tables
        if count:
            pages = _Pages.of(lengths[:count], layout.block_size)
            batch.decode.plan(
                pages.start,
                _listed(tables[:count], pages),
                pages.last_page_len,
                *layout.sizes(),
                **layout.options(),
            )
        if count < len(lengths):
            pages = _Pages.of(lengths[count:], layout.block_size)
            batch.prefill.plan(
                starts[count:] - count,
                pages.start,
                _listed(tables[count:], pages),
                pages.last_page_len,
                *layout.sizes(),
                causal=True,
                **layout.options(),
            )
        batch.metadata, batch.num_decodes = metadata, count
        return batch

    def _captured(
        self, layout: _Layout, metadata: AttentionMetadata, before_replay: dict[Any, Any]
    ) -> Any:
        """The wrapper of a layout in a graph of decodes, which lists the pages of its batch."""
        graph = before_replay.get(layout)
        if graph is None:
            graph = before_replay[layout] = self._graph(layout, metadata)
            graph(HostLengths(metadata.query_start, torch.ones_like(metadata.context_lens).cpu()))
        if "pages" not in metadata.plans:  # once for all layers, whose graphs share the list
            metadata.plans["pages"] = graph.pages
            list_pages(metadata.block_tables, graph.start, graph.pages)
        return graph.wrapper

    def _graph(self, layout: _Layout, metadata: AttentionMetadata) -> _Graph:
        num_seqs, max_blocks = metadata.block_tables.shape
        device = metadata.block_tables.device
        if self._graph_pages is None or len(self._graph_pages) <= num_seqs * max_blocks:
            self._graph_pages = torch.zeros(
                num_seqs * max_blocks + 1, dtype=torch.int32, device=device
            )
        pages = self._graph_pages[: num_seqs * max_blocks + 1]
        start, last_page_len = (
            torch.zeros(length, dtype=torch.int32, device=device)
            for length in (num_seqs + 1, num_seqs)
        )
        planned = self._decode_wrapper(
            device,
            use_cuda_graph=True,
            paged_kv_indptr_buffer=start,
            paged_kv_indices_buffer=pages,
            paged_kv_last_page_len_buffer=last_page_len,
        )
        if layout not in self._graph_plans:
            self._graph_plans[layout] = torch.empty(PLAN_BYTES, dtype=torch.uint8, device=device)
        planned.wrapper.reset_workspace_buffer(
            self._workspace_on(device), self._graph_plans[layout]
        )
        return _Graph(planned, start, pages, layout)


def _listed(block_tables: Tensor, pages: _Pages) -> Tensor:
    """The list of the pages of these sequences, on the device."""
    start = pages.start.to(block_tables.device, non_blocking=True)
    listed = block_tables.new_empty(block_tables.numel() + 1)
    list_pages(block_tables, start, listed)
    return listed[: int(pages.start[-1])]
