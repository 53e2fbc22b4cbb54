"""The host's time for a step is measured without a device."""

import json
import subprocess
import sys
from pathlib import Path


def test_the_time_to_queue_a_step_is_measured(tmp_path: Path) -> None:
    # It replaces functions of torch and Triton, which a process of its own keeps to itself.
    flags = ["--layers", "2", "--decodes", "3", "--chunk", "20", "--repeats", "2", "--results"]
    command = [sys.executable, "-m", "benchmarks.host_time", *flags, str(tmp_path)]
    subprocess.run(command, check=True, capture_output=True, cwd=Path(__file__).parents[2])
    assert json.loads((tmp_path / "host_time.json").read_text())["ms"] > 0
