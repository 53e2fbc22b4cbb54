"""The tour of a package, the docstring of its `__init__.py`, names its modules, and no others."""

import ast
import re
import subprocess
from pathlib import Path

import pytest

from tools.launch import ROOT

FILES = {
    Path(file)
    for file in subprocess.run(
        ["git", "ls-files", "*.py", "*.proto", "*.h", "*.cpp"],
        cwd=ROOT,
        check=True,
        capture_output=True,
        text=True,
    ).stdout.split()
}
PACKAGES = {file.parent for file in FILES if file.name == "__init__.py"}
ROOTS = {Path("scheduler_service"), Path("worker_service"), Path("protos/pagewire/v1"), Path()}
NAME = re.compile(
    r"(?<![\w./{}*-])"
    r"((?:[a-z_]+/)+(?:[a-z_]+\.(?:py|proto))?|[a-z_]+\.(?:py|proto))(?!\w)"
)


def tour(package: Path) -> str:
    text = (ROOT / package / "__init__.py").read_text()
    return ast.get_docstring(ast.parse(text)) or ""


TOURS = sorted(
    str(package)
    for package in PACKAGES
    if package.parts[0] != "tests" and len(tour(package).splitlines()) > 3
)


@pytest.mark.parametrize("package", TOURS)
def test_every_file_that_a_tour_names_exists(package: str) -> None:
    named = {name for line in tour(Path(package)).splitlines() for name in NAME.findall(line)}
    places = [Path(package), *Path(package).parents, *ROOTS]
    missing = {name for name in named if not any((ROOT / at / name).exists() for at in places)}
    assert missing == set()


@pytest.mark.parametrize("package", TOURS)
def test_a_tour_names_every_module(package: str) -> None:
    words = set(re.findall(r"\w+", tour(Path(package))))
    modules = {
        file.stem
        for file in FILES
        if file.parent == Path(package) and file.suffix == ".py" and "_pb2" not in file.stem
    }
    assert modules - {"__init__", "__main__"} - words == set()
