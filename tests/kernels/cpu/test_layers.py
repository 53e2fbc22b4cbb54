"""Row-wise operations in C++ agree with plain torch, whatever the sizes and strides."""

from typing import Any

import pytest
import torch
from torch import Tensor

from pagewire_kernels import reference
from pagewire_kernels.cpu.layers import NativeLayerKernels
from pagewire_kernels.interface import stored_head_size
from pagewire_kernels.reference import ACTIVATIONS, Gate
from pagewire_kernels.reference.backend import LayerKernels
from pagewire_kernels.reference.kv_cache import dequantize_heads
from tests.support.native import native_libraries

LIBRARIES = native_libraries()
DTYPES = [torch.float32, torch.bfloat16]
TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 2**-8}
"""Relative, and absolute for numbers below 1: some float32 roundings, or one to bfloat16 that falls
on the other side."""

pytestmark = [
    pytest.mark.skipif(not LIBRARIES, reason="no compiled kernels for this processor"),
    pytest.mark.parametrize("dtype", DTYPES, ids=str),
]


@pytest.fixture(params=LIBRARIES, ids=lambda library: library.instruction_set)
def kernels(request: pytest.FixtureRequest) -> NativeLayerKernels:
    return NativeLayerKernels(request.param)


def _random(*shape: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def _assert_agrees(output: Tensor, expected: Tensor) -> None:
    assert output.dtype == expected.dtype
    tolerance = TOLERANCE[expected.dtype]
    torch.testing.assert_close(output, expected, rtol=tolerance * 2, atol=tolerance)


@pytest.mark.parametrize("size", [1, 16, 100, 5001])
@pytest.mark.parametrize(("with_residual", "affine"), [(False, False), (True, True)])
def test_norms_agree(
    kernels: NativeLayerKernels, dtype: torch.dtype, size: int, with_residual: bool, affine: bool
) -> None:
    x = _random(7, 2 * size, dtype=dtype)[:, :size]
    weight, bias = (_random(size, dtype=dtype, seed=seed) for seed in (1, 2))
    streams = [_random(7, size, dtype=dtype, seed=3) if with_residual else None for _ in range(2)]
    shift = (weight, bias) if affine else (None, None)
    _assert_agrees(
        kernels.layer_norm(x, *shift, 1e-5, streams[0]),
        reference.layer_norm(x, *shift, 1e-5, streams[1]),
    )
    _assert_agrees(
        kernels.rms_norm(x, weight, 1e-5, streams[0]),
        reference.rms_norm(x, weight, 1e-5, streams[1]),
    )
    if with_residual:
        assert torch.equal(*(stream for stream in streams if stream is not None))


def test_an_rms_norm_with_a_float32_weight_agrees(
    kernels: NativeLayerKernels, dtype: torch.dtype
) -> None:
    x, weight = _random(3, 100, dtype=dtype), 1 + _random(100, dtype=torch.float32, seed=1) / 1000
    _assert_agrees(kernels.rms_norm(x, weight, 1e-5), reference.rms_norm(x, weight, 1e-5))
    found, expected = (_random(3, 5, 100, dtype=dtype, seed=2) for _ in range(2))
    angles = _random(3, 20, dtype=torch.float32, seed=3)
    tables = torch.arange(3), angles.cos().to(dtype), angles.sin().to(dtype)
    for rotate, heads in ((kernels.rotate, found), (reference.rotate, expected)):
        rotate(heads[:, :3], heads[:, 3:], *tables, query_norm=weight, key_norm=weight)
    _assert_agrees(found, expected)


@pytest.mark.parametrize("size", [1, 1100])
def test_sums_and_multiples_agree(
    kernels: NativeLayerKernels, dtype: torch.dtype, size: int
) -> None:
    x, sums = (_random(7, 2 * size, dtype=dtype, seed=seed)[:, :size] for seed in (0, 1))
    expected, more = 0.3 * x.float(), sums.float() + x.float()
    assert kernels.add(sums, x) is sums
    assert torch.equal(sums, more.to(dtype))
    assert kernels.scale(x, 0.3) is x
    _assert_agrees(x, expected.to(dtype))


def test_columns_may_be_left_out_and_occur_several_times(
    kernels: NativeLayerKernels, dtype: torch.dtype
) -> None:
    x = _random(7, 200, dtype=dtype)[:, 20:120]
    for columns in (range(0, 100, 3), [5, 5, 99, 0] * 500):
        order = torch.tensor([*columns], dtype=torch.int32)
        assert torch.equal(kernels.take_columns(x, order), x[:, order])


def test_xielu_agrees(kernels: NativeLayerKernels, dtype: torch.dtype) -> None:
    numbers = torch.tensor([0.8, 1.3, 0.5, -1e-6])
    x = torch.cat([torch.linspace(-100, 20, 3001), torch.linspace(-1, 1, 3001) ** 3])[None]
    found, expected = x.to(dtype), x.to(dtype)
    assert kernels.xielu(found, numbers) is found
    _assert_agrees(found, reference.xielu(expected, numbers))
    assert kernels.xielu(torch.tensor([[torch.nan]], dtype=dtype), numbers).isnan().all()


@pytest.mark.parametrize("name", ["multiply_sigmoid", "multiply_softplus"])
def test_products_with_activations_agree(
    kernels: NativeLayerKernels, dtype: torch.dtype, name: str
) -> None:
    x = torch.cat([torch.linspace(-80, 80, 3001), _random(7, dtype=torch.float32)])[None].to(dtype)
    products = _random(1, 3008, dtype=dtype, seed=1)
    expected = getattr(reference, name)(products.clone(), x)
    assert getattr(kernels, name)(products, x) is products
    _assert_agrees(products, expected)


def test_a_soft_cap_agrees(kernels: NativeLayerKernels, dtype: torch.dtype) -> None:
    x = torch.cat([torch.linspace(-300, 300, 5001), _random(7, dtype=torch.float32)])[None]
    expected = 30 * torch.tanh(x.double() / 30)
    torch.testing.assert_close(kernels.soft_cap(x, 30.0).double(), expected, rtol=1e-6, atol=1e-5)
    assert kernels.soft_cap(torch.tensor([[torch.nan, 1.0]]), 30.0)[0, 0].isnan()


@pytest.mark.parametrize("size", [1, 37, 1100])
def test_operations_on_statistics_of_rows_agree(
    kernels: NativeLayerKernels, dtype: torch.dtype, size: int
) -> None:
    x, like = (_random(7, 2 * size, dtype=dtype, seed=seed)[:, :size] for seed in (0, 1))
    expected = reference.sparsify(x.clone(), 0.7)
    assert (expected > 0).any() or size == 1
    found = x.clone()
    assert kernels.sparsify(found, 0.7) is found
    _assert_agrees(found, expected)
    x[3] = 0  # divided by no less than the minimum
    expected = reference.match_rms(x.clone(), like)
    found = x.clone()
    assert kernels.match_rms(found, like) is found
    _assert_agrees(found, expected)


@pytest.mark.parametrize(("num_streams", "size"), [(1, 5), (4, 37), (3, 300)])
def test_streams_agree(
    kernels: NativeLayerKernels, dtype: torch.dtype, num_streams: int, size: int
) -> None:
    wide = _random(7, 2 * num_streams * size, dtype=dtype)
    streams = wide[:, : num_streams * size]
    factors = _random(7, num_streams**2, dtype=dtype, seed=1)
    x, active = _random(7, size, dtype=dtype, seed=2), num_streams - 1
    _assert_agrees(kernels.mix_streams(streams, factors), reference.mix_streams(streams, factors))
    factors = factors[:, :num_streams]
    expected = reference.correct_streams(streams.clone(), x, factors, active)
    assert kernels.correct_streams(streams, x, factors, active) is streams
    _assert_agrees(streams, expected)
    parts = streams.split(size, dim=1)
    assert torch.equal(kernels.concatenate(parts), streams)


@pytest.mark.parametrize(("num_streams", "size"), [(1, 5), (4, 37), (16, 300)])
@pytest.mark.parametrize(("num_kinds", "num_divisions"), [(1, 0), (2, 0), (2, 1), (2, 20)])
def test_gated_streams_agree(
    kernels: NativeLayerKernels,
    dtype: torch.dtype,
    num_streams: int,
    size: int,
    num_kinds: int,
    num_divisions: int,
) -> None:
    streams = _random(7, 2 * num_streams * size, dtype=dtype)[:, : num_streams * size]
    num_gates = reference.gate_counts(num_streams, num_divisions)[num_kinds - 2]
    gates = 3 * _random(7, num_gates, dtype=torch.float32, seed=1)
    gates[2], gates[3] = -1e4, 1e4  # whose sigmoids are 0 and 1
    numbers = 1 + _random(2, num_gates, dtype=torch.float32, seed=2)
    options: dict[str, Any] = {"eps": 1e-3, "offset": 0.01, "magnitude": 2.0}
    options["num_divisions"] = num_divisions
    found = gates.clone()
    read = kernels.read_streams(streams, found, numbers, num_streams, **options)
    expected = reference.read_streams(streams, gates, numbers, num_streams, **options)
    _assert_agrees(read, expected)
    torch.testing.assert_close(found, gates, rtol=1e-5, atol=1e-6)
    for row in range(7):  # whatever the batch
        one = 3 * _random(7, num_gates, dtype=torch.float32, seed=1)[row : row + 1]
        one = one if row not in (2, 3) else torch.full_like(one, -1e4 if row == 2 else 1e4)
        alone = kernels.read_streams(streams[row : row + 1], one, numbers, num_streams, **options)
        assert torch.equal(alone[0], read[row])
        assert torch.equal(one[0], found[row])
    if num_divisions == 20:
        matrices = gates[:, 2 * num_streams :].unflatten(1, (num_streams, num_streams))
        torch.testing.assert_close(matrices.sum(1), torch.ones(7, num_streams), atol=0.02, rtol=0)
    of_output = gates[:, num_streams:] if num_divisions else gates[:, -num_streams:]
    expected = reference.write_streams(streams.clone(), read, of_output)
    assert kernels.write_streams(streams, read, of_output) is streams
    _assert_agrees(streams, expected)


def test_a_layer_norm_of_numbers_far_from_zero_agrees(
    kernels: NativeLayerKernels, dtype: torch.dtype
) -> None:
    x = 100 + _random(3, 200, dtype=torch.float32).to(dtype)
    output = kernels.layer_norm(x, None, None, 1e-5)
    expected = reference.layer_norm(x.double(), None, None, 1e-5).to(dtype)
    torch.testing.assert_close(output, expected, rtol=1e-2, atol=1e-4)


@pytest.mark.parametrize("size", [1, 1100])
@pytest.mark.parametrize("name", ACTIVATIONS)
def test_activations_agree(
    kernels: NativeLayerKernels, dtype: torch.dtype, size: int, name: str
) -> None:
    x = _random(5, 2 * size, dtype=dtype) * 4
    _assert_agrees(kernels.act_and_mul(x, name), reference.act_and_mul(x, name))
    _assert_agrees(kernels.activate(x.clone(), name), reference.activate(x, name))


GATES = {
    "offset": Gate(limit=0.5, alpha=1.7, offset=1.0),
    "limit": Gate(limit=3.0),
    "limit of the activation": Gate(limit=1.5, limits_active=True),
    "gelu": Gate(activation="gelu"),
}


@pytest.mark.parametrize("size", [1, 1100])
@pytest.mark.parametrize("gate", GATES.values(), ids=GATES)
def test_gates_agree(
    kernels: NativeLayerKernels, dtype: torch.dtype, size: int, gate: Gate
) -> None:
    x = _random(5, 2 * size + 3, dtype=dtype)[:, : 2 * size] * 4
    _assert_agrees(kernels.apply_gate(x, gate), LayerKernels().apply_gate(x, gate))
    assert kernels.apply_gate(torch.full((1, 2), torch.nan, dtype=dtype), gate).isnan().all()


@pytest.mark.parametrize("name", ["silu", "gelu", "gelu_tanh"])
def test_far_from_zero_an_activation_stays_finite(
    kernels: NativeLayerKernels, dtype: torch.dtype, name: str
) -> None:
    x = torch.tensor([[-1e4, -200, -90, 90, 200, 1e4]]).to(dtype)
    _assert_agrees(kernels.activate(x.clone(), name), torch.relu(x))


def test_a_broken_number_stays_one(kernels: NativeLayerKernels, dtype: torch.dtype) -> None:
    x = torch.tensor([[float("nan"), 1.0]]).to(dtype)
    for name in ("silu", "gelu", "gelu_tanh"):
        assert kernels.activate(x.clone(), name).isnan().tolist() == [[True, False]]
    assert kernels.rms_norm(x, torch.ones(2, dtype=dtype), 1e-5).isnan().all()


def test_embedding_takes_rows_of_a_table(kernels: NativeLayerKernels, dtype: torch.dtype) -> None:
    """A part of a wider one here; tokens that it does not have are zeros."""
    table = torch.randn(30, 50).to(dtype)[:, :37]
    token_ids = torch.tensor([29, 0, 7, 7, 30, -1])
    rows = kernels.embed(table, token_ids)
    assert torch.equal(rows[:4], reference.embed(table, token_ids[:4]))
    assert not rows[4:].any()


@pytest.mark.parametrize(
    ("head_dim", "rotary_dim", "with_norms"),
    [(64, 64, False), (128, 128, True), (40, 40, True), (80, 32, False)],
)
@pytest.mark.parametrize("in_int8", [False, True])
def test_rotation_and_cache_write_agree(
    kernels: NativeLayerKernels,
    dtype: torch.dtype,
    in_int8: bool,
    head_dim: int,
    rotary_dim: int,
    with_norms: bool,
) -> None:
    heads = _random(5, 6 + 2 * 2, head_dim, dtype=dtype)
    angles = _random(50, rotary_dim // 2, dtype=torch.float32, seed=1)
    norms = [_random(head_dim, dtype=dtype, seed=seed) if with_norms else None for seed in (2, 3)]
    results = []
    for rotate in (kernels.rotate_and_write_kv, reference.rotate_and_write_kv):
        rows = heads.clone()
        cache_dtype = torch.int8 if in_int8 else dtype
        head_size = stored_head_size(head_dim, cache_dtype)
        cache = torch.zeros(8, 3, 2, 4, 2, head_size, dtype=cache_dtype)
        rotate(
            *rows.split([6, 2, 2], dim=1),
            cache[:, 2, 0],
            cache[:, 2, 1],
            slot_mapping=torch.tensor([3, -1, 30, 0, 17]),
            positions=torch.tensor([49, 0, 7, 8, 9]),
            cos=angles.cos().to(dtype),
            sin=angles.sin().to(dtype),
            query_norm=norms[0],
            key_norm=norms[1],
        )
        results.append((rows[:, :6], cache))
    (query, cache), (expected_query, expected_cache) = results
    _assert_agrees(query, expected_query)
    assert torch.equal(cache[:, 2, 1], expected_cache[:, 2, 1])
    if in_int8:  # a key that is rounded to the other side may have the next code
        keys, expected_keys = (
            dequantize_heads(tensor[:, 2, 0]) for tensor in (cache, expected_cache)
        )
        step = expected_keys.abs().amax(-1, keepdim=True) / 127
        assert (
            (keys - expected_keys).abs() <= (1 + 2**-7) * step + 2**-7 * expected_keys.abs()
        ).all()
    else:
        _assert_agrees(cache, expected_cache)
    assert not cache[:, :2].any()
