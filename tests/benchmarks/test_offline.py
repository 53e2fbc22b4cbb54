"""The offline benchmark runs whole engines on one checkpoint, and compares what they did."""

import json
from pathlib import Path

import pytest

from benchmarks.engines.choice import DEFAULT_NAMES, Programs
from benchmarks.engines.engine import Settings
from benchmarks.interleaved_runs import Patience
from benchmarks.model_shapes import SHAPES
from benchmarks.offline import main, parse, patience_of, run, show
from benchmarks.workloads import WORKLOADS

TINY = SHAPES["tiny"]


@pytest.mark.timeout(900)  # four Pythons that import torch, however busy the machine is
def test_engines_compete_and_agree(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    settings = Settings(
        shape=TINY,
        dtype="float32",
        checkpoints=tmp_path,
        max_model_len=1024,
        kv_cache_gib=1,
        threads=1,
        logs=tmp_path,
    )
    workloads = [WORKLOADS["single"], WORKLOADS["prefix"]]
    content = run(settings, Programs(), DEFAULT_NAMES, workloads, Patience(repeats=1))
    names = {"pagewire", "pagewire in-process", "transformers", "transformers cb"}
    assert set(content["engines"]) == names
    assert set(content["absent"]) == {"vllm", "llama.cpp", "nano-vllm"}
    for row in content["rows"]:
        assert set(row["tokens_per_s"]) == names
        assert row["best_peer"] in {"transformers", "transformers cb"}
        assert row["ratio"] > 0
        assert 0 < row["share_of_floor"] < 1
    for measured in content["ceilings"].values():  # each by another process, four times
        assert min(measured) > 1e8
    for name, agreement in content["greedy_tokens_equal_transformers"].items():
        assert agreement["equal_requests"] == agreement["requests"], name
    assert json.loads(json.dumps(content)) == content
    show(content)
    assert "without vllm: not given by --vllm-python" in capsys.readouterr().out


def test_a_shape_is_one_of_those_known() -> None:
    with pytest.raises(SystemExit):
        main(["--shape", "gpt-9"])


@pytest.mark.timeout(900)
def test_quantized_weights_compete_with_dense_ones(tmp_path: Path) -> None:
    arguments = ["--shape", "tiny", "--quantization", "int8", "--engines", "pagewire"]
    flags = ["--checkpoints", str(tmp_path), "--results", str(tmp_path), "--threads", "1"]
    flags += ["--kv-cache-gib", "1", "--workloads", "single", "--repeats", "1", "--no-ceilings"]
    main([*arguments, "pagewire dense", "llama.cpp", *flags, "--llama-server", str(tmp_path)])
    content = json.loads((tmp_path / "offline_tiny_int8_bfloat16.json").read_text())
    (row,) = content["rows"]
    assert row["best_peer"] == "pagewire dense"
    assert row["ratio"] > 0
    settings = {name: about["settings"] for name, about in content["engines"].items()}
    assert settings["pagewire"]["quantization"] == "int8"
    assert "quantization" not in settings["pagewire dense"]
    assert content["absent"] == {"llama.cpp": "requires a GGUF file"}


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["--weights", "awq", "--quantization", "int4"], "is for dense checkpoints"),
        (["--weights", "q4_1"], "--weights q4_1 needs --model"),
    ],
)
def test_weights_that_nothing_writes_are_refused(
    arguments: list[str], reason: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        parse(arguments)
    assert reason in capsys.readouterr().err


def test_as_many_turns_may_be_asked_for_as_are_wanted() -> None:
    assert patience_of(parse([])).repeats == 3
    assert patience_of(parse(["--repeats", "12"])).repeats == 12
