"""The script about weights in fewer bits prints its table; what it measures is not judged."""

import pytest

from benchmarks import ceilings, quantized_weights


def test_products_are_compared_with_dense_ones(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, value in (("NUM_WEIGHTS", 1), ("ROUNDS", 1), ("NUM_ROWS", (1, 4))):
        monkeypatch.setattr(quantized_weights, name, value)
    for name, number in (("READ_BYTES", 2**22), ("TRIAL_S", 1e-4), ("SUSTAINED_S", 1e-4)):
        monkeypatch.setattr(ceilings, name, number)
    quantized_weights.main(["--dtype", "float32"])
    printed = capsys.readouterr().out
    assert printed.count("Q4_1") == 1
    assert "4 rows" in printed
