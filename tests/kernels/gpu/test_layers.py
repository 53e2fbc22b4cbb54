"""Norm, rotation and activation on the GPU against the reference."""

from typing import Any

import pytest
import torch

from pagewire_kernels import reference
from pagewire_kernels.reference import ACTIVATIONS, Gate
from pagewire_kernels.reference.backend import LayerKernels
from pagewire_kernels.triton import TritonLayerKernels, act_and_mul, rotate_and_write_kv
from pagewire_kernels.triton.layers import rms_norm
from tests.support.gpu_kernels import DEVICE, DTYPES, MARKS, assert_agrees

pytestmark = MARKS


def _random(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


KERNELS: LayerKernels = TritonLayerKernels()
TORCH: LayerKernels = LayerKernels()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [16, 100, 768])
@pytest.mark.parametrize("with_residual", [False, True])
@pytest.mark.parametrize("norm", ["rms_norm", "layer_norm", "layer_norm without weights"])
def test_a_norm_agrees_with_the_reference(
    norm: str, dtype: torch.dtype, size: int, with_residual: bool
) -> None:
    x = _random(3, 2 * size, dtype=dtype)[:, :size]
    weights: list[torch.Tensor | None] = [_random(size, dtype=dtype, seed=seed) for seed in (1, 3)]
    if norm == "rms_norm":
        del weights[1]
    elif norm != "layer_norm":
        weights = [None, None]
    residual = _random(3, size, dtype=dtype, seed=2) if with_residual else None
    moved = None if residual is None else residual.to(DEVICE, copy=True)
    name = norm.split()[0]
    there = [None if weight is None else weight.to(DEVICE) for weight in weights]
    output = getattr(KERNELS, name)(x.to(DEVICE), *there, 1e-5, moved)
    assert_agrees(output, getattr(TORCH, name)(x, *weights, 1e-5, residual))
    if moved is not None and residual is not None:
        assert torch.equal(moved.cpu(), residual)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_an_activation_agrees_with_the_reference(dtype: torch.dtype, activation: str) -> None:
    gate_up = _random(3, 2 * 1100, dtype=dtype) * 4
    expected = TORCH.activate(gate_up.clone(), activation)
    assert_agrees(KERNELS.activate(gate_up.to(DEVICE, copy=True), activation), expected)
    output = KERNELS.act_and_mul(gate_up.to(DEVICE), activation)
    assert_agrees(output, TORCH.act_and_mul(gate_up, activation))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "gate",
    [
        Gate(limit=0.5, alpha=1.7, offset=1.0),
        Gate(limit=3.0),
        Gate(limit=1.5, limits_active=True),
        Gate(),
    ],
)
def test_a_gate_agrees_with_the_reference(dtype: torch.dtype, gate: Gate) -> None:
    gate_up = _random(3, 2 * 1100 + 1, dtype=dtype)[:, :-1] * 4
    output = KERNELS.apply_gate(gate_up.to(DEVICE), gate)
    assert_agrees(output, TORCH.apply_gate(gate_up, gate))


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_has_the_same_bits_in_any_batch(dtype: torch.dtype) -> None:
    rows, weight = _random(5, 300, dtype=dtype).to(DEVICE), _random(300, dtype=dtype).to(DEVICE)
    operations = {
        "rms norm": lambda x: KERNELS.rms_norm(x, weight, 1e-6, x * 0.3),
        "layer norm": lambda x: KERNELS.layer_norm(x, weight, weight, 1e-6, x * 0.3),
        "activation": lambda x: KERNELS.activate(x.clone(), "gelu_tanh"),
        "product": lambda x: KERNELS.act_and_mul(x, "silu"),
        "deviations": lambda x: KERNELS.sparsify(x.clone(), 0.7),
        "mean squares": lambda x: KERNELS.match_rms(x.clone(), x * 0.3),
        "streams": lambda x: KERNELS.mix_streams(x, x[:, :9]),
    }
    for name, operation in operations.items():
        together = operation(rows)
        for i in range(5):
            assert torch.equal(operation(rows[i : i + 1])[0], together[i]), name


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ["multiply_sigmoid", "multiply_softplus"])
def test_a_product_with_an_activation_agrees_with_the_reference(
    dtype: torch.dtype, name: str
) -> None:
    products, x = (_random(3, 1300, dtype=dtype, seed=seed)[:, :1100] for seed in range(2))
    moved = products.to(DEVICE, copy=True)
    assert getattr(KERNELS, name)(moved, x.to(DEVICE)) is moved
    assert_agrees(moved, getattr(TORCH, name)(products, x))


@pytest.mark.parametrize("dtype", DTYPES)
def test_operations_on_statistics_of_rows_agree_with_the_reference(dtype: torch.dtype) -> None:
    x, like = (_random(5, 1300, dtype=dtype, seed=seed)[:, :1100] for seed in range(2))
    x[3] = 0
    moved = x.to(DEVICE, copy=True)
    assert KERNELS.sparsify(moved, 0.7) is moved
    assert_agrees(moved, TORCH.sparsify(x.clone(), 0.7))
    moved = x.to(DEVICE, copy=True)
    assert KERNELS.match_rms(moved, like.to(DEVICE)) is moved
    assert_agrees(moved, TORCH.match_rms(x, like))


def test_what_is_no_number_spoils_the_statistics_of_its_row() -> None:
    x, like = (_random(3, 300, dtype=torch.float32, seed=seed) for seed in range(2))
    x[1, 7] = torch.nan
    found = KERNELS.sparsify(x.to(DEVICE, copy=True), 0.7).cpu()
    assert torch.equal(found.isnan(), TORCH.sparsify(x.clone(), 0.7).isnan())
    assert found[1].isnan().all()
    found = KERNELS.match_rms(x.to(DEVICE, copy=True), like.to(DEVICE)).cpu()
    assert torch.equal(found.isnan(), TORCH.match_rms(x.clone(), like).isnan())
    assert found[1].isnan().all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_streams_agree_with_the_reference(dtype: torch.dtype) -> None:
    streams, factors = _random(5, 3 * 1100, dtype=dtype), _random(5, 9, dtype=dtype, seed=1)
    moved, x = streams.to(DEVICE, copy=True), _random(5, 1100, dtype=dtype, seed=2)
    assert_agrees(
        KERNELS.mix_streams(moved, factors.to(DEVICE)), TORCH.mix_streams(streams, factors)
    )
    factors = factors[:, :3]
    assert KERNELS.correct_streams(moved, x.to(DEVICE), factors.to(DEVICE), 2) is moved
    assert_agrees(moved, TORCH.correct_streams(streams, x, factors, 2))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("num_gates", "num_divisions"), [(3, 0), (6, 0), (15, 1), (15, 20)])
def test_gated_streams_agree_with_the_reference(
    dtype: torch.dtype, num_gates: int, num_divisions: int
) -> None:
    streams, numbers = _random(5, 3 * 1100, dtype=dtype), _random(2, num_gates, dtype=torch.float32)
    gates = _random(5, num_gates, dtype=torch.float32, seed=1)
    moved, found = streams.to(DEVICE, copy=True), gates.to(DEVICE, copy=True)
    options: dict[str, Any] = {"eps": 1e-3, "offset": 0.01, "magnitude": 2.0}
    options["num_divisions"] = num_divisions
    read = KERNELS.read_streams(moved, found, numbers.to(DEVICE), 3, **options)
    expected = TORCH.read_streams(streams, gates, numbers, 3, **options)
    assert_agrees(read, expected)
    assert_agrees(found, gates)
    first = 3 if num_divisions else num_gates - 3
    written = KERNELS.write_streams(moved, expected.to(DEVICE), found[:, first:])
    assert written is moved
    assert_agrees(moved, TORCH.write_streams(streams, expected, gates[:, first:]))


def test_far_from_zero_an_activation_stays_finite() -> None:
    gate_up = torch.tensor([[-1e4, 1e4, 2.0, 2.0]])
    for activation in ACTIVATIONS:
        large = 2e8 if activation == "relu2" else 2e4
        assert act_and_mul(gate_up.to(DEVICE), activation)[0].tolist() == pytest.approx([0, large])


def test_an_unknown_activation_is_refused() -> None:
    with pytest.raises(ValueError, match=f"expected one of {', '.join(ACTIVATIONS)}, got 'elu'"):
        act_and_mul(torch.zeros(1, 2), "elu")


def test_what_was_computed_before_allows_nothing_else() -> None:
    x, weight = _random(3, 40).to(DEVICE), _random(40).to(DEVICE)
    for _ in range(2):
        rms_norm(x, weight, 1e-5)
        with pytest.raises(ValueError, match=r"weight: expected shape \[40\], got \[39\]"):
            rms_norm(x, weight[:39], 1e-5)
        with pytest.raises(ValueError, match=r"weight: expected a dense last axis"):
            rms_norm(x[:, :20], weight[::2], 1e-5)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rotary_dim", [32, 20])
@pytest.mark.parametrize(("with_norms", "is_fp8"), [(False, False), (True, False), (False, True)])
def test_rotation_and_cache_write_agree_with_the_reference(
    dtype: torch.dtype, rotary_dim: int, with_norms: bool, is_fp8: bool
) -> None:
    heads = _random(5, 10 + 2 * 2, 32, dtype=dtype)
    angles = _random(50, rotary_dim // 2, seed=1)
    if is_fp8:  # quarter turns of what fp8 holds exactly: the interpreter's fp8 does not round
        heads = heads.to(torch.float8_e4m3fn).to(dtype)
        angles = (angles > 0) * (torch.pi / 2)
    cos, sin = (table.to(dtype) for table in (angles.cos(), angles.sin()))
    if is_fp8:
        cos, sin = cos.round(), sin.round()
    positions, slots = torch.tensor([49, 0, 7, 8, 9]), torch.tensor([3, -1, 30, 0, 17])
    norms = [_random(32, dtype=dtype, seed=seed) if with_norms else None for seed in (2, 3)]
    results = []
    for device, rotate in (
        (torch.device("cpu"), reference.rotate_and_write_kv),
        (DEVICE, rotate_and_write_kv),
    ):
        query, key, value = heads.to(device, copy=True).split([10, 2, 2], dim=1)
        cache = torch.zeros(8, 3, 2, 4, 2, 32).to(torch.float8_e4m3fn if is_fp8 else dtype)
        cache = cache.to(device)
        query_norm, key_norm = (None if norm is None else norm.to(device) for norm in norms)
        rotate(
            query,
            key,
            value,
            cache[:, 2, 0],
            cache[:, 2, 1],
            slots.to(device),
            positions.to(device),
            cos.to(device),
            sin.to(device),
            query_norm=query_norm,
            key_norm=key_norm,
            key_scale=0.5,
            value_scale=0.25,
        )
        assert torch.equal(key.cpu(), heads[:, 10:12])
        results.append((query.cpu(), cache.cpu().float()))
    (expected_query, expected_cache), (query, cache) = results
    assert_agrees(query, expected_query)
    assert_agrees(cache.to(dtype), expected_cache.to(dtype))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("with_norms", [False, True])
def test_rotation_without_a_cache_agrees_with_the_reference(
    dtype: torch.dtype, with_norms: bool
) -> None:
    heads, angles = _random(5, 14, 32, dtype=dtype), _random(50, 10, seed=1)
    cos, sin = (table.to(dtype) for table in (angles.cos(), angles.sin()))
    positions, norms = torch.tensor([49, 0, 7, 8, 9]), {}
    if with_norms:
        norms = {name: _random(32, dtype=dtype, seed=2) for name in ("query_norm", "key_norm")}
    results = []
    for device, kernels in ((torch.device("cpu"), TORCH), (DEVICE, KERNELS)):
        rotated = heads.to(device, copy=True)
        weights = {name: norm.to(device) for name, norm in norms.items()}
        columns = (column.to(device) for column in (positions, cos, sin))
        kernels.rotate(rotated[:, :10], rotated[:, 10:12], *columns, **weights)
        results.append(rotated)
    assert_agrees(results[1], results[0])
    assert torch.equal(results[1][:, 12:].cpu(), heads[:, 12:])


@pytest.mark.parametrize("dtype", DTYPES)
def test_sums_of_rows_have_the_bits_of_the_reference(dtype: torch.dtype) -> None:
    hidden, sums = _random(60, 300, dtype=dtype), _random(4, 300, seed=1)
    starts = torch.tensor([0, 1, 1, 40, 60], dtype=torch.int32)
    output = sums.to(DEVICE, copy=True)
    KERNELS.sum_rows(hidden.to(DEVICE), starts.to(DEVICE), output)
    TORCH.sum_rows(hidden, starts, sums)
    assert torch.equal(output.cpu(), sums)


@pytest.mark.parametrize("dtype", DTYPES)
def test_queries_and_keys_are_rotated_apart_with_the_same_bits(dtype: torch.dtype) -> None:
    heads, angles = _random(5, 14, 32, dtype=dtype).to(DEVICE), _random(50, 16, seed=1)
    tables = [table.to(DEVICE, dtype) for table in (angles.cos(), angles.sin())]
    positions = torch.tensor([49, 0, 7, 8, 9]).to(DEVICE)
    together, apart = heads.clone(), heads.clone()
    caches = torch.zeros(2, 2, 8, 3, 2, 32, dtype=dtype, device=DEVICE)
    slots = torch.tensor([3, 4, 20, 0, 17]).to(DEVICE)
    rows, keys = together.split([10, 2, 2], dim=1), apart.split([10, 2, 2], dim=1)
    rotate_and_write_kv(*rows, *caches[0], slots, positions, *tables)
    none = apart[:, :0]
    KERNELS.rotate(keys[0], none, positions, *tables)
    rotate_and_write_kv(none, *keys[1:], *caches[1], slots, positions, *tables)
    assert torch.equal(together, apart)
    assert torch.equal(*caches)
    assert caches.any()


@pytest.mark.parametrize("dtype", DTYPES)
def test_an_rms_norm_with_a_float32_weight_agrees(dtype: torch.dtype) -> None:
    rows, weight = _random(5, 60, dtype=dtype), 1 + _random(60, seed=1) / 1000
    norm = KERNELS.rms_norm(rows.to(DEVICE), weight.to(DEVICE), 1e-6)
    assert_agrees(norm, reference.rms_norm(rows, weight, 1e-6))
