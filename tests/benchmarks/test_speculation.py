"""The benchmark of speculation runs and says what it measured; the times are not judged."""

import json
from pathlib import Path

import pytest

from benchmarks.speculation import main


def test_it_writes_a_row_for_each_workload_and_number_of_streams(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ["--dtype", "float32", "--streams", "1", "4", "--turns", "1", "--tokens", "24"]
    main(["embedded", *flags, "--results", str(tmp_path)])
    content = json.loads((tmp_path / "speculation_ngram.json").read_text())
    rows = content["rows"]
    assert [(row["streams"], row["workload"]) for row in rows] == [
        (streams, workload) for streams in (1, 4) for workload in ("copy", "bound", "chat", "free")
    ]
    for row in rows:
        assert row["ratio"] > 0
        assert 0 < row["tokens"] <= 24 * max(3, row["streams"])
        assert row["tokens_per_step"] >= 0.9
    assert sum(row["drafts"] for row in rows) > 0
    assert "tokens/step" in capsys.readouterr().out
