"""The thread on which the model runs, and the one that collects its results.

Jobs run in the order in which they were posted, so that the model's state needs no lock and the
event loop never waits for the device.

A second thread collects each step and reports its result, in order too, for two reasons. Waiting
for a GPU must not delay the launch of the next step. And waking the event loop takes a system call,
which passes the interpreter lock to the loop for as long as it has messages to handle: the device
would be idle for milliseconds between two steps. The second thread gets the lock when the next step
releases it, that is, while the device computes.
"""

import asyncio
import logging
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from queue import SimpleQueue
from typing import TypeVar

logger = logging.getLogger(__name__)

Result = TypeVar("Result")


class ModelThread:
    """The model thread and the follow-up thread, each with a queue of jobs."""

    def __init__(self) -> None:
        self._jobs: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._sequels: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._busy_since: dict[str, float] = {}
        """When the present job began, in monotonic seconds, by thread; none for idle threads."""
        self._thread = threading.Thread(target=self._run, name="model", daemon=True)
        self._thread.start()
        follow_up = threading.Thread(
            target=self._run_jobs, args=(self._sequels,), name="model-sequels", daemon=True
        )
        follow_up.start()

    @property
    def busy_s(self) -> float:
        """How long the older of both threads' present jobs has been running; 0 when idle."""
        since = list(self._busy_since.values())
        return time.monotonic() - min(since) if since else 0.0

    def post(self, job: Callable[[], None]) -> None:
        """Queue `job` for the model thread; it must handle its own exceptions."""
        self._jobs.put(job)

    async def run(self, work: Callable[[], Result]) -> Result:
        """Run `work` on the model thread. Returns or raises what it does."""
        future: Future[Result] = Future()
        future.set_running_or_notify_cancel()  # the work is done even if its caller is cancelled

        def job() -> None:
            try:
                future.set_result(work())
            except Exception as error:
                future.set_exception(error)

        self.post(job)
        return await asyncio.wrap_future(future)

    def follow_up(self, sequel: Callable[[], None]) -> None:
        """Run `sequel` on the second thread, in the order of these calls; called by jobs.

        It may wait for the device, and must handle its own exceptions.
        """
        self._sequels.put(sequel)

    def stop(self, *, wait_s: float) -> bool:
        """End the thread after its queued jobs, and wait for that at most `wait_s` seconds.

        Returns whether it has ended; a thread that is stuck never does.
        """
        self._jobs.put(None)
        self._thread.join(wait_s)
        return not self._thread.is_alive()

    def _run(self) -> None:
        self._run_jobs(self._jobs)
        self._sequels.put(None)

    def _run_jobs(self, jobs: "SimpleQueue[Callable[[], None] | None]") -> None:
        name = threading.current_thread().name
        while (job := jobs.get()) is not None:
            self._busy_since[name] = time.monotonic()
            try:
                job()
            except Exception:  # a bug in a job; later streams need this thread
                logger.exception("unhandled error thread=%s", name)
            finally:
                del self._busy_since[name]
