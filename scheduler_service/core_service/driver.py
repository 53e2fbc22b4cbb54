"""Runs the pure core on an event loop: passes it the time, wakes it, and delivers its outputs.

All calls into the core go through here and happen on the loop's thread, so the core needs no lock.
After them the driver settles, once per turn of the loop however many calls there were: it
hands each frontend its outputs and sets the timer for the next deadline.
"""

import asyncio
import time
from collections.abc import Callable
from typing import Protocol

from scheduler_service.core.config import WorkerGroupCapacity
from scheduler_service.core.core import SchedulerCore
from scheduler_service.core.request import EngineOutputs, Request
from scheduler_service.core.stats.request_timing import TracedRequest
from scheduler_service.core.step_plan import StepPlan, StepResult


class Mailbox(Protocol):
    """Receives the outputs for one frontend."""

    def deliver(self, outbox: EngineOutputs) -> None:
        """Take outputs; must not block."""


class CoreDriver:
    """Owner of the core; made and used on one running event loop."""

    def __init__(self, core: SchedulerCore, *, clock: Callable[[], float] = time.monotonic) -> None:
        self.core = core
        self.clock = clock
        self.on_traced: Callable[[TracedRequest], None] | None = None
        """Called with each traced request that has ended, if traces are exported."""
        self._loop = asyncio.get_running_loop()
        self._mailboxes: dict[str, Mailbox] = {}
        self._work: dict[str, asyncio.Event] = {}
        self._settled = asyncio.Event()
        self._settling: asyncio.Handle | None = None
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
        self._follow_up()

    def submit(self, request: Request) -> None:
        """Queue a request; raises an error of `scheduler_service.errors` when it is refused."""
        self.core.submit(request, self.clock())
        self._follow_up()

    def cancel(self, frontend_id: str, handle: int) -> None:
        """End a request that its client has cancelled."""
        self.core.cancel(frontend_id, handle, self.clock())
        self._follow_up()

    def abort(self, tenant: str, request_id: str) -> None:
        """End a tenant's request, of any frontend; raises UnknownRequest if there is none."""
        self.core.abort(tenant, request_id, self.clock())
        self._follow_up()

    def stop_choice(self, frontend_id: str, handle: int, num_tokens: int) -> None:
        """End a choice at its stop string."""
        self.core.stop_choice(frontend_id, handle, num_tokens, self.clock())
        self._follow_up()

    # Worker groups

    def add_worker_group(self, capacity: WorkerGroupCapacity) -> asyncio.Event:
        """Plan for a group from now on; the event is set whenever there may be a plan.

        Raises ValueError when the core's configuration cannot work with the group.
        """
        self.core.add_worker_group(capacity, self.clock())
        work = self._work[capacity.worker_group_id] = asyncio.Event()
        self._changed()
        return work

    def remove_worker_group(self, group_id: str) -> None:
        """Return the sequences of a lost group to the queue; no effect the second time."""
        if self._work.pop(group_id, None) is not None:
            self.core.remove_worker_group(group_id, self.clock())
            self._changed()

    def drain_worker_group(self, group_id: str) -> None:
        """Give a group nothing new, and move its requests to other groups where possible."""
        if group_id in self._work:
            self.core.drain_worker_group(group_id, self.clock())
            self._changed()

    def is_drained(self, group_id: str) -> bool:
        """Whether a group has nothing left to do, or is not planned for."""
        return group_id not in self._work or self.core.is_drained(group_id)

    def next_plan(self, group_id: str) -> StepPlan | None:
        """The group's next step, if there is work for it now."""
        plan = self.core.schedule(group_id, self.clock())
        self._follow_up()
        return plan

    def apply(self, group_id: str, result: StepResult) -> None:
        """Apply the result of the group's oldest step in flight."""
        self.core.update(group_id, result, self.clock())
        self._wake(group_id)
        self._follow_up()

    async def wait_idle(self) -> None:
        """Wait until no request is left."""
        while self.core.num_requests() > 0:
            self._settled.clear()
            await self._settled.wait()

    def close(self) -> None:
        """Stop the timers. The core is not used after this."""
        for timer in (self._settling, self._alarm):
            if timer is not None:
                timer.cancel()

    def _changed(self) -> None:
        """The set of groups has changed: wake all, as any may now have work."""
        for work in self._work.values():
            work.set()
        self._settle_soon()

    def _wake(self, group_id: str) -> None:
        """There may be a plan for one group. Groups that can use capacity that it frees are woken
        when it plans."""
        work = self._work.get(group_id)
        if work is not None:
            work.set()

    def _follow_up(self) -> None:
        """After any call into the core: wake the groups that it names, and deliver outputs soon."""
        for group_id in self.core.take_woken():
            self._wake(group_id)
        self._settle_soon()

    def _settle_soon(self) -> None:
        if self._settling is None:
            self._settling = self._loop.call_soon(self._settle)

    def _settle(self) -> None:
        self._settling = None
        for frontend_id, outbox in self.core.take_outboxes().items():
            mailbox = self._mailboxes.get(frontend_id)
            if mailbox is not None:
                mailbox.deliver(outbox)
        for traced in self.core.take_traced():
            if self.on_traced is not None:
                self.on_traced(traced)
        self._set_alarm()
        self._settled.set()

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
        self._follow_up()
