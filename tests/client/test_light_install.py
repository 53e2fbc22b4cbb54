"""`pip install pagewire` without extras is a working client."""

import importlib.metadata
import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from tests.support.fake_frontend import FakeFrontend

ROOT = Path(__file__).parents[2]


def base_distributions() -> set[str]:
    """What the base dependencies of pyproject.toml install, with all that those need."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    wanted = [Requirement(line) for line in project["dependencies"]]
    found: set[str] = set()
    while wanted:
        requirement = wanted.pop()
        applies = requirement.marker is None or requirement.marker.evaluate({"extra": ""})
        if applies and requirement.name not in found:
            found.add(requirement.name)
            wanted += map(Requirement, importlib.metadata.requires(requirement.name) or [])
    return found


def installed_entries(distribution: str) -> set[Path]:
    """The distribution's own files and folders at the top of site-packages."""
    files = importlib.metadata.files(distribution) or []
    site = Path(str(importlib.metadata.distribution(distribution).locate_file("")))
    return {site / file.parts[0] for file in files if file.parts[0] != ".."}


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """In which only the base dependencies and our own packages can be imported."""
    folder = tmp_path_factory.mktemp("installed")
    for entry in {e for name in base_distributions() for e in installed_entries(name)}:
        (folder / entry.name).symlink_to(entry)
    roots = [str(ROOT / root) for root in (".", "kernels", "client", "protos")]
    return os.environ | {"PYTHONPATH": os.pathsep.join([str(folder), *roots])}


def run(environment: dict[str, str], *arguments: str) -> "subprocess.CompletedProcess[str]":
    # -S: the packages of this environment are out of sight.
    return subprocess.run(
        [sys.executable, "-S", *arguments],
        env=environment,
        capture_output=True,
        text=True,
        timeout=60,
    )


def test_the_client_works_without_torch(
    environment: dict[str, str], frontend: FakeFrontend
) -> None:
    code = (
        "import importlib.util\n"
        "absent = ['torch', 'numpy', 'transformers', 'tokenizers']\n"
        "assert not any(importlib.util.find_spec(module) for module in absent)\n"
        "from pagewire_client import Client\n"
        f"print(Client({frontend.address!r}).generate('Hello').finished)\n"
    )
    done = run(environment, "-c", code)
    assert done.stdout == "True\n", done.stderr


def test_the_command_line_works_without_torch(
    environment: dict[str, str], frontend: FakeFrontend
) -> None:
    arguments = ["generate", "Hello", "--address", frontend.address]
    done = run(environment, "-m", "pagewire_cli", *arguments)
    assert done.returncode == 0, done.stderr
    assert len(frontend.requests) == 1


def test_the_conformance_kit_works_without_extras(environment: dict[str, str]) -> None:
    done = run(environment, "-m", "pagewire_cli", "conformance", "--list")
    assert done.returncode == 0, done.stderr
    assert "epochs: a stream of an older epoch is refused" in done.stdout


@pytest.mark.parametrize(
    ("command", "extra"),
    [("worker", "worker"), ("scheduler", "scheduler"), ("frontend", "scheduler")],
)
def test_a_missing_service_is_told_by_its_extra(
    environment: dict[str, str], command: str, extra: str
) -> None:
    done = run(environment, "-m", "pagewire_cli", command)
    assert done.returncode == 1
    assert done.stderr == (
        f"error: this needs the {command}: in a checkout, pip install '.[{extra}]'\n"
    )


def test_serve_and_demo_and_llm_tell_it_too(environment: dict[str, str]) -> None:
    for command in ("serve", "demo"):
        done = run(environment, "-m", "pagewire_cli", command)
        assert done.stderr.endswith("in a checkout, pip install '.[worker,scheduler]'\n")
        assert done.returncode == 1
    done = run(environment, "-c", "import pagewire_client; pagewire_client.LLM()")
    assert "LocalServiceError: this needs the worker and the scheduler" in done.stderr
