"""Ranks as children of the launcher, on its own machine: all of a group, or the machine's part."""

import asyncio
import contextlib
import os
from collections.abc import Sequence
from dataclasses import dataclass

from worker_service.address import TcpAddress, UnixAddress, parse
from worker_service.errors import InvalidOption
from worker_service.launchers.launcher import RankHost
from worker_service.launchers.rank_process import RankCommand, free_port


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
        """Choose the store's port, unless rank 0 is on another machine or told where."""
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
        if self._is_ending:  # since before it was there to be told
            _tell_to_end(process)
        try:
            return await process.wait()
        finally:
            del self._processes[rank]

    def terminate(self) -> None:
        """Send SIGTERM to all."""
        self._is_ending = True
        for process in self._processes.values():
            _tell_to_end(process)

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
        """Ranks share the machine's cores, unless told how many threads to take."""
        threads = max(1, (os.cpu_count() or 1) // len(self._config.ranks))
        return {"OMP_NUM_THREADS": str(threads)} | os.environ


def _tell_to_end(process: asyncio.subprocess.Process) -> None:
    with contextlib.suppress(ProcessLookupError):  # it has just ended by itself
        process.terminate()
