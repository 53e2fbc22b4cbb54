"""The GPU kernels' tests, in Triton's interpreter."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
NO_CACHE = ("-p", "no:cacheprovider")
INTERPRETED = ("tests/kernels/gpu", "tests/worker_service/runner/device/test_device_sampler.py")


OTHER_BLAS = {"OPENBLAS_CORETYPE": "Haswell"}
"""numpy's products as on a processor with AVX2 only, whose BLAS chooses a kernel by the shape."""


def _run(*arguments: str, **environment: str) -> None:
    """In a process of its own: see `tests/support/gpu_kernels.py`."""
    run = subprocess.run(
        [
            sys.executable,
            "-m",
            "pytest",
            *INTERPRETED,
            "-q",
            "-m",
            "not gpu",
            *NO_CACHE,
            *arguments,
        ],
        cwd=ROOT,
        env=os.environ | {"TRITON_INTERPRET": "1"} | environment,
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stdout[-20_000:]


def test_the_kernels_agree_with_the_reference_in_the_interpreter() -> None:
    _run()


def test_rows_keep_their_bits_in_any_batch_whatever_processor_interprets() -> None:
    _run("-k", "in_any_batch", **OTHER_BLAS)
