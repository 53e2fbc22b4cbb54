"""Memory that is freed while a model is loaded returns to the system."""

import ctypes
import subprocess
import sys

import pytest

# In a process of its own, whose heap has no free pieces that others left.
SCRIPT = """
import re
from pathlib import Path
import torch
from worker_service.loader.device import freed_memory_returns

PIECE_BYTES, NUM_PIECES = 4 << 20, 16

def resident_bytes():
    return int(re.search(r"RssAnon:\\s+(\\d+) kB", Path("/proc/self/status").read_text())[1]) * 1024

torch.ones(30 << 20, dtype=torch.uint8)  # freed at once: what glibc calls large grows
with freed_memory_returns():
    pieces = [torch.ones(PIECE_BYTES, dtype=torch.uint8) for _ in range(NUM_PIECES)]
    full = resident_bytes()
    keep = pieces.pop()  # the topmost: what is below it could not be cut off
    pieces.clear()
    assert full - resident_bytes() > PIECE_BYTES * NUM_PIECES * 0.8
assert bool(keep.all())
"""


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "mallopt"), reason="needs glibc")
def test_freed_weights_go_back_to_the_system() -> None:
    path = [entry for entry in sys.path if entry]
    run = subprocess.run(
        [sys.executable, "-c", f"import sys; sys.path = {path!r}\n{SCRIPT}"],
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stderr
