"""Native linear layers are correct and batch-invariant: a row's bits are the same in any batch."""

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from pagewire_kernels import reference
from pagewire_kernels.cpu.build import INSTRUCTION_SETS, compiler, library_path
from pagewire_kernels.cpu.layers import NativeLayerKernels
from pagewire_kernels.cpu.linear import HugeMemory, NativeGatedWeight, NativeWeight
from pagewire_kernels.cpu.native_library import Library, instruction_sets, library

SHAPES = [(1, 1), (1, 64), (31, 3), (33, 37), (64, 192), (257, 1030), (100, 2049)]
"""(out_features, in_features): whole panels and parts of one, odd numbers of inputs, several
stretches of them."""

DTYPES = [torch.float32, torch.bfloat16]

pytestmark = pytest.mark.skipif(compiler() is None, reason="nothing to build the kernels with")


@pytest.fixture(scope="module", params=[*INSTRUCTION_SETS])
def kernels(request: pytest.FixtureRequest) -> Library:
    if request.param not in instruction_sets():
        pytest.skip(f"this processor lacks {request.param}")
    return Library(library_path(request.param), request.param)


@pytest.fixture
def num_threads() -> Iterator[None]:
    """Puts back the number of threads that a test changes."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def _random(*shape: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def _weight(kernels: Library, weight: Tensor) -> NativeWeight:
    return NativeWeight(weight, kernels, HugeMemory())


def test_the_libraries_were_built_from_these_sources() -> None:
    found = library()
    assert instruction_sets() == [] or found is not None


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_products_agree_with_float64(
    kernels: Library, shape: tuple[int, int], dtype: torch.dtype
) -> None:
    """Float32 sums of `in_features` products err by less than a millionth of their absolute sum."""
    weight, bias = _random(*shape, dtype=dtype), _random(shape[0], dtype=dtype, seed=1)
    rows = _random(150, shape[1], dtype=dtype, seed=2)
    packed = _weight(kernels, weight)
    exact = rows.double() @ weight.double().t()
    bound = 1e-6 * (rows.double().abs() @ weight.double().abs().t() + bias.double().abs())
    sums = packed.apply(rows, output_dtype=torch.float32)
    assert (sums.double() - exact).abs().le(bound).all()
    with_bias = packed.apply(rows, bias, output_dtype=torch.float32)
    assert (with_bias.double() - exact - bias.double()).abs().le(bound).all()
    assert torch.equal(packed.apply(rows, bias), with_bias.to(dtype))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("out_features", "in_features"), [(100, 1037), (72, 64)])
def test_a_row_has_the_same_bits_in_any_batch(
    kernels: Library, out_features: int, in_features: int, dtype: torch.dtype
) -> None:
    packed = _weight(kernels, _random(out_features, in_features, dtype=dtype))
    rows = _random(900, in_features, dtype=dtype, seed=1)
    expected = packed.apply(rows)
    assert torch.equal(torch.cat([packed.apply(row[None]) for row in rows]), expected)
    for num_rows in [*range(2, 131), 192, 193, 255, 256, 511, 640]:
        start = 7 * num_rows % (901 - num_rows)
        few = packed.apply(rows[start : start + num_rows])
        assert torch.equal(few, expected[start : start + num_rows]), num_rows


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.usefixtures("num_threads")
def test_the_number_of_threads_changes_nothing(kernels: Library, dtype: torch.dtype) -> None:
    packed = _weight(kernels, _random(700, 640, dtype=dtype))
    for num_rows in (1, 5, 40, 400):
        rows = _random(num_rows, 640, dtype=dtype, seed=num_rows)
        torch.set_num_threads(1)
        expected = packed.apply(rows)
        for count in (2, 3, 7):
            torch.set_num_threads(count)
            assert torch.equal(packed.apply(rows), expected), (num_rows, count)


@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_may_be_columns_of_a_wider_buffer(kernels: Library, dtype: torch.dtype) -> None:
    packed = _weight(kernels, _random(48, 33, dtype=dtype))
    wide = _random(60, 101, dtype=dtype, seed=1)
    for view in (wide[:, 7:40], wide[::3, 7:40], wide[:33].t(), wide[:1, 7:40].expand(9, 33)):
        assert torch.equal(packed.apply(view), packed.apply(view.contiguous()))


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_weight_may_be_a_view(kernels: Library, dtype: torch.dtype) -> None:
    wide = _random(90, 90, dtype=dtype)
    rows = _random(5, 41, dtype=dtype, seed=1)
    for view in (wide[::2, 3:44], wide[:41, 5:60].t()):
        expected = _weight(kernels, view.clone(memory_format=torch.contiguous_format)).apply(rows)
        assert torch.equal(_weight(kernels, view).apply(rows), expected)


@pytest.mark.parametrize("dtype", DTYPES)
def test_one_number_that_is_none_spoils_its_own_row_only(
    kernels: Library, dtype: torch.dtype
) -> None:
    packed = _weight(kernels, _random(70, 37, dtype=dtype))
    rows = _random(30, 37, dtype=dtype, seed=1)
    expected = packed.apply(rows)
    rows[11, 36] = torch.nan
    result = packed.apply(rows)
    assert result[11].isnan().all()
    others = torch.arange(30) != 11
    assert torch.equal(result[others], expected[others])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("activation", "size", "in_features"),
    [
        *((activation, 15, 37) for activation in reference.ACTIVATIONS),
        *(("silu", *shape) for shape in ((1, 1), (16, 64), (100, 129))),
    ],
)
def test_a_gated_product_agrees_with_the_reference(
    kernels: Library, activation: str, size: int, in_features: int, dtype: torch.dtype
) -> None:
    """But for the rounding of the two products, which it does without."""
    weight = _random(2 * size, in_features, dtype=dtype) * in_features**-0.5
    bias, rows = _random(2 * size, dtype=dtype, seed=1), _random(31, in_features, dtype=dtype)
    packed = NativeGatedWeight(weight, activation, kernels, HugeMemory())
    for each_bias in (None, bias):
        products = rows.double() @ weight.double().t()
        if each_bias is not None:
            products += each_bias.double()
        exact = reference.act_and_mul(products.float(), activation)
        tolerance = {"atol": 1e-5, "rtol": 1e-5} if dtype == torch.float32 else {}
        torch.testing.assert_close(packed.apply(rows, each_bias), exact.to(dtype), **tolerance)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_gated_row_has_the_same_bits_in_any_batch(kernels: Library, dtype: torch.dtype) -> None:
    weight, bias = _random(140, 333, dtype=dtype), _random(140, dtype=dtype, seed=1)
    packed = NativeGatedWeight(weight, "silu", kernels, HugeMemory())
    rows = _random(400, 333, dtype=dtype, seed=2)
    expected = packed.apply(rows, bias)
    for num_rows in [*range(1, 40), 130, 193, 300]:
        start = 7 * num_rows % (401 - num_rows)
        few = packed.apply(rows[start : start + num_rows], bias)
        assert torch.equal(few, expected[start : start + num_rows]), num_rows


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("activation", reference.ACTIVATIONS)
def test_an_activation_is_applied_to_the_sums_before_they_are_rounded(
    kernels: Library, activation: str, dtype: torch.dtype
) -> None:
    packed, bias = _weight(kernels, _random(75, 192, dtype=dtype)), _random(75, dtype=dtype, seed=1)
    rows = _random(130, 192, dtype=dtype, seed=2)
    sums = packed.apply(rows, bias, output_dtype=torch.float32)
    expected = NativeLayerKernels(kernels).activate(sums, activation).to(dtype)
    assert torch.equal(packed.apply(rows, bias, activation=activation), expected)
    assert torch.equal(packed.apply(rows[7:8], bias, activation=activation), expected[7:8])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_rows_of_the_weight_come_back_as_they_were(
    kernels: Library, shape: tuple[int, int], dtype: torch.dtype
) -> None:
    weight = _random(*shape, dtype=dtype)
    ids = torch.randint(shape[0], (50,), generator=torch.Generator().manual_seed(1))
    packed = _weight(kernels, weight)
    assert torch.equal(packed.gather(ids), weight[ids])
    assert packed.gather(torch.tensor([-1, shape[0]])).eq(0).all()


def test_no_rows_give_no_rows(kernels: Library) -> None:
    packed = _weight(kernels, torch.ones(8, 8))
    assert packed.apply(torch.empty(0, 8)).shape == (0, 8)
    assert packed.gather(torch.empty(0, dtype=torch.int64)).shape == (0, 8)


def test_rows_that_do_not_fit_are_refused(kernels: Library) -> None:
    packed = _weight(kernels, torch.ones(8, 8))
    for rows in (torch.ones(2, 9), torch.ones(2, 8, dtype=torch.bfloat16)):
        with pytest.raises(TypeError, match="rows: expected torch"):
            packed.apply(rows)


def test_pieces_of_huge_memory_are_apart_and_outlive_it() -> None:
    memory = HugeMemory()
    pieces = [memory.take(num_bytes) for num_bytes in (5, 4096, 100 << 20, 7)]
    del memory
    for i, piece in enumerate(pieces):
        piece.fill_(i + 1)
    assert [piece.numel() for piece in pieces] == [5, 4096, 100 << 20, 7]
    assert all(piece.eq(i + 1).all() for i, piece in enumerate(pieces))
    assert all(piece.data_ptr() % 4096 == 0 for piece in pieces)
