"""The GPU kernels' tests, in Triton's interpreter."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
NO_CACHE = ("-p", "no:cacheprovider")
INTERPRETED = ("tests/kernels/gpu", "tests/worker_service/runner/device/test_device_sampler.py")


def test_the_kernels_agree_with_the_reference_in_the_interpreter() -> None:
    """In a process of its own: see `tests/support/gpu_kernels.py`."""
    run = subprocess.run(
        [sys.executable, "-m", "pytest", *INTERPRETED, "-q", "-m", "not gpu", *NO_CACHE],
        cwd=ROOT,
        env=os.environ | {"TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stdout[-20_000:]
