"""The wrappers of package `flashinfer`, as far as we call them, by way of the reference.

Their parameters are those of flashinfer-python 0.7.2, and their meaning is what its documentation
says: a batch is planned before it is run, and a wrapper for CUDA graphs keeps its batch size and
reads its buffers at each run.
"""

from typing import Any, ClassVar

import torch
from torch import Tensor

from pagewire_kernels import reference
from pagewire_kernels.batch import AttentionMetadata

INT32 = torch.int32


class _Wrapper:
    """What both wrappers do. `num_plans` and `num_runs` count calls."""

    def __init__(
        self,
        float_workspace_buffer: Tensor,
        kv_layout: str,
        use_cuda_graph: bool,
        start: Tensor | None,
        pages: Tensor | None,
        last_page_len: Tensor | None,
    ) -> None:
        assert float_workspace_buffer.dtype == torch.uint8
        assert not float_workspace_buffer.any(), "must be initialised to zero"
        assert kv_layout == "NHD"
        self.is_graph = use_cuda_graph
        self.workspaces = [float_workspace_buffer]
        self.start, self.pages, self.last_page_len = start, pages, last_page_len
        if use_cuda_graph:
            assert start is not None
            assert pages is not None
            assert last_page_len is not None
            assert len(start) == len(last_page_len) + 1
            self.batch_size = len(last_page_len)
        self.sizes: tuple[int, int, int, int] | None = None
        self.num_plans = self.num_runs = 0

    def reset_workspace_buffer(
        self, float_workspace_buffer: Tensor, int_workspace_buffer: Tensor
    ) -> None:
        """Replace what is allocated at first."""
        assert int_workspace_buffer.nbytes == 8 * 2**20
        self.workspaces = [float_workspace_buffer, int_workspace_buffer]

    def _plan(
        self,
        start: Tensor,
        pages: Tensor,
        last_page_len: Tensor,
        sizes: tuple[int, int, int, int],
        *,
        sm_scale: float | None,
        window_left: int,
        logits_soft_cap: float | None,
        q_data_type: torch.dtype,
        kv_data_type: torch.dtype | None,
    ) -> None:
        for each in (start, pages, last_page_len):
            assert each.dtype == INT32
        assert start.device.type == last_page_len.device.type == "cpu", "would wait for the device"
        assert start[0] == 0
        assert (start.diff() >= 1).all()
        assert (last_page_len >= 1).all()
        assert (last_page_len <= sizes[3]).all()
        if self.is_graph:
            assert len(last_page_len) == self.batch_size, "the batch size is fixed"
            assert self.start is not None
            assert self.pages is not None
            assert self.last_page_len is not None
            assert self.sizes in (None, sizes)
            self.start.copy_(start)
            self.last_page_len.copy_(last_page_len)
            self.pages[: len(pages)].copy_(pages)
        else:
            assert len(pages) == start[-1]
            self.start, self.pages = start.clone(), pages.clone()
            self.last_page_len = last_page_len.clone()
        self.sizes = sizes
        self.features: dict[str, Any] = {
            "scale": sm_scale,
            "sliding_window": None if window_left == -1 else window_left + 1,
            "soft_cap": logits_soft_cap or None,
        }
        self.dtypes = q_data_type, kv_data_type or q_data_type
        self.num_plans += 1

    def _run(
        self,
        q: Tensor,
        paged_kv_cache: tuple[Tensor, Tensor],
        query_start: Tensor,
        k_scale: float | None,
        v_scale: float | None,
        out: Tensor | None,
        window_left: int | None,
    ) -> Tensor:
        assert self.sizes is not None, "planned first"
        assert window_left is None, "as planned"
        keys, values = paged_kv_cache
        assert self.sizes == (q.shape[1], keys.shape[2], q.shape[2], keys.shape[1])
        assert self.dtypes == (q.dtype, keys.dtype)
        assert q.dtype in (torch.bfloat16, torch.float16)
        assert q.stride(-1) == keys.stride(-1) == values.stride(-1) == 1
        assert query_start[-1] == len(q)
        assert self.start is not None
        assert self.pages is not None
        assert self.last_page_len is not None
        counts = self.start.diff()
        lengths = (counts - 1) * self.sizes[3] + self.last_page_len
        tables = torch.full((len(counts), int(counts.max())), -1, dtype=INT32)
        for row, first, count in zip(tables, self.start.tolist(), counts.tolist(), strict=False):
            row[:count] = self.pages[first : first + count]
        assert (tables[:, 0] >= 0).all()
        output = reference.paged_attention(
            q,
            keys,
            values,
            AttentionMetadata(
                query_start=query_start,
                context_lens=lengths.int(),
                block_tables=tables,
                slot_mapping=torch.full((len(q),), -1),
                max_query_len=int(query_start.diff().max()),
                max_context_len=int(lengths.max()),
            ),
            **self.features,
            **({} if k_scale is None else {"key_scale": k_scale}),
            **({} if v_scale is None else {"value_scale": v_scale}),
        )
        self.num_runs += 1
        return output if out is None else out.copy_(output)


class BatchDecodeWithPagedKVCacheWrapper(_Wrapper):
    """Of sequences with one row each."""

    made: ClassVar[list["BatchDecodeWithPagedKVCacheWrapper"]] = []

    def __init__(
        self,
        float_workspace_buffer: Tensor,
        kv_layout: str = "NHD",
        use_cuda_graph: bool = False,
        use_tensor_cores: bool = False,
        paged_kv_indptr_buffer: Tensor | None = None,
        paged_kv_indices_buffer: Tensor | None = None,
        paged_kv_last_page_len_buffer: Tensor | None = None,
        backend: str = "auto",
        jit_args: list[Any] | None = None,
    ) -> None:
        super().__init__(
            float_workspace_buffer,
            kv_layout,
            use_cuda_graph,
            paged_kv_indptr_buffer,
            paged_kv_indices_buffer,
            paged_kv_last_page_len_buffer,
        )
        assert use_tensor_cores, "the others take few group sizes"
        assert backend == "fa2"
        self.made.append(self)

    def plan(
        self,
        indptr: Tensor,
        indices: Tensor,
        last_page_len: Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim: int,
        page_size: int,
        *,
        pos_encoding_mode: str = "NONE",
        window_left: int = -1,
        window_right: int = 0,
        logits_soft_cap: float | None = None,
        q_data_type: torch.dtype = torch.float16,
        kv_data_type: torch.dtype | None = None,
        o_data_type: torch.dtype | None = None,
        data_type: torch.dtype | None = None,
        sm_scale: float | None = None,
        rope_scale: float | None = None,
        rope_theta: float | None = None,
        non_blocking: bool = True,
        block_tables: Tensor | None = None,
        seq_lens: Tensor | None = None,
        fixed_split_size: int | None = None,
        disable_split_kv: bool = False,
        q_len_per_req: int = 1,
        is_causal: bool | None = None,
    ) -> None:
        """Plan a batch."""
        self._plan(
            indptr,
            indices,
            last_page_len,
            (num_qo_heads, num_kv_heads, head_dim, page_size),
            sm_scale=sm_scale,
            window_left=window_left,
            logits_soft_cap=logits_soft_cap,
            q_data_type=q_data_type,
            kv_data_type=kv_data_type,
        )

    def run(
        self,
        q: Tensor,
        paged_kv_cache: tuple[Tensor, Tensor],
        *args: Any,
        q_scale: float | None = None,
        k_scale: float | None = None,
        v_scale: float | None = None,
        out: Tensor | None = None,
        lse: Tensor | None = None,
        return_lse: bool = False,
        enable_pdl: bool | None = None,
        window_left: int | None = None,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """Compute a layer."""
        query_start = torch.arange(len(q) + 1, dtype=INT32)
        assert self.last_page_len is not None
        assert len(q) == len(self.last_page_len)
        return self._run(q, paged_kv_cache, query_start, k_scale, v_scale, out, window_left)


class BatchPrefillWithPagedKVCacheWrapper(_Wrapper):
    """Of sequences with any number of rows."""

    made: ClassVar[list["BatchPrefillWithPagedKVCacheWrapper"]] = []

    def __init__(
        self,
        float_workspace_buffer: Tensor,
        kv_layout: str = "NHD",
        use_cuda_graph: bool = False,
        qo_indptr_buf: Tensor | None = None,
        paged_kv_indptr_buf: Tensor | None = None,
        paged_kv_indices_buf: Tensor | None = None,
        paged_kv_last_page_len_buf: Tensor | None = None,
        custom_mask_buf: Tensor | None = None,
        mask_indptr_buf: Tensor | None = None,
        backend: str = "auto",
        jit_args: list[Any] | None = None,
        jit_kwargs: dict[str, Any] | None = None,
        variant_owns_mask: bool = False,
    ) -> None:
        assert not use_cuda_graph
        super().__init__(
            float_workspace_buffer,
            kv_layout,
            use_cuda_graph,
            paged_kv_indptr_buf,
            paged_kv_indices_buf,
            paged_kv_last_page_len_buf,
        )
        self.backend = backend
        self.made.append(self)

    def plan(
        self,
        qo_indptr: Tensor,
        paged_kv_indptr: Tensor,
        paged_kv_indices: Tensor,
        paged_kv_last_page_len: Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim_qk: int,
        page_size: int,
        head_dim_vo: int | None = None,
        custom_mask: Tensor | None = None,
        packed_custom_mask: Tensor | None = None,
        causal: bool = False,
        pos_encoding_mode: str = "NONE",
        use_fp16_qk_reduction: bool = False,
        sm_scale: float | None = None,
        window_left: int = -1,
        logits_soft_cap: float | None = None,
        rope_scale: float | None = None,
        rope_theta: float | None = None,
        q_data_type: torch.dtype = torch.float16,
        kv_data_type: torch.dtype | None = None,
        o_data_type: torch.dtype | None = None,
        non_blocking: bool = True,
    ) -> None:
        """Plan a batch."""
        assert causal
        assert qo_indptr.dtype == INT32
        assert qo_indptr[0] == 0
        assert len(qo_indptr) == len(paged_kv_indptr)
        is_fp8 = kv_data_type == torch.float8_e4m3fn
        assert self.backend == ("fa2" if is_fp8 else "auto")
        self.query_start = qo_indptr.clone()
        self._plan(
            paged_kv_indptr,
            paged_kv_indices,
            paged_kv_last_page_len,
            (num_qo_heads, num_kv_heads, head_dim_qk, page_size),
            sm_scale=sm_scale,
            window_left=window_left,
            logits_soft_cap=logits_soft_cap,
            q_data_type=q_data_type,
            kv_data_type=kv_data_type,
        )

    def run(
        self,
        q: Tensor,
        paged_kv_cache: tuple[Tensor, Tensor],
        *args: Any,
        q_scale: float | None = None,
        k_scale: float | None = None,
        v_scale: float | None = None,
        out: Tensor | None = None,
        lse: Tensor | None = None,
        return_lse: bool = False,
        lse_base: str = "log2",
        lse_layout: str = "NH",
        enable_pdl: bool | None = None,
        window_left: int | None = None,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """Compute a layer."""
        return self._run(q, paged_kv_cache, self.query_start, k_scale, v_scale, out, window_left)
