"""The one thread on which the model runs.

Work is done in the order in which it was handed over, so that nothing the model touches needs a
lock, and the event loop never waits for the device.
"""

import asyncio
import logging
import threading
from collections.abc import Callable
from queue import SimpleQueue
from typing import TypeVar

logger = logging.getLogger(__name__)

Result = TypeVar("Result")


class ModelThread:
    """A thread and the queue of what it has to do."""

    def __init__(self) -> None:
        self._jobs: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="model", daemon=True)
        self._thread.start()

    def post(self, job: Callable[[], None]) -> None:
        """Have `job` done; it must handle its own exceptions."""
        self._jobs.put(job)

    async def run(self, work: Callable[[], Result]) -> Result:
        """Have `work` done and wait for what it returns or raises."""
        loop = asyncio.get_running_loop()
        future: asyncio.Future[Result] = loop.create_future()

        def resolve(result: Result) -> None:
            if not future.done():
                future.set_result(result)

        def fail(error: Exception) -> None:
            if not future.done():
                future.set_exception(error)

        def job() -> None:
            try:
                result = work()
            except Exception as error:
                loop.call_soon_threadsafe(fail, error)
            else:
                loop.call_soon_threadsafe(resolve, result)

        self.post(job)
        return await future

    def stop(self, *, wait: bool) -> None:
        """End the thread once what was handed over is done; wait for that, or let it be."""
        self._jobs.put(None)
        if wait:
            self._thread.join()

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            try:
                job()
            except Exception:  # a bug in a job; the steps of all later streams need this thread
                logger.exception("unhandled error on the model thread")
