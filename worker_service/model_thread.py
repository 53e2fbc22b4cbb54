"""The one thread on which the model runs.

Work is done in the order in which it was handed over, so that nothing the model touches needs a
lock, and the event loop never waits for the device.

To wake an event loop takes a system call, and with it the interpreter's lock goes to the loop, for
as long as that has messages to handle: milliseconds in which the device would stand idle between
two steps. So what the model thread has to tell is called out by a thread of its own, which gets
the lock when the next step lets go of it, that is, while the device computes.
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
        self._calls: SimpleQueue[Callable[[], object] | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="model", daemon=True)
        self._thread.start()
        threading.Thread(target=self._call_out, name="model-calls", daemon=True).start()

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

    def tell(self, loop: asyncio.AbstractEventLoop, call: Callable[[], object]) -> None:
        """Have a loop make a call, in the order of these; for jobs to use."""
        self._calls.put(lambda: loop.call_soon_threadsafe(call))

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
        self._calls.put(None)

    def _call_out(self) -> None:
        while (call := self._calls.get()) is not None:
            try:
                call()
            except RuntimeError:  # the loop is closed: nobody is there to be told
                logger.debug("the event loop is closed")
