"""Products with weights in fewer bits are those of the dequantized weights, and batch-invariant."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from pagewire_kernels import reference
from pagewire_kernels.cpu.build import INSTRUCTION_SETS, compiler, library_path
from pagewire_kernels.cpu.layers import NativeLayerKernels
from pagewire_kernels.cpu.linear import (
    HugeMemory,
    NativeGatedWeight,
    NativeWeight,
    can_pack_codes,
)
from pagewire_kernels.cpu.native_library import Library, instruction_sets
from pagewire_kernels.quantized_weight import (
    SIGNED_TABLE,
    UNSIGNED_TABLE,
    QuantizedWeight,
    stack,
)
from tests.support.quantized_files import FP4, NF4
from tests.support.quantized_weights import as_multiplied, random_weight

DTYPES = [torch.float32, torch.bfloat16]
TABLE = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
"""Of the format IQ4_NL, which is not linear."""

pytestmark = pytest.mark.skipif(compiler() is None, reason="nothing to build the kernels with")


@pytest.fixture(scope="module", params=[*INSTRUCTION_SETS])
def kernels(request: pytest.FixtureRequest) -> Library:
    if request.param not in instruction_sets():
        pytest.skip(f"this processor lacks {request.param}")
    return Library(library_path(request.param), request.param)


def _rows(num_rows: int, weight: QuantizedWeight, dtype: torch.dtype) -> Tensor:
    return torch.randn(num_rows, weight.shape[1], generator=torch.Generator().manual_seed(1)).to(
        dtype
    )


SIZES = [
    *((4, 16), (4, 32), (4, 96), (4, 576)),
    *((5, 16), (5, 32), (5, 288), (6, 16), (6, 32)),
    *((8, 16), (8, 32), (8, 288)),
]
CASES = [
    *((*size, False, "float16") for size in SIZES),
    *((*size, True, "units") for size in SIZES),
    *((bits, 32, True, "float32") for bits in (4, 5, 6, 8)),
]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("bits", "group_size", "offsets", "scales"), CASES)
def test_products_agree_with_float64(
    kernels: Library, bits: int, group_size: int, offsets: bool, scales: str, dtype: torch.dtype
) -> None:
    weight = random_weight(70, 1152, bits, group_size, offsets=offsets, scales=scales)
    packed = NativeWeight(weight, kernels, HugeMemory(), dtype)
    rows = _rows(205, weight, dtype)
    bias = _rows(1, weight, dtype)[0, :70]
    sums = packed.apply(rows, bias, output_dtype=torch.float32)
    dense = weight.dequantize().double()
    exact = rows.double() @ dense.T + bias.double()
    spread = rows.double().abs() @ dense.abs().T + bias.double().abs()
    if weight.offsets is not None:  # which may cancel what the codes give
        whole = weight.without_units().offsets
        assert whole is not None
        offsets_of = whole.double().abs().repeat_interleave(group_size, dim=1)
        spread = spread + 2 * rows.double().abs() @ offsets_of.T
    error = 1e-6 * spread
    if dtype == torch.bfloat16:
        error = error + _rounding_of_rows(rows, weight)
    assert ((sums - exact).abs() <= error).all()
    for num_rows in (1, 2, 3, 5, 6, 7, 12, 13, 64, 193):
        alone = packed.apply(rows[:num_rows], bias, output_dtype=torch.float32)
        assert torch.equal(alone, sums[:num_rows])
    rounded = packed.apply(rows, bias)
    assert torch.equal(rounded, sums.to(dtype))


@pytest.mark.parametrize(
    ("table", "group_size", "offsets"),
    [(UNSIGNED_TABLE, 32, True), (SIGNED_TABLE, 16, False), (None, 16, False)],
)
@pytest.mark.parametrize("unit_inputs", [256, 640])
def test_products_of_the_largest_codes_and_whole_scales_are_exact(
    kernels: Library,
    table: tuple[int, ...] | None,
    group_size: int,
    offsets: bool,
    unit_inputs: int,
) -> None:
    """As those of K-quants: sums of 32 bits, which these almost fill, do not overflow."""
    num_groups, num_units = 1280 // group_size, 1280 // unit_inputs
    code = (0 if table is SIGNED_TABLE else 15) if table else -32
    units = torch.full((70, num_units), 0.5) * 2.0 ** torch.arange(num_units)
    weight = QuantizedWeight(
        codes=torch.full((70, 1280), code, dtype=torch.int8).view(torch.uint8),
        scales=torch.full((70, num_groups), -128.0),
        offsets=torch.full((70, num_groups), 127.0) if offsets else None,
        units=units,
        offset_units=units * 4 if offsets else None,
        table=table,
    )
    packed = NativeWeight(weight, kernels, HugeMemory(), torch.bfloat16)
    rows = torch.full((17, 1280), 254.0) * 2.0 ** torch.arange(17)[:, None]
    expected = rows.double() @ weight.dequantize().double().T
    for num_rows in (1, 4, 5, 6, 7, 16, 17):
        found = packed.apply(rows[:num_rows].bfloat16(), output_dtype=torch.float32)
        assert found.double().equal(expected[:num_rows])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("bits", "table", "group_size", "scales"),
    [
        *((4, NF4, size, "float32") for size in (16, 48, 128, 1152)),
        *((8, SIGNED_TABLE, size, "float32") for size in (16, 48, 128, 1152)),
        (4, NF4, 32, "float16"),
        (4, FP4, 64, "float16"),
        (8, SIGNED_TABLE, 288, "float16"),
    ],
)
def test_products_with_floats_agree_with_float64(
    kernels: Library,
    bits: int,
    table: tuple[float, ...],
    group_size: int,
    scales: str,
    dtype: torch.dtype,
) -> None:
    weight = random_weight(
        70, 1152, bits, group_size, offsets=False, scales=scales, table=table, is_float=True
    )
    packed = NativeWeight(weight, kernels, HugeMemory(), dtype)
    rows = _rows(205, weight, dtype)
    bias = _rows(1, weight, dtype)[0, :70]
    sums = packed.apply(rows, bias, output_dtype=torch.float32)
    dense = as_multiplied(weight, dtype).dequantize().double()
    exact = rows.double() @ dense.T + bias.double()
    spread = rows.double().abs() @ dense.abs().T + bias.double().abs()
    assert ((sums - exact).abs() <= 1e-6 * spread).all()
    for num_rows in (1, 2, 3, 4, 5, 6, 7, 12, 13, 16, 17, 33, 64, 193):
        alone = packed.apply(rows[:num_rows], bias, output_dtype=torch.float32)
        assert torch.equal(alone, sums[:num_rows])
    assert torch.equal(packed.apply(rows, bias), sums.to(dtype))


@pytest.mark.parametrize("dtype", DTYPES)
def test_all_floats_of_8_bits_are_exact(kernels: Library, dtype: torch.dtype) -> None:
    """Subnormal ones, too, which many instructions treat as zero."""
    codes = torch.arange(256, dtype=torch.uint8)
    codes[(codes & 127) == 127] = 0
    weight = QuantizedWeight(
        codes=torch.stack([codes.roll(i) for i in range(70)]),
        scales=torch.full((70, 2), 0.75),
        is_float=True,
    )
    packed = NativeWeight(weight, kernels, HugeMemory(), dtype)
    assert packed.num_bytes == 96 * (256 + 4)  # outputs are padded to a multiple of 32
    expected = weight.dequantize()
    for rows in (torch.eye(256), torch.eye(256)[:1], torch.eye(256)[7:20]):
        found = packed.apply(rows.to(dtype), output_dtype=torch.float32)
        assert torch.equal(found, rows @ expected.T)
    assert torch.equal(packed.gather(torch.tensor([69, 0, 70]))[:2], expected[[69, 0]].to(dtype))


@pytest.mark.parametrize("dtype", DTYPES)
def test_all_values_of_a_table_of_floats_are_exact(kernels: Library, dtype: torch.dtype) -> None:
    """But in products with rows of bfloat16, for which the table is rounded."""
    codes = torch.arange(16, dtype=torch.uint8)
    weight = QuantizedWeight(
        codes=torch.stack([codes.roll(i).repeat(4) for i in range(70)]),
        scales=torch.full((70, 2), 0.75),
        table=tuple((torch.tensor(NF4) * 3e-30).tolist()),
        is_float=True,
    )
    packed = NativeWeight(weight, kernels, HugeMemory(), dtype)
    assert packed.num_bytes == 96 * (32 + 4)  # outputs are padded to a multiple of 32
    expected = as_multiplied(weight, dtype).dequantize()
    for rows in (torch.eye(64), torch.eye(64)[:1], torch.eye(64)[7:20]):
        found = packed.apply(rows.to(dtype), output_dtype=torch.float32)
        assert torch.equal(found, rows @ expected.T)
    gathered = packed.gather(torch.tensor([69, 0, 70]))[:2]
    assert torch.equal(gathered, weight.dequantize()[[69, 0]].to(dtype))


def _rounding_of_rows(rows: Tensor, weight: QuantizedWeight) -> Tensor:
    """The most that rounding rows of bfloat16 to whole numbers of 15 bits may change a product.

    These are multiples of at most 2^-14 of the largest input of a group, of at most 256 inputs.
    """
    whole = weight.without_units()
    values = (whole.values().float() * whole.scales.repeat_interleave(whole.group_size, 1)).double()
    size = max(size for size in range(16, 257, 16) if whole.group_size % size == 0)
    largest = rows.double().abs().unflatten(1, (-1, size)).amax(2)
    return 2.0**-15 * largest @ values.abs().unflatten(1, (-1, size)).sum(2).T


def test_rows_of_bfloat16_with_15_bits_between_them_are_not_rounded(kernels: Library) -> None:
    weight = random_weight(70, 1152, 4, 128, offsets=False, scales="float16")
    packed = NativeWeight(weight, kernels, HugeMemory(), torch.bfloat16)
    whole = torch.randint(-255, 256, (9, 1152), generator=torch.Generator().manual_seed(2))
    rows = (whole * 2.0 ** torch.randint(0, 6, whole.shape)).bfloat16()
    sums = packed.apply(rows, output_dtype=torch.float32)
    dense = weight.dequantize().double()
    spread = rows.double().abs() @ dense.abs().T
    assert ((sums - rows.double() @ dense.T).abs() <= 1e-6 * spread).all()


@pytest.mark.parametrize(
    ("group_size", "scales"),
    [(16, "float16"), (32, "units"), (48, "float16"), (128, "units"), (144, "float16")],
)
@pytest.mark.parametrize(
    ("bits", "table"),
    [(4, SIGNED_TABLE), (4, TABLE), *((bits, SIGNED_TABLE) for bits in (5, 6, 8))],
)
def test_tiles_give_the_bits_of_vector_instructions(
    bits: int, table: tuple[int, ...], group_size: int, scales: str
) -> None:
    if "amx" not in instruction_sets():
        pytest.skip("this processor lacks amx")
    weight = random_weight(70, 2304, bits, group_size, offsets=True, scales=scales, table=table)
    rows = _rows(205, weight, torch.bfloat16)
    rows[20, 40], rows[30, 1000], rows[40] = torch.nan, -torch.inf, 0.0
    tiles, vectors = (
        NativeWeight(weight, Library(library_path(name), name), HugeMemory(), torch.bfloat16)
        for name in ("amx", "avx512_bf16")
    )
    for num_rows in (1, 4, 5, 15, 16, 17, 33, 205):
        sums = [
            term.apply(rows[:num_rows], output_dtype=torch.float32) for term in (tiles, vectors)
        ]
        torch.testing.assert_close(*sums, rtol=0, atol=0, equal_nan=True)


def test_inputs_that_are_not_finite_or_of_any_size(kernels: Library) -> None:
    weight = random_weight(70, 1152, 4, 32, offsets=True, scales="float32")
    packed = NativeWeight(weight, kernels, HugeMemory(), torch.float32)
    rows = _rows(7, weight, torch.float32)
    found = packed.apply(rows)
    rows[1, 40], rows[2, 1000], rows[3] = torch.nan, -torch.inf, 0.0
    rows[4] *= 2.0**-40
    rows[5] *= 2.0**100
    rows[6] *= 1e-44
    odd = packed.apply(rows)
    assert torch.equal(odd[0], found[0])
    assert not odd[1:3].isfinite().any()
    assert not odd[3].any()
    assert torch.equal(odd[4], found[4] * 2.0**-40)
    assert torch.equal(odd[5], found[5] * 2.0**100)
    assert (odd[6].abs() < 1e-38).all()


@pytest.mark.parametrize(
    ("values", "group_size", "kind"),
    [
        ((0, 31), 32, "int5"),
        ((-16, 15), 32, "int5"),
        ((-16, 15), 16, "int6"),
        ((-32, 31), 16, "int6"),
        ((0, 63), 64, "int6"),
        ((-33, 0), 32, "int8"),
        ((0, 64), 32, "int8"),
        ((-128, 127), 32, "int8"),
    ],
)
def test_codes_take_the_fewest_bits(
    kernels: Library, values: tuple[int, int], group_size: int, kind: str
) -> None:
    least, most = values
    numbers = torch.randint(least, most + 1, (64, 256), dtype=torch.int8)
    numbers[0, 0], numbers[63, 255] = least, most
    weight = QuantizedWeight(
        codes=numbers.view(torch.uint8), scales=torch.ones(64, 256 // group_size)
    )
    packed = NativeWeight(weight, kernels, HugeMemory(), torch.float32)
    bits = int(kind.removeprefix("int"))
    assert packed.num_bytes == 64 * 256 * bits // 8 + 2 * weight.scales.numel()
    assert torch.equal(packed.gather(torch.arange(64)), numbers.float())
    identity = packed.apply(torch.eye(256))
    assert torch.equal(identity.T, numbers.float())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("scales", ["float16", "units"])
def test_columns_may_stand_in_another_order_than_inputs(
    kernels: Library, scales: str, dtype: torch.dtype
) -> None:
    """The same bits as of inputs that are sorted before."""
    weight = random_weight(70, 1152, 4, 64, offsets=True, scales=scales, ordered=False)
    assert weight.order is not None
    packed = NativeWeight(weight, kernels, HugeMemory(), dtype)
    plain = NativeWeight(replace(weight, order=None), kernels, HugeMemory(), dtype)
    gated = NativeGatedWeight(weight, "silu", kernels, HugeMemory(), dtype)
    plain_gated = NativeGatedWeight(
        replace(weight, order=None), "silu", kernels, HugeMemory(), dtype
    )
    rows = _rows(205, weight, dtype)
    dense = weight.dequantize()
    assert dense[:, weight.order].equal(replace(weight, order=None).dequantize())
    assert weight.in_order().dequantize().equal(dense)
    assert weight.columns(32, 500).dequantize().equal(dense[:, 32:500])
    for part in (rows, rows[:1], rows[::2], rows[:, ::1][7:9]):
        ordered = part[:, weight.order]
        assert packed.apply(part).equal(plain.apply(ordered))
        assert gated.apply(part).equal(plain_gated.apply(ordered))
    a, b = torch.randn(2, 1152), torch.randn(70, 2)
    norms = torch.linalg.vector_norm(dense + b @ a, dim=1)
    for some in (packed, gated):
        torch.testing.assert_close(some.norms(0, a, b), norms, atol=0, rtol=1e-6)
    with pytest.raises(ValueError, match="columns in their order"):
        packed.gather(torch.zeros(1, dtype=torch.int64))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("bits", "scales"), [(4, "units"), (5, "float16"), (6, "units"), (8, "float32"), (8, "units")]
)
def test_rows_by_token(kernels: Library, bits: int, scales: str, dtype: torch.dtype) -> None:
    weight = random_weight(70, 64, bits, 32, offsets=True, scales=scales)
    packed = NativeWeight(weight, kernels, HugeMemory(), dtype)
    found = packed.gather(torch.tensor([0, 33, 69, -1, 70]))
    assert torch.equal(found[:3], weight.dequantize()[[0, 33, 69]].to(dtype))
    assert not found[3:].any()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("bits", "table", "is_float", "activation"),
    [
        *((4, SIGNED_TABLE, False, activation) for activation in reference.ACTIVATIONS),
        (4, NF4, True, "silu"),
        (6, SIGNED_TABLE, False, "gelu"),
        (8, SIGNED_TABLE, False, "gelu_tanh"),
        (8, SIGNED_TABLE, True, "relu"),
    ],
)
def test_gated_products(
    kernels: Library,
    bits: int,
    table: tuple[float, ...],
    is_float: bool,
    activation: str,
    dtype: torch.dtype,
) -> None:
    weight = random_weight(
        2 * 37, 192, bits, 64, offsets=not is_float, table=table, is_float=is_float
    )
    packed = NativeGatedWeight(weight, activation, kernels, HugeMemory(), dtype)
    rows = _rows(65, weight, dtype)
    products = packed.apply(rows)
    dense = as_multiplied(weight, dtype).dequantize().double()
    sums = rows.double() @ dense.T
    exact = reference.act_and_mul(sums, activation)
    gate, up = (1e-6 * rows.double().abs() @ dense.abs().T).chunk(2, dim=1)  # errors of the sums
    error = 1.2 * gate * sums[:, 37:].abs() + up * sums[:, :37].abs() + gate * up
    rounding = torch.finfo(dtype).eps * 4 * exact.abs()
    assert ((products - exact).abs() <= error + rounding + 1e-6).all()
    assert torch.equal(packed.apply(rows[:1]), products[:1])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("bits", "table", "is_float"),
    [
        (4, SIGNED_TABLE, False),
        (4, TABLE, False),
        (4, NF4, True),
        (6, SIGNED_TABLE, False),
        (8, SIGNED_TABLE, False),
        (8, SIGNED_TABLE, True),
    ],
)
def test_products_with_an_activation(
    kernels: Library, bits: int, table: tuple[float, ...], is_float: bool, dtype: torch.dtype
) -> None:
    weight = random_weight(75, 192, bits, 64, offsets=False, table=table, is_float=is_float)
    packed, rows = NativeWeight(weight, kernels, HugeMemory(), dtype), _rows(65, weight, dtype)
    sums = packed.apply(rows, output_dtype=torch.float32)
    expected = NativeLayerKernels(kernels).activate(sums, "gelu").to(dtype)
    assert torch.equal(packed.apply(rows, activation="gelu"), expected)


@pytest.mark.parametrize("num_threads", [1, 3])
def test_values_of_a_table_and_any_number_of_threads(kernels: Library, num_threads: int) -> None:
    weight = random_weight(256, 512, 4, 32, offsets=False, scales="float16", table=TABLE)
    packed = NativeWeight(weight, kernels, HugeMemory(), torch.float32)
    rows = _rows(9, weight, torch.float32)
    before = torch.get_num_threads()
    torch.set_num_threads(num_threads)
    try:
        products = packed.apply(rows)
    finally:
        torch.set_num_threads(before)
    torch.testing.assert_close(products, rows @ weight.dequantize().T, rtol=1e-4, atol=1e-2)
    assert torch.equal(products, packed.apply(rows))


def test_groups_and_codes_that_the_kernels_lack_are_refused(kernels: Library) -> None:
    weight = random_weight(32, 24, 4, 8, offsets=False, scales="float16")
    floats = random_weight(32, 32, 8, 16, offsets=True, is_float=True)
    for refused in (weight, floats):
        assert not can_pack_codes(refused)
        with pytest.raises(ValueError, match="groups of a multiple of 16 inputs, and of floats no"):
            NativeWeight(refused, kernels, HugeMemory(), torch.float32)


@pytest.mark.parametrize("scales", ["float32", "units"])
def test_parts_of_a_weight(scales: str) -> None:
    weight = random_weight(70, 128, 4, 32, offsets=True, scales=scales)
    dense = weight.dequantize()
    assert torch.equal(weight.rows(slice(3, 9)).dequantize(), dense[3:9])
    assert torch.equal(weight.columns(32, 96).dequantize(), dense[:, 32:96])
    assert torch.equal(weight.columns(64, 128).dequantize(), dense[:, 64:])
    assert (weight.columns(64, 128).units is None) == (scales != "units")
    assert torch.equal(weight.columns(32, 80).dequantize(), dense[:, 32:80])
    assert weight.columns(32, 80).group_size == 16
    assert torch.equal(weight.padded(80).dequantize()[:70], dense)
    assert not weight.padded(80).dequantize()[70:].any()


def test_stacks_of_different_weights_are_exact() -> None:
    parts = [
        random_weight(5, 128, 4, 32, offsets=False),
        random_weight(6, 128, 8, 16, offsets=True, scales="float32"),
        random_weight(7, 128, 4, 64, offsets=False, table=TABLE),
        random_weight(8, 128, 4, 32, offsets=True, scales="units"),
    ]
    dense = torch.cat([part.dequantize() for part in parts])
    assert torch.equal(stack(parts).dequantize(), dense)
    assert stack(parts).bits == 8
    for part in parts:
        joined = stack([part, part])
        assert torch.equal(joined.dequantize(), torch.cat([part.dequantize()] * 2))
        assert (joined.bits, joined.group_size) == (part.bits, part.group_size)
        assert (joined.units is None) == (part.units is None)
