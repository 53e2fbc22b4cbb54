"""Launchers of src/take.cpp, src/norm.cpp, src/activation.cpp and src/rotate.cpp.

They raise ValueError for tensors of unsupported dtypes, shapes or strides.
"""

import ctypes
import math
from collections.abc import Sequence
from typing import Unpack

import numpy as np
import torch
from torch import Tensor

from pagewire_kernels import reference
from pagewire_kernels.cpu import threads
from pagewire_kernels.cpu.checks import DTYPES, kernel_over, require
from pagewire_kernels.cpu.native_library import Library
from pagewire_kernels.cpu.program import (
    batch_of,
    batch_with,
    count_address,
    launch,
    new_rows,
    new_tensor,
)
from pagewire_kernels.cpu.states import NativeStateKernels
from pagewire_kernels.cpu.tasks import (
    CLAMPED_SILU,
    ActivationTask,
    Batch,
    ElementwiseTask,
    GatedStreamsTask,
    LargestTask,
    LatentTask,
    NormTask,
    PermuteTask,
    RotateTask,
    StreamsTask,
    SumRowsTask,
    TakeTask,
    address,
    rows_of,
)
from pagewire_kernels.interface import HeadNorms, RotaryOptions, stored_head_size
from pagewire_kernels.reference.experts import Gate

_CLAMPED = len(reference.ACTIVATIONS)
"""`kClampedSilu` of src/activation.h."""

NO_ACTIVATION = _CLAMPED + 1
"""`kNone` of src/activation.h."""


def activation_of(gate: Gate) -> dict[str, int | float]:
    """The fields of a task for how a gate acts."""
    if gate.limit is None:
        return {"activation": reference.ACTIVATIONS.index(gate.activation)}
    gate_limit, active_limit = gate.limits
    numbers = (gate.alpha, gate_limit, active_limit, gate.limit, gate.offset)
    return {"activation": _CLAMPED, **dict(zip(CLAMPED_SILU.split(), numbers, strict=True))}


def take(
    library: Library,
    table: Tensor,
    num_rows: int,
    batch: Batch,
    count: str,
    indices: str,
    sums: Tensor | None = None,
) -> Tensor:
    """Gather rows of a table by indices in the batch.

    table: [n, size]; num_rows: maximum number of indices; count, indices: names of the fields of
    `Batch` that hold their number and address; sums: [num_rows, size], to which the rows are added
    if it is given. Returns these, or else [num_rows, size], with zeros for indices out of range.
    """
    y, task = _take_task(table, num_rows, sums)
    task.num_rows = ctypes.addressof(batch) + getattr(Batch, count).offset
    task.indices = ctypes.addressof(batch) + getattr(Batch, indices).offset
    kernel = "take" if sums is None else f"add_rows_{DTYPES[table.dtype]}"
    launch(library.kernel(kernel), task, threads.count_for(num_rows * table.shape[1]))
    return y


def _take_task(table: Tensor, num_rows: int, sums: Tensor | None = None) -> tuple[Tensor, TakeTask]:
    """Return the tensor that is filled, and a task that lacks the number of rows and indices."""
    require(table.stride(1) == 1, "a table with a dense last axis")
    size, item = table.shape[1], table.element_size()
    y = new_rows(num_rows, size, table.dtype) if sums is None else sums
    require(
        _is_rows(y, num_rows, table.dtype) and y.shape[1] == size,
        "sums of the table's dtype and row size, with a dense last axis",
    )
    task = TakeTask(
        table=table.data_ptr(),
        table_row_bytes=table.stride(0) * item,
        y=y.data_ptr(),
        y_row_bytes=y.stride(0) * item,
        row_bytes=size * item,
        table_rows=table.shape[0],
    )
    return y, task


def find_largest(library: Library, x: Tensor) -> tuple[Tensor, Tensor]:
    """Find the largest number of each row. x: float32 [num_rows, size], with a dense last axis.

    Returns its column, the lowest among equals, int64 [num_rows], and the number, float32
    [num_rows]: NaN, with an arbitrary column, if the row has a NaN.
    """
    require(x.dtype == torch.float32, "float32 rows")
    require(x.stride(1) == 1, "rows with a dense last axis")
    num_rows, size = x.shape
    places = new_tensor((num_rows,), torch.int64)
    values = new_tensor((num_rows,), torch.float32)
    task = LargestTask(
        num_rows=count_address(num_rows),
        **rows_of(x=x),
        size=size,
        place=places.data_ptr(),
        value=values.data_ptr(),
    )
    launch(library.kernel("largest"), task, 1)
    return places, values


MAX_HEAD_DIM = 1024
MAX_STREAMS = 16


class NativeLayerKernels(NativeStateKernels):
    """Layer kernels in C++, for rows of float32 or bfloat16."""

    name = "native"

    def embed(self, table: Tensor, indices: Tensor, sums: Tensor | None = None) -> Tensor:
        """Gather rows of a table, with zeros for indices out of range."""
        require(indices.dtype == torch.int64, "int64 indices")
        indices = indices.contiguous()
        batch, name = batch_with(indices)
        return take(self._library, table, indices.shape[0], batch, "num_rows", name, sums)

    def copy(self, x: Tensor) -> Tensor:
        """Copy the rows."""
        return self._copy(x, new_rows(x.shape[0], x.shape[1], x.dtype))

    def take_columns(self, x: Tensor, order: Tensor) -> Tensor:
        """Gather columns."""
        (num_rows, _), (size,) = x.shape, order.shape
        require(_is_rows(x, num_rows, x.dtype), "rows with a dense last axis")
        require(_is_dense(order, (size,), torch.int32), "dense int32 columns")
        y = new_rows(num_rows, size, x.dtype)
        task = PermuteTask(
            num_rows=count_address(num_rows),
            **rows_of(x=x, y=y),
            order=order.data_ptr(),
            size=size,
        )
        task.kept_alive = order
        self._launch("permute", task, x.dtype, y.numel())
        return y

    def concatenate(self, parts: Sequence[Tensor]) -> Tensor:
        """Rows that consist of those of the parts."""
        sizes = [part.shape[1] for part in parts]
        y = new_rows(parts[0].shape[0], sum(sizes), parts[0].dtype)
        for part, columns in zip(parts, y.split(sizes, dim=1), strict=True):
            self._copy(part, columns)
        return y

    def _copy(self, x: Tensor, y: Tensor) -> Tensor:
        y, task = _take_task(x, x.shape[0], y)
        numbers = np.arange(x.shape[0], dtype=np.int64)
        indices = ctypes.c_int64(numbers.ctypes.data)
        task.num_rows, task.indices = count_address(x.shape[0]), ctypes.addressof(indices)
        task.kept_alive = numbers, indices
        launch(self._library.kernel("take"), task, threads.count_for(x.numel()))
        return y

    def rms_norm(
        self, x: Tensor, weight: Tensor, eps: float, residual: Tensor | None = None
    ) -> Tensor:
        """x / rms(x) * weight, after adding x to the residual if given."""
        return self._norm("rms_norm", x, weight, None, eps, residual)

    def layer_norm(
        self,
        x: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        eps: float,
        residual: Tensor | None = None,
    ) -> Tensor:
        """(x - mean) / deviation * weight + bias; `residual` as in `rms_norm`."""
        return self._norm("layer_norm", x, weight, bias, eps, residual)

    def _norm(
        self,
        name: str,
        x: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        eps: float,
        residual: Tensor | None,
    ) -> Tensor:
        num_rows, size = x.shape
        require(_is_rows(x, num_rows, x.dtype), "rows with a dense last axis")
        has_float_weight = weight is not None and weight.dtype == torch.float32
        weight_dtype = torch.float32 if has_float_weight else x.dtype
        require(
            _is_dense(weight, (size,), weight_dtype),
            "a dense weight of the rows' size, and of their dtype or float32",
        )
        require(_is_dense(bias, (size,), x.dtype), "a dense bias of the rows' size and dtype")
        require(
            residual is None or _is_rows(residual, num_rows, x.dtype),
            "a residual of as many rows, of the same dtype, with a dense last axis",
        )
        y = new_rows(num_rows, size, x.dtype)
        task = NormTask(
            num_rows=count_address(num_rows),
            **rows_of(x=x, residual=residual, y=y),
            weight=address(weight),
            has_float_weight=has_float_weight,
            bias=address(bias),
            size=size,
            eps=eps,
        )
        self._launch(name, task, x.dtype, num_rows * size)
        return y

    def activate(self, x: Tensor, activation: str) -> Tensor:
        """activation(x), in place."""
        self._activate("activate", x, x, Gate(activation=activation))
        return x

    def act_and_mul(self, gate_up: Tensor, activation: str) -> Tensor:
        """activation(gate) * up, where `gate_up` holds gate, then up."""
        return self.apply_gate(gate_up, Gate(activation=activation))

    def apply_gate(self, gate_up: Tensor, gate: Gate) -> Tensor:
        """The activation of rows that hold gate, then up, or up alone."""
        if not gate.multiplies:
            return self.activate(gate_up, gate.activation)
        num_rows, width = gate_up.shape
        require(width % 2 == 0, "an even number of columns: gate and up are of one size")
        y = new_rows(num_rows, width // 2, gate_up.dtype)
        self._activate("act_and_mul", gate_up, y, gate)
        return y

    def _activate(self, name: str, x: Tensor, y: Tensor, gate: Gate) -> None:
        num_rows, size = y.shape
        require(_is_rows(x, num_rows, y.dtype), "rows of the output's dtype with a dense last axis")
        task = ActivationTask(
            num_rows=count_address(num_rows),
            **rows_of(x=x, y=y),
            size=size,
            **activation_of(gate),
        )
        self._launch(name, task, x.dtype, y.numel())

    def scale(self, x: Tensor, factor: float) -> Tensor:
        """factor * x, in place."""
        return self._elementwise("scale", x, x, factor)

    def soft_cap(self, x: Tensor, cap: float) -> Tensor:
        """cap * tanh(x / cap), in place."""
        return self._elementwise("soft_cap", x, x, cap)

    def sparsify(self, x: Tensor, num_deviations: float) -> Tensor:
        """max(x - mean - num_deviations * deviation, 0) of each row, in place."""
        return self._elementwise("sparsify", x, x, num_deviations)

    def match_rms(self, x: Tensor, like: Tensor) -> Tensor:
        """x * rms(like) / rms(x) of each row, in place."""
        return self._elementwise("match_rms", like, x, reference.layers.MIN_MEAN_SQUARE)

    def mix_streams(self, streams: Tensor, factors: Tensor) -> Tensor:
        """Add to each stream of a row a sum of all, weighted by the row's factors."""
        mixed = new_rows(streams.shape[0], streams.shape[1], streams.dtype)
        self._of_streams("mix_streams", streams, factors, mixed, math.isqrt(factors.shape[1]))
        return mixed

    def correct_streams(self, streams: Tensor, x: Tensor, factors: Tensor, active: int) -> Tensor:
        """Add to each stream of a row, in place, 1 + its factor times the difference of x and the
        active one."""
        num_streams = factors.shape[1]
        require(x.shape[1] * num_streams == streams.shape[1], "rows of a stream's size")
        self._of_streams("correct_streams", x, factors, streams, num_streams, active)
        return streams

    def _of_streams(
        self, name: str, x: Tensor, factors: Tensor, y: Tensor, num_streams: int, active: int = 0
    ) -> None:
        num_rows, width = y.shape
        require(
            all(_is_rows(rows, num_rows, y.dtype) for rows in (x, factors, y)),
            "as many rows of one dtype, with a dense last axis",
        )
        require(
            active < num_streams <= MAX_STREAMS and width % num_streams == 0,
            f"at most {MAX_STREAMS} streams of one size",
        )
        task = StreamsTask(
            num_rows=count_address(num_rows),
            **rows_of(x=x, factors=factors, y=y),
            num_streams=num_streams,
            size=width // num_streams,
            active=active,
        )
        self._launch(name, task, y.dtype, y.numel())

    def read_streams(
        self,
        streams: Tensor,
        gates: Tensor,
        numbers: Tensor,
        num_streams: int,
        *,
        eps: float,
        offset: float,
        magnitude: float,
        num_divisions: int = 0,
    ) -> Tensor:
        """The sum of the streams of a row, weighted by gates, which overwrite `gates`."""
        (num_rows, width), num_gates = streams.shape, gates.shape[1]
        require(width % num_streams == 0, "streams of one size")
        counts = reference.gate_counts(num_streams, num_divisions)
        require(num_gates in counts, "gates of each stream, and of each pair that is mixed")
        require(_is_dense(numbers, (2, num_gates), torch.float32), "float32 numbers of gates")
        y = new_rows(num_rows, width // num_streams, streams.dtype)
        task = _gated_streams_task(streams, gates, y, num_streams)
        task.numbers, task.num_divisions = numbers.data_ptr(), num_divisions
        task.eps, task.offset, task.magnitude = eps, offset, magnitude
        task.kept_alive = numbers
        self._launch("read_streams", task, y.dtype, streams.numel())
        return y

    def write_streams(self, streams: Tensor, x: Tensor, gates: Tensor) -> Tensor:
        """Add x, times the gate of each stream, to the streams in place, or to what they become
        when they are mixed."""
        num_streams, num_gates = streams.shape[1] // x.shape[1], gates.shape[1]
        require(x.shape[1] * num_streams == streams.shape[1], "rows of a stream's size")
        require(num_gates in (num_streams, num_streams * (num_streams + 1)), "gates of streams")
        task = _gated_streams_task(x, gates, streams, num_streams)
        self._launch("write_streams", task, streams.dtype, streams.numel())
        return streams

    def add(self, sums: Tensor, x: Tensor) -> Tensor:
        """Add x to the sums in place."""
        return self._elementwise("add", x, sums, 1.0)

    def multiply(self, products: Tensor, x: Tensor) -> Tensor:
        """Multiply the products by x in place."""
        return self._elementwise("multiply", x, products, 1.0)

    def multiply_sigmoid(self, products: Tensor, x: Tensor) -> Tensor:
        """Multiply the products by sigmoid(x) in place."""
        return self._elementwise("multiply_sigmoid", x, products, 1.0)

    def multiply_softplus(self, products: Tensor, x: Tensor) -> Tensor:
        """Multiply the products by softplus(x) in place."""
        return self._elementwise("multiply_softplus", x, products, 1.0)

    def xielu(self, x: Tensor, numbers: Tensor) -> Tensor:
        """xIELU, in place."""
        require(_is_dense(numbers, (4,), torch.float32), "four dense float32 numbers")
        return self._elementwise("xielu", x, x, 1.0, numbers)

    def _elementwise(
        self, name: str, x: Tensor, y: Tensor, factor: float, numbers: Tensor | None = None
    ) -> Tensor:
        num_rows, size = y.shape
        require(
            _is_rows(x, num_rows, y.dtype) and x.shape[1] == size and y.stride(1) == 1,
            "rows of one dtype and size, with a dense last axis",
        )
        task = ElementwiseTask(
            num_rows=count_address(num_rows),
            **rows_of(x=x, y=y),
            size=size,
            numbers=address(numbers),
            factor=factor,
        )
        self._launch(name, task, y.dtype, y.numel())
        return y

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
        **options: Unpack[RotaryOptions],
    ) -> None:
        """Apply norms and RoPE to `query` in place; write normed and RoPE'd keys, and raw values,
        to the cache.

        The cache has the dtype of the rows or is int8, so scales are ignored.
        """
        caches = key_cache, value_cache
        require(_is_rows(value, len(key), key.dtype), "values as many and of the dtype of the keys")
        require(
            key_cache.stride() == value_cache.stride()
            and all(_is_cache(cache, key) for cache in caches),
            "key and value caches of one layout that fits the keys",
        )
        require(
            _is_dense(slot_mapping, (len(key),), torch.int64), "a dense int64 slot for each row"
        )
        task = _rotate_task(query, key, positions, cos, sin, options)
        batch = batch_of(len(key), positions=positions, slot_mapping=slot_mapping)
        task.batch = ctypes.addressof(batch)
        task.value, task.value_stride, task.value_head_stride = address(value), *value.stride()[:2]
        task.key_cache, task.value_cache = address(key_cache), address(value_cache)
        task.block_stride, task.slot_stride, task.cache_head_stride = key_cache.stride()[:3]
        task.block_size = key_cache.shape[1]
        num_numbers = query.numel() + 2 * key.numel()
        self._launch(kernel_over(key_cache, "rotate_and_write"), task, query.dtype, num_numbers)

    def rotate(
        self,
        query: Tensor,
        key: Tensor,
        positions: Tensor,
        cos: Tensor,
        sin: Tensor,
        **norms: Unpack[HeadNorms],
    ) -> None:
        """Apply norms and RoPE to `query` and `key` in place."""
        task = _rotate_task(query, key, positions, cos, sin, norms)
        task.batch = ctypes.addressof(batch_of(len(key), positions=positions))
        self._launch("rotate", task, query.dtype, query.numel() + key.numel())

    def write_latents(
        self,
        query: Tensor,
        rotated: Tensor,
        latents: Tensor,
        norm: Tensor,
        cache: Tensor,
        slot_mapping: Tensor,
        positions: Tensor,
        cos: Tensor,
        sin: Tensor,
        *,
        eps: float,
        scale: float = 1.0,
    ) -> None:
        """Write RoPE'd ends of queries to `rotated`, and normed latents with the RoPE'd end of keys
        to the cache, which has the dtype of the rows or is int8: the scale is ignored."""
        (num_rows, num_heads, rotary_dim), dtype = query.shape, query.dtype
        half, rank = cos.shape[1], norm.shape[0]
        require(
            _is_rows(query, num_rows, dtype)
            and _is_rows(rotated, num_rows, dtype)
            and rotated.shape == query.shape
            and rotary_dim == 2 * half,
            "ends of queries of one dtype and shape, twice as long as rows of the tables",
        )
        require(
            _is_rows(latents, num_rows, dtype)
            and rank + rotary_dim == latents.shape[1] <= MAX_HEAD_DIM,
            f"rows of latents and ends of keys, of at most {MAX_HEAD_DIM} elements",
        )
        norm_dtype = torch.float32 if norm.dtype == torch.float32 else dtype
        require(_is_dense(norm, (rank,), norm_dtype), "a dense norm weight of a latent's size")
        require(
            all(_is_dense(table, cos.shape, dtype) for table in (cos, sin)),
            "dense cos and sin tables of one shape and the rows' dtype",
        )
        require(_is_cache(cache, latents.unsqueeze(1)), "a cache that fits the latents")
        for name, column in (("position", positions), ("slot", slot_mapping)):
            require(
                _is_dense(column, (num_rows,), torch.int64), f"a dense int64 {name} of each row"
            )
        batch = batch_of(num_rows, positions=positions, slot_mapping=slot_mapping)
        task = LatentTask(
            batch=ctypes.addressof(batch),
            **rows_of(query=query, rotated=rotated, latents=latents),
            query_head_stride=query.stride(1),
            rotated_head_stride=rotated.stride(1),
            norm=address(norm),
            has_float_norm=norm.dtype == torch.float32,
            cache=address(cache),
            block_stride=cache.stride(0),
            slot_stride=cache.stride(1),
            block_size=cache.shape[1],
            cos=address(cos),
            sin=address(sin),
            table_stride=half,
            num_heads=num_heads,
            rank=rank,
            half=half,
            eps=eps,
        )
        num_numbers = query.numel() + latents.numel()
        self._launch(kernel_over(cache, "write_latents"), task, dtype, num_numbers)

    def sum_rows(self, hidden: Tensor, starts: Tensor, sums: Tensor) -> None:
        """Add the rows of each text to its sum, one after the other."""
        num_seqs, size = sums.shape
        require(_is_dense(starts, (num_seqs + 1,), torch.int32), "a dense int32 start of each text")
        require(_is_rows(hidden, len(hidden), hidden.dtype), "rows with a dense last axis")
        require(
            _is_rows(sums, num_seqs, torch.float32) and hidden.shape[1] == size,
            "float32 sums of the rows' size with a dense last axis",
        )
        task = SumRowsTask(
            **rows_of(x=hidden, sums=sums), starts=starts.data_ptr(), num_seqs=num_seqs, size=size
        )
        self._launch("sum_rows", task, hidden.dtype, hidden.numel())

    def _launch(
        self, name: str, task: ctypes.Structure, dtype: torch.dtype, num_numbers: int
    ) -> None:
        kernel = self._library.kernel(f"{name}_{DTYPES[dtype]}")
        launch(kernel, task, threads.count_for(num_numbers))


def _gated_streams_task(x: Tensor, gates: Tensor, y: Tensor, num_streams: int) -> GatedStreamsTask:
    """A task that lacks what makes gates."""
    num_rows, width = len(x), max(x.shape[1], y.shape[1])
    require(
        _is_rows(x, num_rows, x.dtype) and _is_rows(y, num_rows, x.dtype),
        "as many rows of one dtype, with a dense last axis",
    )
    require(
        _is_rows(gates, num_rows, torch.float32),
        "float32 gates of each row, with a dense last axis",
    )
    require(num_streams <= MAX_STREAMS, f"at most {MAX_STREAMS} streams")
    return GatedStreamsTask(
        num_rows=count_address(num_rows),
        **rows_of(x=x, gates=gates, y=y),
        num_gates=gates.shape[1],
        num_streams=num_streams,
        size=width // num_streams,
    )


def _rotate_task(
    query: Tensor, key: Tensor, positions: Tensor, cos: Tensor, sin: Tensor, norms: HeadNorms
) -> RotateTask:
    """A task that lacks its batch, and values and caches if they are written."""
    (num_rows, num_heads, head_dim), dtype = query.shape, query.dtype
    weights = norms.get("query_norm"), norms.get("key_norm")
    require(head_dim <= MAX_HEAD_DIM, f"heads of at most {MAX_HEAD_DIM} elements")
    require(
        _is_rows(query, num_rows, dtype) and _is_rows(key, num_rows, dtype),
        "query and key of as many rows, of one dtype, with a dense last axis",
    )
    require(
        all(_is_dense(table, cos.shape, dtype) for table in (cos, sin)),
        "dense cos and sin tables of one shape and the rows' dtype",
    )
    has_float_norms = weights[0] is not None and weights[0].dtype == torch.float32
    norm_dtype = torch.float32 if has_float_norms else dtype
    require(
        all(_is_dense(weight, (head_dim,), norm_dtype) for weight in weights),
        "dense norm weights of a head's size, of one dtype: that of heads or float32",
    )
    require(_is_dense(positions, (num_rows,), torch.int64), "a dense int64 position for each row")
    return RotateTask(
        **rows_of(query=query, key=key),
        query_head_stride=query.stride(1),
        key_head_stride=key.stride(1),
        cos=cos.data_ptr(),
        sin=sin.data_ptr(),
        table_stride=cos.shape[1],
        query_norm=address(weights[0]),
        key_norm=address(weights[1]),
        has_float_norms=has_float_norms,
        num_heads=num_heads,
        num_kv_heads=key.shape[1],
        head_dim=head_dim,
        half=cos.shape[1],
        eps=norms.get("eps", 1e-6),
    )


def _is_rows(rows: Tensor, num_rows: int, dtype: torch.dtype) -> bool:
    return rows.dtype == dtype and rows.shape[0] == num_rows and rows.stride(-1) == 1


def _is_dense(tensor: Tensor | None, shape: tuple[int, ...], dtype: torch.dtype) -> bool:
    if tensor is None:
        return True
    return tensor.dtype == dtype and tensor.shape == shape and tensor.is_contiguous()


def _is_cache(cache: Tensor, rows: Tensor) -> bool:
    heads = (rows.shape[1], stored_head_size(rows.shape[2], cache.dtype))
    is_known = cache.dtype in (rows.dtype, torch.int8)
    return is_known and cache.shape[2:] == heads and cache.stride(3) == 1
