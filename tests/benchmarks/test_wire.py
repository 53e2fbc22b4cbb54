"""The benchmark of the wire runs, keeps to the budget, and measures what the services send."""

import json
from pathlib import Path

from benchmarks.wire import BUDGET_BYTES, main, new_row, steady_row


def test_a_plan_for_steady_decoding_keeps_its_budget() -> None:
    """Sixteen steps: with blocks of 16 tokens, every sequence gets one block."""
    alone, many = steady_row(1, 16), steady_row(64, 16)
    assert 4 < float(str(alone["plan_bytes_per_sequence"])) <= BUDGET_BYTES
    # Four bytes for the row, and twelve for a block every sixteen steps.
    assert 4 + 12 / 16 <= float(str(many["plan_bytes_per_sequence"])) < 5.5


def test_a_new_prompt_travels_once_at_four_bytes_a_token() -> None:
    short, long = new_row(100, 2), new_row(1100, 2)
    grown = float(str(long["plan_bytes"])) - float(str(short["plan_bytes"]))
    # A thousand tokens, and the ids of 62 or 63 more blocks.
    assert 4 * (1000 + 62) <= grown <= 4 * (1000 + 64) + 16


def test_it_writes_messages_and_round_trips(tmp_path: Path) -> None:
    load = ["--running", "2", "4", "--prompt-tokens", "32", "--steps", "2"]
    main([*load, "--bytes", "10", "1000", "--round-trips", "3", "--results", str(tmp_path)])
    content = json.loads((tmp_path / "wire.json").read_text())
    assert [row["sequences"] for row in content["messages"]] == [2, 4, 1]
    assert [(row["transport"], row["bytes"]) for row in content["round_trips"]] == [
        ("unix socket", 10),
        ("unix socket", 1000),
        ("loopback TCP", 10),
        ("loopback TCP", 1000),
    ]
    assert all(0 < row["p50_us"] <= row["p99_us"] for row in content["round_trips"])
