"""The benchmark of the core's own time runs and says what it measured; the times are not judged."""

import json
import sys
from pathlib import Path

import pytest

from benchmarks.scheduler_overhead import VllmProcess, growth, main, measure
from benchmarks.steady_core import Queue, SteadyCore
from scheduler_service.core import StepPlan

RIVAL = """
import json, sys
print(json.dumps({"version": "1.2.3"}), flush=True)
for line in sys.stdin:
    asked = json.loads(line)
    print(json.dumps([[8.0, 2.0]] * asked["steps"] if "steps" in asked else {}), flush=True)
"""


def test_it_writes_a_row_for_each_queue(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--running", "2", "4", "--prompt-tokens", "20", "40", "--groups", "1", "4"]
    main([*flags, "--drafts", "0", "--steps", "3", "--results", str(tmp_path)])
    content = json.loads((tmp_path / "scheduler_overhead.json").read_text())
    rows = content["rows"]
    assert [(row["groups"], row["prompt_tokens"], row["running"]) for row in rows] == [
        (1, 20, 2),
        (1, 20, 4),
        (1, 40, 2),
        (1, 40, 4),
        (4, 20, 4),
        (4, 40, 4),
    ]
    assert all(row["all_us"] >= row["deciding_us"] > 0 for row in rows)
    assert all("vllm_all_us" not in row for row in rows)
    assert content["machine"]["cores"] >= 1
    assert "budget" in capsys.readouterr().out


def test_a_rival_takes_its_turns_on_the_same_queue() -> None:
    with VllmProcess([sys.executable, "-c", RIVAL]) as rival:
        assert rival.version == "1.2.3"
        row = measure(Queue(num_seqs=2, prompt_tokens=20), 3, rival)
    assert row["vllm_deciding_us"] == 8.0
    assert row["vllm_all_us"] == 10.0
    # Ratios are written with two decimals.
    assert row["all_ratio"] == pytest.approx(10.0 / float(row["all_us"] or 0), abs=0.01)


def test_every_step_is_a_decode_of_everything() -> None:
    queue = Queue(num_seqs=6, prompt_tokens=20, num_groups=2)
    assert SteadyCore(queue).round()[0].plan_bytes >= 4 * 3


def test_rows_keep_none_to_all_of_their_drafts_in_turn() -> None:
    plans: list[StepPlan] = []
    core = SteadyCore(
        Queue(num_seqs=4, prompt_tokens=20, num_drafts=3), on_plan=lambda plan: plans.append(plan)
    )
    before = core.core.snapshot().num_generated_tokens
    core.round()
    assert plans[-1].lookahead == [3] * 4
    assert core.core.snapshot().num_generated_tokens - before == 1 + 2 + 3 + 4


def test_growth_compares_what_differs_in_one_thing() -> None:
    def row(rows: int, length: int, cost: float) -> dict[str, float | int | None]:
        return {
            "groups": 1,
            "rows_per_step": rows,
            "prompt_tokens": length,
            "drafts": 0,
            "all_us_per_row": cost,
        }

    rows = [row(16, 64, 9.0), row(256, 64, 2.0), row(4096, 64, 3.0), row(256, 4096, 2.5)]
    assert growth(rows) == {"with_rows": 1.5, "with_length": 1.25}
