"""A deployment of processes of which any can be killed and started again."""

import asyncio
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from types import TracebackType
from typing import Self

from pagewire.v1 import status_pb2
from pagewire_client import AsyncClient, PagewireError
from pagewire_client.local.programs import COMMANDS, environment

NUM_WORKERS = 2
NUM_FRONTENDS = 2
START_TIMEOUT_S = 120.0
_POLL_S = 0.02


class KillableServices:
    """A core, two frontends and two workers on unix sockets; an asynchronous context manager.

    Nobody starts what was killed but who kills it, so that it is known what runs at any time.
    """

    def __init__(self, worker_flags: Sequence[str]) -> None:
        """`worker_flags`: what the workers serve."""
        self._folder = TemporaryDirectory(prefix="pagewire-")
        self._commands = {"core": [*COMMANDS["scheduler"], "--listen", self._address("core")]}
        to_core = ("--core", self._address("core"))
        for index in range(NUM_FRONTENDS):
            name = f"frontend-{index}"
            listen = ("--listen", self._address(name))
            self._commands[name] = [*COMMANDS["frontend"], *to_core, *listen]
        for index in range(NUM_WORKERS):
            name = f"worker-{index}"
            listen = ("--listen", self._address(name), "--group-id", name)
            self._commands[name] = [*COMMANDS["worker"], *to_core, *listen, *worker_flags]
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        self.addresses = [self._address(f"frontend-{index}") for index in range(NUM_FRONTENDS)]

    async def __aenter__(self) -> Self:
        for name in self._commands:
            self.start(name)
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for process in self._processes.values():
            process.kill()
        for process in self._processes.values():
            process.wait()
        self._folder.cleanup()

    def start(self, name: str) -> None:
        """Start a service that is not running."""
        self._processes[name] = subprocess.Popen(
            [sys.executable, "-m", *self._commands[name], "--log-level", "warning"],
            env=environment(),
            cwd=self._folder.name,
            stdout=subprocess.DEVNULL,
            stderr=None if os.environ.get("PAGEWIRE_SHOW_LOGS") else subprocess.DEVNULL,
        )

    def kill(self, name: str) -> None:
        """SIGKILL; the process is gone when this returns."""
        process = self._processes.pop(name)
        process.kill()
        process.wait()

    async def wait_whole(self) -> None:
        """Wait until each frontend answers, and tells of every worker that it is ready.

        Raises RuntimeError if a service has ended that was not killed.
        """
        async with asyncio.timeout(START_TIMEOUT_S):
            for address in self.addresses:
                async with AsyncClient(address) as client:
                    while not await _is_whole(client):
                        self._require_alive()
                        await asyncio.sleep(_POLL_S)

    def _require_alive(self) -> None:
        for name, process in self._processes.items():
            if process.poll() is not None:
                raise RuntimeError(f"the {name} ended with exit code {process.returncode}")

    def _address(self, name: str) -> str:
        return f"unix:{Path(self._folder.name) / name}.sock"


async def _is_whole(client: AsyncClient) -> bool:
    try:
        status = await client.get_status(timeout=1)
    except PagewireError:
        return False
    ready = [g for g in status.groups if g.state == status_pb2.WORKER_STATE_READY]
    return len(ready) == NUM_WORKERS and status.num_frontends == NUM_FRONTENDS
