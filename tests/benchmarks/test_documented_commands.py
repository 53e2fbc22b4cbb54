"""The command lines of benchmarks in the documentation are understood."""

import re
import shlex
import subprocess
import sys

import pytest

from tools.launch import ROOT, environment

TEXT = "\n".join(page.read_text() for page in sorted((ROOT / "docs").glob("*.md")))
COMMAND = re.compile(r"python (-m benchmarks\.\w+ (?:[^`\n#\\]|\\\n)*)")
COMMANDS = sorted({match[1].replace("\\\n", " ").strip() for match in COMMAND.finditer(TEXT)})


def test_pages_have_commands() -> None:
    assert len(COMMANDS) > 8
    assert any("--vllm-python" in command for command in COMMANDS)


@pytest.mark.parametrize("command", [each for each in COMMANDS if " --" in each])
def test_a_documented_command_line_is_understood(command: str) -> None:
    """`--help` ends a program when its arguments before it have been read."""
    done = subprocess.run(
        [sys.executable, *shlex.split(command), "--help"],
        cwd=ROOT,
        env=environment(),
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
