"""Choosing a backend, and getting it ready."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from pagewire_kernels.backends import select_backend

KERNELS = Path(__file__).parents[2] / "kernels"

WARM_UP = """
import logging, sys, warnings
warnings.simplefilter("ignore")
logging.basicConfig(level=logging.INFO, stream=sys.stdout)
import torch
from pagewire_kernels.cpu import CpuBackend
CpuBackend().warm_up(torch.float32)
"""


def test_the_cpu_gets_the_compiled_kernels(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO"):
        assert select_backend(torch.device("cpu")).name == "cpu"
    assert "name=cpu reason=default for device type cpu" in caplog.text


def test_a_gpu_gets_the_triton_kernels_when_it_asks_for_them() -> None:
    backend = select_backend(torch.device("cuda"), "triton", batch_invariant=True)
    assert backend.name == "triton"


@pytest.mark.parametrize("device", ["cuda", "meta"])
def test_a_device_without_proven_kernels_gets_the_reference(device: str) -> None:
    assert select_backend(torch.device(device)).name == "reference"


def test_a_backend_can_be_asked_for_by_name(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO"):
        assert select_backend(torch.device("cpu"), "reference").name == "reference"
    assert "name=reference reason=asked for" in caplog.text


@pytest.mark.parametrize(
    ("device", "name", "message"),
    [
        ("cpu", "warp", "expected one of cpu, triton, reference, got 'warp'"),
        ("cuda", "cpu", "'cpu' does not run on device cuda"),
        ("cpu", "triton", "'triton' does not run on device cpu"),
    ],
)
def test_a_backend_that_cannot_be_is_refused(device: str, name: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        select_backend(torch.device(device), name)


def test_the_reference_promises_no_batch_invariance() -> None:
    with pytest.raises(ValueError, match="'reference' is not batch-invariant"):
        select_backend(torch.device("cuda"), "reference", batch_invariant=True)


def _warm_up(home: Path, kernels: Path, cache: str) -> str:
    """What a fresh process logs while it gets its kernels."""
    environment = {"PYTHONPATH": str(kernels), "HOME": str(home), "PATH": os.environ["PATH"]}
    if cache:
        environment["NUMBA_CACHE_DIR"] = cache
    run = subprocess.run(
        [sys.executable, "-c", WARM_UP], env=environment, capture_output=True, text=True
    )
    assert run.returncode == 0, run.stderr
    return run.stdout


def test_a_second_process_finds_the_first_ones_code(tmp_path: Path) -> None:
    cache = str(tmp_path / "cache")
    assert "source=compiler" in _warm_up(tmp_path, KERNELS, cache)
    again = _warm_up(tmp_path, KERNELS, cache)
    assert "name=attention dtype=torch.float32" in again
    assert "source=compiler" not in again


def test_without_a_place_for_it_code_is_compiled_in_each_process(tmp_path: Path) -> None:
    kernels = tmp_path / "kernels"
    shutil.copytree(KERNELS, kernels, ignore=shutil.ignore_patterns("__pycache__"))
    (kernels / "pagewire_kernels/cpu/__pycache__").write_text("a file where a directory would be")
    home = tmp_path / "home"
    home.write_text("another one")
    log = _warm_up(home, kernels, cache="")
    assert "kernels are compiled anew in each process" in log
    assert "source=compiler" in log
