"""The offline benchmark runs whole engines on one checkpoint, and compares what they did."""

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.offline import main

TINY = ["--shape", "tiny", "--kv-cache-gib", "1", "--threads", "1", "--repeats", "1"]


def run(folder: Path, *flags: str) -> dict[str, Any]:
    main([*TINY, "--checkpoints", str(folder), "--results", str(folder), *flags])
    [path] = folder.glob("offline_*.json")
    return json.loads(path.read_text())  # type: ignore[no-any-return]


@pytest.mark.timeout(900)  # several Pythons that import torch, however busy the machine is
@pytest.mark.parametrize(
    ("peers", "flags"),
    [
        pytest.param({"pagewire"}, ["--no-ceilings"], id="two"),
        pytest.param({"pagewire"}, ["--no-ceilings", "--http"], id="http", marks=pytest.mark.long),
        pytest.param({"pagewire", "pagewire in-process"}, [], id="all", marks=pytest.mark.long),
    ],
)
def test_engines_compete_and_agree(peers: set[str], flags: list[str], tmp_path: Path) -> None:
    names = {*peers, "transformers"}
    engines = ["--engines", *sorted({*names, "vllm", "llama.cpp", "nano-vllm"})]
    limits = ["--least-seconds", "0", "--logs", str(tmp_path), "--dtype", "float32"]
    content = run(tmp_path, *limits, "--workloads", "prefix", *engines, *flags)
    assert set(content["engines"]) == names
    assert set(content["absent"]) == {"vllm", "llama.cpp", "nano-vllm"}
    assert "vllm: not given by --vllm-python" in content["facts"]
    assert ("over HTTP" in content["facts"]) == ("--http" in flags)
    for row in content["rows"]:
        assert all(row[name] > 0 for name in names)
        assert row["best_peer"] == "transformers"
        assert row["ratio"] > 0
        assert ("share_of_floor" in row) == ("--no-ceilings" not in flags)
        assert 0 < row.get("share_of_floor", 0.5) < 1
    for measured in content["ceilings"].values():  # each by another process, four times
        assert min(measured) > 1e8
    for name, agreement in content["greedy_tokens_equal_transformers"].items():
        assert agreement["equal_tokens"] == agreement["tokens"] > 0, name
