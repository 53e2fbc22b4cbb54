"""Keeps ranks running, wherever their host runs them."""

import asyncio
import logging
import signal
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence

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

        Once `terminate` has been called, no rank is left running that has not been told to end.
        """

    @abstractmethod
    def terminate(self) -> None:
        """Have all ranks end in order; told again, they end at once."""


async def launch(ranks: Sequence[int], host: RankHost) -> int:
    """Run ranks to their end; returns the exit code that tells of it."""
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
        """Open the host, unless told to end while it is waiting for something."""
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
        """Have all ranks end in order; told again, they end at once."""
        if not self._ending.is_set():
            self._ending.set()
            self._exit_code = exit_code
        self._host.terminate()
