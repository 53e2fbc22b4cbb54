"""Products of rows and weights of 8 bits: the library's rounding, the reference's bits."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from pagewire_kernels import reference
from pagewire_kernels.cpu import w8a8
from pagewire_kernels.cpu.build import INSTRUCTION_SETS, compiler, library_path
from pagewire_kernels.cpu.layers import NativeLayerKernels
from pagewire_kernels.cpu.linear import (
    HugeMemory,
    NativeGatedWeight,
    NativeWeight,
    can_pack_codes,
)
from pagewire_kernels.cpu.native_library import Library, instruction_sets
from pagewire_kernels.quantized_weight import Int8Activations
from tests.support.quantized_rows import multiply_quantized_rows, quantize_rows
from tests.support.quantized_weights import random_int8_weight

DTYPES = [torch.float32, torch.bfloat16]
ACTIVATIONS = {
    "dynamic": Int8Activations(),
    "dynamic asymmetric": Int8Activations(symmetric=False),
    "static": Int8Activations(scale=0.02),
    "static asymmetric": Int8Activations(symmetric=False, scale=0.013, zero_point=-37),
}

each_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)
each_kind = pytest.mark.parametrize("activations", ACTIVATIONS.values(), ids=ACTIVATIONS)

pytestmark = pytest.mark.skipif(compiler() is None, reason="nothing to build the kernels with")


@pytest.fixture(
    params=[(name, False) for name in INSTRUCTION_SETS]
    + [(name, True) for name in INSTRUCTION_SETS if name.startswith("avx512")],
    ids=str,
)
def kernels(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Library:
    """Of an instruction set, with VNNI or without."""
    name, vnni = request.param
    if name not in instruction_sets():
        pytest.skip(f"this processor lacks {name}")
    library = Library(library_path(name), name)
    if vnni and not w8a8.has_vnni(library):
        pytest.skip(f"{name} has no VNNI here")
    monkeypatch.setattr(w8a8, "has_vnni", lambda _: vnni)
    return library


def _rows(num_rows: int, size: int, dtype: torch.dtype) -> Tensor:
    """Of different magnitudes, and far from symmetric."""
    draw = torch.Generator().manual_seed(1)
    magnitudes = torch.rand(num_rows, 1, generator=draw) * 4 + 0.01
    return ((torch.randn(num_rows, size, generator=draw) + 0.7) * magnitudes).to(dtype)


@each_kind
def test_rows_are_rounded_as_compressed_tensors_does(activations: Int8Activations) -> None:
    from compressed_tensors.quantization import QuantizationArgs
    from compressed_tensors.quantization.lifecycle.forward import dequantize, quantize
    from compressed_tensors.quantization.utils import compute_dynamic_scales_and_zp

    rows = _rows(97, 101, torch.float32)
    rows[3] = 0
    rows[4] = 1
    symmetric, is_dynamic = activations.symmetric, activations.scale is None
    strategy = "token" if is_dynamic else "tensor"
    settings = QuantizationArgs(symmetric=symmetric, dynamic=is_dynamic, strategy=strategy)
    if is_dynamic:
        module = torch.nn.Module()
        scale, zero = compute_dynamic_scales_and_zp(rows.unsqueeze(0), settings, module)
        scale, zero = scale.squeeze(0), zero.squeeze(0)
    else:
        scale = torch.tensor([activations.scale])
        zero = torch.tensor([activations.zero_point], dtype=torch.int8)
    expected = quantize(rows, scale, zero, settings)
    codes, scales, zeros = quantize_rows(rows, activations)
    is_zero = (rows == 0).all(1)
    assert torch.equal(codes[~is_zero], expected[~is_zero])
    assert torch.equal(((codes - zeros) * scales), dequantize(expected, scale, zero, settings))


@each_dtype
@pytest.mark.parametrize(
    ("size", "activations"),
    [
        *((size, ACTIVATIONS["dynamic asymmetric"]) for size in (1, 15, 64, 333, 3072)),
        *((333, activations) for activations in ACTIVATIONS.values()),
    ],
    ids=str,
)
def test_products_have_the_bits_of_the_reference(
    kernels: Library, size: int, activations: Int8Activations, dtype: torch.dtype
) -> None:
    weight = random_int8_weight(70, size, activations)
    rows, bias = _rows(205, size, dtype), _rows(1, 70, dtype)[0]
    rows[2] = 0
    packed = NativeWeight(weight, kernels, HugeMemory(), dtype)
    products = packed.apply(rows, bias, output_dtype=torch.float32)
    assert torch.equal(products, multiply_quantized_rows(rows, weight, bias))
    for num_rows in (1, 2, 3, 4, 5, 8, 9, 12, 13, 24, 193):
        some = packed.apply(rows[-num_rows:], bias, output_dtype=torch.float32)
        assert torch.equal(some, products[-num_rows:])
    assert torch.equal(packed.apply(rows, bias), products.to(dtype))
    tokens = torch.tensor([0, 33, 69, -1, 70])
    expected = torch.cat([weight.dequantize()[tokens[:3]], torch.zeros(2, size)])
    assert torch.equal(packed.gather(tokens), expected.to(dtype))


@each_dtype
@each_kind
def test_gated_products(kernels: Library, activations: Int8Activations, dtype: torch.dtype) -> None:
    weight = random_int8_weight(2 * 37, 192, activations)
    rows = _rows(65, 192, dtype)
    packed = NativeGatedWeight(weight, "silu", kernels, HugeMemory(), dtype)
    exact = reference.act_and_mul(multiply_quantized_rows(rows, weight), "silu")
    tolerance = {torch.float32: 1e-5, torch.bfloat16: 1e-2}[dtype]
    products = packed.apply(rows)
    torch.testing.assert_close(products.float(), exact, rtol=tolerance, atol=tolerance)
    assert torch.equal(packed.apply(rows[-1:]), products[-1:])


@each_dtype
@each_kind
def test_products_with_an_activation(
    kernels: Library, activations: Int8Activations, dtype: torch.dtype
) -> None:
    weight = random_int8_weight(37, 192, activations)
    packed, rows = NativeWeight(weight, kernels, HugeMemory(), dtype), _rows(65, 192, dtype)
    sums = packed.apply(rows, output_dtype=torch.float32)
    expected = NativeLayerKernels(kernels).activate(sums, "gelu").to(dtype)
    assert torch.equal(packed.apply(rows, activation="gelu"), expected)


@pytest.mark.parametrize("num_threads", [1, 3])
def test_any_number_of_threads(kernels: Library, num_threads: int) -> None:
    weight, rows = random_int8_weight(256, 512, Int8Activations()), _rows(400, 512, torch.float32)
    packed = NativeWeight(weight, kernels, HugeMemory(), torch.float32)
    before = torch.get_num_threads()
    torch.set_num_threads(num_threads)
    try:
        products = packed.apply(rows)
    finally:
        torch.set_num_threads(before)
    assert torch.equal(products, multiply_quantized_rows(rows, weight))


@each_kind
def test_the_largest_sums_are_exact(kernels: Library, activations: Int8Activations) -> None:
    """2^31 is not exceeded, and sums of bytes are not saturated, at the extremes of both."""
    size = 1 << 16
    codes = torch.full((4, size), -128, dtype=torch.int8)
    codes[1], codes[2, ::2] = 127, 127
    weight = random_int8_weight(4, size, activations)
    weight = replace(weight, codes=codes.view(torch.uint8))
    rows = torch.full((3, size), 100.0)
    rows[1], rows[2, ::2] = -100.0, -100.0
    packed = NativeWeight(weight, kernels, HugeMemory(), torch.float32)
    expected = multiply_quantized_rows(rows, weight)
    assert torch.equal(packed.apply(rows), expected)


@each_dtype
@each_kind
def test_what_is_no_number_makes_its_row_nan(
    kernels: Library, activations: Int8Activations, dtype: torch.dtype
) -> None:
    weight, rows = random_int8_weight(40, 100, activations), _rows(3, 100, dtype)
    packed = NativeWeight(weight, kernels, HugeMemory(), dtype)
    expected = packed.apply(rows)
    for value in (torch.nan, torch.inf, -torch.inf):
        rows[1, 7] = value
        products = packed.apply(rows)
        assert products[1].isnan().all()
        assert torch.equal(products[[0, 2]], expected[[0, 2]])


def test_weights_that_the_kernels_lack_are_refused(kernels: Library) -> None:
    weight = random_int8_weight(32, 64, Int8Activations())
    changes: list[dict[str, Any]] = [
        {"scales": torch.ones(32, 2)},
        {"offsets": torch.ones(32, 1)},
        {"is_float": True},
        {"codes": torch.zeros(32, (1 << 16) + 1, dtype=torch.uint8)},
    ]
    for change in changes:
        refused = replace(weight, **change)
        assert not can_pack_codes(refused)
        with pytest.raises(ValueError, match="groups of a multiple of 16 inputs"):
            NativeWeight(refused, kernels, HugeMemory(), torch.float32)
