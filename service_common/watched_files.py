"""Files that may change while they are in use: keys, tokens, certificates.

They are checked at every use, which takes one system call per file, so that a revocation takes
effect at once and no process needs a signal.
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
    """The parsed contents of some files, read again when one of them changes.

    If the files cannot be read or parsed, the previous contents stay in effect.
    """

    def __init__(self, paths: Sequence[Path], load: Callable[[], T]) -> None:
        """`load` reads the files; it raises ValueError if they are invalid, also here."""
        self._paths = paths
        self._load = load
        self._seen = self._look()
        self._value = load()

    def get(self) -> T:
        """The current contents."""
        seen = self._look()
        if seen != self._seen:
            self._seen = seen
            self._reload()
        return self._value

    def _reload(self) -> None:
        names = ",".join(map(str, self._paths))
        try:
            self._value = self._load()
        except (OSError, ValueError) as error:  # a file may disappear between the two calls
            logger.error("reload failed; keeping the previous contents: %s", error)
        else:
            logger.info("reloaded changed files files=%s", names)

    def _look(self) -> list[tuple[int, int, int] | None]:
        """A value that changes when a file is written or replaced, also through a link."""
        return [_identity(path) for path in self._paths]


def _identity(path: Path) -> tuple[int, int, int] | None:
    try:
        found = os.stat(path)
    except OSError:
        return None
    return found.st_mtime_ns, found.st_size, found.st_ino


def warn_if_shared(path: Path) -> None:
    """Warn if other users of this machine can read a file that holds a secret."""
    mode = path.stat().st_mode
    if mode & stat.S_IROTH:
        logger.warning(
            "other users of this machine can read a secret file=%s mode=%o",
            path,
            stat.S_IMODE(mode),
        )
