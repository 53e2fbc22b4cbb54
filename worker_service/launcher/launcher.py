"""Keeps the ranks of a group, or of one machine of it, running: by default as child processes."""

import asyncio
import contextlib
import ctypes
import logging
import os
import signal
import socket
import sys
import time
from abc import ABC, abstractmethod
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


class RankHost(ABC):
    """Where ranks run."""

    @abstractmethod
    async def open(self) -> None:
        """Make room for them. Raises WorkerError where there is none."""

    @abstractmethod
    async def run(self, rank: int) -> int:
        """Run a rank to its end; its exit code, negative where a signal killed it.

        Once `terminate` has been called, no rank is left running that has not been sent a signal.
        """

    @abstractmethod
    def terminate(self) -> None:
        """Make all ranks end in order; if called again, at once."""


async def launch(ranks: Sequence[int], host: RankHost) -> int:
    """Run ranks to their end; returns the launcher's exit code."""
    return await _Launcher(ranks, host).run()


class _Launcher:
    def __init__(self, ranks: Sequence[int], host: RankHost) -> None:
        self._ranks = ranks
        self._host = host
        self._ending = asyncio.Event()
        self._exit_code = 0

    async def run(self) -> int:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._end, 0)
        await self._open()
        async with asyncio.TaskGroup() as tasks:
            for rank in self._ranks:
                tasks.create_task(self._keep(rank))
        return self._exit_code

    async def _open(self) -> None:
        """Open the host, unless asked to end while it is waiting for something."""
        opening = asyncio.ensure_future(self._host.open())
        ending = asyncio.ensure_future(self._ending.wait())
        await asyncio.wait((opening, ending), return_when=asyncio.FIRST_COMPLETED)
        ending.cancel()
        if opening.done():
            opening.result()
        else:
            opening.cancel()

    async def _keep(self, rank: int) -> None:
        """Run a rank again and again, until all shall end."""
        num_quick_deaths = 0
        while not self._ending.is_set():
            started_at = time.monotonic()
            code = await self._host.run(rank)
            if self._ending.is_set():
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

    def _end(self, exit_code: int) -> None:
        """Make all ranks end in order; if called again, at once."""
        if not self._ending.is_set():
            self._ending.set()
            self._exit_code = exit_code
        self._host.terminate()


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


def die_with_parent(launcher_pid: int) -> None:
    """Make the kernel kill this process when its launcher ends. On Linux only.

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


@dataclass(frozen=True, kw_only=True, slots=True)
class LocalConfig:
    """What the ranks' command lines have in common, and in what they differ."""

    arguments: Sequence[str]
    """The launcher's own."""

    ranks: range
    """Those of this machine."""

    group_id: str
    listen: str
    """Of this machine's first rank; the others take the following ports, or paths."""

    advertise: str | None
    distributed_init: str | None
    """Where rank 0 keeps the store. None: rank 0 is one of these, and takes a free port."""

    first_local_rank: int = 0
    """Which of the machine's GPUs the first of these ranks takes."""

    def __post_init__(self) -> None:
        address_of(self.listen, len(self.ranks) - 1, "listen")
        if self.advertise is not None:
            address_of(self.advertise, len(self.ranks) - 1, "advertise")


def address_of(first: str, offset: int, option: str) -> str:
    """Of one of several ranks: as many ports after the first's, or its path with a suffix."""
    address = parse(first, option)
    if offset == 0 or (isinstance(address, TcpAddress) and address.port == 0):
        return first
    if isinstance(address, UnixAddress):
        return str(UnixAddress(f"{address.path}.{offset}"))
    if address.port + offset >= 2**16:
        raise InvalidOption(f"{option}: expected room for {offset} more ports, got {first!r}")
    return str(TcpAddress(address.host, address.port + offset))


class LocalHost(RankHost):
    """This machine."""

    def __init__(self, config: LocalConfig) -> None:
        self._config = config
        self._store = config.distributed_init or ""
        self._processes: dict[int, asyncio.subprocess.Process] = {}
        self._is_ending = False

    async def open(self) -> None:
        """Choose the store's port, unless rank 0 is on another machine or its address is given."""
        self._store = self._store or f"127.0.0.1:{free_port('127.0.0.1')}"

    async def run(self, rank: int) -> int:
        """Run a rank as a child process."""
        process = await asyncio.create_subprocess_exec(
            *self._command(rank).as_child_of_this(),
            env=self._environment(),
            # A terminal's ctrl-C is for the launcher, which passes it on.
            process_group=0,
        )
        self._processes[rank] = process
        if self._is_ending:  # since before the process was started
            _terminate(process)
        try:
            return await process.wait()
        finally:
            del self._processes[rank]

    def terminate(self) -> None:
        """Send SIGTERM to all."""
        self._is_ending = True
        for process in self._processes.values():
            _terminate(process)

    def _command(self, rank: int) -> RankCommand:
        config = self._config
        offset = config.ranks.index(rank)
        advertise = config.advertise
        return RankCommand(
            arguments=config.arguments,
            rank=rank,
            local_rank=config.first_local_rank + offset,
            store=self._store,
            group_id=config.group_id,
            listen=address_of(config.listen, offset, "listen"),
            advertise=None if advertise is None else address_of(advertise, offset, "advertise"),
        )

    def _environment(self) -> dict[str, str]:
        """Ranks share the machine's cores, unless the number of threads is set."""
        threads = max(1, (os.cpu_count() or 1) // len(self._config.ranks))
        return {"OMP_NUM_THREADS": str(threads)} | os.environ


def _terminate(process: asyncio.subprocess.Process) -> None:
    with contextlib.suppress(ProcessLookupError):  # it has just ended by itself
        process.terminate()
