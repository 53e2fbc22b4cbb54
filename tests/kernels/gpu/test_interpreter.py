"""What `tests/support/gpu_kernels.py` replaces in Triton's interpreter still finds faults."""

import pytest
import torch
import triton
import triton.language as tl

from tests.support.gpu_kernels import INTERPRETED, MARKS

pytestmark = [*MARKS, pytest.mark.skipif(not INTERPRETED, reason="a GPU checks nothing")]

LARGEST = 2**31 - 1


@triton.jit
def _next(values, by):
    tl.store(values, tl.load(values) + by)


@pytest.mark.parametrize(
    ("dtype", "first"), [(torch.int32, LARGEST), (torch.int32, -LARGEST), (torch.int64, LARGEST)]
)
def test_integers_that_overflow_are_found(dtype: torch.dtype, first: int) -> None:
    sign = 1 if first > 0 else -1
    values = torch.tensor([first - sign], dtype=dtype)
    _next[(1,)](values, sign)
    assert values.tolist() == [first]
    if dtype == torch.int64:
        _next[(1,)](values, sign)
        assert values.tolist() == [first + sign]
        return
    with pytest.raises(Exception, match="int32 overflow detected"):
        _next[(1,)](values, 2 * sign)
