"""Products of heads with weights of their own: the bits of separate products, in any batch."""

import pytest
import torch

from pagewire_kernels.cpu.heads import NativeHeads
from pagewire_kernels.cpu.linear import HugeMemory, NativeWeight
from pagewire_kernels.cpu.native_library import Library
from tests.support.native import native_libraries

pytestmark = pytest.mark.parametrize(
    "library", native_libraries(), ids=lambda found: found.instruction_set
)
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)


def _random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@DTYPES
@pytest.mark.parametrize("num_rows", [1, 3, 70, 700])
@pytest.mark.parametrize(("outputs", "inputs", "num_spare"), [(40, 12, 8), (65, 130, 0), (7, 6, 3)])
def test_each_head_is_multiplied_by_its_weight(
    library: Library,
    dtype: torch.dtype,
    num_rows: int,
    outputs: int,
    inputs: int,
    num_spare: int,
) -> None:
    weights = _random(3, outputs, inputs).to(dtype)
    rows = _random(num_rows, 3, inputs + 9, seed=1).to(dtype)
    rows[:, :, inputs:] = torch.nan
    product = NativeHeads(weights, library, HugeMemory())
    found = product.apply(rows[:, :, :inputs], num_spare)
    assert found.shape == (num_rows, 3, outputs + num_spare)
    for head, weight in enumerate(weights):
        alone = NativeWeight(weight, library, HugeMemory())
        expected = alone.apply(rows[:, head, :inputs].contiguous())
        assert torch.equal(found[:, head, :outputs], expected)


@DTYPES
def test_a_row_has_the_same_bits_in_any_batch(library: Library, dtype: torch.dtype) -> None:
    product = NativeHeads(_random(4, 40, 72).to(dtype), library, HugeMemory())
    rows = _random(90, 4, 72, seed=1).to(dtype)
    expected = product.apply(rows)
    for first, end in ((0, 1), (17, 22), (50, 90)):
        assert torch.equal(product.apply(rows[first:end]), expected[first:end])


def test_rows_of_other_shapes_are_refused(library: Library) -> None:
    product = NativeHeads(_random(4, 8, 6), library, HugeMemory())
    for rows in (_random(2, 3, 6), _random(2, 4, 5), _random(2, 4, 6).double()):
        with pytest.raises(ValueError, match=r"dense rows of torch.float32 \[\*, 4, 6\]"):
            product.apply(rows)
