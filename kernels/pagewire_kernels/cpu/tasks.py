"""The C structures that kernels read, as ctypes structures. Addresses are int64; 0 is null."""

from ctypes import c_float, c_int64

import torch
from torch import Tensor

from pagewire_kernels.batch import AttentionMetadata, StepBatch
from pagewire_kernels.cpu.checks import require
from pagewire_kernels.cpu.native_library import NativeStruct


def fields_of(int64s: str, floats: str = "") -> list[tuple[str, type[c_int64] | type[c_float]]]:
    """Fields of a `ctypes.Structure` with these names, separated by spaces."""
    return [(name, c_int64) for name in int64s.split()] + [(n, c_float) for n in floats.split()]


def address(tensor: Tensor | None) -> int:
    """The address of a tensor's first element; 0 for None."""
    return 0 if tensor is None else tensor.data_ptr()


def rows_of(**tensors: Tensor | None) -> dict[str, int]:
    """The fields of a task for some tensors: the address of each, and in `NAME_stride` the distance
    of its rows, in elements."""
    strides = {f"{name}_stride": t.stride(0) for name, t in tensors.items() if t is not None}
    return {**{name: address(tensor) for name, tensor in tensors.items()}, **strides}


CLAMPED_SILU = "alpha gate_limit active_limit up_limit offset"
"""The fields of `ClampedSilu` of src/activation.h."""


class Batch(NativeStruct):
    """`pagewire::Batch` in src/batch.h."""

    _fields_ = fields_of(
        "num_rows num_seqs token_ids positions token_types slot_mapping query_start context_lens "
        "block_tables table_width num_sampled sampled saves saved_tables"
    )


def describe_batch(
    batch: Batch, num_rows: int, metadata: AttentionMetadata, step: StepBatch | None = None
) -> None:
    """Set the fields of `batch` to the tensors of a step, which must outlive its use. step: None
    for the attention of a single layer, which reads the metadata only.

    Raises ValueError for tensors that are not contiguous or have other dtypes.
    """
    saves = metadata.saves or (None, None)
    for tensor in (metadata.query_start, metadata.context_lens, metadata.block_tables, *saves):
        require(
            tensor is None or (tensor.dtype == torch.int32 and tensor.is_contiguous()),
            "dense int32 metadata",
        )
    names = ("token_ids", "positions", "token_types", "sampled")
    columns = {name: getattr(step, name, None) for name in names}
    for column in (metadata.slot_mapping, *columns.values()):
        if column is not None:
            require(column.dtype == torch.int64 and column.is_contiguous(), "dense int64 columns")
    for name, column in columns.items():
        setattr(batch, name, address(column))
    batch.num_rows = num_rows
    batch.num_seqs = metadata.context_lens.shape[0]
    batch.slot_mapping = metadata.slot_mapping.data_ptr()
    batch.query_start = metadata.query_start.data_ptr()
    batch.context_lens = metadata.context_lens.data_ptr()
    batch.block_tables = metadata.block_tables.data_ptr()
    batch.table_width = metadata.block_tables.shape[1]
    sampled = columns["sampled"]
    batch.num_sampled = 0 if sampled is None else sampled.shape[0]
    batch.saves, batch.saved_tables = map(address, saves)


class AttentionTask(NativeStruct):
    """`pagewire::AttentionTask` in src/attention.h."""

    _fields_ = fields_of(
        "next_item next_slot num_slots slot_bytes scratch batch query query_token_bytes "
        "query_head_bytes output output_token_bytes key_cache value_cache block_bytes "
        "token_bytes head_bytes block_size num_kv_heads group head_dim value_dim tile_tokens "
        "keys_before keys_after sinks alibi_slopes bias bias_width",
        "scale soft_cap",
    )


class CacheWriteTask(NativeStruct):
    """`CacheWriteTask` in src/cache_write.cpp."""

    _fields_ = fields_of(
        "next_item batch key value key_row_bytes value_row_bytes key_cache value_cache block_bytes "
        "token_bytes block_size num_kv_heads head_dim copied_bytes"
    )


class BlockCopyTask(NativeStruct):
    """`BlockCopyTask` in src/block_copy.cpp."""

    _fields_ = fields_of("next_item num_threads source target pairs num_pairs block_bytes")


class NormTask(NativeStruct):
    """`NormTask` of src/layers.h."""

    _fields_ = fields_of(
        "next_item num_rows x x_stride residual residual_stride weight has_float_weight bias y "
        "y_stride size",
        "eps",
    )


class ActivationTask(NativeStruct):
    """`ActivationTask` of src/layers.h."""

    _fields_ = fields_of("next_item num_rows x x_stride y y_stride size activation", CLAMPED_SILU)


class ElementwiseTask(NativeStruct):
    """`ElementwiseTask` of src/layers.h."""

    _fields_ = fields_of("next_item num_rows x x_stride y y_stride size numbers", "factor")


class StreamsTask(NativeStruct):
    """`StreamsTask` of src/layers.h."""

    _fields_ = fields_of(
        "next_item num_rows x x_stride factors factors_stride y y_stride num_streams size active"
    )


class GatedStreamsTask(NativeStruct):
    """`GatedStreamsTask` of src/layers.h."""

    _fields_ = fields_of(
        "next_item num_rows x x_stride gates gates_stride y y_stride numbers num_gates num_streams"
        " size num_divisions",
        "eps offset magnitude",
    )


class TakeTask(NativeStruct):
    """`TakeTask` of src/layers.h."""

    _fields_ = fields_of(
        "next_item num_rows indices table table_row_bytes y y_row_bytes row_bytes table_rows"
    )


class SumRowsTask(NativeStruct):
    """`SumRowsTask` of src/layers.h."""

    _fields_ = fields_of("next_item x x_stride starts num_seqs size sums sums_stride")


class PermuteTask(NativeStruct):
    """`PermuteTask` of src/layers.h."""

    _fields_ = fields_of("next_item num_rows x x_stride order y y_stride size")


class LargestTask(NativeStruct):
    """`LargestTask` of src/layers.h."""

    _fields_ = fields_of("next_item num_rows x x_stride size place value")


class RotateTask(NativeStruct):
    """`RotateTask` of src/layers.h."""

    _fields_ = fields_of(
        "next_item batch query key value query_stride query_head_stride key_stride "
        "key_head_stride value_stride value_head_stride key_cache value_cache block_stride "
        "slot_stride cache_head_stride block_size cos sin table_stride query_norm key_norm "
        "has_float_norms num_heads num_kv_heads head_dim half",
        "eps",
    )


class LatentTask(NativeStruct):
    """`LatentTask` of src/layers.h."""

    _fields_ = fields_of(
        "next_item batch query query_stride query_head_stride rotated rotated_stride "
        "rotated_head_stride latents latents_stride norm has_float_norm cache block_stride "
        "slot_stride block_size cos sin table_stride num_heads rank half",
        "eps",
    )


_UNITS = " pages page_stride places num_units"
"""The fields of `StateUnits` of src/states.h."""


class ConvolutionTask(NativeStruct):
    """`ConvolutionTask` of src/states.h."""

    _fields_ = fields_of(
        "next_item num_threads batch" + _UNITS + " x x_stride y y_stride weight bias num_channels "
        "width has_silu"
    )


class Mamba1Task(NativeStruct):
    """`Mamba1Task` of src/states.h."""

    _fields_ = fields_of(
        "next_item num_threads batch" + _UNITS + " x x_stride dt dt_stride b b_stride c c_stride "
        "gate gate_stride y y_stride a d dt_bias num_channels state_size"
    )


class RglruTask(NativeStruct):
    """`RglruTask` of src/states.h."""

    _fields_ = fields_of(
        "next_item num_threads batch" + _UNITS + " x x_stride input_gate input_gate_stride "
        "decay_gate decay_gate_stride y y_stride input_bias decay_bias rate num_channels"
    )


class Mamba2Task(NativeStruct):
    """`Mamba2Task` of src/states.h."""

    _fields_ = fields_of(
        "next_item num_threads batch" + _UNITS + " x x_stride x_head_stride dt dt_stride b "
        "b_stride b_group_stride c c_stride c_group_stride gate gate_stride gate_head_stride "
        "y y_stride y_head_stride a d dt_bias num_heads heads_per_group head_dim state_size",
        "min_dt max_dt",
    )


class DeltaTask(NativeStruct):
    """`DeltaTask` of src/states.h."""

    _fields_ = fields_of(
        "next_item num_threads batch"
        + _UNITS
        + " query query_stride query_head_stride key key_stride key_head_stride value value_stride "
        "value_head_stride decay decay_stride decay_head_stride beta beta_stride y y_stride "
        "y_head_stride a_log dt_bias num_heads heads_per_key key_dim value_dim decay_width",
        "beta_scale decay_bound",
    )


class GatedNormTask(NativeStruct):
    """`GatedNormTask` of src/states.h."""

    _fields_ = fields_of(
        "next_item num_rows x x_stride x_group_stride gate gate_stride gate_group_stride weight "
        "weight_group_stride has_float_weight y y_stride y_group_stride num_groups group_size "
        "gates_first has_sigmoid",
        "eps",
    )


class PackTask(NativeStruct):
    """`PackTask` of src/linear.h."""

    _fields_ = fields_of("next_item weight weight_stride packed in_features out_features num_parts")


_DELTAS = " delta_slots delta_rows inner inner_stride "
"""The fields of `Deltas` of src/adapters.h."""

_QUANTIZATION = " group_size scale_bytes has_offsets unit_groups zero table"
"""The fields of `Quantization` of src/linear.h."""


class LinearTask(NativeStruct):
    """`LinearTask` of src/linear.h."""

    _fields_ = fields_of(
        "next_item num_threads num_rows x x_stride weight bias y y_stride in_features out_features"
        + _DELTAS
        + "activation"
        + _QUANTIZATION
    )


class HeadsTask(NativeStruct):
    """`HeadsTask` of src/linear.h."""

    _fields_ = fields_of(
        "next_item num_threads num_rows x x_stride weight bias y y_stride in_features out_features"
        + _DELTAS
        + "activation"
        + _QUANTIZATION
        + " num_heads head_bytes x_head_stride y_head_stride"
    )


class AdapterSpan(NativeStruct):
    """`AdapterSpan` of src/adapters.h."""

    _fields_ = fields_of("end first_step num_steps b")


class AdapterSlot(NativeStruct):
    """`AdapterSlot` of src/adapters.h."""

    _fields_ = fields_of("a a_row_bytes rank scales spans factors")


class AdapterRows(NativeStruct):
    """`AdapterRows` of src/adapters.h."""

    _fields_ = fields_of("num_groups slots starts rows groups")


class AdapterTask(NativeStruct):
    """`AdapterTask` of src/adapters.h."""

    _fields_ = fields_of(
        "next_item num_threads x x_stride in_features slots rows inner inner_stride num_heads "
        "x_head_stride"
    )


class ExpertAdapterTask(NativeStruct):
    """`ExpertAdapterTask` of src/experts.h."""

    _fields_ = fields_of(
        "next_item num_threads x x_stride in_features slots rows inner inner_stride num_heads "
        "x_head_stride plan gathers num_experts"
    )


class EmbeddingDeltaTask(NativeStruct):
    """`EmbeddingDeltaTask` of src/adapters.h."""

    _fields_ = fields_of("next_item batch slots rows num_tokens y y_stride size")


class ExpertPlan(NativeStruct):
    """`ExpertPlan` of src/experts.h."""

    _fields_ = fields_of("num_active active starts rows slots weights")


class RouteTask(NativeStruct):
    """`RouteTask` of src/experts.h."""

    _fields_ = fields_of(
        "next_item num_done num_rows logits logits_stride bias factors plan num_experts "
        "num_zero_experts num_chosen scoring normalizes num_groups num_chosen_groups num_best",
        "nearness epsilon min_sum scale",
    )


class ExpertsTask(NativeStruct):
    """`ExpertsTask` of src/experts.h."""

    _fields_ = fields_of(
        "next_item num_threads num_rows x x_stride weight bias y y_stride in_features out_features"
        + _DELTAS
        + "activation"
        + _QUANTIZATION
        + " expert_bytes plan gathers num_experts",
        CLAMPED_SILU,
    )


class ScatterTask(NativeStruct):
    """`ScatterTask` of src/experts.h."""

    _fields_ = fields_of("next_item num_rows x x_stride plan num_chosen y y_stride size")


class CombineTask(NativeStruct):
    """`CombineTask` of src/experts.h."""

    _fields_ = fields_of(
        "next_item num_rows x x_stride plan num_chosen shared shared_stride gate gate_stride "
        "zero zero_stride y y_stride size is_weighted"
    )


class GatherTask(NativeStruct):
    """`GatherTask` of src/linear.h."""

    _fields_ = fields_of(
        "next_item batch packed y y_stride in_features out_features num_parts" + _QUANTIZATION
    )


class QuantizedPackTask(NativeStruct):
    """`QuantizedPackTask` of src/linear.h."""

    _fields_ = fields_of(
        "next_item codes scales offsets units offset_units packed in_features out_features "
        "num_parts" + _QUANTIZATION
    )
