"""Attention over whole texts without a cache, for encoders.

Bound by the two matrix products, `4 * head_dim * num_heads` operations per pair of tokens of a
text. A program computes a tile of rows of one text with one head, over its keys in order of
position (online softmax, as in `attention_kernels.py`). Sizes of tiles depend on the head only, and
tiles of keys start at multiples of their size within a text, so that a text has the same bits in
any batch.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from pagewire_kernels.batch import AttentionMetadata
from pagewire_kernels.interface import FLOATS
from pagewire_kernels.triton.attention_kernels import (
    LOG2_E,
    attend_to_tile,
    nothing_attended,
    sequence_of,
)
from pagewire_kernels.triton.checks import dense, expect, expect_tensors
from pagewire_kernels.triton.launch import LayoutLaunch, layout_launch, layouts, run

_TILE_ROWS = 64


@triton.jit(do_not_specialize=["num_texts", "window", "bias_width"])
def attend_texts(
    output_pointer,
    query_pointer,
    key_pointer,
    value_pointer,
    bias,
    query_start,
    scale,
    num_texts,
    window,
    bias_width,
    query_stride,
    query_head_stride,
    key_stride,
    key_head_stride,
    value_stride,
    value_head_stride,
    HAS_WINDOW: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    NUM_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    TILE_KEYS: tl.constexpr,
):
    """Program (tile of rows of a text, query head)."""
    tile, head = tl.program_id(0), tl.program_id(1)
    text = sequence_of(query_start, num_texts, tile, TILE_ROWS)
    start = tl.load(query_start + text)
    length = tl.load(query_start + text + 1) - start
    first = (tile - text - start // TILE_ROWS) * TILE_ROWS
    if first >= length:
        return
    row_at, column = first + tl.arange(0, TILE_ROWS), tl.arange(0, PADDED_DIM)
    row = (start + row_at).to(tl.int64)
    is_row, is_column = (row_at < length)[:, None], (column < HEAD_DIM)[None, :]
    query_row = (row * query_stride + head * query_head_stride)[:, None]
    query = tl.load(query_pointer + query_row + column[None, :], is_row & is_column, other=0.0)
    key_pointer += head // GROUP * key_head_stride
    value_pointer += head // GROUP * value_head_stride
    begin, end = 0, length
    if HAS_WINDOW:
        begin = tl.maximum(first - window, 0) // TILE_KEYS * TILE_KEYS
        end = tl.minimum(first + TILE_ROWS + window, length)
    maximum, total, output = nothing_attended(query)
    for at in range(begin, end, TILE_KEYS):
        key_at = at + tl.arange(0, TILE_KEYS)
        is_key = key_at < end
        key_row = (start + key_at).to(tl.int64)[:, None]
        mask = is_key[:, None] & is_column
        keys = tl.load(key_pointer + key_row * key_stride + column[None, :], mask, other=0.0)
        values = tl.load(value_pointer + key_row * value_stride + column[None, :], mask, other=0.0)
        scores = tl.dot(query, tl.trans(keys), input_precision="ieee") * (scale * LOG2_E)
        distance = key_at[None, :] - row_at[:, None]
        is_visible = is_row & is_key[None, :]
        if HAS_BIAS:
            by_distance = bias + head * bias_width + bias_width // 2 + distance
            scores += tl.load(by_distance, is_visible, other=0.0) * LOG2_E
        if HAS_WINDOW:
            is_visible = is_visible & (tl.abs(distance) <= window)
        scores = tl.where(is_visible, scores, float("-inf"))
        maximum, total, output = attend_to_tile(query, scores, values, maximum, total, output)
    output = output / tl.where(total == 0.0, 1.0, total)[:, None]
    at = ((row * NUM_HEADS + head) * HEAD_DIM)[:, None] + column[None, :]
    tl.store(output_pointer + at, output.to(output_pointer.dtype.element_ty), is_row & is_column)


def packed_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    metadata: AttentionMetadata,
    *,
    scale: float,
    window: int | None = None,
    bias: Tensor | None = None,
) -> Tensor:
    """Attention over all rows of whole texts; as `reference.packed_attention`.

    Raises TypeError or ValueError for tensors of unsupported dtypes, shapes or strides.
    """
    query, key, value = dense(query), dense(key), dense(value)
    output = query.new_empty(query.shape)
    given = "texts", layouts(query, key, value, bias), window
    launch = metadata.plans.get(given)
    if launch is None:
        launch = metadata.plans[given] = _launch(query, key, value, bias, metadata, window)
    run(launch, (output, query, key, value, output if bias is None else bias), scale)
    return output


def _launch(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    bias: Tensor | None,
    metadata: AttentionMetadata,
    window: int | None,
) -> LayoutLaunch:
    (num_rows, num_heads, head_dim), num_kv_heads = query.shape, key.shape[1]
    expect_tensors(
        ("query", query, FLOATS, (None, None, None)),
        ("key", key, (query.dtype,), (num_rows, None, head_dim)),
        ("value", value, (query.dtype,), key.shape),
        ("bias", bias, (torch.float32,), (num_heads, None)),
    )
    expect(
        num_heads % num_kv_heads == 0,
        f"query: expected a multiple of {num_kv_heads} heads, got {num_heads}",
    )
    width = 0 if bias is None else bias.shape[1]
    least = 2 * metadata.max_context_len - 1
    expect(
        bias is None or (width >= least and width % 2 == 1 and bias.is_contiguous()),
        f"bias: expected a dense odd number of at least {least} columns, got {width}",
    )
    num_texts = len(metadata.context_lens)
    strides = (stride for rows in (query, key, value) for stride in rows.stride()[:2])
    return layout_launch(
        attend_texts,
        (num_texts + num_rows // _TILE_ROWS, num_heads),
        (num_texts, window or 0, width, *strides),
        (metadata.query_start,),
        HAS_WINDOW=window is not None,
        HAS_BIAS=bias is not None,
        HEAD_DIM=head_dim,
        PADDED_DIM=max(16, triton.next_power_of_2(head_dim)),
        NUM_HEADS=num_heads,
        GROUP=num_heads // num_kv_heads,
        TILE_ROWS=_TILE_ROWS,
        TILE_KEYS=64 >> ((query.dtype == torch.float32) + (head_dim > 128)),
        num_warps=4,
        num_stages=2,
        enable_fp_fusion=False,
    )
