"""Folders that are removed when the process ends."""

import atexit
import shutil
import tempfile
from pathlib import Path


def folder_of_process(kind: str) -> Path:
    """A new folder for things of one kind that are made once per process."""
    folder = Path(tempfile.mkdtemp(prefix=f"pagewire-{kind}-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder
