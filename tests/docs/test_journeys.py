"""The journeys in docs/architecture.md name files and functions that exist."""

import re
from itertools import pairwise
from pathlib import Path

import pytest

from tools.launch import ROOT

PAGE = (ROOT / "docs/architecture.md").read_text()
SECTION = PAGE.partition("## Six journeys")[2].partition("\n## ")[0]
FOLDERS = [
    ROOT / folder
    for folder in (
        "",
        "scheduler_service",
        "scheduler_service/frontend",
        "service_common",
        "client",
        "worker_service",
        "kernels/pagewire_kernels",
    )
]
PATH = re.compile(r"`([\w/.]+\.(?:py|proto|ts))`")
HOPS = re.findall(r"^\| \d+ \| (.*) \| (.*) \|$", SECTION, re.MULTILINE)


def found(name: str) -> list[Path]:
    """The files that a name may mean."""
    return [path for folder in FOLDERS if (path := folder / name).exists()]


def test_every_file_of_a_journey_exists() -> None:
    assert [name for name in PATH.findall(SECTION) if not found(name)] == []


@pytest.mark.parametrize(("files", "functions"), HOPS)
def test_a_hop_names_what_its_files_define(files: str, functions: str) -> None:
    text = "".join(path.read_text() for name in PATH.findall(files) for path in found(name))
    for name in re.findall(r"`([\w.]+)`", functions):
        for part in name.split("."):
            assert part == "finally" or re.search(rf"\b(?:def|class) {part}\b", text), name


def test_the_summary_gives_the_number_of_each_journeys_hops() -> None:
    summary = re.findall(r"^\| \[.*\]\(#.*\) \| \d+ \| (\d+) \|$", SECTION, re.MULTILINE)
    numbers = [int(n) for n in re.findall(r"^\| (\d+) \|", SECTION, re.MULTILINE)]
    ends = [n for n, after in zip(numbers, [*numbers[1:], 1], strict=True) if after == 1]
    assert [int(n) for n in summary] == ends
    assert all(after in (n + 1, 1) for n, after in pairwise(numbers))
