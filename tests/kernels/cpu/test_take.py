"""The largest number of a row and its place, as numpy finds them."""

import numpy as np
import pytest
import torch

from pagewire_kernels.cpu.layers import find_largest
from pagewire_kernels.cpu.native_library import Library
from tests.support.native import native_libraries

LIBRARIES = native_libraries()
NAN, INF = float("nan"), float("inf")

pytestmark = pytest.mark.skipif(not LIBRARIES, reason="no compiled kernels for this processor")


@pytest.fixture(params=LIBRARIES, ids=lambda library: library.instruction_set)
def library(request: pytest.FixtureRequest) -> Library:
    found: Library = request.param
    return found


@pytest.mark.parametrize("size", [1, 7, 16, 17, 200, 1024, 1025, 5003])
def test_it_is_the_first_of_the_largest(library: Library, size: int) -> None:
    generator = torch.Generator().manual_seed(size)
    x = torch.randint(-9, 9, (7, size), generator=generator).float()  # many are equal
    x[1] = -INF
    x[2, size // 2] = INF
    x[3] = x[3].sort().values
    places, values = find_largest(library, x)
    assert places.tolist() == x.numpy().argmax(axis=1).tolist()
    assert torch.equal(values, x.amax(dim=1))


@pytest.mark.parametrize("place", [0, 17, 1500, 1999])
def test_a_broken_number_is_found_wherever_it_stands(library: Library, place: int) -> None:
    x = torch.zeros(2, 2000)
    x[0, place], x[0, 1400] = NAN, INF
    places, values = find_largest(library, x)
    assert values.isnan().tolist() == [True, False]
    assert places[0] == np.argmax(x[0].numpy())
