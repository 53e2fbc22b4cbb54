"""The files of a model that frontends need."""

from collections.abc import Iterator
from pathlib import Path


def iter_assets(model_dir: Path) -> Iterator[tuple[str, bytes]]:
    """(file name, content) of each file a frontend needs."""
    raise NotImplementedError
