"""Norm, rotation and activation on the GPU against the reference."""

import pytest
import torch

from pagewire_kernels import reference
from pagewire_kernels.gpu import act_and_mul, rms_norm, rotate_and_write_kv
from tests.support.gpu_kernels import DEVICE, DTYPES, MARKS, assert_agrees

pytestmark = MARKS


def _random(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [16, 100, 768])
@pytest.mark.parametrize("with_residual", [False, True])
def test_a_norm_agrees_with_the_reference(
    dtype: torch.dtype, size: int, with_residual: bool
) -> None:
    x, weight = _random(3, 2 * size, dtype=dtype)[:, :size], _random(size, dtype=dtype, seed=1)
    residual = _random(3, size, dtype=dtype, seed=2) if with_residual else None
    moved = None if residual is None else residual.to(DEVICE, copy=True)
    output = rms_norm(x.to(DEVICE), weight.to(DEVICE), 1e-5, moved)
    expected = reference.rms_norm(x, weight, 1e-5, residual)
    assert_agrees(output, expected)
    if moved is not None and residual is not None:
        assert torch.equal(moved.cpu(), residual)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("activation", ["silu", "gelu", "gelu_tanh"])
def test_an_activation_agrees_with_the_reference(dtype: torch.dtype, activation: str) -> None:
    gate_up = _random(3, 2 * 1100, dtype=dtype) * 4
    output = act_and_mul(gate_up.to(DEVICE), activation)
    assert_agrees(output, reference.act_and_mul(gate_up, activation))


def test_far_from_zero_an_activation_stays_finite() -> None:
    gate_up = torch.tensor([[-1e4, 1e4, 2.0, 2.0]])
    for activation in ("silu", "gelu", "gelu_tanh"):
        assert act_and_mul(gate_up.to(DEVICE), activation)[0].tolist() == pytest.approx([0, 2e4])


def test_an_unknown_activation_is_refused() -> None:
    with pytest.raises(ValueError, match="expected one of silu, gelu, gelu_tanh, got 'relu'"):
        act_and_mul(torch.zeros(1, 2), "relu")


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
    cos, sin = (each.to(dtype) for each in (angles.cos(), angles.sin()))
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
