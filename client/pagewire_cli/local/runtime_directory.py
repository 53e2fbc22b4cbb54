"""A directory for a deployment's sockets, which is removed with its process.

A process that is killed removes nothing. Therefore each holds a lock in its directory, which is
released at its end, and the next process removes the directories whose locks are free.
"""

import fcntl
import os
import shutil
import tempfile
from pathlib import Path

_PREFIX = "pagewire-"
_LOCK = "lock"
CORE = "core"
"""Name of the core's socket, without its suffix."""
_MAX_SOCKET_PATH_BYTES = 107


class RuntimeDirectory:
    """A new folder that only this user can enter, with room for a socket's name in its path."""

    def __init__(self, parent: Path | None = None) -> None:
        """parent: by default the system's folder for temporary files, or /tmp if that is deep."""
        parent = parent or _shallow(Path(tempfile.gettempdir()))
        remove_abandoned(parent)
        self.path = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=parent))
        # Locked before it gets the name under which other processes find it.
        unnamed = self.path / f"{_LOCK}.new"
        self._lock = unnamed.open("w")
        fcntl.flock(self._lock, fcntl.LOCK_EX)
        unnamed.rename(self.path / _LOCK)

    def remove(self) -> None:
        """Remove the directory and its contents. Idempotent."""
        shutil.rmtree(self.path, ignore_errors=True)
        self._lock.close()


def remove_abandoned(parent: Path) -> None:
    """Remove the folders of this user whose processes were killed."""
    for folder in parent.glob(f"{_PREFIX}*"):
        try:
            if folder.stat().st_uid == os.getuid() and _is_abandoned(folder / _LOCK):
                shutil.rmtree(folder, ignore_errors=True)
        except OSError:  # another process has just removed it
            continue


def running_cores() -> list[str]:
    """Addresses of the cores of this user's local deployments."""
    folders = _shallow(Path(tempfile.gettempdir())).glob(f"{_PREFIX}*")
    return sorted(f"unix:{folder / CORE}.sock" for folder in folders if _has_core(folder))


def _has_core(folder: Path) -> bool:
    try:
        is_ours = folder.stat().st_uid == os.getuid()
        return is_ours and (folder / f"{CORE}.sock").exists() and not _is_abandoned(folder / _LOCK)
    except OSError:  # another process has just removed it
        return False


def _is_abandoned(lock: Path) -> bool:
    with lock.open() as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
    return True


def _shallow(parent: Path) -> Path:
    longest = parent / (_PREFIX + "x" * 8) / "frontend-000-health.sock"
    return Path("/tmp") if len(str(longest).encode()) > _MAX_SOCKET_PATH_BYTES else parent
