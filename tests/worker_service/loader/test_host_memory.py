"""What is freed while a model is loaded does not stay with the process."""

import ctypes
import re
from pathlib import Path

import pytest
import torch

from worker_service.loader.host_memory import freed_memory_returns

PIECE_BYTES, NUM_PIECES = 4 << 20, 16


def resident_bytes() -> int:
    found = re.search(r"RssAnon:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None
    return int(found[1]) * 1024


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "mallopt"), reason="needs glibc")
def test_freed_weights_go_back_to_the_system() -> None:
    torch.ones(30 << 20, dtype=torch.uint8)  # freed at once: what glibc calls large grows
    with freed_memory_returns():
        pieces = [torch.ones(PIECE_BYTES, dtype=torch.uint8) for _ in range(NUM_PIECES)]
        full = resident_bytes()
        keep = pieces.pop()  # the topmost: what is below it could not be cut off
        pieces.clear()
        assert full - resident_bytes() > PIECE_BYTES * NUM_PIECES * 0.8
    assert bool(keep.all())
