"""The services of docker-compose.yml as processes on this machine, with their very commands.

Host names become the loopback address. A service that others find by its name has one port; workers
each take a free one, as each container has addresses of its own.
"""

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import yaml

from benchmarks.processes import free_port
from pagewire_client.local import programs

COMPOSE_FILE = Path(__file__).parents[1] / "docker-compose.yml"
FRONTEND, SCHEDULER, WORKER = "frontend", "scheduler", "worker-cpu"

_END_TIMEOUT_S = 60.0
_NAMED_PORT = re.compile(r"^(scheduler|frontend|0\.0\.0\.0):(\d+)$")
_DEFAULT_OF_VARIABLE = re.compile(r"\$\{\w+:-(.*)\}")


class Process:
    """One container's process."""

    def __init__(self, name: str, popen: "subprocess.Popen[bytes]") -> None:
        self.name = name
        self.leaving_s: float | None = None
        """From SIGTERM to its end."""
        self._popen = popen

    @property
    def exit_code(self) -> int | None:
        """None while it runs."""
        return self._popen.poll()

    def kill(self) -> None:
        """End it without a word."""
        self._popen.kill()
        self._popen.wait()

    def end(self) -> int:
        """What `docker compose stop` does: SIGTERM, and SIGKILL if it does not end; the exit
        code."""
        started_at = time.monotonic()
        self._popen.send_signal(signal.SIGTERM)
        try:
            self._popen.wait(_END_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self.kill()
        self.leaving_s = time.monotonic() - started_at
        return self._popen.wait()


class Composed:
    """A context manager that starts processes by service name, and ends them all."""

    def __init__(self, environment: Mapping[str, str], logs: Path) -> None:
        """`environment`: for all services, beside the file's own. `logs`: an existing folder."""
        self._services: Mapping[str, Any] = yaml.safe_load(COMPOSE_FILE.read_text())["services"]
        self._environment = environment
        self._logs = logs
        self._ports = {port: str(free_port()) for port in ("7600", "7610", "8000")}
        self._ports |= dict.fromkeys(("7601", "7611", "7620", "7621"), "0")
        self._started: list[Process] = []

    @property
    def address(self) -> str:
        """Where clients call."""
        return f"127.0.0.1:{self._ports['7600']}"

    def start(self, service: str) -> Process:
        """One more container of a service."""
        settings = self._services[service]
        words = [self._on_loopback(word) for word in settings["command"]]
        own = {name: _value(text) for name, text in settings.get("environment", {}).items()}
        name = f"{service}-{len(self._started)}"
        with (self._logs / f"{name}.log").open("wb") as log:
            popen = subprocess.Popen(
                [sys.executable, "-m", "pagewire_client.cli", *words],
                env=_clean(programs.environment()) | own | self._environment,
                stdout=log,
                stderr=log,
            )
        self._started.append(Process(name, popen))
        return self._started[-1]

    def _on_loopback(self, word: str) -> str:
        return _NAMED_PORT.sub(lambda match: f"127.0.0.1:{self._ports[match[2]]}", word)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """The last started first; after an error at once, as requests may be open."""
        for process in reversed(self._started):
            if process.exit_code is not None:
                continue
            if error is None:
                process.end()
            else:
                process.kill()


def _clean(environment: Mapping[str, str]) -> dict[str, str]:
    """Without settings of whoever runs this, which containers would not see."""
    ours = {name: value for name, value in environment.items() if not name.startswith("PAGEWIRE_")}
    return ours | {"PATH": os.environ["PATH"]}


def _value(text: str) -> str:
    """A variable's value in the file, where `${NAME:-default}` stands for the default."""
    match = _DEFAULT_OF_VARIABLE.fullmatch(text)
    return match[1] if match else text
