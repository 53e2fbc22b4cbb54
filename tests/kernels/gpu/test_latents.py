"""Latent attention on the GPU against the reference."""

import pytest
import torch

from pagewire_kernels import reference
from pagewire_kernels.triton import TritonBackend, TritonLayerKernels
from tests.support.gpu_kernels import DEVICE, DTYPES, MARKS, assert_agrees
from tests.support.paged_batch import PagedSequences, Shape

pytestmark = MARKS


def _random(*shape: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("num_heads", "rank", "rotary_dim"), [(3, 40, 8), (3, 40, 0), (16, 512, 64)]
)
def test_latents_and_ends_of_queries_agree_with_the_reference(
    dtype: torch.dtype, num_heads: int, rank: int, rotary_dim: int
) -> None:
    query = _random(5, num_heads, 12 + rotary_dim, dtype=dtype)
    latents = _random(5, rank + rotary_dim, dtype=dtype, seed=1)
    norm, angles = _random(rank, dtype=dtype, seed=2), _random(8, rotary_dim // 2, dtype=dtype)
    tables = angles.float().cos().to(dtype), angles.float().sin().to(dtype)
    columns = torch.tensor([6, 1, -1, 0, 7]), torch.tensor([7, 0, 3, 1, 2])
    outputs = []
    for device, write in (
        (torch.device("cpu"), reference.write_latents),
        (DEVICE, TritonLayerKernels().write_latents),
    ):
        queries = torch.zeros(5, num_heads, rank + rotary_dim, dtype=dtype, device=device)
        cache = torch.zeros(2, 4, 1, rank + rotary_dim, dtype=dtype, device=device)
        write(
            query.to(device)[:, :, 12:],
            queries[:, :, rank:],
            latents.to(device, copy=True),
            norm.to(device),
            cache,
            *(column.to(device) for column in columns),
            *(table.to(device) for table in tables),
            eps=1e-6,
        )
        outputs.append((queries, cache))
    (expected_queries, expected_cache), (queries, cache) = outputs
    assert_agrees(queries, expected_queries)
    assert_agrees(cache, expected_cache)
    assert not cache.flatten(0, 1)[[2, 3, 4, 5]].any()


@pytest.mark.parametrize("is_invariant", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("num_heads", "head_dim"),
    [(16, 144), (20, 288), pytest.param(34, 576, marks=pytest.mark.long)],
)
def test_keys_may_be_values(
    dtype: torch.dtype, num_heads: int, head_dim: int, is_invariant: bool
) -> None:
    shape = Shape(num_heads=num_heads, num_kv_heads=1, head_dim=head_dim, dtype=dtype)
    sequences = PagedSequences(shape, [40, 9, 33])
    sequences.value_cache = sequences.key_cache
    sequences.values = sequences.keys
    sequences.write()
    parts = [(0, 39, 40), (1, 0, 9), (2, 20, 33)]
    expected = sequences.attend(parts, scale=0.1)
    for name in ("tables", "key_cache"):
        setattr(sequences, name, getattr(sequences, name).to(DEVICE))
    sequences.value_cache = sequences.key_cache
    sequences.queries = [rows.to(DEVICE) for rows in sequences.queries]
    output = sequences.attend(parts, TritonBackend(batch_invariant=is_invariant), scale=0.1)
    assert_agrees(output, expected)
