"""A service's numbers, read on the thread that they belong to."""

import asyncio
import concurrent.futures
import threading
from collections.abc import Callable, Iterable

from prometheus_client.metrics_core import Metric as Family
from prometheus_client.registry import Collector

TIMEOUT_S = 5.0
"""For the event loop to come to it; a scrape that takes longer fails."""


class LoopCollector(Collector):
    """Has the running event loop make the families whenever a scrape asks, from whatever thread.

    So services need no locks, and a scrape costs their loop no more than reading the numbers: they
    are written out on the thread that serves the scrape.
    """

    def __init__(self, collect: Callable[[], Iterable[Family]]) -> None:
        """To be made on the event loop."""
        self._collect = collect
        self._loop = asyncio.get_running_loop()
        self._thread = threading.get_ident()

    def describe(self) -> Iterable[Family]:
        """Nothing, so that registering it asks for no numbers."""
        return ()

    def collect(self) -> Iterable[Family]:
        """The families. Raises TimeoutError if the loop is held up, RuntimeError if closed."""
        if threading.get_ident() == self._thread:
            return list(self._collect())
        found: concurrent.futures.Future[list[Family]] = concurrent.futures.Future()

        def read() -> None:
            try:
                found.set_result(list(self._collect()))
            except Exception as error:
                found.set_exception(error)

        self._loop.call_soon_threadsafe(read)
        return found.result(TIMEOUT_S)
