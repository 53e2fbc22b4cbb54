"""Markdown is wrapped one way, and its links lead to files: the site's test sees `docs/` alone."""

import re
import subprocess
from collections.abc import Iterator

import pytest

from tools.docs.reference import PAGES
from tools.launch import ROOT

WIDTH = 100
FILES = subprocess.run(
    ["git", "ls-files", "*.md"], cwd=ROOT, check=True, capture_output=True, text=True
).stdout.split()
UNBREAKABLE = re.compile(r"^\s*(\||#|!\[|<|\S+$|`[^`]+`\S?$)|\]\(https?:")
"""Tables, headings, pictures, HTML, a single word, one piece of code, and addresses."""


def prose(text: str) -> Iterator[tuple[int, str]]:
    """(line number, line) outside code blocks and the results of benchmarks."""
    until = None
    for number, line in enumerate(text.splitlines(), start=1):
        start = line.strip()
        if until:
            until = None if start.startswith(until) else until
        elif start.startswith("```"):
            until = "```"
        elif start.startswith("<!-- results of"):
            until = "<!-- end of results"
        else:
            yield number, line


@pytest.mark.parametrize("file", [file for file in FILES if file not in PAGES])
def test_prose_is_wrapped_at_100_columns(file: str) -> None:
    long = [
        f"{number}: {line}"
        for number, line in prose((ROOT / file).read_text())
        if len(line) > WIDTH and not UNBREAKABLE.search(line)
    ]
    assert long == []


@pytest.mark.parametrize("file", FILES)
def test_a_link_to_a_file_leads_to_it(file: str) -> None:
    folder = (ROOT / file).parent
    pages = "\n".join(line for _, line in prose((ROOT / file).read_text()))
    linked = set(re.findall(r"\]\((?!\w+:|#)([^)#\s]+)", pages))
    missing = {link for link in linked if not (folder / link).exists()}
    assert missing == set()


@pytest.mark.parametrize("page", PAGES)
def test_a_reference_page_is_made_of_the_code(page: str) -> None:
    assert (ROOT / page).read_text() == PAGES[page](), "make references"


def test_every_source_that_contributing_names_exists() -> None:
    text = (ROOT / "CONTRIBUTING.md").read_text()
    named = re.findall(r"`((?:\w+/)+\w+\.(?:py|proto|txt|binpb))`", text)
    assert len(named) > 10
    assert [name for name in named if not (ROOT / name).exists()] == []
