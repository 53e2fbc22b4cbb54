"""The scripts about weights in fewer bits print their tables; what they measure is not judged."""

from pathlib import Path

import pytest

from benchmarks import ceilings, gguf_decode, quantized_weights
from tests.support.gguf_files import make_gguf

PROGRAM = """#!/bin/sh
echo "|    PP |     TG |    B | N_KV | T_PP s | S_PP t/s | T_TG s | S_TG t/s |  T s | S t/s |"
echo "|    32 |     64 |    4 |  384 |  0.100 |   100.00 |  0.200 |    0.001 |  0.3 | 100.0 |"
"""


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


def test_decoding_is_compared_with_llama_cpp(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(gguf_decode, "NUM_SEQUENCES", (1, 4))
    monkeypatch.setattr(gguf_decode, "TURNS", 1)
    file, _ = make_gguf("llama", "Q4_1", tmp_path)
    program = tmp_path / "llama-batched-bench"
    program.write_text(PROGRAM)
    program.chmod(0o755)
    gguf_decode.main([str(file), "--llama-batched-bench", str(program)])
    rows = [line for line in capsys.readouterr().out.splitlines() if line.startswith("│")]
    assert [float(row.split("│")[3]) for row in rows] == [0, 0]
    assert all(float(row.split("│")[4]) > 1 for row in rows)
