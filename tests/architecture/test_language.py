"""Comments, docstrings, messages and docs are written in the field's English.

The idioms below crept in once and made a quarter of the text hard to read. CONTRIBUTING.md has the
words to use instead.
"""

import io
import re
import subprocess
import tokenize
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

IDIOMS = {
    r"\b(tells?|told|telling)\b": "report, notify, return",
    r"\bnews\b": "output, update",
    r"\b(sequence|group|block|worker|rank|request|stream|process)s? whom?\b": "that, which",
    r"\bwho (waits|is next|goes|leaves|has|gets)\b": "which requests/sequences ...",
    r"\bwhat (came|comes|has come) of\b": "result, outcome",
    r"\bwhat follows from\b": "result, outcome",
    r"\bbe (it|they)\b": "even if, whether or not",
    r"\bfor want of\b": "because ... ran out",
    r"\bin vain\b": "wasted, discarded",
    r"\banew\b": "again, from scratch",
    r"\bso many\b": "N, `count`",
    r"\bso-manieth\b": "every k-th",
    r"\b(begin|begins|began) alike\b": "share a prefix",
    r"\bof late\b": "recently",
    r"\b(go|goes|went|going) ahead of\b": "preempt, take precedence over",
    r'^"""Have ': "Make X do Y; wake, notify, require",
    r"\b(no good|good for the)\b": "invalid; valid for",
    r"\bbeside it\b": "requires `X`",
}
PATTERNS = [(re.compile(pattern, re.IGNORECASE), better) for pattern, better in IDIOMS.items()]

# Training texts, this list, the list in CONTRIBUTING.md, and past changes.
EXEMPT = (
    "worker_service/embedded_model/",
    "tests/architecture/test_language.py",
    "CHANGELOG.md",
    "CONTRIBUTING.md",
)


def prose_of_python(text: str) -> Iterator[tuple[int, str]]:
    """(line, text) of every comment and string."""
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type in (tokenize.COMMENT, tokenize.STRING):
            for number, line in enumerate(token.string.splitlines()):
                yield token.start[0] + number, line


def prose_of(file: Path) -> Iterator[tuple[int, str]]:
    text = file.read_text()
    if file.suffix == ".py":
        return prose_of_python(text)
    return enumerate(text.splitlines(), start=1)


KINDS = ("py", "md", "proto", "cpp", "h", "js", "ts", "toml")


def test_no_text_uses_an_idiom_that_the_field_does_not_know() -> None:
    names = subprocess.run(
        ["git", "ls-files", *(f"*.{kind}" for kind in KINDS)],
        cwd=ROOT,
        check=True,
        capture_output=True,
        text=True,
    ).stdout.split()
    wrong = []
    for name in names:
        if name.startswith(EXEMPT) or "_pb2" in name:
            continue
        for line, text in prose_of(ROOT / name):
            for pattern, better in PATTERNS:
                if match := pattern.search(text):
                    wrong.append(f"{name}:{line}: {match.group(0)!r}: say {better}")
    assert wrong == []


CLEAN_PACKAGES = (
    *("benchmarks/", "client/", "conformance/", "kernels/", "protos/", "scheduler_service/"),
    *("service_common/", "tools/", "worker_service/"),
)
"""Folders in which names are checked as well."""

NAMES = {
    r"each": "the thing: row, request, field",
    r"_?(in_vain|alike)|\w*_(in_vain|alike)": "failed, equal",
    r"\w*who_\w*": "holder, owner",
    r"\w*_beside_\w*": "_with_",
    r"\w*(lets_|hopeless|stranded)\w*": "may_, unservable, unroutable",
}
CORE_PACKAGES = (
    *("scheduler_service/core/", "scheduler_service/core_service/", "scheduler_service/replay/"),
    "tools/what_if/",
)
"""Folders in which these names are checked as well."""
CORE_NAMES = {
    r"_?note(_\w+)?": "record_x, observe_x, add_x",
    r"_?why(_\w+)?": "reason, refusal, x_error",
    r"_?take_\w+": "accept, pop",
    r"_?outgrown\w*": "exceeding, exceeded",
    r"_?least(_\w+)?|_?most_(?!shared)\w+": "min_, max_",
    r"_?(own|left|asked|former|known|is_whole)(_(?!tokens|models)\w+)?": "previous, remaining",
}


def wrong_names(text: str, names: Mapping[str, str] = NAMES) -> Iterator[tuple[int, str]]:
    """(line, what to write) of every name that is not the field's English."""
    patterns = [(re.compile(pattern), better) for pattern, better in names.items()]
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.NAME:
            for pattern, better in patterns:
                if pattern.fullmatch(token.string):
                    yield token.start[0], f"{token.string}: say {better}"


@pytest.mark.parametrize(
    ("folders", "names"), [(CLEAN_PACKAGES, NAMES), (CORE_PACKAGES, CORE_NAMES)]
)
def test_names_are_those_of_the_field(folders: Sequence[str], names: Mapping[str, str]) -> None:
    files = [file for folder in folders for file in sorted((ROOT / folder).rglob("*.py"))]
    assert len(files) > 40
    assert [
        f"{file.relative_to(ROOT)}:{line}: {problem}"
        for file in files
        if "_pb2" not in file.name
        for line, problem in wrong_names(file.read_text(), names)
    ] == []
