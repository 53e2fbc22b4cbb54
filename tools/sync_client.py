"""Writes the blocking client from the asyncio client: `make sync-client`.

    python -m tools.sync_client

The modules differ only by what `SUBSTITUTIONS` replaces, so only the asyncio modules are edited by
hand. The method is that of httpcore's `scripts/unasync.py`.
"""

import re
import subprocess
import sys
from pathlib import Path

PACKAGE = Path(__file__).parents[1] / "client" / "pagewire_client"
MODULES = ("calls", "client")

SUBSTITUTIONS = [
    # A blocked thread cannot be cancelled.
    (r"(?m)^( *)except asyncio\.CancelledError:\n(?:\1 +.*\n)+", ""),
    (r"AsyncGenerator\[([\w.]+), None\]", r"Generator[\1, None, None]"),
    (r"\bawait |\basync (?=def|with|for)", ""),
    (r"\b__a(enter|exit|next)__\b", r"__\1__"),
    (r"\ba(next\(|close\(|closing\()", r"\1"),
    (r"grpc\.aio\.", "grpc."),
    (r"\basync_(?=calls)", ""),
    (r"\basync_(?=channel)", "sync_"),
    (r"\b(_?)Async(?=[A-Z])", r"\1"),
    # What docstrings say.
    (r"for asyncio", "that block"),
    (r"To be used from one event loop", "Safe to share between threads"),
    (
        r"Closing it, dropping it, or cancelling the task that iterates ends the request\.",
        "Closing or dropping it ends the request. `close` may be called from another\n"
        "    thread, and ends a blocked iteration.",
    ),
]


def blocking(name: str) -> str:
    """The blocking module `name`, from `async_NAME`."""
    text = (PACKAGE / f"async_{name}.py").read_text()
    for pattern, replacement in SUBSTITUTIONS:
        text = re.sub(pattern, replacement, text)
    text = f"# Generated from async_{name}.py by `make sync-client`; edit that file.\n{text}"
    # Sort and remove imports; write `yield from`, which asyncio does not have; drop parentheses.
    rules = ("--fix-only", "--unsafe-fixes", "--select", "I,F401,UP028,UP034")
    text = _ruff("check", "--quiet", *rules, name=name, text=text)
    return _ruff("format", "--quiet", name=name, text=text)


def _ruff(*arguments: str, name: str, text: str) -> str:
    command = [sys.executable, "-m", "ruff", *arguments]
    path = PACKAGE / f"{name}.py"
    return subprocess.run(
        [*command, "--stdin-filename", str(path), "-"],
        cwd=PACKAGE.parents[1],
        input=text,
        check=True,
        stdout=subprocess.PIPE,
        text=True,
    ).stdout


def main() -> None:
    for name in MODULES:
        (PACKAGE / f"{name}.py").write_text(blocking(name))


if __name__ == "__main__":
    main()
