"""The script about memory while loading measures each format in a process of its own."""

import json
from pathlib import Path

from benchmarks.loading_memory import main


def test_formats_are_measured(tmp_path: Path) -> None:
    flags = ["--checkpoints", str(tmp_path), "--results", str(tmp_path)]
    main(["--shape", "tiny", *flags, "--weights", "dense", "int8", "w8a8"])
    rows = json.loads((tmp_path / "loading_memory.json").read_text())["rows"]
    assert [row["weights"] for row in rows] == ["dense", "int8", "w8a8"]
    dense, rounded, w8a8 = (row["packed_mib"] for row in rows)
    assert 0 < rounded < w8a8 < dense  # int8 has the embedding and the head in 8 bits, too
    assert all(row["peak_mib"] > 0 for row in rows)
