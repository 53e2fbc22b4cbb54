"""The documentation: no broken link, nothing loaded from elsewhere, no flag that is not there."""

import fnmatch
import re
import subprocess
import sys
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path

import pytest
import yaml

from tools.docs.command_line import commands
from tools.launch import ROOT, environment

DOCS = ROOT / "docs"


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built as `make docs` does it: any warning, such as of a broken link, is an error."""
    folder = tmp_path_factory.mktemp("site")
    build = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--site-dir", str(folder)],
        cwd=ROOT,
        env=environment() | {"NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert build.returncode == 0, build.stderr
    return folder


class Loaded(HTMLParser):
    """What a page makes a browser load."""

    def __init__(self) -> None:
        super().__init__()
        self.addresses: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        named = dict(attrs)
        if tag in ("script", "img", "iframe", "source"):
            self.addresses.append(named.get("src") or "")
        elif tag == "link" and named.get("rel") != "canonical":
            self.addresses.append(named.get("href") or "")


def test_a_reader_loads_nothing_from_elsewhere(site: Path) -> None:
    pages = list(site.rglob("*.html"))
    assert len(pages) > 25
    for page in pages:
        loaded = Loaded()
        loaded.feed(page.read_text())
        assert [
            address for address in loaded.addresses if re.match(r"(https?:)?//", address)
        ] == [], page


def test_the_references_are_made_of_the_code(site: Path) -> None:
    def text(path: str) -> str:
        return (site / path / "index.html").read_text()

    assert 'id="generaterequest"' in text("reference/grpc")
    assert "cancelling the call frees" in text("reference/grpc")
    assert "PAGEWIRE_MAX_NUM_SEQS" in text("reference/command-line")
    assert "vllm:num_requests_waiting" in text("reference/metrics")
    assert "POST /v1/chat/completions" in text("reference/http")
    assert 'id="chatrequest"' in text("reference/http")
    assert 'id="pagewire_client.client.Client.generate_many"' in text("reference/python")
    assert 'id="pagewire_client.sampling_params.SamplingParams' in text("reference/python")


def _pages(entry: object) -> Iterator[str]:
    if isinstance(entry, str):
        yield entry
    elif isinstance(entry, dict):
        for child in entry.values():
            yield from _pages(child)
    elif isinstance(entry, list):
        for child in entry:
            yield from _pages(child)


def test_every_page_has_a_place_in_the_navigation() -> None:
    navigation = yaml.safe_load((ROOT / "mkdocs.yml").read_text())["nav"]
    placed = set(_pages(navigation))
    assert {page.relative_to(DOCS).as_posix() for page in DOCS.rglob("*.md")} <= placed


def flags() -> set[str]:
    """All flags of all commands."""
    return {
        name
        for _, command in commands()
        for parameter in command.params
        for name in (*parameter.opts, *parameter.secondary_opts)
        if name.startswith("--")
    }


def test_the_reference_has_flags_for_every_command_also_of_a_group() -> None:
    assert [name for name, command in commands() if not command.params] == []
    assert {"--replace", "--expires"} <= flags()


def rows(page: str) -> Iterator[list[str]]:
    """The cells of each row of a page's tables."""
    for line in (DOCS / page).read_text().splitlines():
        if line.startswith("| ") and not line.startswith("| ---"):
            yield [cell.strip() for cell in line.strip("|").split("|")]


@pytest.mark.parametrize("page", ["migrating-from-vllm.md", "migrating-from-others.md"])
def test_each_flag_of_ours_that_a_foreign_flag_becomes_is_there(page: str) -> None:
    found = [re.findall(r"`(--[\w-]+)", row[1]) for row in rows(page)]
    named = {flag for cell in found for flag in cell}
    assert len(named) > 30
    assert named - flags() == set()


@pytest.mark.parametrize(
    ("tables", "page"),
    [("vllm", "migrating-from-vllm.md"), ("other", "migrating-from-others.md")],
)
def test_the_commands_explain_foreign_flags_with_the_tables_of_the_page(
    tables: str, page: str
) -> None:
    text = (ROOT / f"client/pagewire_cli/{tables}_flags.txt").read_text()
    assert text in (DOCS / page).read_text(), "copy the one to the other"


def test_each_flag_that_is_said_to_be_vllms_is_there() -> None:
    """The list is of vLLM 0.32.0: the option strings of its `make_arg_parser`."""
    text = (DOCS / "migrating-from-vllm.md").read_text()
    tables = text[text.index("## Flags of") : text.index("## Requests")]
    now, older = (
        {
            flag
            for line in part.splitlines()
            if line.startswith("| `")
            for flag in re.findall(r"`(--[\w*-]+)", line.split("|")[1])
        }
        for part in tables.split("### Of older versions")
    )
    theirs = set((Path(__file__).parent / "vllm_0_32_flags.txt").read_text().split())
    assert len(now) > 60
    assert {flag for flag in now if not fnmatch.filter(theirs, flag)} == set()
    assert {flag for flag in older if fnmatch.filter(theirs, flag)} == set()


@pytest.mark.parametrize("page", ["quick-start.md", "deployment.md", "tuning.md", "faq.md"])
def test_the_flags_that_a_page_names_are_there(page: str) -> None:
    text = re.sub(r"docker compose [^`\n]*|`--profile[^`]*`|`--scale[^`]*`", "", _ours(page))
    named = set(re.findall(r"(?<![\w-])(--[a-z][\w-]+)", text))
    assert named - flags() - {"--help", "--version", "--index-url"} == set()


def _ours(page: str) -> str:
    """A page without the command lines of other programs."""
    lines = (DOCS / page).read_text().splitlines()
    others = re.compile(r"^\$ (?!pagewire)|Ctrl-C")
    return "\n".join(line for line in lines if not others.search(line))
