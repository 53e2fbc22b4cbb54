"""The command lines of benchmarks in the documentation are understood."""

import re
import shlex
from importlib import import_module

import pytest

from tools.launch import ROOT

TEXT = "\n".join(page.read_text() for page in sorted((ROOT / "docs").glob("*.md")))
COMMAND = re.compile(r"python -m (benchmarks\.\w+ (?:[^`\n#\\]|\\\n)*)")
COMMANDS = sorted({match[1].replace("\\\n", " ").strip() for match in COMMAND.finditer(TEXT)})


def test_pages_have_commands() -> None:
    assert len(COMMANDS) > 8
    assert any("--vllm-python" in command for command in COMMANDS)


@pytest.mark.parametrize("command", [command for command in COMMANDS if " --" in command])
def test_a_documented_command_line_is_understood(command: str) -> None:
    """`--help` ends a program when its arguments before it have been read."""
    module, *arguments = shlex.split(command)
    with pytest.raises(SystemExit) as end:
        import_module(module).main([*arguments, "--help"])
    assert end.value.code == 0
