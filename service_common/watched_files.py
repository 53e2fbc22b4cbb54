"""Files that may change while they are in use: keys, tokens, certificates.

They are looked at whenever they are asked for, which takes a call of the system for each file, so
that what was revoked is revoked at once and no process has to be told.
"""

import logging
import os
import stat
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Generic, TypeVar

logger = logging.getLogger(__name__)

T = TypeVar("T")


class WatchedFiles(Generic[T]):
    """What some files say together, read again when one of them has changed.

    Files that cannot be read, or say nothing sensible, leave what they said before in force.
    """

    def __init__(self, paths: Sequence[Path], load: Callable[[], T]) -> None:
        """`load` reads the files; it raises ValueError for those that are no good, here too."""
        self._paths = paths
        self._load = load
        self._seen = self._look()
        self._value = load()

    def get(self) -> T:
        """What the files say now."""
        seen = self._look()
        if seen != self._seen:
            self._seen = seen
            self._reload()
        return self._value

    def _reload(self) -> None:
        names = ",".join(map(str, self._paths))
        try:
            self._value = self._load()
        except (OSError, ValueError) as error:  # one may go between two looks at it
            logger.error("changed files are no good, the former stay in force: %s", error)
        else:
            logger.info("read changed files again files=%s", names)

    def _look(self) -> list[tuple[int, int, int] | None]:
        """What changes when a file is written or replaced, also by way of a link to it."""
        return [_identity(path) for path in self._paths]


def _identity(path: Path) -> tuple[int, int, int] | None:
    try:
        found = os.stat(path)
    except OSError:
        return None
    return found.st_mtime_ns, found.st_size, found.st_ino


def warn_if_shared(path: Path) -> None:
    """Say in the log that others on this machine can read a file that holds a secret."""
    mode = path.stat().st_mode
    if mode & stat.S_IROTH:
        logger.warning(
            "other users of this machine can read a secret file=%s mode=%o",
            path,
            stat.S_IMODE(mode),
        )


def read_file(what: str, path: Path) -> bytes:
    """A file's contents; raises ValueError that says what it is and why it cannot be read."""
    try:
        return path.read_bytes()
    except OSError as error:
        raise ValueError(f"{what}: cannot read {path}: {error.strerror}") from error
