"""Quantiles of histograms."""

import pytest

from pagewire.status_rates import quantile


def test_a_quantile_lies_within_its_bucket() -> None:
    assert quantile([], 0.5, 1, 2) is None
    assert quantile([0, 0], 0.5, 1, 2) is None
    assert quantile([0, 4], 1.0, 1, 2) == 2
    assert quantile([1, 0, 1], 0.5, 1, 2) == 1
    assert quantile([1, 0, 1], 0.99, 1, 2) == pytest.approx(2 * 2**0.98, abs=1e-3)
