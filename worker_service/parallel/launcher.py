"""All ranks of a group as children of one process, on one machine.

The launcher computes nothing and loads nothing. It runs its own command line once per rank, passes
signals on, and starts a rank again that was killed: the others keep their weights and meet it anew.
The ranks end with the launcher, even if it is killed.
"""

import asyncio
import ctypes
import logging
import os
import signal
import socket
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass

from worker_service.address import TcpAddress, UnixAddress, parse
from worker_service.errors import InvalidOption

logger = logging.getLogger(__name__)

LONG_LIFE_S = 10.0
"""A rank that ends by itself sooner than this would do so again."""

MAX_QUICK_DEATHS = 5
"""Of one rank in a row, by a signal."""

_BACKOFF_S = 0.5
_PR_SET_PDEATHSIG = 1


@dataclass(frozen=True, kw_only=True, slots=True)
class LaunchConfig:
    """What the ranks' command lines have in common, and in what they differ."""

    arguments: Sequence[str]
    """The worker's own, to which each rank's are added: the later of two counts."""

    world_size: int
    group_id: str
    listen: str
    """Of rank 0; the others take the following ports, or paths."""

    advertise: str | None

    def __post_init__(self) -> None:
        address_of(self.listen, self.world_size - 1, "listen")
        if self.advertise is not None:
            address_of(self.advertise, self.world_size - 1, "advertise")


def address_of(first: str, rank: int, option: str) -> str:
    """A rank's address: as many ports after rank 0's, or its path with the rank appended."""
    address = parse(first, option)
    if rank == 0 or (isinstance(address, TcpAddress) and address.port == 0):
        return first
    if isinstance(address, UnixAddress):
        return str(UnixAddress(f"{address.path}.{rank}"))
    if address.port + rank >= 2**16:
        raise InvalidOption(f"{option}: expected room for {rank} more ports, got {first!r}")
    return str(TcpAddress(address.host, address.port + rank))


async def launch(config: LaunchConfig) -> int:
    """Run all ranks to their end; returns the exit code that tells of it."""
    return await _Launcher(config).run()


class _Launcher:
    def __init__(self, config: LaunchConfig) -> None:
        self._config = config
        self._store = f"127.0.0.1:{_free_port()}"
        self._processes: dict[int, asyncio.subprocess.Process] = {}
        self._is_ending = False
        self._exit_code = 0

    async def run(self) -> int:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._end, 0)
        async with asyncio.TaskGroup() as tasks:
            for rank in range(self._config.world_size):
                tasks.create_task(self._keep(rank))
        return self._exit_code

    async def _keep(self, rank: int) -> None:
        """Run a rank again and again, until all shall end."""
        num_quick_deaths = 0
        while not self._is_ending:
            started_at = time.monotonic()
            code = await self._run_rank(rank)
            if self._is_ending:
                return
            if code == 0:
                self._end(0)
                return
            is_quick = time.monotonic() - started_at < LONG_LIFE_S
            num_quick_deaths = num_quick_deaths + 1 if is_quick else 0
            if (code > 0 and is_quick) or num_quick_deaths == MAX_QUICK_DEATHS:
                logger.error("giving up rank=%d exit_code=%d", rank, code)
                self._end(max(code, 1))
                return
            logger.warning("restarting rank=%d exit_code=%d", rank, code)
            await asyncio.sleep(_BACKOFF_S * num_quick_deaths)

    async def _run_rank(self, rank: int) -> int:
        command = (sys.executable, "-m", "worker_service", *self._config.arguments)
        process = await asyncio.create_subprocess_exec(
            *command,
            *self._arguments(rank),
            env=self._environment(),
            # A terminal's ctrl-C is for the launcher, which passes it on.
            process_group=0,
        )
        self._processes[rank] = process
        if self._is_ending:  # since before it was there to be told
            process.terminate()
        try:
            return await process.wait()
        finally:
            del self._processes[rank]

    def _arguments(self, rank: int) -> list[str]:
        config = self._config
        arguments = ["--rank", str(rank), "--local-rank", str(rank)]
        arguments += ["--distributed-init", self._store, "--group-id", config.group_id]
        arguments += ["--launcher-pid", str(os.getpid())]
        arguments += ["--listen", address_of(config.listen, rank, "listen")]
        if config.advertise is not None:
            arguments += ["--advertise", address_of(config.advertise, rank, "advertise")]
        return arguments

    def _environment(self) -> dict[str, str]:
        """Ranks share the machine's cores, unless told how many threads to take."""
        threads = max(1, (os.cpu_count() or 1) // self._config.world_size)
        return {"OMP_NUM_THREADS": str(threads)} | os.environ

    def _end(self, exit_code: int) -> None:
        """Have all ranks end in order; told again, they end at once."""
        if not self._is_ending:
            self._is_ending = True
            self._exit_code = exit_code
        for process in self._processes.values():
            process.terminate()


def end_with(launcher_pid: int) -> None:
    """Have this process killed when its launcher ends. On Linux only.

    Raises InvalidOption if it has ended already.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != launcher_pid:
        raise InvalidOption(f"launcher_pid: {launcher_pid} is not this process's parent")


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
