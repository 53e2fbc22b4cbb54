"""The GPU kernels' tests, in Triton's interpreter."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.timeout(900)  # each is many tests

ROOT = Path(__file__).parents[2]
NO_CACHE = ("-p", "no:cacheprovider")
GPU_TESTS = Path("tests/kernels/gpu")
SAMPLER = Path("tests/worker_service/runner/device/test_sampler.py")
NATIVE_ONLY = "test_selection.py"
"""None of its tests can be interpreted."""

INTERPRETED = [
    SAMPLER,
    *(
        file.relative_to(ROOT)
        for file in sorted((ROOT / GPU_TESTS).glob("test_*.py"))
        if file.name != NATIVE_ONLY
    ),
]

SLOW = ("test_quantized_linear", "test_whole_model")
"""Files that take half a minute; what they compute with is in the others, too."""

TOGETHER = ("test_adapters_in_models", "test_attention", "test_packed_attention", "test_sampling")
"""Files of one process: two may run at the same time, and each spends seconds with imports."""

PROCESSES = {
    ", ".join(stems): [file for file in INTERPRETED if file.stem in stems]
    for stems in (TOGETHER, *((stem,) for stem in SLOW))
}
PROCESSES["the others"] = [file for file in INTERPRETED if file.stem not in (*TOGETHER, *SLOW)]
"""Files by the process that runs them."""

OTHER_BLAS = {"OPENBLAS_CORETYPE": "Haswell"}
"""numpy's products as on a processor with AVX2 only, whose BLAS chooses a kernel by the shape."""


def _run(*arguments: str | Path, **environment: str) -> None:
    """In a process of its own: see `tests/support/gpu_kernels.py`."""
    run = subprocess.run(
        [
            *(sys.executable, "-m", "pytest", "-q", *NO_CACHE),
            *arguments,
        ],
        cwd=ROOT,
        env=os.environ | {"TRITON_INTERPRET": "1"} | environment,
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stdout[-20_000:]


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[pytest.mark.long] if name in SLOW else []) for name in PROCESSES],
)
def test_the_kernels_agree_with_the_reference_in_the_interpreter(name: str) -> None:
    _run(*PROCESSES[name], "-m", "not gpu and not long", "-k", "not in_any_batch")


@pytest.mark.long
def test_the_remaining_cases_agree_with_the_reference_too() -> None:
    _run(*INTERPRETED, "-m", "long and not gpu", "-k", "not in_any_batch")


@pytest.mark.long
@pytest.mark.parametrize(
    ("blas", "cases"),
    [
        pytest.param(OTHER_BLAS, "not gpu", id="of AVX2"),
        pytest.param({}, "not gpu", id="of this processor"),
    ],
)
def test_rows_keep_their_bits_in_any_batch_whatever_processor_interprets(
    blas: dict[str, str], cases: str
) -> None:
    _run(GPU_TESTS, SAMPLER, "-m", cases, "-k", "in_any_batch", **blas)
