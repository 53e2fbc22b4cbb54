"""Products with quantized weights, which stay packed on the device.

Decodes are bound by reading the packed weight. The inputs are divided into runs of up to 64, each
within one group. The codes of a run are stored by output, so that a tile is contiguous in memory.
Codes of 4 bits share a byte with those of the next run, which are in the upper bits: unpacking
leaves each code in its register, from which it enters the product as the left operand. Values of
codes are small integers or fp8 numbers, which bfloat16 and float16 represent exactly, or those of a
table, which is rounded to the dtype of the rows and read from shared memory. Rows are multiplied by
values, and the sum of a run by its scale, in float32. Only sums are rounded.

For decodes with few outputs the inputs are split among programs, too. The splits depend only on the
shape of the weight, and are added in order, whether one program computes all of them or each has
its own.
"""

import math
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor, nn
from torch.cuda import get_device_capability

from pagewire_kernels.interface import FLOATS
from pagewire_kernels.quantized_weight import GROUP_INPUTS, QuantizedWeight
from pagewire_kernels.triton.checks import dense, expect, expect_dtype, expect_tensors
from pagewire_kernels.triton.linear import GROUP_ROWS, tile_of

_MAX_RUN = 64
_TILE_OUTPUTS = 64
"""Weights are padded to a multiple of this many outputs."""

_MAX_SPLIT_ROWS = 64
"""With more rows there are enough programs without splits."""

_WANTED_PROGRAMS = 264
"""Two for each multiprocessor of an H100."""

_MIN_SPLIT_INPUTS = 512
_GATHER_TILE = _SUM_TILE = 1024


@triton.jit
def _values(codes, table, KIND: tl.constexpr, FIRST: tl.constexpr):
    """The values of codes, in float32 or the dtype of the table. FIRST: of consecutive values.

    A small integer is converted by placing it into the lowest bits of 2^23, which is faster than a
    conversion instruction. Looking a code up in shared memory takes one instruction; selecting from
    constants would take ten or more, and an indirect load from global memory would keep the codes
    from being loaded ahead.
    """
    if KIND == "table":
        values = tl.gather(table, codes.to(tl.int32).reshape(codes.numel), 0).reshape(codes.shape)
    elif KIND == "e4m3":
        values = codes.to(tl.float8e4nv, bitcast=True).to(tl.float32)
    elif KIND == "bits of e4m3":
        # The same bits, shifted, are a float16 number that is 2^8 times smaller.
        bits = codes.to(tl.int16)
        half = ((bits & 0x80) << 8 | (bits & 0x7F) << 7).to(tl.float16, bitcast=True)
        values = tl.where((bits & 0x7F) == 0x7F, float("nan"), half.to(tl.float32) * 256.0)
    else:
        values = (codes.to(tl.int32) | 0x4B000000).to(tl.float32, bitcast=True)
        values -= 8388608.0 - FIRST
    return values


@triton.jit
def _numbers(
    numbers,
    units,
    run,
    out,
    NUM_PADDED: tl.constexpr,
    GROUP_RUNS: tl.constexpr,
    UNIT_RUNS: tl.constexpr,
):
    """Scales or offsets of some outputs for one run of inputs."""
    found = tl.load(numbers + run // GROUP_RUNS * NUM_PADDED + out).to(tl.float32)
    if UNIT_RUNS > 0:
        found *= tl.load(units + run // UNIT_RUNS * NUM_PADDED + out).to(tl.float32)
    return found


# Not specialized by num_rows: code specialized for one row might sum in another order.
@triton.jit(do_not_specialize=["num_rows"])
def _product(
    output,
    rows,
    bias,
    codes,
    table,
    scales,
    offsets,
    units,
    offset_units,
    num_rows,
    row_stride,
    NUM_OUTPUTS: tl.constexpr,
    NUM_INPUTS: tl.constexpr,
    NUM_PADDED: tl.constexpr,
    KIND: tl.constexpr,
    FIRST: tl.constexpr,
    BITS: tl.constexpr,
    RUN: tl.constexpr,
    GROUP_RUNS: tl.constexpr,
    UNIT_RUNS: tl.constexpr,
    HAS_OFFSETS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    NUM_STEPS: tl.constexpr,
    NUM_SPLITS: tl.constexpr,
    IS_SPLIT: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    TILE_OUTPUTS: tl.constexpr,
    GROUP_ROWS: tl.constexpr,
):
    """Program (tile of rows and outputs, split of the inputs if IS_SPLIT).

    output: [num_rows, NUM_OUTPUTS], or [NUM_SPLITS, num_rows, NUM_OUTPUTS] if IS_SPLIT.
    """
    row_tile, output_tile = tile_of(num_rows, NUM_OUTPUTS, TILE_ROWS, TILE_OUTPUTS, GROUP_ROWS)
    row = row_tile * TILE_ROWS + tl.arange(0, TILE_ROWS)
    out = output_tile * TILE_OUTPUTS + tl.arange(0, TILE_OUTPUTS)
    is_row = row < num_rows
    row_at = rows + row.to(tl.int64)[:, None] * row_stride
    split_steps: tl.constexpr = (NUM_STEPS + NUM_SPLITS - 1) // NUM_SPLITS
    code_at = codes + out[:, None] * RUN + tl.arange(0, RUN)[None, :]
    if IS_SPLIT:
        first_split = tl.program_id(1)
        end_split = first_split + 1
        code_at += (first_split * split_steps).to(tl.int64) * (NUM_PADDED * RUN)
    else:
        first_split, end_split = 0, NUM_SPLITS
    if KIND == "table":
        table = tl.load(table + tl.arange(0, 16))
    total = tl.zeros([TILE_OUTPUTS, TILE_ROWS], tl.float32)
    for split in range(first_split, end_split):
        part = tl.zeros([TILE_OUTPUTS, TILE_ROWS], tl.float32)
        end = tl.minimum((split + 1) * split_steps, NUM_STEPS)
        for step in range(split * split_steps, end):
            packed = tl.load(code_at)
            code_at += NUM_PADDED * RUN
            for half in tl.static_range(8 // BITS):
                run = step * (8 // BITS) + half
                column = run * RUN + tl.arange(0, RUN)
                is_there = is_row[:, None]
                if NUM_STEPS * RUN * (8 // BITS) != NUM_INPUTS:  # half of the last bytes is unused
                    is_there = is_there & (column < NUM_INPUTS)[None, :]
                x = tl.load(row_at + column[None, :], mask=is_there, other=0.0)
                found = packed if BITS == 8 else (packed >> 4 if half == 1 else packed & 15)
                values = _values(found, table, KIND, FIRST).to(x.dtype)
                sums = tl.dot(values, tl.trans(x), input_precision="ieee")
                scale = _numbers(scales, units, run, out, NUM_PADDED, GROUP_RUNS, UNIT_RUNS)
                part += sums * scale[:, None]
                if HAS_OFFSETS:
                    offset = _numbers(
                        offsets, offset_units, run, out, NUM_PADDED, GROUP_RUNS, UNIT_RUNS
                    )
                    part += offset[:, None] * tl.sum(x.to(tl.float32), axis=1)[None, :]
        total += part
    is_out = out < NUM_OUTPUTS
    if HAS_BIAS and not IS_SPLIT:
        total += tl.load(bias + out, mask=is_out, other=0.0).to(tl.float32)[:, None]
    place = row.to(tl.int64)
    if IS_SPLIT:
        place += first_split.to(tl.int64) * num_rows
    at = output + place[None, :] * NUM_OUTPUTS + out[:, None]
    tl.store(at, total.to(output.dtype.element_ty), mask=is_out[:, None] & is_row[None, :])


@triton.jit(do_not_specialize=["num_rows"])
def _sum_splits(
    output,
    parts,
    bias,
    num_rows,
    NUM_OUTPUTS: tl.constexpr,
    NUM_SPLITS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    TILE: tl.constexpr,
):
    """Program (row, tile of outputs)."""
    row = tl.program_id(0).to(tl.int64)
    out = tl.program_id(1) * TILE + tl.arange(0, TILE)
    mask = out < NUM_OUTPUTS
    total = tl.zeros([TILE], tl.float32)
    for split in range(NUM_SPLITS):
        total += tl.load(parts + (split * num_rows + row) * NUM_OUTPUTS + out, mask, other=0.0)
    if HAS_BIAS:
        total += tl.load(bias + out, mask, other=0.0).to(tl.float32)
    tl.store(output + row * NUM_OUTPUTS + out, total.to(output.dtype.element_ty), mask)


@triton.jit
def _gather(
    output,
    token_ids,
    codes,
    table,
    scales,
    offsets,
    units,
    offset_units,
    NUM_OUTPUTS: tl.constexpr,
    NUM_INPUTS: tl.constexpr,
    NUM_PADDED: tl.constexpr,
    KIND: tl.constexpr,
    FIRST: tl.constexpr,
    BITS: tl.constexpr,
    RUN: tl.constexpr,
    GROUP_RUNS: tl.constexpr,
    UNIT_RUNS: tl.constexpr,
    HAS_OFFSETS: tl.constexpr,
    TILE: tl.constexpr,
):
    """Program (row, tile of inputs): dequantize the rows of some tokens."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * TILE + tl.arange(0, TILE)
    token = tl.load(token_ids + row)
    mask = (column < NUM_INPUTS) & (token >= 0) & (token < NUM_OUTPUTS)
    run = tl.where(mask, column // RUN, 0)
    token = tl.where(mask, token, 0)
    if BITS == 8:
        found = tl.load(codes + (run * NUM_PADDED + token) * RUN + column % RUN)
    else:
        found = tl.load(codes + (run // 2 * NUM_PADDED + token) * RUN + column % RUN)
        found = tl.where(run % 2 == 1, found >> 4, found & 15)
    scale = _numbers(scales, units, run, token, NUM_PADDED, GROUP_RUNS, UNIT_RUNS)
    if KIND == "table":
        table = tl.load(table + tl.arange(0, 16))
    values = _values(found, table, KIND, FIRST).to(tl.float32) * scale
    if HAS_OFFSETS:
        values += _numbers(offsets, offset_units, run, token, NUM_PADDED, GROUP_RUNS, UNIT_RUNS)
    values = tl.where(mask, values, 0.0).to(output.dtype.element_ty)
    tl.store(output + row * NUM_INPUTS + column, values, mask=column < NUM_INPUTS)


def can_pack_codes(weight: QuantizedWeight) -> bool:
    """Whether the kernels support the group size of a weight."""
    return weight.group_size % GROUP_INPUTS == 0


class TritonQuantizedWeight:
    """A quantized weight on a GPU. Implements `PackedWeight`."""

    def __init__(
        self,
        weight: QuantizedWeight,
        dtype: torch.dtype,
        device: torch.device,
        *,
        batch_invariant: bool,
        has_float8: bool | None = None,
    ) -> None:
        """Pack a weight.

        dtype: of the rows that are multiplied by it; batch_invariant: whether the bits of a row
        must not depend on the other rows; has_float8: whether the device converts fp8 numbers,
        None to query it. Raises ValueError for an unsupported group size.
        """
        if has_float8 is None:
            has_float8 = device.type != "cuda" or get_device_capability(device) >= (8, 9)
        expect(can_pack_codes(weight), f"groups: expected a multiple of {GROUP_INPUTS} inputs")
        self.out_features, self.in_features = weight.shape
        self._dtype, self._is_invariant = dtype, batch_invariant
        self._order = None if weight.order is None else weight.order.to(device)
        run = math.gcd(weight.group_size, _MAX_RUN if dtype.itemsize == 2 else _MAX_RUN // 2)
        num_padded = -(-self.out_features // _TILE_OUTPUTS) * _TILE_OUTPUTS
        self._num_padded = num_padded
        weight = weight.to(device).padded(num_padded)
        is_signed = weight.table is None and not weight.is_float
        codes = weight.codes ^ 128 if is_signed else weight.codes
        runs = codes.unflatten(1, (-1, run)).transpose(0, 1)
        if weight.bits == 4:
            runs = nn.functional.pad(runs, (0, 0, 0, 0, 0, len(runs) % 2))
            runs = runs[::2] | runs[1::2] << 4
        self._codes = runs.contiguous()
        numbers = [array for array in (weight.scales, weight.offsets) if array is not None]
        stored = torch.float32
        if weight.units is not None:
            stored = torch.int8
        elif all(number.half().float().equal(number) for number in numbers):
            stored = torch.float16
        meaning = _meaning(weight, has_float8)
        table = self._codes
        if meaning["KIND"] == "table":
            table = torch.tensor(weight.table, dtype=dtype, device=device)
        self._tensors = (
            self._codes,
            table,
            self._by_group(weight.scales, stored),
            self._by_group(weight.offsets, stored),
            self._by_group(weight.units, torch.float16),
            self._by_group(weight.offset_units, torch.float16),
        )
        self.num_bytes = sum(tensor.nbytes for tensor in set(self._tensors))
        num_units = 0 if weight.units is None else weight.units.shape[1]
        self._constants = {
            "NUM_OUTPUTS": self.out_features,
            "NUM_INPUTS": self.in_features,
            "NUM_PADDED": num_padded,
            **meaning,
            "BITS": weight.bits,
            "RUN": run,
            "GROUP_RUNS": weight.group_size // run,
            "UNIT_RUNS": self.in_features // num_units // run if num_units else 0,
            "HAS_OFFSETS": weight.offsets is not None,
            "enable_fp_fusion": False,
        }
        tiles, splits = num_padded // _TILE_OUTPUTS, self.in_features // _MIN_SPLIT_INPUTS
        self.num_splits = max(1, min(_WANTED_PROGRAMS // tiles, splits))
        """Splits of the inputs, which have partial sums of their own."""

    def _by_group(self, numbers: Tensor | None, dtype: torch.dtype) -> Tensor:
        """Scales, offsets or units as [groups + 1, outputs]: the last group is for the unused half
        of the last bytes. If there are none, any tensor, which is not read."""
        if numbers is None:
            return self._codes
        return nn.functional.pad(numbers, (0, 1)).t().to(dtype).contiguous()

    def apply(
        self, rows: Tensor, bias: Tensor | None = None, *, output_dtype: torch.dtype | None = None
    ) -> Tensor:
        """rows @ weight.T + bias. rows: [num_rows, in_features]. Returns [num_rows, out_features],
        in `output_dtype` or the dtype of the rows. Raises TypeError or ValueError for unsupported
        tensors."""
        rows = dense(rows)
        expect_tensors(
            ("rows", rows, (self._dtype,), (None, self.in_features)),
            ("bias", bias, FLOATS, (self.out_features,)),
        )
        if self._order is not None:
            rows = rows[:, self._order]
        num_rows, has_bias = len(rows), bias is not None
        output = rows.new_empty((num_rows, self.out_features), dtype=output_dtype or rows.dtype)
        if num_rows == 0:
            return output
        tiling = self._tiling(num_rows)
        # Unless the order of summation must be fixed, inputs are split only if that is faster.
        can_split = self._is_invariant or num_rows <= _MAX_SPLIT_ROWS
        num_splits = self.num_splits if can_split else 1
        is_split = num_splits > 1 and num_rows <= _MAX_SPLIT_ROWS
        parts = output
        if is_split:
            parts = rows.new_empty((num_splits, *output.shape), dtype=torch.float32)
        num_tiles = triton.cdiv(num_rows, tiling["TILE_ROWS"])
        num_tiles *= triton.cdiv(self.out_features, tiling["TILE_OUTPUTS"])
        _product[(num_tiles, num_splits if is_split else 1)](
            parts,
            rows,
            output if bias is None else bias,
            *self._tensors,
            num_rows,
            rows.stride(0),
            HAS_BIAS=has_bias and not is_split,
            NUM_STEPS=len(self._codes),
            NUM_SPLITS=num_splits,
            IS_SPLIT=is_split,
            GROUP_ROWS=GROUP_ROWS,
            **tiling,
            **self._constants,
        )
        if is_split:
            _sum_splits[(num_rows, triton.cdiv(self.out_features, _SUM_TILE))](
                output,
                parts,
                output if bias is None else bias,
                num_rows,
                NUM_OUTPUTS=self.out_features,
                NUM_SPLITS=num_splits,
                HAS_BIAS=has_bias,
                TILE=_SUM_TILE,
                num_warps=4,
                enable_fp_fusion=False,
            )
        return output

    def _tiling(self, num_rows: int) -> dict[str, int]:
        """Tile sizes for this number of rows; the same for all numbers if batch-invariant."""
        tile_rows, tile_outputs, num_warps = _MAX_SPLIT_ROWS, _TILE_OUTPUTS, 4
        if not self._is_invariant:
            tile_rows = min(max(16, triton.next_power_of_2(num_rows)), _MAX_SPLIT_ROWS)
            if num_rows > 2 * _MAX_SPLIT_ROWS and self._num_padded % 128 == 0:
                tile_outputs, num_warps = 128, 8
        # More would exceed the shared memory of compute capability 8.9 and 12.
        num_stages = 4 if tile_rows < 64 else 3
        num_stages = 2 if self._dtype == torch.float32 else num_stages
        return {
            "TILE_ROWS": tile_rows,
            "TILE_OUTPUTS": tile_outputs,
            "num_warps": num_warps,
            "num_stages": num_stages,
        }

    def gather(self, token_ids: Tensor) -> Tensor:
        """Dequantize rows of the weight. token_ids: int64 [num_rows]. Returns [num_rows,
        in_features], with zeros for token ids out of range."""
        expect_dtype("token_ids", token_ids, torch.int64)
        output = self._codes.new_empty((len(token_ids), self.in_features), dtype=self._dtype)
        if output.numel():
            _gather[(len(token_ids), triton.cdiv(self.in_features, _GATHER_TILE))](
                output,
                token_ids.contiguous(),
                *self._tensors,
                TILE=_GATHER_TILE,
                num_warps=4,
                **self._constants,
            )
        return output


def _meaning(weight: QuantizedWeight, has_float8: bool) -> dict[str, Any]:
    """The constants that say what codes mean to `_values`."""
    if weight.table is None and weight.is_float:
        return {"KIND": "e4m3" if has_float8 else "bits of e4m3", "FIRST": 0}
    table = weight.table or tuple(range(-128, 128))
    if table == tuple(range(int(table[0]), int(table[0]) + len(table))):
        return {"KIND": "consecutive", "FIRST": int(table[0])}
    return {"KIND": "table", "FIRST": 0}
