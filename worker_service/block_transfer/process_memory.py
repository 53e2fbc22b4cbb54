"""Reads the memory of another process of the same machine, where the system permits it.

`process_vm_readv` copies once, from the source's cache to the target's, without a buffer that both
share: the caches keep their huge pages. It is permitted between processes of one user unless a
security module restricts it; Yama does, except for a process that the other one has named.
"""

import ctypes
import os
import sys
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import NamedTuple

MAX_PIECES = 256
"""Pieces in one call; the system allows 1,024."""

_PR_SET_PTRACER = 0x59616D61


class MemoryUnreadable(Exception):
    """The system does not permit to read the other process, or it is another one."""


class Piece(NamedTuple):
    """A range of memory to copy."""

    remote: int
    """Address in the other process."""
    local: memoryview
    """Writable; its length is the number of bytes."""


class _IoVec(ctypes.Structure):
    _fields_ = (("base", ctypes.c_void_p), ("size", ctypes.c_size_t))


@cache
def machine_name() -> str:
    """Equal for the processes that can name each other by their ids; empty where memory cannot be
    read."""
    if sys.platform != "linux" or _readv() is None:
        return ""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        return f"{boot}/{Path('/proc/self/ns/pid').stat().st_ino}"
    except OSError:
        return ""


def permit(pid: int) -> None:
    """Permit a process to read this one, which Yama may demand; the last call counts."""
    ctypes.CDLL(None).prctl(_PR_SET_PTRACER, ctypes.c_ulong(pid), 0, 0, 0)


def read_memory(pid: int, pieces: Sequence[Piece]) -> None:
    """Copy pieces of another process's memory. Raises MemoryUnreadable."""
    readv = _readv()
    if readv is None:
        raise MemoryUnreadable("process_vm_readv is missing")
    for start in range(0, len(pieces), MAX_PIECES):
        some = pieces[start : start + MAX_PIECES]
        vector = _IoVec * len(some)
        remote = vector(*(_IoVec(piece.remote, len(piece.local)) for piece in some))
        local = vector(*(_IoVec(address_of(piece.local), len(piece.local)) for piece in some))
        wanted = sum(len(piece.local) for piece in some)
        count = readv(pid, local, len(some), remote, len(some), 0)
        if count != wanted:
            reason = os.strerror(ctypes.get_errno()) if count < 0 else f"{count} of {wanted} bytes"
            raise MemoryUnreadable(f"process {pid}: {reason}")


def address_of(view: memoryview) -> int:
    """Where a writable view is in this process's memory."""
    return ctypes.addressof(ctypes.c_char.from_buffer(view)) if len(view) else 0


@cache
def _readv():  # type: ignore[no-untyped-def]
    """The system's function; None where there is none."""
    try:
        readv = ctypes.CDLL(None, use_errno=True).process_vm_readv
    except (AttributeError, OSError):
        return None
    vector = ctypes.POINTER(_IoVec)
    count = ctypes.c_ulong
    readv.argtypes = (ctypes.c_int, vector, count, vector, count, count)
    readv.restype = ctypes.c_ssize_t
    return readv
