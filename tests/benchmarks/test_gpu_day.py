"""The stages of a GPU day can be rehearsed on a CPU, and keep what their parts wrote."""

import json
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from benchmarks.gpu_day import STAGES, Day, Part, run_parts
from benchmarks.tune_attention import SEQUENCES
from tools import gpu_payload

RESULTS = {
    1: ["test_gpu.xml", "racecheck.log"],
    2: ["kernels.json", *(f"tune_attention_{kind}.json" for kind in SEQUENCES)],
    3: ["in_process.json"],
    4: ["services.json"],
    5: ["peers.json"],
    6: ["large.json"],
    7: ["chaos_swap.json"],
    8: ["fp8_kv.json"],
    9: ["adapters_tiny_float32.json"],
    10: ["qwen3_5.json"],
    11: [f"speculation_embedded_float32_{drafter}.json" for drafter in ("ngram", "draft", "eagle")],
    12: ["experts.json", "embeddings.json"],
}


@pytest.fixture
def day(tmp_path: Path) -> Day:
    """On this CPU."""
    return Day(output=tmp_path / "results", is_dry=True, checkpoints=tmp_path / "checkpoints")


@pytest.fixture
def gpu(tmp_path: Path) -> Day:
    """On a GPU of 80 GB, with both peers."""
    return Day(
        output=tmp_path / "results",
        is_dry=False,
        memory_gib=79.6,
        checkpoints=tmp_path / "checkpoints",
        vllm_python=Path("vllm/python"),
        nano_vllm_python=Path("nano/python"),
    )


@pytest.mark.timeout(480)  # each starts several processes, however busy the machine is
@pytest.mark.parametrize(
    "stage",
    [stage if stage == 4 else pytest.param(stage, marks=pytest.mark.long) for stage in STAGES],
)
def test_a_stage_can_be_rehearsed(stage: int, day: Day) -> None:
    outcomes = run_parts(STAGES[stage], day)
    logs = [path.read_text()[-3000:] for path in day.output.glob("*.log")]
    assert {outcome.part: outcome.code for outcome in outcomes if outcome.code != 0} == {}, logs
    for name in RESULTS[stage]:
        assert (day.output / name).stat().st_size > 0


def test_every_part_runs_a_module_and_has_a_name_of_its_own(day: Day, gpu: Day) -> None:
    for parts in STAGES.values():
        assert len({part.name for part in parts}) == len(parts)
        assert any(part.dry is not None for part in parts)
        for part in parts:
            words = gpu.words(part)
            module = words[words.index("-m") + 1]
            assert module == "tests.chaos" or find_spec(module) is not None
            assert day.words(part)[0] == sys.executable
    [racecheck] = [part for part in STAGES[1] if part.under]
    assert gpu.words(racecheck)[:3] == ["compute-sanitizer", "--tool", "racecheck"]


def test_a_failing_part_does_not_stop_the_others_and_one_without_end_is_ended(gpu: Day) -> None:
    parts = [
        Part(name="fails", limit_s=60, command="no_such_module"),
        Part(name="hangs", limit_s=0.5, command="timeit -n1 -r1 'while 1: pass'"),
        Part(name="absent", limit_s=60, command="this", under="no-such-program"),
        Part(name="works", limit_s=60, command="platform"),
    ]
    fails, hangs, absent, works = run_parts(parts, gpu)
    assert fails.code == 1
    assert "No module named" in (gpu.output / "fails.log").read_text()
    assert (hangs.code, hangs.why) == (None, "ended after 0 s")
    assert (absent.code, absent.why) == (None, "no-such-program is absent")
    assert works.code == 0
    summary = json.loads((gpu.output / "summary.json").read_text())
    assert [part["part"] for part in summary] == ["fails", "hangs", "absent", "works"]


def test_the_payload_has_what_the_services_declare_and_not_what_the_machine_has() -> None:
    names = {gpu_payload.name_of(requirement) for requirement in gpu_payload.requirements()}
    assert names >= {"fastapi", "llguidance", "grpcio-health-checking", "rich", "gguf"}
    assert not names & {"torch", "protobuf", "grpcio", "numpy", "transformers"}
