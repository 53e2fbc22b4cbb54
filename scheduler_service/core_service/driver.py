"""Runs the pure core on an event loop: passes it the time, delivers its outputs, and wakes worker
groups.

All calls into the core happen on the loop's thread, so the core needs no lock. `follow_up` comes
after them: it hands each frontend its outputs, wakes worker groups and sets the timer for the next
deadline. The streams, which make most of the calls, call the core directly and follow up once per
message; everything else goes through the driver's methods.
"""

import asyncio
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Protocol

from scheduler_service.core.config import WorkerGroupCapacity
from scheduler_service.core.core import SchedulerCore
from scheduler_service.core.request import EngineOutputs
from scheduler_service.core.scheduling.pipeline import ResultMismatch
from scheduler_service.core.sequence import SequenceGroup
from scheduler_service.errors import PagewireError


class Mailbox(Protocol):
    """Receives the outputs for one frontend."""

    def deliver(self, outbox: EngineOutputs) -> None:
        """Take outputs; must not block."""


class CoreDriver:
    """Owner of the core; constructed and used on one running event loop."""

    def __init__(self, core: SchedulerCore, *, clock: Callable[[], float] = time.monotonic) -> None:
        self.core = core
        self.clock = clock
        self.on_traced: Callable[[SequenceGroup], None] | None = None
        """Called with each traced request that has ended, if traces are exported."""
        self._loop = asyncio.get_running_loop()
        self._mailboxes: dict[str, Mailbox] = {}
        self._work: dict[str, asyncio.Event] = {}
        self._followed_up = asyncio.Event()
        self._alarm: asyncio.TimerHandle | None = None
        self._alarm_at = 0.0

    # Frontends

    def add_frontend(self, frontend_id: str, mailbox: Mailbox) -> None:
        """Deliver outputs for `frontend_id` to `mailbox` from now on."""
        self._mailboxes[frontend_id] = mailbox

    def remove_frontend(self, frontend_id: str) -> None:
        """End all requests of a frontend whose stream has ended."""
        self._mailboxes.pop(frontend_id, None)
        self.core.remove_frontend(frontend_id, self.clock())
        self.follow_up()

    def abort(self, tenant: str, request_id: str) -> None:
        """End a tenant's request, of any frontend; raises UnknownRequest if there is none."""
        self.core.abort(tenant, request_id, self.clock())
        self.follow_up()

    # Worker groups

    def set_adapters(self, model: str, adapters: dict[str, str], *, is_settling: bool) -> None:
        """Set the adapters that all worker groups of a model have, and end the requests that have
        others; see `SchedulerCore.set_adapters`."""
        self.core.set_adapters(model, adapters, self.clock(), is_settling=is_settling)
        self.follow_up()

    def add_worker_group(self, capacity: WorkerGroupCapacity) -> asyncio.Event:
        """Plan for a group from now on; the event is set whenever there may be a plan.

        Raises ValueError when the core's configuration cannot work with the group.
        """
        self.core.add_worker_group(capacity, self.clock())
        work = self._work[capacity.worker_group_id] = asyncio.Event()
        self.follow_up(*self._work)  # any may have work now
        return work

    def remove_worker_group(self, group_id: str) -> None:
        """Return the sequences of a lost group to the queue; no effect the second time."""
        if self._work.pop(group_id, None) is not None:
            self.core.remove_worker_group(group_id, self.clock())
            self.follow_up(*self._work)  # any may have work now

    @contextmanager
    def contained(self, group_id: str) -> Iterator[None]:
        """Fail a group's requests, and no others, if scheduling it raises an error that the core
        does not declare; the error is raised again."""
        try:
            yield
        except (PagewireError, ResultMismatch):
            raise
        except Exception as error:
            if self._work.pop(group_id, None) is not None:
                fault = f"{type(error).__name__}: {error}"
                self.core.fail_worker_group(group_id, fault, self.clock())
                self.follow_up(*self._work)
            raise

    def drain_worker_group(self, group_id: str) -> None:
        """Route no requests to a group, and move its requests to other groups where possible."""
        if group_id in self._work:
            self.core.drain_worker_group(group_id, self.clock())
            self.follow_up(*self._work)  # any may have work now

    def is_drained(self, group_id: str) -> bool:
        """Whether a group is gone, or is draining and has no work left."""
        return group_id not in self._work or self.core.is_drained(group_id)

    async def wait_idle(self) -> None:
        """Wait until no request is left."""
        while len(self.core.requests) > 0:
            self._followed_up.clear()
            await self._followed_up.wait()

    def close(self) -> None:
        """Stop the timer. The core is not used after this."""
        if self._alarm is not None:
            self._alarm.cancel()

    def follow_up(self, *group_ids: str) -> None:
        """Complete calls into the core: deliver outputs; wake these worker groups, and those that
        the core names, because it may have a plan for them; set the timer for the next
        deadline."""
        # First the outputs, for which clients wait: the stream that is woken first runs first. But
        # before them, what a request needs that is new or goes from one group to another.
        woken = self.core.pop_woken()
        if woken:
            self._wake(*group_ids, *woken)
        for frontend_id, outbox in self.core.pop_outboxes().items():
            mailbox = self._mailboxes.get(frontend_id)
            if mailbox is not None:
                mailbox.deliver(outbox)
        if not woken:
            self._wake(*group_ids)
        for traced in self.core.pop_traced():
            if self.on_traced is not None:  # later, so that its failure ends no stream
                self._loop.call_soon(self.on_traced, traced)
        self._set_alarm()
        self._followed_up.set()

    def _wake(self, *group_ids: str) -> None:
        for group_id in group_ids:
            work = self._work.get(group_id)
            if work is not None:
                work.set()

    def _set_alarm(self) -> None:
        deadline = self.core.next_deadline()
        if self._alarm is not None:
            if deadline == self._alarm_at:
                return
            self._alarm.cancel()
            self._alarm = None
        if deadline is not None:
            self._alarm_at = deadline
            delay = max(0.0, deadline - self.clock())
            self._alarm = self._loop.call_later(delay, self._expire)

    def _expire(self) -> None:
        self._alarm = None
        self.core.expire(self.clock())
        self.follow_up()
