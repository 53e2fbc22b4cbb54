"""Scripts run on the smallest scale and publish their rows; what they measure is not judged."""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from benchmarks import (
    frontend,
    moving,
    recovery,
    saved_states,
    scheduler_overhead,
    speculation,
)
from benchmarks.measuring.processes import processor_seconds, resident_bytes, tree
from pagewire_client import SamplingParams

STREAMS = ["--streams", "4", "--tokens", "5", "--pace", "0", "--frontends", "2", "--turns", "1"]
QUEUES = ["--running", "4", "--prompt-tokens", "20", "--groups", "1", "4", "--drafts", "0"]
STATES = ["--shape", "tiny-hybrid", "--dtype", "float32", "--num-requests", "2", "--repeats", "1"]
STATES += ["--prompt-tokens", "600", "--output-tokens", "8", "--kv-cache-gib", "1"]
DRAFTS = ["--dtype", "float32", "--streams", "1", "--turns", "1", "--tokens", "24"]

SCRIPTS: dict[str, tuple[Callable[[list[str]], None], list[str], str, str, list[Any]]] = {
    "frontend": (frontend.main, STREAMS, "way", "cpu_us_per_token", ["grpc", "http"]),
    "moving": (moving.main, ["--scale", "64"], "case", "tokens", list(moving.CASES)),
    "recovery_simulated": (
        recovery.main,
        ["--kills", "1", "--model", "simulated"],
        "victim",
        "p50_ms",
        ["worker", "core", "frontend"],
    ),
    "saved_states": (saved_states.main, STATES, "states", "tokens/s", ["saved", "off", "ratio"]),
    "scheduler_overhead": (
        scheduler_overhead.main,
        [*QUEUES, "--record", "--steps", "3"],
        "groups",
        "recording_us",
        [1, 1, 4, 4],  # without and with windows
    ),
    "speculation_embedded_float32_ngram": (
        speculation.main,
        ["embedded", *DRAFTS],
        "workload",
        "ratio",
        list(speculation.WORKLOADS),
    ),
}
"""By result: the script, its flags, a column with the value of each row, and a measured column."""
SLOW = {"frontend", "moving", "saved_states", "speculation_embedded_float32_ngram"}
"""Those that `make test-long` runs."""


@pytest.mark.parametrize(
    "result",
    [pytest.param(name, marks=[pytest.mark.long] if name in SLOW else []) for name in SCRIPTS],
)
def test_a_script_publishes_a_row_for_each_case(result: str, tmp_path: Path) -> None:
    main, flags, case, measured, cases = SCRIPTS[result]
    main([*flags, "--results", str(tmp_path)])
    rows = json.loads((tmp_path / f"{result}.json").read_text())["rows"]
    assert [row[case] for row in rows] == cases
    assert all(row[measured] > 0 for row in rows)


@pytest.mark.parametrize(
    ("arrivals", "recovery_s"),
    [
        ([9.9, 10.3, 10.31, 10.9], 0.3),  # a later pause is another matter
        ([9.9, 10.01, 10.02, 10.3, 10.31], 0.3),  # what was on its way is not the next token
        ([9.0, 9.9, 10.02, 10.03], 0.02),  # nor is the time before the kill
    ],
)
def test_the_next_token_is_the_one_behind_the_pause(
    arrivals: list[float], recovery_s: float
) -> None:
    stream = recovery.Stream([1], SamplingParams(), arrivals)
    assert stream.recovery_s(killed_at=10.0) == pytest.approx(recovery_s)


def test_memory_and_time_are_those_of_a_process_and_its_children() -> None:
    child = "import sys; held = b'x' * (64 << 20); print('ready', flush=True); sys.stdin.read()"
    parent = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {child!r}])"
    with subprocess.Popen(
        [sys.executable, "-c", parent], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        process.stdout.readline()
        assert len(tree(process.pid)) == 2
        assert resident_bytes(process.pid) >= 64 << 20
        assert processor_seconds(process.pid) > 0
