"""The one thread on which the model runs.

Work is done in the order in which it was handed over, so that nothing the model touches needs a
lock, and the event loop never waits for the device.

What follows a step, such as reporting its result, is done by a second thread, in order too.
Two things make the model thread too good for it. A device that computes beside the host is to be
waited for, and meanwhile the next step can be launched. And to wake an event loop takes a system
call, and with it the interpreter's lock goes to the loop, for as long as that has messages to
handle: milliseconds in which the device would stand idle between two steps. The second thread gets
the lock when the next step lets go of it, that is, while the device computes.
"""

import asyncio
import logging
import threading
import time
from collections.abc import Callable
from queue import SimpleQueue
from typing import TypeVar

logger = logging.getLogger(__name__)

Result = TypeVar("Result")


class ModelThread:
    """A thread and the queue of what it has to do."""

    def __init__(self) -> None:
        self._jobs: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._sequels: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._busy_since: dict[str, float] = {}
        """Monotonic seconds, by thread; of those that are at something."""
        self._thread = threading.Thread(target=self._run, name="model", daemon=True)
        self._thread.start()
        threading.Thread(target=self._follow, name="model-sequels", daemon=True).start()

    @property
    def busy_s(self) -> float:
        """How long the threads have been at what they do now, the longer of both; 0 when idle."""
        since = list(self._busy_since.values())
        return time.monotonic() - min(since) if since else 0.0

    def post(self, job: Callable[[], None]) -> None:
        """Queue `job` for the thread; it must handle its own exceptions."""
        self._jobs.put(job)

    async def run(self, work: Callable[[], Result]) -> Result:
        """Run `work` on the thread and wait for what it returns or raises."""
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

    def follow_up(self, sequel: Callable[[], None]) -> None:
        """Run `sequel` on the second thread, in the order of these calls; for jobs to use.

        It may wait for the device, and must handle its own exceptions.
        """
        self._sequels.put(sequel)

    def stop(self, *, wait_s: float) -> bool:
        """End the thread once what was handed over is done; wait for that, at most `wait_s`.

        Whether it has ended: a thread that is stuck never will.
        """
        self._jobs.put(None)
        self._thread.join(wait_s)
        return not self._thread.is_alive()

    def _run(self) -> None:
        self._work_off(self._jobs)
        self._sequels.put(None)

    def _follow(self) -> None:
        self._work_off(self._sequels)

    def _work_off(self, jobs: "SimpleQueue[Callable[[], None] | None]") -> None:
        name = threading.current_thread().name
        while (job := jobs.get()) is not None:
            self._busy_since[name] = time.monotonic()
            try:
                job()
            except Exception:  # a bug in a job; all later streams need this thread
                logger.exception("unhandled error thread=%s", name)
            finally:
                del self._busy_since[name]
