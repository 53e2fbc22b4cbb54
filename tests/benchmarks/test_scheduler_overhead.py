"""The core's steps, as the benchmark of its own time takes them: bytes of plans, and its rival."""

import sys

import pytest

from benchmarks.scheduler_overhead import VllmProcess, measure
from benchmarks.steady_core import Queue, SteadyCore
from scheduler_service import wire
from scheduler_service.core import StepPlan

RIVAL = """
import json, sys
print(json.dumps({"version": "1.2.3"}), flush=True)
for line in sys.stdin:
    asked = json.loads(line)
    print(json.dumps([[8.0, 2.0]] * asked["steps"] if "steps" in asked else {}), flush=True)
"""


def test_a_rival_takes_its_turns_on_the_same_queue() -> None:
    with VllmProcess([sys.executable, "-c", RIVAL]) as rival:
        assert rival.version == "1.2.3"
        row = measure(Queue(num_seqs=2, prompt_tokens=20), 3, rival)
    assert row["vllm_deciding_us"] == 8.0
    assert row["vllm_all_us"] == 10.0
    # Ratios are written with two decimals.
    assert row["all_ratio"] == pytest.approx(10.0 / float(row["all_us"] or 0), abs=0.01)


@pytest.mark.parametrize(("num_seqs", "max_bytes"), [(1, 16), (64, 5.5)])
def test_a_plan_for_steady_decoding_has_few_bytes_a_row(num_seqs: int, max_bytes: float) -> None:
    """Of sixteen steps: with blocks of 16 tokens, every sequence gets one block."""
    core = SteadyCore(Queue(num_seqs=num_seqs, prompt_tokens=512))
    num_bytes = sum(core.round()[0].plan_bytes for _ in range(16))
    # Four bytes for the row, and twelve for a block every sixteen steps.
    assert 4 + 12 / 16 <= num_bytes / 16 / num_seqs <= max_bytes


def test_a_new_prompt_travels_once_at_four_bytes_a_token() -> None:
    def largest_plan(prompt_tokens: int) -> int:
        sizes: list[int] = []
        SteadyCore(
            Queue(num_seqs=1, prompt_tokens=prompt_tokens),
            on_plan=lambda plan: sizes.append(wire.encode_plan(plan, 1).ByteSize()),
        )
        assert sum(size > 4 * prompt_tokens for size in sizes) == 1
        return max(sizes)

    # A thousand tokens, and the ids of 62 or 63 more blocks.
    assert 4 * (1000 + 62) <= largest_plan(1100) - largest_plan(100) <= 4 * (1000 + 64) + 16


def test_rows_keep_none_to_all_of_their_drafts_in_turn() -> None:
    plans: list[StepPlan] = []
    core = SteadyCore(
        Queue(num_seqs=4, prompt_tokens=20, num_drafts=3), on_plan=lambda plan: plans.append(plan)
    )
    before = core.core.snapshot().num_generated_tokens
    core.round()
    assert plans[-1].lookahead == [3] * 4
    assert core.core.snapshot().num_generated_tokens - before == 1 + 2 + 3 + 4
