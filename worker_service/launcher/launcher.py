"""Keeps the ranks of a group, or those of one machine, running: by default as child processes."""

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
from collections.abc import Awaitable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from service_common.end_signals import end_signals
from worker_service.address import TcpAddress, UnixAddress, parse
from worker_service.cpu_cores import ALL_CORES, CpuShare, num_usable_cores
from worker_service.errors import InvalidOption

logger = logging.getLogger(__name__)


LONG_LIFE_S = 10.0
"""A rank that exits sooner than this without a signal is not restarted: it would exit again."""

MAX_QUICK_DEATHS = 5
"""Maximum number of consecutive early deaths of one rank by signals."""

_BACKOFF_S = 0.5


class RankHost(ABC):
    """Runs ranks somewhere."""

    @abstractmethod
    async def open(self) -> None:
        """Reserve resources for the ranks. Raises WorkerError if there are none."""

    @abstractmethod
    async def run(self, rank: int) -> int:
        """Run a rank until it exits; returns its exit code, negative if a signal killed it.

        After `terminate` every rank is sent a signal, even one that is only starting.
        """

    @abstractmethod
    def terminate(self) -> None:
        """End all ranks gracefully; if called again, at once."""


T = TypeVar("T")


async def unless(ending: asyncio.Event, work: Awaitable[T]) -> T | None:
    """The result of `work`, or None, and `work` cancelled, if `ending` is set first."""
    task = asyncio.ensure_future(work)
    ended = asyncio.ensure_future(ending.wait())
    try:
        await asyncio.wait((task, ended), return_when=asyncio.FIRST_COMPLETED)
        return task.result() if task.done() else None
    finally:
        task.cancel()
        ended.cancel()


class Launcher:
    """Keeps ranks running to their end."""

    def __init__(self, ranks: Sequence[int], host: RankHost) -> None:
        self._ranks = ranks
        self._host = host
        self._ending = asyncio.Event()
        self._exit_code = 0

    async def run(self) -> int:
        """Run the ranks. Returns the launcher's exit code."""
        loop = asyncio.get_running_loop()
        for number in end_signals():
            loop.add_signal_handler(number, self._on_signal, number)
        await unless(self._ending, self._host.open())
        async with asyncio.TaskGroup() as tasks:
            for rank in self._ranks:
                tasks.create_task(self._keep(rank))
        return self._exit_code

    def _on_signal(self, number: int) -> None:
        # Both the kernel and the shell send SIGHUP when a terminal ends.
        if number != signal.SIGHUP or not self._ending.is_set():
            self._end(0)

    async def _keep(self, rank: int) -> None:
        """Run a rank, and run it again when it ends, until the launcher ends."""
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
        """End all ranks gracefully; if called again, at once."""
        if not self._ending.is_set():
            self._ending.set()
            self._exit_code = exit_code
        self._host.terminate()


_PR_SET_PDEATHSIG = 1


@dataclass(frozen=True, kw_only=True, slots=True)
class RankCommand:
    """A rank's command line: the launcher's own, then the rank's flags, which take precedence."""

    arguments: Sequence[str]
    """The launcher's own command line."""

    rank: int
    local_rank: int
    """Index of its GPU among those that its parent sees."""

    store: str
    """`HOST:PORT` of the group's store."""

    group_id: str
    listen: str
    advertise: str | None = None
    cpu_share: CpuShare | None = None

    def as_child_of_this(self) -> list[str]:
        """The command for a child process that ends with this one."""
        words = [sys.executable, "-m", "worker_service", *self.arguments]
        words += ["--rank", str(self.rank), "--local-rank", str(self.local_rank)]
        words += ["--distributed-init", self.store, "--group-id", self.group_id]
        words += ["--listen", self.listen]
        words += [] if self.advertise is None else ["--advertise", self.advertise]
        if self.cpu_share is not None:
            words += ["--cpu-share", f"{self.cpu_share.index}/{self.cpu_share.count}"]
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
    """A port of this machine's address `host` that is free now."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.bind((host, 0))
        port: int = probe.getsockname()[1]
        return port


def address_of(first: str, offset: int, option: str) -> str:
    """A rank's address: the first rank's, `offset` ports later or with a suffix to its path."""
    address = parse(first, option)
    if offset == 0 or (isinstance(address, TcpAddress) and address.port == 0):
        return first
    if isinstance(address, UnixAddress):
        return str(UnixAddress(f"{address.path}.{offset}"))
    if address.port + offset >= 2**16:
        raise InvalidOption(f"{option}: expected room for {offset} more ports, got {first!r}")
    return str(TcpAddress(address.host, address.port + offset))


@dataclass(kw_only=True)
class LocalHost(RankHost):
    """This machine."""

    arguments: Sequence[str]
    """The launcher's own command line."""

    ranks: range
    """The ranks that this machine runs."""

    group_id: str
    listen: str
    """Address of this machine's first rank; the others use the following ports, or paths."""

    advertise: str | None
    distributed_init: str | None
    """The address of rank 0's store. None: rank 0 is one of these, and uses a free port."""

    first_local_rank: int = 0
    """The GPU of the first of these ranks; the others use those after it."""

    cpu_share: CpuShare = ALL_CORES
    """The part of the machine's cores for all of them."""

    def __post_init__(self) -> None:
        address_of(self.listen, len(self.ranks) - 1, "listen")
        if self.advertise is not None:
            address_of(self.advertise, len(self.ranks) - 1, "advertise")
        self._processes: dict[int, asyncio.subprocess.Process] = {}
        self._is_ending = False

    async def open(self) -> None:
        """Choose the store's port, unless rank 0 is on another machine or its address is given."""
        self.distributed_init = self.distributed_init or f"127.0.0.1:{free_port('127.0.0.1')}"

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
        offset, first = self.ranks.index(rank), self.advertise
        assert self.distributed_init is not None, "chosen by open"
        return RankCommand(
            arguments=self.arguments,
            rank=rank,
            local_rank=self.first_local_rank + offset,
            store=self.distributed_init,
            group_id=self.group_id,
            listen=address_of(self.listen, offset, "listen"),
            advertise=None if first is None else address_of(first, offset, "advertise"),
            cpu_share=self.cpu_share.part(offset, len(self.ranks))
            if self.cpu_share.count > 1
            else None,
        )

    def _environment(self) -> dict[str, str]:
        """Ranks share the machine's cores, unless the number of threads is set."""
        threads = max(1, num_usable_cores() // len(self.ranks))
        return {"OMP_NUM_THREADS": str(threads)} | os.environ


def _terminate(process: asyncio.subprocess.Process) -> None:
    with contextlib.suppress(ProcessLookupError):  # it has just ended
        process.terminate()
