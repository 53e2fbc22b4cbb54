"""A deployment of processes of which any can be killed and started again."""

import asyncio
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Self

from pagewire_client import AsyncClient, PagewireError
from tools import launch

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
        core, quiet = self._address("core"), ("--log-level", "warning")
        self._commands = {"core": launch.scheduler(core, *quiet)}
        for index in range(NUM_FRONTENDS):
            name = f"frontend-{index}"
            self._commands[name] = launch.frontend(self._address(name), core, *quiet)
        for index in range(NUM_WORKERS):
            name = f"worker-{index}"
            flags = ("--group-id", name, *worker_flags, *quiet)
            self._commands[name] = launch.worker(self._address(name), core, *flags)
        self._services: dict[str, launch.Service] = {}
        self.addresses = [self._address(f"frontend-{index}") for index in range(NUM_FRONTENDS)]

    async def __aenter__(self) -> Self:
        for name in self._commands:
            self.start(name)
        return self

    async def __aexit__(self, *_: object) -> None:
        for service in self._services.values():
            service.kill()
        self._folder.cleanup()

    def start(self, name: str) -> None:
        """Start a service that is not running."""
        log = Path(self._folder.name) / f"{name}.log"
        self._services[name] = launch.Service(name, self._commands[name], log)

    def kill(self, name: str) -> None:
        """SIGKILL; the process is gone when this returns."""
        self._services.pop(name).kill()

    async def wait_whole(self) -> None:
        """Wait until each frontend responds and reports every worker as ready.

        Raises RuntimeError if a service has ended that was not killed.
        """
        async with asyncio.timeout(START_TIMEOUT_S):
            for address in self.addresses:
                async with AsyncClient(address) as client:
                    while not await _is_whole(client):
                        self._require_alive()
                        await asyncio.sleep(_POLL_S)

    def _require_alive(self) -> None:
        for name, service in self._services.items():
            if service.exit_code is not None:
                raise RuntimeError(f"the {name} ended with {service.exit_code}:\n{service.log}")

    def _address(self, name: str) -> str:
        return f"unix:{Path(self._folder.name) / name}.sock"


async def _is_whole(client: AsyncClient) -> bool:
    try:
        status = await client.get_status(timeout=1)
    except PagewireError:
        return False
    ready = [g for g in status.groups if g.state == "ready"]
    return len(ready) == NUM_WORKERS and status.num_frontends == NUM_FRONTENDS
