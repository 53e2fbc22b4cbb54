"""The C structures of src/layers.h, for ctypes. Addresses are int64; 0 is none."""

import ctypes
from ctypes import c_float, c_int64


class NormTask(ctypes.Structure):
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


class ActivationTask(ctypes.Structure):
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


class TakeTask(ctypes.Structure):
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


class LargestTask(ctypes.Structure):
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


class RotateTask(ctypes.Structure):
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
