"""The services of this checkout as processes, for benchmarks and tests.

Only its owner starts, stops or kills such a process, at any moment. (`pagewire_cli.local`, which
users' deployments consist of, keeps its services alive instead.)
"""

import os
import secrets
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO, ClassVar, Protocol

ROOT = Path(__file__).parents[1]
_SOURCES = (".", "kernels", "client", "protos")
_KILL_TIMEOUT_S = 40.0


def environment() -> dict[str, str]:
    """This process's environment, with the packages of the checkout before those on its path, and
    without the user's settings."""
    ours = {name: value for name, value in os.environ.items() if not name.startswith("PAGEWIRE_")}
    given = [os.path.abspath(root) for root in ours.get("PYTHONPATH", "").split(os.pathsep) if root]
    path = [*(str(ROOT / source) for source in _SOURCES), *given]
    return ours | {"PYTHONPATH": os.pathsep.join(path), "PYTHONUNBUFFERED": "1"}


def free_port() -> int:
    """A TCP port of the loopback interface on which no process listens at the moment. It is below
    those that Linux gives to outgoing connections, so that none takes it before it is used."""
    while True:
        port = 10_000 + secrets.randbelow(20_000)  # no generator that tests seed
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port


def module(*words: str) -> list[str]:
    """The command that runs a module with its arguments."""
    return [sys.executable, "-m", *words]


def scheduler(listen: str, *flags: str) -> list[str]:
    """The command that starts a scheduler core."""
    return module("scheduler_service", "scheduler", "--listen", listen, *flags)


def frontend(listen: str, core: str, *flags: str) -> list[str]:
    """The command that starts a frontend of the core at an address."""
    return module("scheduler_service", "frontend", "--listen", listen, "--core", core, *flags)


def worker(listen: str, core: str, *flags: str) -> list[str]:
    """The command that starts a worker of the core at an address."""
    return module("worker_service", "--listen", listen, "--core", core, *flags)


class Process(Protocol):
    """What is used of a process, with the meaning that `subprocess.Popen` gives it."""

    pid: int
    returncode: int | None

    def poll(self) -> int | None:
        """The exit code, negative for a signal; None while the process runs."""

    def wait(self, timeout: float | None = None) -> int:
        """The exit code, once it has ended. Raises subprocess.TimeoutExpired after `timeout`
        seconds."""

    def send_signal(self, sig: int) -> None:
        """Send a signal, unless the process has ended."""

    def terminate(self) -> None:
        """Send SIGTERM."""

    def kill(self) -> None:
        """Send SIGKILL."""


def start_process(
    command: Sequence[str], output: IO[bytes], variables: Mapping[str, str], folder: Path
) -> Process:
    """Start a command in a folder, with its output to a file. `variables`: additional environment
    variables."""
    return subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=subprocess.STDOUT,
        env=environment() | dict(variables),
        cwd=folder,
    )


class Service:
    """One process with its log."""

    starter: ClassVar[Callable[..., Process]] = staticmethod(start_process)
    """What starts the processes; tests set another."""

    def __init__(
        self,
        name: str,
        command: Sequence[str],
        log: Path,
        variables: Mapping[str, str] | None = None,
    ) -> None:
        """Start the process in the log's directory. `log`: file to which its output is appended.
        `variables`: additional environment variables."""
        self.name = name
        self.log_path = log
        self.leaving_s: float | None = None
        """Seconds that `end` took."""
        with log.open("ab") as output:
            self.process = self.starter(command, output, variables or {}, log.parent)

    @property
    def exit_code(self) -> int | None:
        """The exit code; None while the process runs."""
        return self.process.poll()

    @property
    def log(self) -> str:
        """The output so far."""
        return self.log_path.read_text(errors="replace")

    def kill(self, how: int = signal.SIGKILL) -> None:
        """Send a signal and wait for the process to end."""
        with suppress(ProcessLookupError):
            self.process.send_signal(how)
        self.process.wait(timeout=_KILL_TIMEOUT_S)

    def end(self, timeout_s: float) -> int:
        """Send SIGTERM, and SIGKILL if it does not end in time; returns the exit code."""
        started_at = time.monotonic()
        self.process.terminate()
        code = self.wait_or_kill(timeout_s)
        self.leaving_s = time.monotonic() - started_at
        return code

    def wait_or_kill(self, timeout_s: float) -> int:
        """The exit code of a process that was asked to stop."""
        try:
            return self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            self.kill()
            return self.process.wait()

    def wait(self, timeout_s: float = 60) -> int:
        """The exit code of a process that ends without a signal."""
        return self.process.wait(timeout=timeout_s)
