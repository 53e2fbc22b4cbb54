"""The C structures that kernels read, for ctypes. Addresses are int64; 0 is none."""

import ctypes
from ctypes import c_float, c_int64


class Batch(ctypes.Structure):
    """`pagewire::Batch` in src/batch.h."""

    _fields_ = (
        ("num_rows", c_int64),
        ("num_seqs", c_int64),
        ("positions", c_int64),
        ("slot_mapping", c_int64),
        ("query_start", c_int64),
        ("context_lens", c_int64),
        ("block_tables", c_int64),
        ("table_width", c_int64),
    )


class AttentionTask(ctypes.Structure):
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


class CacheWriteTask(ctypes.Structure):
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
