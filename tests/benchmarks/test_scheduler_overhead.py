"""The core's steps, as the benchmark of its own time takes them: bytes of plans, and its rival."""

import pytest

from benchmarks.measuring.steady_core import Queue, SteadyCore
from scheduler_service import wire


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
