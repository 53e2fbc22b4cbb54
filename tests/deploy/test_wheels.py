"""`make wheels`: tags, contents, and that they generate where there is no compiler."""

import json
import os
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path
from typing import Any

import pytest
from packaging.utils import parse_wheel_filename

from tests.support.docker import PYTHON_VERSION, SUITE, mirrors, run
from tools.launch import ROOT

pytestmark = [pytest.mark.long, pytest.mark.timeout(3600)]

KERNELS = {"x86_64": {"avx2", "avx512", "avx512_bf16", "amx"}, "aarch64": {"neon"}}
"""By machine."""


@pytest.fixture(scope="module")
def wheels() -> dict[str, Path]:
    """By machine."""
    run("make", "wheels", f"PYTHON={sys.executable}", cwd=ROOT)
    return {path.stem.rpartition("_2_17_")[2]: path for path in (ROOT / "dist").glob("*.whl")}


def test_a_wheel_has_all_kernels_of_its_machine_and_runs_on_old_distributions(
    wheels: dict[str, Path],
) -> None:
    assert wheels.keys() == KERNELS.keys()
    for machine, path in wheels.items():
        _, _, _, tags = parse_wheel_filename(path.name)
        assert f"py3-none-manylinux_2_17_{machine}" in set(map(str, tags))
        with zipfile.ZipFile(path) as wheel:
            libraries = {Path(name).stem for name in wheel.namelist() if name.endswith(".so")}
        assert libraries == {f"libpagewire_{kernels}" for kernels in KERNELS[machine]}


def test_a_fresh_environment_without_a_compiler_generates(
    wheels: dict[str, Path], tmp_path: Path
) -> None:
    [torch] = [
        line.removeprefix("TORCH ?= ")
        for line in (ROOT / "Makefile").read_text().splitlines()
        if line.startswith("TORCH ?= ")
    ]
    run(sys.executable, "-m", "venv", str(tmp_path / "venv"))
    programs = tmp_path / "venv/bin"
    run(str(programs / "pip"), "install", "--quiet", torch, f"{wheels['x86_64']}[scheduler,worker]")
    alone = {"PATH": str(programs), "HOME": str(tmp_path)}
    assert shutil.which("c++", path=alone["PATH"]) is None
    assert "27 + 45 = 72" in run(str(programs / "pagewire"), "demo", env=alone, cwd=tmp_path)
    script = "from pagewire_kernels.cpu.native_library import library; assert library() is not None"
    run(str(programs / "python"), "-c", script, env=alone, cwd=tmp_path)


EMULATOR = "qemu-aarch64"
ARM_TORCH = "torch==2.10.0"
"""The newest whose wheel for Arm on PyPI is one for CPUs."""
PLATFORMS = [f"--platform=manylinux_2_{minor}_aarch64" for minor in (17, 28, 31, 34)]


@pytest.mark.skipif(
    os.geteuid() != 0 or not all(map(shutil.which, ("debootstrap", EMULATOR))),
    reason=f"needs root, debootstrap and {EMULATOR}: apt-get install debootstrap qemu-user",
)
def test_an_arm_processor_generates_the_same_tokens_with_native_kernels(
    wheels: dict[str, Path], tmp_path: Path
) -> None:
    root, site = tmp_path / "root", tmp_path / "site"
    options = ["--arch=arm64", "--foreign", "--variant=minbase", "--include=python3"]
    run("debootstrap", *options, SUITE, str(root), *mirrors())
    for package in (root / "var/cache/apt/archives").glob("*.deb"):
        run("dpkg-deb", "--extract", str(package), str(root))
    install_for_arm(site, wheels["aarch64"])
    emulated = [EMULATOR, "-L", str(root), str(root / f"usr/bin/python{PYTHON_VERSION}"), "-S"]
    on_arm = generated(emulated, f"{site}:{ROOT}")
    here = generated([sys.executable], os.pathsep.join(sys.path))
    assert (on_arm["machine"], on_arm["kernels"]) == ("aarch64", "neon")
    assert here["machine"] != "aarch64"
    assert on_arm["tokens"] == here["tokens"]


def install_for_arm(site: Path, wheel: Path) -> None:
    """The wheel, torch and what the worker and the scheduler need, without what torch's and
    transformers' own dependencies would add."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    needed = [*project["dependencies"], *extras["scheduler"], *extras["worker"]]
    needed = [requirement for requirement in needed if not requirement.startswith("torch")]
    of_torch = ["sympy", "networkx", "fsspec", "filelock", "typing-extensions"]
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--target", str(site)]
    pip += [*PLATFORMS, "--implementation=cp", f"--python-version={PYTHON_VERSION}"]
    pip += ["--only-binary=:all:"]
    run(*pip, *needed, *of_torch)
    run(*pip, "--no-deps", "--upgrade", ARM_TORCH)
    with zipfile.ZipFile(wheel) as opened:
        opened.extractall(site)


def generated(python: list[str], path: str) -> dict[str, Any]:
    done = subprocess.run(
        [*python, str(Path(__file__).parent / "arm_generation.py")],
        env=dict(os.environ, PYTHONPATH=path),
        capture_output=True,
        text=True,
        timeout=1200,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert isinstance(found, dict)
    return found
