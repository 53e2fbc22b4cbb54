"""Choosing a backend, and getting it ready."""

import os
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from pagewire_kernels import reference
from pagewire_kernels.cpu import cpu_backend, library
from pagewire_kernels.cpu.numba import NumbaBackend
from pagewire_kernels.interface import Abilities, AttentionBackend, AttentionNeeds
from pagewire_kernels.reference.backend import ReferenceBackend
from pagewire_kernels.select import choose, layer_kernels, select_backend
from pagewire_kernels.self_check import self_check

KERNELS = Path(__file__).parents[2] / "kernels"

WARM_UP = """
import logging, sys, warnings
warnings.simplefilter("ignore")
logging.basicConfig(level=logging.INFO, stream=sys.stdout)
import torch
from pagewire_kernels.cpu.numba import NumbaBackend
NumbaBackend().warm_up(torch.float32)
"""


CPU, GPU = torch.device("cpu"), torch.device("cuda")
NEEDS = AttentionNeeds(dtype=torch.bfloat16, head_dim=128)


class FakeBackend(ReferenceBackend):
    """A backend with any name and abilities."""

    def __init__(self, name: str, **abilities: Any) -> None:
        self.name = name
        self.abilities = Abilities(devices=("cuda",), **abilities)


def _passes(*arguments: object) -> None:
    """A check that finds nothing."""


def test_the_cpu_gets_the_compiled_kernels(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO"):
        assert select_backend(CPU).name == "cpu"
    assert "name=cpu reason=default for device type cpu" in caplog.text


def test_a_device_without_kernels_gets_the_reference() -> None:
    assert select_backend(torch.device("meta")).name == "reference"


def test_a_backend_can_be_asked_for_by_name(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO"):
        assert select_backend(CPU, "reference").name == "reference"
    assert "name=reference reason=requested" in caplog.text


@pytest.mark.parametrize(
    ("device", "name", "message"),
    [
        (CPU, "warp", "expected one of flash, triton, cpu, reference, got 'warp'"),
        (GPU, "cpu", "'cpu' does not run on device cuda"),
        (CPU, "triton", "'triton' does not run on device cpu"),
        (CPU, "flash", "'flash' does not run on device cpu"),
    ],
)
def test_a_backend_that_cannot_be_is_refused(device: torch.device, name: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        select_backend(device, name)


def test_the_reference_promises_no_batch_invariance() -> None:
    with pytest.raises(
        ValueError, match=r"--attention-backend reference: .*reference is not batch-invariant"
    ):
        select_backend(CPU, "reference", replace(NEEDS, batch_invariant=True))


@pytest.mark.parametrize(
    ("needs", "abilities", "obstacle"),
    [
        ({"dtype": torch.float32}, {"dtypes": (torch.bfloat16,)}, "does not compute in float32"),
        ({"cache_dtype": torch.float8_e4m3fn}, {}, "has no fp8 cache (--kv-cache-dtype)"),
        ({"head_dim": 320}, {"max_head_dim": 256}, "takes heads of at most 256 elements, not 320"),
        (
            {"head_dim": 20},
            {"head_dim_multiple": 8},
            "takes heads of a multiple of 8 elements, not 20",
        ),
        (
            {"block_size": 16},
            {"block_multiple": 256},
            "takes blocks of a multiple of 256 tokens (--block-size), not 16",
        ),
        ({"sinks": True}, {"sinks": False}, "has no attention sinks"),
        ({"soft_cap": True}, {"soft_cap": False}, "has no soft cap"),
        ({"alibi": True}, {"alibi": False}, "has no ALiBi biases"),
        ({"sliding_window": True}, {"sliding_window": False}, "has no sliding window"),
        ({"batch_invariant": True}, {}, "is not batch-invariant"),
    ],
)
def test_what_a_backend_cannot_do_is_told(
    needs: dict[str, Any], abilities: dict[str, Any], obstacle: str
) -> None:
    backend = FakeBackend("first", **abilities)
    assert [*backend.abilities.obstacles(NEEDS)] == []
    assert [*backend.abilities.obstacles(replace(NEEDS, **needs))] == [obstacle]


def test_what_the_best_backend_cannot_do_the_next_one_does(
    caplog: pytest.LogCaptureFixture,
) -> None:
    offered = [FakeBackend("first", sinks=False), FakeBackend("second")]
    with caplog.at_level("INFO"):
        assert choose(GPU, None, replace(NEEDS, sinks=True), offered, _passes).name == "second"
    assert "default for device type cuda, since first has no attention sinks" in caplog.text
    assert choose(GPU, None, NEEDS, offered, _passes).name == "first"


def test_a_backend_that_fails_its_check_is_passed_over_with_a_warning(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def check(backend: AttentionBackend, *others: object) -> None:
        if backend.name == "first":
            raise RuntimeError("no kernel image is available")

    offered = [FakeBackend("first"), FakeBackend("second")]
    assert choose(GPU, None, NEEDS, offered, check).name == "second"
    (record,) = [record for record in caplog.records if record.levelname == "WARNING"]
    assert "name=first error=failed its check: no kernel image" in record.getMessage()


def test_a_backend_that_was_asked_for_and_fails_ends_the_choice() -> None:
    def check(*arguments: object) -> None:
        raise RuntimeError("no kernel image")

    with pytest.raises(ValueError, match="first failed its check: no kernel image"):
        choose(GPU, "first", NEEDS, [FakeBackend("first")], check)


@pytest.mark.parametrize(("backend", "layers"), [("triton", "triton"), ("flash", "triton")])
def test_layer_kernels_go_with_the_backend(backend: str, layers: str) -> None:
    assert layer_kernels(FakeBackend(backend), GPU, torch.bfloat16).name == layers
    assert layer_kernels(ReferenceBackend(), GPU, torch.bfloat16).name == "torch"


class OffBackend(FakeBackend):
    """The reference, but for a factor."""

    def paged_attention(self, *arguments: Any, **options: Any) -> torch.Tensor:  # type: ignore[override]
        return reference.paged_attention(*arguments, **options) * 1.1


@pytest.mark.parametrize(
    "needs",
    [
        NEEDS,
        replace(NEEDS, dtype=torch.float32, sliding_window=True, sinks=True, alibi=True),
        replace(NEEDS, dtype=torch.float16, soft_cap=True, block_size=32),
        replace(NEEDS, cache_dtype=torch.float8_e4m3fn),
    ],
)
def test_the_check_tells_right_results_from_wrong_ones(needs: AttentionNeeds) -> None:
    self_check(ReferenceBackend(), CPU, needs)
    with pytest.raises(ValueError, match="its results differ from the reference by"):
        self_check(OffBackend("off"), CPU, needs)


def test_the_native_kernels_leave_numba_unloaded() -> None:
    if library() is None:
        pytest.skip("no native kernels here")
    check = "import sys; from pagewire_kernels.select import select_backend; import torch; "
    check += "select_backend(torch.device('cpu')); sys.exit('numba' in sys.modules)"
    environment = {"PYTHONPATH": str(KERNELS), "PATH": os.environ["PATH"]}
    assert subprocess.run([sys.executable, "-c", check], env=environment).returncode == 0


def test_numba_serves_where_there_are_no_native_kernels() -> None:
    assert isinstance(cpu_backend(None), NumbaBackend)


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
    (kernels / "pagewire_kernels/cpu/numba/__pycache__").write_text(
        "a file where a directory would be"
    )
    home = tmp_path / "home"
    home.write_text("another one")
    log = _warm_up(home, kernels, cache="")
    assert "kernels are compiled again in each process" in log
    assert "source=compiler" in log
