"""The types of the Python client: mypy takes what is right and finds what is wrong."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def check(program: Path, folder: Path) -> tuple[str, list[str]]:
    """The last line of `mypy --strict`, and what it says about the program."""
    options = ("--strict", "--follow-imports=silent", f"--cache-dir={folder / 'cache'}")
    path = os.pathsep.join(str(ROOT / name) for name in ("client", "protos"))
    run = subprocess.run(
        [sys.executable, "-m", "mypy", "--config-file=", *options, program.name],
        cwd=program.parent,
        env=os.environ | {"MYPYPATH": path},
        capture_output=True,
        text=True,
        timeout=300,
    )
    lines = run.stdout.splitlines()
    return lines[-1], [line for line in lines if f"{program.name}:" in line and ": error:" in line]


def test_a_program_with_types_is_right_and_mistakes_are_found(tmp_path: Path) -> None:
    text = Path(__file__).with_name("typed_program.py").read_text()
    program = tmp_path / "typed_program.py"
    program.write_text(text)
    summary, errors = check(program, tmp_path)
    assert "1 source file" in summary
    assert errors == []
    program.write_text(text.replace("top_p=0.5", "topp=0.5"))
    _, (error,) = check(program, tmp_path)
    assert 'Unexpected keyword argument "topp"' in error
