"""One rank's process, as its parent starts it."""

import ctypes
import os
import signal
import socket
import sys
from collections.abc import Sequence
from dataclasses import dataclass

from worker_service.errors import InvalidOption

_PR_SET_PDEATHSIG = 1


@dataclass(frozen=True, kw_only=True, slots=True)
class RankCommand:
    """A rank's command line: the launcher's own, and what is the rank's alone."""

    arguments: Sequence[str]
    """The launcher's, to which the rank's are added: the later of two counts."""

    rank: int
    local_rank: int
    """Which of the GPUs that its parent sees it takes."""

    store: str
    """`HOST:PORT` of the group's store."""

    group_id: str
    listen: str
    advertise: str | None = None

    def as_child_of_this(self) -> list[str]:
        """For a process that is to end with this one."""
        words = [sys.executable, "-m", "worker_service", *self.arguments]
        words += ["--rank", str(self.rank), "--local-rank", str(self.local_rank)]
        words += ["--distributed-init", self.store, "--group-id", self.group_id]
        words += ["--listen", self.listen]
        words += [] if self.advertise is None else ["--advertise", self.advertise]
        return [*words, "--launcher-pid", str(os.getpid())]


def end_with(launcher_pid: int) -> None:
    """Have this process killed when its launcher ends. On Linux only.

    Raises InvalidOption if it has ended already.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != launcher_pid:
        raise InvalidOption(f"launcher_pid: {launcher_pid} is not this process's parent")


def free_port(host: str) -> int:
    """A port that nobody listens on now at one of this machine's addresses."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.bind((host, 0))
        port: int = probe.getsockname()[1]
        return port
