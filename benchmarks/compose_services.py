"""The services of docker-compose.yml as processes on this machine, with the same commands.

Host names become the loopback address. A service that others find by its name has one port; workers
each take a free one, as each container has addresses of its own.
"""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

import yaml

from benchmarks.processes import free_port
from tools.launch import ROOT, Service, module

COMPOSE_FILE = ROOT / "docker-compose.yml"
FRONTEND, SCHEDULER, WORKER = "frontend", "scheduler", "worker-cpu"

END_TIMEOUT_S = 40.0
"""The file's `stop_grace_period`."""
_NAMED_PORT = re.compile(r"^(scheduler|frontend|0\.0\.0\.0):(\d+)$")
_DEFAULT_OF_VARIABLE = re.compile(r"\$\{\w+:-(.*)\}")


class Composed:
    """A context manager that starts processes by service name, and ends them all."""

    def __init__(self, environment: Mapping[str, str], logs: Path) -> None:
        """`environment`: for all services, beside the file's own. `logs`: an existing folder."""
        self._services: Mapping[str, Any] = yaml.safe_load(COMPOSE_FILE.read_text())["services"]
        self._environment = environment
        self._logs = logs
        self._ports = {port: str(free_port()) for port in ("7600", "7610", "8000")}
        self._ports |= dict.fromkeys(("7601", "7611", "7620", "7621"), "0")
        self._started: list[Service] = []

    @property
    def address(self) -> str:
        """Addresses for clients."""
        return f"127.0.0.1:{self._ports['7600']}"

    def start(self, service: str) -> Service:
        """One more container of a service."""
        settings = self._services[service]
        words = [self._on_loopback(word) for word in settings["command"]]
        own = {name: _value(text) for name, text in settings.get("environment", {}).items()}
        name = f"{service}-{len(self._started)}"
        self._started.append(
            Service(
                name,
                module("pagewire_cli", *words),
                self._logs / f"{name}.log",
                {**own, **self._environment},
            )
        )
        return self._started[-1]

    def _on_loopback(self, word: str) -> str:
        return _NAMED_PORT.sub(lambda match: f"127.0.0.1:{self._ports[match[2]]}", word)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, error: object, *_: object) -> None:
        """Stop in reverse order; after an error kill, as requests may be open."""
        for service in reversed(self._started):
            if service.exit_code is not None:
                continue
            if error is None:
                service.end(END_TIMEOUT_S)
            else:
                service.kill()


def _value(text: str) -> str:
    """A variable's value in the file, where `${NAME:-default}` stands for the default."""
    match = _DEFAULT_OF_VARIABLE.fullmatch(text)
    return match[1] if match else text
