"""Row-wise operations: what they are called, and the same bits for a row wherever it stands."""

import pytest
import torch

from pagewire_kernels import reference
from pagewire_kernels.cpu.layers import NativeLayerKernels
from pagewire_kernels.interface import stored_head_size
from pagewire_kernels.reference import ACTIVATIONS
from pagewire_kernels.reference.backend import LayerKernels
from pagewire_kernels.reference.kv_cache import dequantize_heads
from tests.support.native import native_libraries

IMPLEMENTATIONS: dict[str, LayerKernels] = {"torch": LayerKernels()}
IMPLEMENTATIONS |= {
    found.instruction_set: NativeLayerKernels(found) for found in native_libraries()
}

FUNCTIONS = {
    "silu": torch.nn.functional.silu,
    "gelu": torch.nn.functional.gelu,
    "gelu_tanh": lambda x: torch.nn.functional.gelu(x, approximate="tanh"),
    "relu": torch.nn.functional.relu,
    "relu2": lambda x: torch.nn.functional.relu(x).square(),
}

pytestmark = pytest.mark.parametrize(
    "kernels", IMPLEMENTATIONS.values(), ids=IMPLEMENTATIONS.keys()
)


def _random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_an_activation_is_what_it_is_called(kernels: LayerKernels, name: str) -> None:
    x = torch.linspace(-100, 100, 4001).view(1, -1)
    expected = FUNCTIONS[name](x)
    torch.testing.assert_close(kernels.activate(x.clone(), name), expected, atol=1e-5, rtol=1e-5)
    product = kernels.act_and_mul(torch.cat([x, x + 1], dim=1), name)
    torch.testing.assert_close(product, expected * (x + 1), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    ("name", "size"), [*((name, 60) for name in ACTIVATIONS), ("silu", 1), ("gelu", 1100)]
)
def test_an_activation_has_the_same_bits_wherever_a_row_stands(
    kernels: LayerKernels, name: str, size: int
) -> None:
    x = _random(50, 2 * size) * 3
    expected, products = kernels.activate(x.clone(), name), kernels.act_and_mul(x, name)
    for row in range(50):
        assert torch.equal(kernels.activate(x[row, None].clone(), name)[0], expected[row])
        assert torch.equal(kernels.act_and_mul(x[row, None], name)[0], products[row])


@pytest.mark.parametrize(
    ("num_rows", "dtype"), [(1, torch.float32), (3, torch.bfloat16), (400, torch.float32)]
)
def test_a_copy_stays_when_its_rows_change(
    kernels: LayerKernels, num_rows: int, dtype: torch.dtype
) -> None:
    rows = _random(num_rows, 80).to(dtype)[:, :70]
    before = rows.clone()
    copied = kernels.copy(rows)
    rows.zero_()
    assert copied.dtype == dtype
    assert torch.equal(copied, before)


@pytest.mark.parametrize("size", [64, 60, 896, 4096])
def test_a_norm_has_the_same_bits_for_any_number_of_rows(kernels: LayerKernels, size: int) -> None:
    rows, weight, bias = _random(70, size), _random(size, seed=1), _random(size, seed=2)

    def norms(rows: torch.Tensor) -> torch.Tensor:
        root = kernels.rms_norm(rows, weight, 1e-6, rows * 0.3)
        return torch.cat([root, kernels.layer_norm(rows, weight, bias, 1e-5, rows * 0.3)], 1)

    expected = norms(rows)
    assert all(torch.equal(norms(rows[i : i + 1]), expected[i : i + 1]) for i in range(70))


def test_a_norm_adds_to_the_residual_stream(kernels: LayerKernels) -> None:
    x, residual, weight = _random(3, 40), _random(3, 40, seed=1), _random(40, seed=2)
    for norm in (
        lambda x, residual=None: kernels.rms_norm(x, weight, 1e-6, residual),
        lambda x, residual=None: kernels.layer_norm(x, weight, weight, 1e-6, residual),
    ):
        stream = residual.clone()
        normed = norm(x, stream)
        assert torch.equal(stream, residual + x)
        assert torch.equal(normed, norm(stream))


@pytest.mark.parametrize("rotary_dim", [24, 16, 6])
def test_turning_keeps_lengths_and_the_angle_between_equal_positions(
    kernels: LayerKernels, rotary_dim: int
) -> None:
    heads = _random(2, 5, 24)
    turned, cache = heads.clone(), torch.zeros(2, 2, 4, 1, 24)
    angles = _random(8, rotary_dim // 2, seed=1)
    kernels.rotate_and_write_kv(
        *turned.split([3, 1, 1], dim=1),
        *cache.unbind(1),
        slot_mapping=torch.tensor([5, -1]),
        positions=torch.tensor([7, 7]),
        cos=angles.cos(),
        sin=angles.sin(),
    )
    query, given = turned[:, :3], heads[:, :3]
    assert not torch.equal(query[..., :rotary_dim], given[..., :rotary_dim])
    assert torch.equal(query[..., rotary_dim:], given[..., rotary_dim:])
    torch.testing.assert_close(query.norm(dim=-1), given.norm(dim=-1))
    torch.testing.assert_close((query[0] * query[1]).sum(-1), (given[0] * given[1]).sum(-1))
    key, value = cache[1, :, 1, 0]
    torch.testing.assert_close(key @ query[0, 0], heads[0, 3] @ given[0, 0])
    assert torch.equal(value, heads[0, 4])
    cache[1, :, 1] = 0
    assert not cache.any()


@pytest.mark.parametrize("rotary_dim", [24, 16, 6])
@pytest.mark.parametrize("normed", [False, True])
def test_rotation_without_a_cache_gives_the_bits_of_a_cache_write(
    kernels: LayerKernels, rotary_dim: int, normed: bool
) -> None:
    heads, angles = _random(7, 6, 24), _random(8, rotary_dim // 2, seed=1)
    positions, tables = torch.tensor([7, 0, 1, 2, 3, 4, 7]), (angles.cos(), angles.sin())
    norms = {"query_norm": _random(24, seed=2), "key_norm": _random(24, seed=3)} if normed else {}
    written, cache = heads.clone(), torch.zeros(2, 2, 4, 1, 24)
    kernels.rotate_and_write_kv(
        *written.split([4, 1, 1], dim=1), *cache.unbind(1), torch.arange(7), positions, *tables,
        **norms,
    )  # fmt: skip
    rotated = heads.clone()
    kernels.rotate(rotated[:, :4], rotated[:, 4:5], positions, *tables, **norms)
    assert torch.equal(rotated[:, :4], written[:, :4])
    assert torch.equal(rotated[:, 4], cache[:, 0].flatten(0, 1)[:7, 0])
    assert torch.equal(rotated[:, 5], heads[:, 5])


def test_queries_are_rotated_without_keys_with_the_same_bits(kernels: LayerKernels) -> None:
    heads, angles = _random(7, 6, 24), _random(8, 12, seed=1)
    columns = torch.tensor([7, 0, 1, 2, 3, 4, 7]), angles.cos(), angles.sin()
    expected, found = heads.clone(), heads.clone()
    kernels.rotate(expected[:, :4], expected[:, 4:], *columns)
    kernels.rotate(found[:, :4], found[:, :0], *columns)
    assert torch.equal(found[:, :4], expected[:, :4])
    assert torch.equal(found[:, 4:], heads[:, 4:])


@pytest.mark.parametrize("cache_dtype", [None, torch.int8], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("num_heads", "rank", "rotary_dim"), [(3, 40, 8), (1, 33, 6), (5, 16, 64)])
def test_latents_are_written_as_norm_rotation_and_cache_write_would(
    kernels: LayerKernels,
    num_heads: int,
    rank: int,
    rotary_dim: int,
    dtype: torch.dtype,
    cache_dtype: torch.dtype | None,
) -> None:
    query, latents = (
        _random(*shape).to(dtype)
        for shape in ((5, num_heads, 12 + rotary_dim), (5, rank + rotary_dim))
    )
    norm, angles = _random(rank, seed=2).to(dtype), _random(8, rotary_dim // 2, seed=1)
    tables = angles.cos().to(dtype), angles.sin().to(dtype)
    slots, positions = torch.tensor([6, 1, -1, 0, 7]), torch.tensor([7, 0, 3, 1, 2])
    stored = cache_dtype or dtype
    shape = 2, 4, 1, stored_head_size(rank + rotary_dim, stored)
    found, expected = torch.zeros(shape, dtype=stored), torch.zeros(shape, dtype=stored)
    rotated = torch.full((5, num_heads, rank + rotary_dim), 9.0, dtype=dtype)

    ends = query[:, :, 12:]
    kernels.write_latents(
        ends, rotated[:, :, rank:], latents, norm, found, slots, positions, *tables, eps=1e-6
    )

    turned, end = ends.clone(), latents[:, None, rank:].clone()
    kernels.rotate(turned, end, positions, *tables)
    entry = torch.cat([kernels.rms_norm(latents[:, :rank], norm, 1e-6), end[:, 0]], dim=1)
    reference.write_kv(*[entry.unsqueeze(1)] * 2, *[expected] * 2, slots)
    assert torch.equal(rotated[:, :, rank:], turned)
    assert (rotated[:, :, :rank] == 9).all()
    if cache_dtype is not None:
        found, expected = (dequantize_heads(cache) for cache in (found, expected))
    tolerance = 0.05 if cache_dtype is not None else 1e-6 if dtype == torch.float32 else 0.04
    torch.testing.assert_close(found.float(), expected.float(), atol=tolerance, rtol=tolerance)
    assert not found.flatten(0, 1)[[2, 3, 4, 5]].any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_sum_of_a_text_has_the_same_bits_in_any_chunks(
    kernels: LayerKernels, dtype: torch.dtype
) -> None:
    hidden, size = _random(60, 70).to(dtype), 70
    expected = torch.zeros(size)
    for row in hidden[20:]:
        expected += row.float()
    sums = torch.zeros(3, size)
    for first, end in ((20, 21), (21, 50), (50, 60)):
        chunk = torch.cat([hidden[:5], hidden[first:end]])
        starts = torch.tensor([0, 5, 5, 5 + end - first], dtype=torch.int32)
        kernels.sum_rows(chunk, starts, sums)
    assert torch.equal(sums[2], expected)
    assert not sums[1].any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_rows_of_several_tables_are_added(kernels: LayerKernels, dtype: torch.dtype) -> None:
    words, positions = (_random(9, 70, seed=seed).to(dtype) for seed in (0, 1))
    indices = torch.tensor([8, 0, 3]), torch.tensor([0, 1, 2])
    sums = kernels.embed(positions[1:], indices[1], kernels.embed(words, indices[0]))
    assert torch.equal(sums, words[[8, 0, 3]] + positions[[1, 2, 3]])
