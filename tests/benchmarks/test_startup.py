"""Starts are compared by their medians, and memory is that of a whole tree of processes."""

import signal
import subprocess
import sys
from pathlib import Path

from benchmarks.processes import processor_seconds, resident_bytes, send_signal, tree
from benchmarks.startup import Start, compare

HOLDS = """
import subprocess, sys
held = b"x" * (64 << 20)
if len(sys.argv) > 1:
    child = subprocess.Popen([sys.executable, sys.argv[1], *sys.argv[2:]], stdin=subprocess.PIPE,
                             stdout=subprocess.PIPE)
    child.stdout.readline()
print("ready", flush=True)
sys.stdin.read()
"""


def start(first_token_s: float, peak_mib: float) -> Start:
    return Start(first_token_s=first_token_s, peak_mib=peak_mib, foreign_cores=0.0)


def test_servers_are_compared_with_ours() -> None:
    ours = [start(4.0, 500), start(9.0, 700), start(5.0, 600)]
    theirs = [start(40.0, 1200), start(42.0, 1300), start(41.0, 1500)]
    rows = compare({"pagewire": ours, "vllm": theirs})
    assert [row["first_token_s"] for row in rows] == [5.0, 41.0]
    assert rows[0]["first_token_s_worst"] == 9.0
    assert rows[0]["times_pagewire_peak"] == 1.0
    assert rows[1]["times_pagewire_first_token"] == 8.2
    assert rows[1]["times_pagewire_peak"] == round(1300 / 600, 2)


def test_memory_and_time_are_those_of_the_whole_tree(tmp_path: Path) -> None:
    script = tmp_path / "holds.py"
    script.write_text(HOLDS)
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen([sys.executable, script, script], **pipes) as parent:  # type: ignore[call-overload]
        parent.stdout.readline()
        assert len(tree(parent.pid)) == 2
        assert resident_bytes(parent.pid) >= 2 * (64 << 20)
        assert processor_seconds(parent.pid) > 0
        send_signal(parent.pid, signal.SIGKILL)
    assert tree(parent.pid) == []
    assert resident_bytes(parent.pid) == 0
