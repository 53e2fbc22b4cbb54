"""Text files of commands with what each of them prints, which a program can write again.

A file holds comments (#), empty lines and commands; what a command prints is indented below it.
"""

from collections.abc import Iterable


def commands(text: str) -> list[str]:
    """The commands of a file, in order."""
    return [line for line in text.splitlines() if line and not line.startswith(("  ", "#"))]


def transcript(text: str, printed: Iterable[Iterable[str]]) -> str:
    """The file with the lines that its commands print now; `printed`: those of each command."""
    outputs = iter(printed)
    lines: list[str] = []
    for line in text.splitlines():
        if line.startswith("  "):
            continue
        lines.append(line)
        if line and not line.startswith("#"):
            lines += [f"  {output}" for output in next(outputs)]
    return "\n".join(lines) + "\n"
