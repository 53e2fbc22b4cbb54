"""The C structures that kernels read, for ctypes. Addresses are int64; 0 is none."""

import ctypes
from ctypes import c_float, c_int64

import torch
from torch import Tensor

from pagewire_kernels.batch import AttentionMetadata
from pagewire_kernels.cpu.checks import require
from pagewire_kernels.cpu.native_library import NativeStruct


class Batch(NativeStruct):
    """`pagewire::Batch` in src/batch.h."""

    _fields_ = (
        ("num_rows", c_int64),
        ("num_seqs", c_int64),
        ("token_ids", c_int64),
        ("positions", c_int64),
        ("slot_mapping", c_int64),
        ("query_start", c_int64),
        ("context_lens", c_int64),
        ("block_tables", c_int64),
        ("table_width", c_int64),
        ("num_sampled", c_int64),
        ("sampled", c_int64),
    )


def describe_batch(
    batch: Batch,
    metadata: AttentionMetadata,
    positions: Tensor | None = None,
    token_ids: Tensor | None = None,
    sampled: Tensor | None = None,
) -> None:
    """Point `batch` to a step's tensors, which must live as long as it is used."""
    for tensor in (metadata.query_start, metadata.context_lens, metadata.block_tables):
        require(tensor.dtype == torch.int32 and tensor.is_contiguous(), "dense int32 metadata")
    for column in (metadata.slot_mapping, positions, token_ids, sampled):
        if column is not None:
            require(column.dtype == torch.int64 and column.is_contiguous(), "dense int64 columns")
    batch.num_rows = metadata.slot_mapping.shape[0]
    batch.num_seqs = metadata.context_lens.shape[0]
    batch.token_ids = 0 if token_ids is None else token_ids.data_ptr()
    batch.positions = 0 if positions is None else positions.data_ptr()
    batch.slot_mapping = metadata.slot_mapping.data_ptr()
    batch.query_start = metadata.query_start.data_ptr()
    batch.context_lens = metadata.context_lens.data_ptr()
    batch.block_tables = metadata.block_tables.data_ptr()
    batch.table_width = metadata.block_tables.shape[1]
    batch.num_sampled = 0 if sampled is None else sampled.shape[0]
    batch.sampled = 0 if sampled is None else sampled.data_ptr()


class AttentionTask(NativeStruct):
    """`pagewire::AttentionTask` in src/attention.h."""

    _fields_ = (
        ("next_item", c_int64),
        ("next_slot", c_int64),
        ("num_slots", c_int64),
        ("slot_bytes", c_int64),
        ("scratch", c_int64),
        ("batch", c_int64),
        ("query", c_int64),
        ("query_token_bytes", c_int64),
        ("query_head_bytes", c_int64),
        ("output", c_int64),
        ("output_token_bytes", c_int64),
        ("key_cache", c_int64),
        ("value_cache", c_int64),
        ("block_bytes", c_int64),
        ("token_bytes", c_int64),
        ("head_bytes", c_int64),
        ("block_size", c_int64),
        ("num_kv_heads", c_int64),
        ("group", c_int64),
        ("head_dim", c_int64),
        ("tile_tokens", c_int64),
        ("window", c_int64),
        ("sinks", c_int64),
        ("alibi_slopes", c_int64),
        ("scale", c_float),
        ("soft_cap", c_float),
    )


class CacheWriteTask(NativeStruct):
    """`CacheWriteTask` in src/cache_write.cpp."""

    _fields_ = (
        ("next_item", c_int64),
        ("batch", c_int64),
        ("key", c_int64),
        ("value", c_int64),
        ("key_row_bytes", c_int64),
        ("value_row_bytes", c_int64),
        ("key_cache", c_int64),
        ("value_cache", c_int64),
        ("block_bytes", c_int64),
        ("token_bytes", c_int64),
        ("block_size", c_int64),
        ("copied_bytes", c_int64),
    )


class BlockCopyTask(NativeStruct):
    """`BlockCopyTask` in src/block_copy.cpp."""

    _fields_ = (
        ("next_item", c_int64),
        ("num_threads", c_int64),
        ("source", c_int64),
        ("target", c_int64),
        ("pairs", c_int64),
        ("num_pairs", c_int64),
        ("block_bytes", c_int64),
    )


class NormTask(NativeStruct):
    """`NormTask` of src/layers.h."""

    _fields_ = (
        ("next_item", c_int64),
        ("num_rows", c_int64),
        ("x", c_int64),
        ("x_stride", c_int64),
        ("residual", c_int64),
        ("residual_stride", c_int64),
        ("weight", c_int64),
        ("bias", c_int64),
        ("y", c_int64),
        ("y_stride", c_int64),
        ("size", c_int64),
        ("eps", c_float),
    )


class ActivationTask(NativeStruct):
    """`ActivationTask` of src/layers.h."""

    _fields_ = (
        ("next_item", c_int64),
        ("num_rows", c_int64),
        ("x", c_int64),
        ("x_stride", c_int64),
        ("y", c_int64),
        ("y_stride", c_int64),
        ("size", c_int64),
        ("activation", c_int64),
    )


class TakeTask(NativeStruct):
    """`TakeTask` of src/layers.h."""

    _fields_ = (
        ("next_item", c_int64),
        ("num_rows", c_int64),
        ("indices", c_int64),
        ("table", c_int64),
        ("table_row_bytes", c_int64),
        ("y", c_int64),
        ("y_row_bytes", c_int64),
        ("row_bytes", c_int64),
        ("table_rows", c_int64),
    )


class LargestTask(NativeStruct):
    """`LargestTask` of src/layers.h."""

    _fields_ = (
        ("next_item", c_int64),
        ("num_rows", c_int64),
        ("x", c_int64),
        ("x_stride", c_int64),
        ("size", c_int64),
        ("place", c_int64),
        ("value", c_int64),
    )


class RotateTask(NativeStruct):
    """`RotateTask` of src/layers.h."""

    _fields_ = (
        ("next_item", c_int64),
        ("batch", c_int64),
        ("query", c_int64),
        ("key", c_int64),
        ("value", c_int64),
        ("query_stride", c_int64),
        ("query_head_stride", c_int64),
        ("key_stride", c_int64),
        ("key_head_stride", c_int64),
        ("value_stride", c_int64),
        ("value_head_stride", c_int64),
        ("key_cache", c_int64),
        ("value_cache", c_int64),
        ("block_stride", c_int64),
        ("slot_stride", c_int64),
        ("cache_head_stride", c_int64),
        ("block_size", c_int64),
        ("cos", c_int64),
        ("sin", c_int64),
        ("table_stride", c_int64),
        ("query_norm", c_int64),
        ("key_norm", c_int64),
        ("num_heads", c_int64),
        ("num_kv_heads", c_int64),
        ("head_dim", c_int64),
        ("half", c_int64),
        ("eps", c_float),
    )


class PackTask(NativeStruct):
    """`PackTask` of src/linear.h."""

    _fields_ = (
        ("next_item", ctypes.c_int64),
        ("weight", ctypes.c_void_p),
        ("weight_stride", ctypes.c_int64),
        ("packed", ctypes.c_void_p),
        ("in_features", ctypes.c_int64),
        ("out_features", ctypes.c_int64),
        ("num_parts", ctypes.c_int64),
    )


class LinearTask(NativeStruct):
    """`LinearTask` of src/linear.h."""

    _fields_ = (
        ("next_item", ctypes.c_int64),
        ("num_threads", ctypes.c_int64),
        ("num_rows", ctypes.c_void_p),
        ("x", ctypes.c_void_p),
        ("x_stride", ctypes.c_int64),
        ("weight", ctypes.c_void_p),
        ("bias", ctypes.c_void_p),
        ("y", ctypes.c_void_p),
        ("y_stride", ctypes.c_int64),
        ("in_features", ctypes.c_int64),
        ("out_features", ctypes.c_int64),
        ("activation", ctypes.c_int64),
    )


class GatherTask(NativeStruct):
    """`GatherTask` of src/linear.h."""

    _fields_ = (
        ("next_item", ctypes.c_int64),
        ("batch", ctypes.c_void_p),
        ("packed", ctypes.c_void_p),
        ("y", ctypes.c_void_p),
        ("y_stride", ctypes.c_int64),
        ("in_features", ctypes.c_int64),
        ("out_features", ctypes.c_int64),
    )
