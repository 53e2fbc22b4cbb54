"""Comments, docstrings, messages and docs are written in the field's English.

The idioms below crept in once and made a quarter of the text hard to read. CONTRIBUTING.md has the
words to use instead.
"""

import io
import re
import subprocess
import tokenize
from collections.abc import Iterator
from pathlib import Path

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


def test_no_text_uses_an_idiom_that_the_field_does_not_know() -> None:
    names = subprocess.run(
        ["git", "ls-files", "*.py", "*.md", "*.proto", "*.cpp", "*.h", "*.js", "*.ts"],
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
NAME_PATTERNS = [(re.compile(pattern), better) for pattern, better in NAMES.items()]


def wrong_names(text: str) -> Iterator[tuple[int, str]]:
    """(line, what to write) of every name that is not the field's English."""
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.NAME:
            for pattern, better in NAME_PATTERNS:
                if pattern.fullmatch(token.string):
                    yield token.start[0], f"{token.string}: say {better}"


def test_names_are_those_of_the_field() -> None:
    files = [file for folder in CLEAN_PACKAGES for file in sorted((ROOT / folder).rglob("*.py"))]
    assert len(files) > 100
    assert [
        f"{file.relative_to(ROOT)}:{line}: {problem}"
        for file in files
        if "_pb2" not in file.name
        for line, problem in wrong_names(file.read_text())
    ] == []
