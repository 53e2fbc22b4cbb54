"""Weights packed for the linear layers in C++; see src/linear.h."""

import ctypes
import mmap
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from pagewire_kernels import reference
from pagewire_kernels.cpu import threads
from pagewire_kernels.cpu.adapters import ActiveRows, NativeDeltas
from pagewire_kernels.cpu.checks import DTYPES, require
from pagewire_kernels.cpu.native_library import Kernel, Library
from pagewire_kernels.cpu.program import batch_of, count_address, launch, new_rows
from pagewire_kernels.cpu.tasks import (
    GatherTask,
    LinearTask,
    PackTask,
    PermuteTask,
    QuantizedPackTask,
    address,
    rows_of,
)
from pagewire_kernels.cpu.w8a8 import can_multiply_quantized_rows, quantize_rows
from pagewire_kernels.quantized_weight import (
    GROUP_INPUTS,
    Int8Activations,
    QuantizedWeight,
    stack,
)

PAGE_BYTES = 2 << 20
"""Size of a huge page."""

_CHUNK_BYTES = 64 << 20
_ALIGNMENT = 4096


class HugeMemory:
    """Allocates pieces of large chunks, in huge pages if the system grants them.

    A chunk is freed with the last of its pieces. Pages are committed when they are written to.
    """

    def __init__(self) -> None:
        self._chunk = torch.empty(0, dtype=torch.uint8)
        self._used = 0

    def take(self, num_bytes: int) -> Tensor:
        """Allocate zeros: uint8 [num_bytes], aligned to 4 KiB."""
        if num_bytes > self._chunk.numel() - self._used:
            self._chunk, self._used = _chunk(max(num_bytes, _CHUNK_BYTES)), 0
        piece = self._chunk[self._used : self._used + num_bytes]
        self._used += -(-num_bytes // _ALIGNMENT) * _ALIGNMENT
        return piece


def _chunk(num_bytes: int) -> Tensor:
    memory = mmap.mmap(-1, num_bytes + PAGE_BYTES, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        memory.madvise(mmap.MADV_HUGEPAGE)
    chunk = torch.frombuffer(memory, dtype=torch.uint8)
    start = -chunk.data_ptr() % PAGE_BYTES
    return chunk[start : start + num_bytes]


_MADV_DONTNEED = getattr(mmap, "MADV_DONTNEED", None)


def discard(tensor: Tensor) -> None:
    """Return the memory of a contiguous tensor on the host to the system, if that is possible.

    Its content is undefined from then on. It must not be part of a mapped file.
    """
    libc = ctypes.CDLL(None)
    if _MADV_DONTNEED is None or not hasattr(libc, "madvise"):
        return
    first = -(-tensor.data_ptr() // mmap.PAGESIZE) * mmap.PAGESIZE
    num_bytes = tensor.data_ptr() + tensor.nbytes - first
    if num_bytes >= mmap.PAGESIZE:
        libc.madvise(
            ctypes.c_void_p(first),
            ctypes.c_size_t(num_bytes // mmap.PAGESIZE * mmap.PAGESIZE),
            _MADV_DONTNEED,
        )


_PANEL_OUTPUTS = 32
"""Weights are padded to a multiple of this many outputs, for every instruction set."""

_STEP_BYTES = 4
"""The inputs of each output are padded to a multiple of this many bytes."""

SERIAL_PRODUCTS = 1 << 17
"""Fewer multiply-adds end before other threads have woken up, and use one thread."""

_MAX_GROUP_INPUTS = 256
"""Larger groups are divided, and their scale is repeated."""

_PACKED_AT_ONCE = 2 << 20
"""Numbers of a weight that are packed at once, which needs a temporary copy of them."""

_NUMBERS = ("scales", "offsets", "units", "offset_units")

_RANGES = ((5, 0), (5, 16), (6, 0), (6, 32))
"""Codes of 5 and 6 bits: (bits, zero point)."""


def can_pack_codes(weight: QuantizedWeight) -> bool:
    """Whether the kernels support the codes, group size and activations of a weight."""
    if weight.activations is not None:
        return can_multiply_quantized_rows(weight)
    has_offsets = weight.offsets is not None
    return weight.group_size % GROUP_INPUTS == 0 and not (weight.is_float and has_offsets)


class _Codes(NamedTuple):
    """The encoding of a weight's values for the kernels."""

    kind: str
    """The suffix of the kernels' names."""

    bits: int
    zero: int
    """The zero point, which is subtracted from codes."""

    table: Tensor
    """[16]: of kind `table4`, values plus `zero` in uint8; of kind `float4`, values in float32."""

    def of(self, weight: QuantizedWeight) -> Tensor:
        """Encode the rows of a weight: uint8 [out_features, in_features]."""
        if weight.table is not None or weight.is_float:
            return weight.codes
        return weight.codes ^ 128 if self.bits == 8 else weight.codes + self.zero


class Encoding(NamedTuple):
    """How some weights are packed."""

    codes: _Codes
    scale_bytes: int
    """Bytes of scales and offsets."""


def encoding_of(weights: Sequence[QuantizedWeight]) -> Encoding:
    """Choose the encoding with the fewest bits that holds the values of all weights, which are of
    one format and shape."""
    if weights[0].units is not None:
        return Encoding(_codes_of(weights), 1)
    numbers = [number for w in weights for number in (w.scales, w.offsets) if number is not None]
    is_half = all(number.half().float().equal(number) for number in numbers)
    return Encoding(_codes_of(weights), 2 if is_half else 4)


def _codes_of(weights: Sequence[QuantizedWeight]) -> _Codes:
    weight, group_size = weights[0], _packed_group_size(weights[0])
    no_table = torch.zeros(16, dtype=torch.uint8)
    if weight.is_float and weight.table is None:
        return _Codes("float8", 8, 0, no_table)
    if weight.is_float:
        return _Codes("float4", 4, 0, torch.tensor(weight.table, dtype=torch.float32))
    if weight.table is not None:
        first = int(weight.table[0])
        if weight.table == tuple(range(first, first + 16)):
            return _Codes("int4", 4, -first, no_table)
        table = torch.tensor(weight.table, dtype=torch.int16) + 128
        return _Codes("table4", 4, 128, table.to(torch.uint8))
    extremes = [values.aminmax() for values in (weight.values() for weight in weights)]
    least, most = min(int(low) for low, _ in extremes), max(int(high) for _, high in extremes)
    for bits, zero in _RANGES:
        fits = -zero <= least and most < (1 << bits) - zero
        if fits and group_size % (32 // (bits - 4)) == 0:
            return _Codes(f"int{bits}", bits, zero, no_table)
    return _Codes("int8", 8, 128, no_table)


def _packed_group_size(weight: QuantizedWeight) -> int:
    sizes = range(GROUP_INPUTS, _MAX_GROUP_INPUTS + 1, GROUP_INPUTS)
    return max(size for size in sizes if weight.group_size % size == 0)


class Memory(Protocol):
    """Allocates memory for packed weights."""

    def take(self, num_bytes: int) -> Tensor:
        """Allocate zeros: uint8 [num_bytes], aligned to 4 KiB."""


class Pieces:
    """Consecutive pieces of memory, all of the size of the first one that is taken."""

    def __init__(self, memory: Memory, count: int) -> None:
        self._memory, self._count = memory, count
        self._all = torch.empty(0, dtype=torch.uint8)
        self._num_taken = 0
        self.piece_bytes = 0

    def take(self, num_bytes: int) -> Tensor:
        """The next piece: uint8 [num_bytes]."""
        if self._num_taken == 0:
            self.piece_bytes = -(-num_bytes // _ALIGNMENT) * _ALIGNMENT
            self._all = self._memory.take(self._count * self.piece_bytes)
        first = self._num_taken * self.piece_bytes
        self._num_taken += 1
        return self._all[first : first + num_bytes]


class _Packed:
    """A weight in packed panels of outputs. Batch-invariant: the bits of a row depend neither on
    the other rows nor on the number of threads."""

    _num_parts = 1
    """2 if the weight consists of gate and up projection."""

    def __init__(
        self,
        weight: Tensor | QuantizedWeight,
        library: Library,
        memory: Memory,
        dtype: torch.dtype | None = None,
        *,
        consume: bool = False,
        encoding: Encoding | None = None,
    ) -> None:
        """Pack a weight into `memory`.

        weight: [out_features, in_features], float32, bfloat16 or quantized; dtype: of inputs and
        outputs if the weight is quantized, float32 or bfloat16; consume: whether the memory of the
        original is freed while it is packed, so that only a small part is in memory twice;
        encoding: of a quantized weight, None for the smallest. Raises ValueError for unsupported
        weights.
        """
        self.out_features, self.in_features = weight.shape
        self._consume = consume
        self._library, self._memory = library, memory
        self._quantization: dict[str, int] = {}
        self._suffix = ""
        self._order: Tensor | None = None
        self._activations: Int8Activations | None = None
        if isinstance(weight, QuantizedWeight):
            assert dtype is not None
            self.dtype = dtype
            self._pack_codes(weight, encoding)
        else:
            self.dtype = weight.dtype
            self._pack_dense(weight)
        require(self.dtype in DTYPES, "float32 or bfloat16")

    def _pack_dense(self, weight: Tensor) -> None:
        require(weight.dtype in DTYPES, "a float32 or bfloat16 weight")
        require(weight.device.type == "cpu", "a weight in the host's memory")
        if weight.stride(1) != 1:
            weight = weight.contiguous()
        row_bytes = -(-self.in_features * weight.element_size() // _STEP_BYTES) * _STEP_BYTES
        kernel = f"pack_{DTYPES[weight.dtype]}"
        self._allocate(row_bytes)
        for first, slices in self._slices():
            parts = [weight[rows] for rows in slices]
            rows = parts[0] if len(parts) == 1 else torch.cat(parts)
            task = PackTask(**rows_of(weight=rows))
            self._pack(kernel, task, first, rows.shape[0], row_bytes)
            self._discard(weight, slices)

    def _pack_codes(self, weight: QuantizedWeight, encoding: Encoding | None) -> None:
        require(
            can_pack_codes(weight),
            f"groups of a multiple of {GROUP_INPUTS} inputs, and of floats no offsets",
        )
        if weight.activations is not None:
            self._pack_for_quantized_rows(weight)
            return
        if weight.order is not None:
            self._order = weight.order.int().contiguous()
        packed, scale_bytes = encoding or encoding_of([weight])
        weight = weight.regrouped(_packed_group_size(weight))
        self._suffix, self._table = f"_{packed.kind}", packed.table
        numbers = [tensor for tensor in (weight.scales, weight.offsets) if tensor is not None]
        num_groups = weight.scales.shape[1]
        num_units = 0 if weight.units is None else weight.units.shape[1]
        self._quantization = {
            "group_size": weight.group_size,
            "scale_bytes": scale_bytes,
            "has_offsets": int(weight.offsets is not None),
            "unit_groups": num_groups // num_units if num_units else 0,
            "zero": packed.zero,
            "table": self._table.data_ptr(),
        }
        row_bytes = self.in_features * packed.bits // 8
        row_bytes += (num_groups * scale_bytes + num_units * 2) * len(numbers)
        self._pack_slices(weight, packed.of, row_bytes)

    def _pack_for_quantized_rows(self, weight: QuantizedWeight) -> None:
        self._suffix, self._activations = "_w8a8", weight.activations
        # Each output has a scale and the sum of its weights, of 4 bytes each.
        row_bytes = 8 + -(-self.in_features // _STEP_BYTES) * _STEP_BYTES
        self._pack_slices(weight, lambda rows: rows.codes, row_bytes)

    def _pack_slices(
        self, weight: QuantizedWeight, codes_of: Callable[[QuantizedWeight], Tensor], row_bytes: int
    ) -> None:
        """Pack all slices of a weight. codes_of: encodes some rows for the kernel."""
        self._allocate(row_bytes)
        for first, slices in self._slices():
            rows = stack([weight.rows(rows) for rows in slices])
            tensors = {name: getattr(rows, name) for name in _NUMBERS} | {"codes": codes_of(rows)}
            dense = {name: None if t is None else t.contiguous() for name, t in tensors.items()}
            addresses = {name: address(tensor) for name, tensor in dense.items()}
            task = QuantizedPackTask(**addresses, **self._quantization)
            self._pack(f"pack{self._suffix}", task, first, rows.shape[0], row_bytes)
            self._discard(weight.codes, slices)

    def _allocate(self, row_bytes: int) -> None:
        panel = _PANEL_OUTPUTS // self._num_parts
        num_padded = -(-self.out_features // self._num_parts // panel) * _PANEL_OUTPUTS
        self._packed = self._memory.take(num_padded * row_bytes)

    def _slices(self) -> Iterator[tuple[int, list[slice]]]:
        """Yield the slices that are packed at once, which are whole panels: the first output within
        each part, and the rows of each part."""
        size = self.out_features // self._num_parts
        step = max(1, _PACKED_AT_ONCE // (self.in_features * _PANEL_OUTPUTS)) * _PANEL_OUTPUTS
        for first in range(0, size, step):
            last = min(first + step, size)
            starts = [part * size for part in range(self._num_parts)]
            yield first, [slice(start + first, start + last) for start in starts]

    def _pack(
        self,
        kernel: str,
        task: PackTask | QuantizedPackTask,
        first: int,
        num_rows: int,
        row_bytes: int,
    ) -> None:
        """Pack a slice. first: index of its first output within each part."""
        task.packed = self.address + first * self._num_parts * row_bytes
        task.num_parts = self._num_parts
        task.in_features, task.out_features = self.in_features, num_rows
        threads.run(self._library.kernel(kernel), ctypes.addressof(task), torch.get_num_threads())

    def _discard(self, numbers: Tensor, slices: list[slice]) -> None:
        if self._consume and numbers.is_contiguous():
            for rows in slices:
                discard(numbers[rows])

    def _kernel(self, name: str) -> Kernel:
        return self._library.kernel(f"{name}{self._suffix}")

    @property
    def address(self) -> int:
        """Address of the packed weight, which is never moved."""
        return self._packed.data_ptr()

    @property
    def suffix(self) -> str:
        """The end of the names of the weight's kernels."""
        return self._suffix

    @property
    def quantization(self) -> dict[str, int]:
        """The fields of a task that describe how the weight is quantized."""
        return self._quantization

    @property
    def num_bytes(self) -> int:
        """Bytes of the packed weight."""
        return self._packed.numel()

    def make_deltas(
        self, rows: ActiveRows, max_slots: int, num_modules: int, max_rank: int
    ) -> NativeDeltas:
        """Make slots for what adapters add to the product.

        rows: of the present step; num_modules: that are stacked in this weight; max_rank: of what
        an adapter adds to one.
        """
        sizes = [self.out_features // self._num_parts] * self._num_parts
        limits = max_slots, num_modules, max_rank
        return NativeDeltas(sizes, rows, *limits, self._library, self.dtype)

    def norms(self, first: int, a: Tensor, b: Tensor) -> Tensor:
        """Norms of the rows of the sum of this weight and b @ a, as DoRA needs them.

        first: the row of the weight that is added to the first row of b; a: float32 [rank,
        in_features]; b: float32 [num_rows, rank]. Returns float32 [num_rows].
        """
        dtype = torch.float32 if self._suffix else self.dtype
        if self._order is not None:
            a = a[:, self._order]
        step, norms = max(1, _PACKED_AT_ONCE // self.in_features), []
        for start in range(0, len(b), step):
            some = b[start : start + step]
            at = first + start
            rows = self._gather(torch.arange(at, at + len(some)), dtype).float()
            norms.append(torch.linalg.vector_norm(rows.addmm_(some, a), dim=1))
        return torch.cat(norms)

    def _gather(self, indices: Tensor, dtype: torch.dtype) -> Tensor:
        """Rows of the weight, with its columns as they are packed; dtype: float32, or the
        weight's."""
        num_rows, indices = indices.shape[0], indices.contiguous()
        y = new_rows(num_rows, self.in_features, dtype)
        task = GatherTask(
            batch=ctypes.addressof(batch_of(num_rows, token_ids=indices)),
            packed=self.address,
            **rows_of(y=y),
            in_features=self.in_features,
            out_features=self.out_features,
            num_parts=self._num_parts,
            **self._quantization,
        )
        kernel = self._kernel(f"gather_{DTYPES[dtype]}")
        launch(kernel, task, max(1, min(torch.get_num_threads(), num_rows)))
        return y

    def _multiply(
        self,
        kernel: Kernel,
        rows: Tensor,
        bias: Tensor | None,
        y: Tensor,
        deltas: NativeDeltas | None,
        activation: int = 0,
    ) -> None:
        if rows.dtype != self.dtype or rows.shape[1] != self.in_features:
            raise TypeError(
                f"rows: expected {self.dtype} [*, {self.in_features}], got {rows.dtype}"
                f" {list(rows.shape)}"
            )
        if rows.stride(1) != 1:
            rows = rows.contiguous()
        inner = None if deltas is None else deltas.multiply(rows)
        if self._activations is not None:
            rows = quantize_rows(self._library, rows, self._activations)
        num_rows = rows.shape[0]
        if self._order is not None:
            rows = self._permute(rows, self._order)
        num_products = num_rows * self.in_features * self.out_features
        num_threads = threads.count_for(num_products, SERIAL_PRODUCTS)
        task = LinearTask(
            num_threads=num_threads,
            num_rows=count_address(num_rows),
            **rows_of(x=rows, y=y),
            weight=self.address,
            bias=address(bias),
            in_features=self.in_features,
            out_features=self.out_features,
            activation=activation,
            **self._quantization,
        )
        if deltas is not None and inner is not None:
            for name, value in deltas.fields(inner).items():
                setattr(task, name, value)
        launch(kernel, task, num_threads)

    def _permute(self, rows: Tensor, order: Tensor) -> Tensor:
        """Reorder the columns of rows. order: int32 [in_features]."""
        num_rows, size = rows.shape
        y = new_rows(num_rows, size, rows.dtype)
        task = PermuteTask(
            num_rows=count_address(num_rows),
            **rows_of(x=rows, y=y),
            order=order.data_ptr(),
            size=size,
        )
        kernel = self._library.kernel(f"permute_{DTYPES[rows.dtype]}")
        launch(kernel, task, threads.count_for(rows.numel()))
        return y


class NativeWeight(_Packed):
    """The weight of a linear layer, packed for the C++ kernels. Implements `PackedWeight`."""

    @cached_property
    def _kernels(self) -> dict[torch.dtype, Kernel]:
        """By dtype of the outputs."""
        names = {self.dtype: DTYPES[self.dtype], torch.float32: "float32"}
        if self.dtype != torch.float32:
            names[torch.float32] = f"{DTYPES[self.dtype]}_float32"
        return {dtype: self._kernel(f"linear_{name}") for dtype, name in names.items()}

    def apply(
        self,
        rows: Tensor,
        bias: Tensor | None = None,
        *,
        output_dtype: torch.dtype | None = None,
        deltas: NativeDeltas | None = None,
        activation: str | None = None,
    ) -> Tensor:
        """rows @ weight.T + bias, and what adapters add.

        rows: [num_rows, in_features], of `dtype`; output_dtype: `dtype`, or float32, which leaves
        sums unrounded; activation: one of `reference.ACTIVATIONS`, which is applied before sums are
        rounded to `dtype`, or None. Returns [num_rows, out_features]. Raises TypeError for other
        rows.
        """
        y = new_rows(rows.shape[0], self.out_features, output_dtype or self.dtype)
        if activation is None:
            self._multiply(self._kernels[y.dtype], rows, bias, y, deltas)
        else:
            require(y.dtype == self.dtype, "outputs of the weight's dtype with an activation")
            kernel = self._kernel(f"activated_linear_{DTYPES[self.dtype]}")
            index = reference.ACTIVATIONS.index(activation)
            self._multiply(kernel, rows, bias, y, deltas, index)
        return y

    def gather(self, token_ids: Tensor) -> Tensor:
        """Dequantize rows of the weight. token_ids: int64 [num_rows]. Returns [num_rows,
        in_features], with zeros for token ids out of range."""
        require(token_ids.dtype == torch.int64, "int64 token ids")
        require(self._order is None, "a table with its columns in their order")
        return self._gather(token_ids, self.dtype)


class NativeGatedWeight(_Packed):
    """The weights of activation(x @ G.T) * (x @ U.T), computed without storing both products."""

    _num_parts = 2

    def __init__(
        self, weight: Tensor | QuantizedWeight, activation: str, *arguments: Any, **options: Any
    ) -> None:
        """Pack the weights: G, then U, [2 * size, in_features].

        activation: one of `reference.ACTIVATIONS`; the others: as for `NativeWeight`.
        """
        super().__init__(weight, *arguments, **options)
        self._product = self._kernel(f"gated_linear_{DTYPES[self.dtype]}")
        self._activation = reference.ACTIVATIONS.index(activation)

    def apply(
        self, rows: Tensor, bias: Tensor | None = None, deltas: NativeDeltas | None = None
    ) -> Tensor:
        """Apply the gated projection. rows: [num_rows, in_features]; bias: [2 * size]; deltas: what
        adapters add to both products. Returns [num_rows, size]."""
        y = new_rows(rows.shape[0], self.out_features // 2, self.dtype)
        self._multiply(self._product, rows, bias, y, deltas, self._activation)
        return y
