"""Products with weights in fewer bits: those of the dequantized weights, each row the same in any
batch."""

import itertools
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from pagewire_kernels.quantized_weight import (
    SIGNED_TABLE,
    UNSIGNED_TABLE,
    QuantizedWeight,
    stack,
)
from pagewire_kernels.reference.backend import LayerKernels
from pagewire_kernels.select import can_keep_weights_packed
from pagewire_kernels.triton import TritonLayerKernels, TritonQuantizedWeight, can_pack_codes
from tests.support.gpu_kernels import DEVICE, INTERPRETED, MARKS
from tests.support.quantized_files import FP4, NF4
from tests.support.quantized_weights import as_multiplied, random_weight

pytestmark = MARKS

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
NOT_LINEAR = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
"""Of the format IQ4_NL."""

SIZES = [(4, 16), (4, 32), (4, 96), (4, 128), (4, 384), (8, 16), (8, 32), (8, 384)]
KINDS = [
    (bits, group_size, offsets, scales, dtype)
    for (bits, group_size), offsets, scales, dtype in itertools.product(
        SIZES, [False, True], ["float16", "float32", "units"], DTYPES
    )
    if (scales == "float16" or dtype == torch.float32) and (group_size < 128 or scales != "units")
]


def _rows(num_rows: int, weight: QuantizedWeight, dtype: torch.dtype) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(num_rows, weight.shape[1], generator=generator).to(dtype)


def _assert_exact_but_for_sums(
    sums: Tensor, rows: Tensor, weight: QuantizedWeight, bias: Tensor | float = 0.0
) -> None:
    """Sums in float32 are those of dequantized weights, relative to what they add up."""
    dense = weight.dequantize().double()
    exact = rows.double() @ dense.T + bias
    spread = rows.double().abs() @ dense.abs().T + torch.as_tensor(bias).abs()
    whole = weight.without_units().offsets
    if whole is not None:  # which may cancel what the codes give
        offsets = whole.double().abs().repeat_interleave(weight.group_size, dim=1)
        spread = spread + 2 * rows.double().abs() @ offsets.T
    assert ((sums.cpu() - exact).abs() <= 1e-6 * spread).all()


def _assert_rounded(found: Tensor, exact: Tensor) -> None:
    """To the nearest; the interpreter cuts bits off to get bfloat16 numbers."""
    expected = exact.to(found.dtype)
    if INTERPRETED and found.dtype == torch.bfloat16:
        expected = (exact.view(torch.int32) & -(1 << 16)).view(torch.float32).bfloat16()
    assert torch.equal(found, expected)


def _packed(
    weight: QuantizedWeight, dtype: torch.dtype, *, batch_invariant: bool = True
) -> TritonQuantizedWeight:
    return TritonQuantizedWeight(weight, dtype, DEVICE, batch_invariant=batch_invariant)


@pytest.mark.parametrize(("bits", "group_size", "offsets", "scales", "dtype"), KINDS)
def test_products_are_those_of_the_dequantized_weight(
    bits: int, group_size: int, offsets: bool, scales: str, dtype: torch.dtype
) -> None:
    num_inputs = 384 if group_size > 96 else 192
    weight = random_weight(39, num_inputs, bits, group_size, offsets=offsets, scales=scales)
    rows, bias = _rows(5, weight, dtype), torch.linspace(-1, 1, 39).to(dtype)
    packed = _packed(weight, dtype)
    sums = packed.apply(rows.to(DEVICE), bias.to(DEVICE), output_dtype=torch.float32)
    _assert_exact_but_for_sums(sums, rows, weight, bias.double())
    _assert_rounded(packed.apply(rows.to(DEVICE), bias.to(DEVICE)), sums)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_columns_may_stand_in_another_order_than_inputs(dtype: torch.dtype) -> None:
    weight = random_weight(39, 384, 4, 64, offsets=True, ordered=False)
    rows = _rows(5, weight, dtype)
    sums = _packed(weight, dtype).apply(rows.to(DEVICE), output_dtype=torch.float32)
    _assert_exact_but_for_sums(sums, rows, weight)


@pytest.mark.parametrize("scales", ["float16", "units"])
@pytest.mark.parametrize("table", [NOT_LINEAR, UNSIGNED_TABLE, tuple(range(15, -1, -1))])
def test_codes_of_four_bits_mean_what_their_table_says(table: tuple[int, ...], scales: str) -> None:
    weight = random_weight(64, 192, 4, 32, offsets=True, scales=scales, table=table)
    rows = _rows(3, weight, torch.float16)
    sums = _packed(weight, torch.float16).apply(rows.to(DEVICE), output_dtype=torch.float32)
    _assert_exact_but_for_sums(sums, rows, weight)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("table", [NF4, FP4])
def test_codes_of_four_bits_may_be_floats_which_are_rounded_to_the_dtype_of_the_rows(
    table: tuple[float, ...], dtype: torch.dtype
) -> None:
    """Every code is among them, of both halves of a byte."""
    weight = random_weight(
        39, 320, 4, 64, offsets=False, scales="float32", table=table, is_float=True
    )
    weight.codes[0, 56:72] = torch.arange(16)
    weight.codes[1, 120:136] = torch.arange(16)
    rounded, packed = as_multiplied(weight, dtype), _packed(weight, dtype)
    rows = torch.cat([torch.eye(320).to(dtype), _rows(7, weight, dtype)])
    sums = packed.apply(rows.to(DEVICE), output_dtype=torch.float32)
    assert torch.equal(sums[:320].cpu(), rounded.dequantize().T)
    _assert_exact_but_for_sums(sums, rows, rounded)
    tokens = torch.tensor([0, 1, 38], device=DEVICE)
    _assert_rounded(packed.gather(tokens).cpu(), rounded.dequantize()[tokens.cpu()])


@pytest.mark.parametrize(
    ("group_size", "dtype"), [(16, torch.float16), *((256, dtype) for dtype in DTYPES)]
)
@pytest.mark.parametrize("has_float8", [False, True])
def test_codes_may_be_floats(has_float8: bool, group_size: int, dtype: torch.dtype) -> None:
    """Every number of the type is among them."""
    if has_float8 and not INTERPRETED and torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("this GPU lacks float8")
    weight = random_weight(39, 256, 8, group_size, offsets=False, scales="float32", is_float=True)
    weight.codes[0, :127] = torch.arange(127)
    weight.codes[1, :127] = torch.arange(128, 255)
    packed = TritonQuantizedWeight(
        weight, dtype, DEVICE, batch_invariant=True, has_float8=has_float8
    )
    rows = torch.cat([torch.eye(256).to(dtype), _rows(7, weight, dtype)])
    sums = packed.apply(rows.to(DEVICE), output_dtype=torch.float32)
    assert torch.equal(sums[:256].cpu(), weight.dequantize().T)
    _assert_exact_but_for_sums(sums, rows, weight)
    tokens = torch.tensor([0, 1, 38], device=DEVICE)
    _assert_rounded(packed.gather(tokens).cpu(), weight.dequantize()[tokens.cpu()])
    if INTERPRETED and has_float8:
        return  # it takes the type's NaN for 480
    weight.codes[1, 5] = 0x7F
    broken = TritonQuantizedWeight(
        weight, dtype, DEVICE, batch_invariant=True, has_float8=has_float8
    )
    sums = broken.apply(rows[-1:].to(DEVICE), output_dtype=torch.float32)[0]
    assert sums.isnan().tolist() == [i == 1 for i in range(39)]


@pytest.mark.parametrize("shape", [(1, 16), (3, 48), (130, 144), (64, 80), (129, 32)], ids=str)
@pytest.mark.parametrize("bits", [4, 8])
def test_shapes_that_fill_no_tile(shape: tuple[int, int], bits: int) -> None:
    weight = random_weight(*shape, bits, 16, offsets=True, scales="float32")
    rows = _rows(18, weight, torch.float32)
    sums = _packed(weight, torch.float32).apply(rows.to(DEVICE))
    _assert_exact_but_for_sums(sums, rows, weight)


SOME = (1, 16, 17, 63, 64, 65)


@pytest.mark.parametrize(
    ("bits", "scales", "table", "offsets", "dtype", "counts"),
    [
        (4, "units", SIGNED_TABLE, True, torch.float16, SOME),
        pytest.param(
            4, "units", SIGNED_TABLE, True, torch.float16, range(1, 66), marks=pytest.mark.long
        ),
        (4, "float16", SIGNED_TABLE, False, torch.bfloat16, SOME),
        (4, "float32", NF4, False, torch.bfloat16, SOME),
        (8, "float32", SIGNED_TABLE, True, torch.float32, SOME),
    ],
)
def test_a_row_has_the_same_bits_alone_and_in_any_batch(
    bits: int,
    scales: str,
    table: tuple[float, ...],
    offsets: bool,
    dtype: torch.dtype,
    counts: Sequence[int],
) -> None:
    weight = random_weight(
        39, 1024, bits, 64, offsets=offsets, scales=scales, table=table, is_float=table is NF4
    )
    packed, rows = _packed(weight, dtype), _rows(130, weight, dtype).to(DEVICE)
    together = packed.apply(rows, output_dtype=torch.float32)
    _assert_exact_but_for_sums(together, rows.cpu(), as_multiplied(weight, dtype))
    assert packed.num_splits > 1
    for n in counts:
        assert torch.equal(packed.apply(rows[:n], output_dtype=torch.float32), together[:n]), n
    for part in (slice(63, 66), slice(129, 130), slice(7, 130), slice(100, 110)):
        assert torch.equal(packed.apply(rows[part], output_dtype=torch.float32), together[part])


@pytest.mark.parametrize("num_rows", [1, 16, 17, 33, 64, 65, 129])
@pytest.mark.parametrize("bits", [4, 8])
def test_tiles_that_suit_the_number_of_rows_give_the_same_products(
    num_rows: int, bits: int
) -> None:
    weight = random_weight(128, 1056, bits, 32, offsets=True)
    rows = _rows(num_rows, weight, torch.float16)
    packed = _packed(weight, torch.float16, batch_invariant=False)
    sums = packed.apply(rows.to(DEVICE), output_dtype=torch.float32)
    _assert_exact_but_for_sums(sums, rows, weight)


def test_a_stack_of_weights_is_one_product() -> None:
    parts = [
        random_weight(48, 128, 4, 32, offsets=False),
        random_weight(16, 128, 4, 64, offsets=True, scales="float32"),
        random_weight(16, 128, 8, 32, offsets=True, scales="units"),
    ]
    rows = _rows(4, parts[0], torch.float16)
    found = _packed(stack(parts), torch.float16).apply(rows.to(DEVICE), output_dtype=torch.float32)
    for part, sums in zip(parts, found.split([48, 16, 16], dim=1), strict=True):
        _assert_exact_but_for_sums(sums, rows, part)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("bits", "scales"), [(4, "units"), (4, "float16"), (8, "float32")])
def test_rows_by_token(bits: int, scales: str, dtype: torch.dtype) -> None:
    weight = random_weight(70, 1056, bits, 16, offsets=True, scales=scales)
    found = _packed(weight, dtype).gather(torch.tensor([0, 33, 69, -1, 70], device=DEVICE)).cpu()
    _assert_rounded(found[:3], weight.dequantize()[[0, 33, 69]])
    assert not found[3:].any()


def test_rows_of_any_strides_and_no_rows() -> None:
    weight = random_weight(20, 64, 4, 32, offsets=False)
    packed = _packed(weight, torch.float32)
    wide = _rows(6, weight, torch.float32).repeat(1, 2).to(DEVICE)
    expected = packed.apply(wide[:, :64].contiguous())
    assert torch.equal(packed.apply(wide[:, :64]), expected)
    assert torch.equal(packed.apply(wide[:, :64].t().contiguous().t()), expected)
    assert packed.apply(wide[:0, :64]).shape == (0, 20)
    assert packed.gather(torch.zeros(0, dtype=torch.int64, device=DEVICE)).shape == (0, 64)


def test_what_would_be_misread_is_refused() -> None:
    weight = random_weight(20, 24, 4, 8, offsets=False)
    assert not can_pack_codes(weight)
    with pytest.raises(ValueError, match="groups: expected a multiple of 16 inputs"):
        _packed(weight, torch.float32)
    packed = _packed(random_weight(20, 64, 4, 32, offsets=False), torch.float32)
    with pytest.raises(TypeError, match="rows: expected float32, got"):
        packed.apply(torch.ones(2, 64, dtype=torch.float16, device=DEVICE))
    with pytest.raises(ValueError, match=r"rows: expected shape \[\*, 64\], got \[2, 32\]"):
        packed.apply(torch.ones(2, 32, device=DEVICE))


@pytest.mark.parametrize("dtype", DTYPES)
def test_weights_are_packed_if_the_kernels_are_right_on_the_device(
    dtype: torch.dtype, caplog: pytest.LogCaptureFixture
) -> None:
    assert can_keep_weights_packed(TritonLayerKernels(), DEVICE, dtype)
    assert not caplog.messages
    assert not can_keep_weights_packed(LayerKernels(), DEVICE, dtype)

    def off(weight: QuantizedWeight) -> TritonQuantizedWeight:
        return _packed(replace(weight, scales=weight.scales * 1.01), dtype)

    assert not can_keep_weights_packed(TritonLayerKernels(), DEVICE, dtype, off)
    assert "quantized weights are dequantized" in caplog.messages[0]
    assert "differ from the reference" in caplog.messages[0]
