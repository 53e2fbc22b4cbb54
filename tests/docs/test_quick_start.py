"""The commands of docs/quick-start.md, as they stand there and in their order."""

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.containers import can_contain
from tools.launch import ROOT, environment

PAGE = ROOT / "docs/quick-start.md"
ALONE = ["unshare", "--net", "--pid", "--fork", "--kill-child", "--mount-proc"]
"""Where the usual ports are free, and no process of others can be seen or killed."""
FOREGROUND = "pagewire serve"
"""What goes on until Ctrl-C, in a terminal of its own."""


def commands() -> Iterator[str]:
    """Each command, with what is typed into it."""
    for block in re.findall(r"```console\n(.*?)```", PAGE.read_text(), re.DOTALL):
        yield from (
            command.strip() for command in re.split(r"^\$ ", block, flags=re.MULTILINE) if command
        )


def script() -> str:
    """All of them for a shell: what serves does so in the background, and is waited for."""
    lines = [
        "set -e",
        "ip link set lo up",
        # What these install is there already, and the network's rest is not.
        'make() { command make --old-file=.venv/.ready "$@"; }',
        'npm() { test -d node_modules || { echo "no $PWD/node_modules: make test"; false; }; }',
        "trap 'kill $(jobs -p); wait' EXIT",
    ]
    for command in commands():
        lines.append(f"echo {shlex.quote('>>> ' + command.split()[0])}")
        if command == FOREGROUND:
            lines.append(f"{command} > serve.log 2>&1 &")
            lines.append("until grep -q '^serving ' serve.log; do kill -0 $!; sleep 0.05; done")
            lines.append("pagewire health 127.0.0.1:7600")
        else:
            lines.append(command)
    return "\n".join(lines)


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A folder like a fresh checkout, whose environment is this one."""
    for entry in ROOT.iterdir():
        if entry.name not in (".git", ".venv"):
            (tmp_path / entry.name).symlink_to(entry)
    (tmp_path / ".venv").symlink_to(sys.prefix)
    return tmp_path


def test_the_page_has_commands() -> None:
    found = list(commands())
    assert "make demo" in found
    assert found.count(FOREGROUND) == 1
    assert len(found) >= 10


@pytest.mark.timeout(600)
@pytest.mark.skipif(not can_contain(), reason="needs a network of its own, for the usual ports")
def test_every_command_does_what_the_page_says(checkout: Path) -> None:
    run = subprocess.run(
        [*ALONE, "bash", "-c", script()],
        cwd=checkout,
        env=environment() | {"PATH": os.environ["PATH"], "NO_COLOR": "1"},
        capture_output=True,
        text=True,
        timeout=580,
    )
    assert run.returncode == 0, (
        f"{run.stdout}\n{run.stderr}\n{(checkout / 'serve.log').read_text()}"
    )
    answers = run.stdout.split(">>> ")
    first_words = [answer.split("\n", 1)[0] for answer in answers[1:]]
    assert first_words.count("pagewire") == 5
    generated = [answer for answer in answers if answer.startswith("pagewire\n") and "72" in answer]
    assert len(generated) == 2, "once before the worker was killed, and once after"
