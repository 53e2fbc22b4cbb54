"""A registered worker and its stream: heartbeats renew the lease, directives go out in order."""

import asyncio
from collections.abc import Callable
from contextlib import suppress
from typing import TypeAlias

import grpc

from pagewire.v1 import scheduler_service_pb2 as pb
from scheduler_service.tasks import shielded

Context: TypeAlias = grpc.aio.ServicerContext[pb.RegisterWorkerRequest, pb.RegisterWorkerResponse]

LOOP_DELAY_SHARE = 0.1
"""Extra share of the lease, in which a loop that was delayed reads waiting heartbeats."""

LAST_WRITE_TIMEOUT_S = 1.0
"""Time limit for the last message to a worker, which may no longer read."""


class Worker:
    """A registered worker, from its first message to the end of its stream."""

    def __init__(
        self, registration: pb.WorkerRegistration, lease_s: float, clock: Callable[[], float]
    ) -> None:
        self.registration = registration
        self.last_heartbeat = clock()
        self.stop_reason: str | None = None
        """The reason why the process must end, if it must."""
        self.dismissed = asyncio.Event()
        """Set when the core ends the stream."""
        self._lease_s = lease_s
        self._clock = clock
        self._stop_sent = asyncio.Event()
        """Set when a stop directive has been sent."""
        self.directives: asyncio.Queue[pb.WorkerDirective] = asyncio.Queue()
        """Directives to send. A stream takes one message at a time, so all pass through here."""

    def dismiss(self, stop_reason: str | None) -> None:
        """End the stream, and also the process if there is a reason. Only the first call has an
        effect: the ranks of a drained group leave one by one."""
        if self.dismissed.is_set():
            return
        self.stop_reason = stop_reason
        if stop_reason is not None:
            self.send_stop(stop_reason)
        self.dismissed.set()

    def send(self, directive: pb.WorkerDirective) -> None:
        """Send a directive after those before it."""
        self.directives.put_nowait(directive)

    def send_stop(self, reason: str) -> None:
        """Send a stop directive; the stream continues until the process ends it."""
        self.send(pb.WorkerDirective(stop=pb.Stop(reason=reason)))

    async def write_directives(self, context: Context) -> None:
        """Send directives, for as long as the stream lasts."""
        while True:
            directive = await self.directives.get()
            await write(context, directive)
            if directive.HasField("stop"):
                self._stop_sent.set()

    async def wait_dismissed(self) -> None:
        """Return when the worker is dismissed, and a stop directive was sent if its process must
        end."""
        await self.dismissed.wait()
        if self.stop_reason is not None:
            with suppress(TimeoutError):
                async with asyncio.timeout(LAST_WRITE_TIMEOUT_S):
                    await self._stop_sent.wait()

    def renew_lease(self) -> None:
        """Count the lease from now."""
        self.last_heartbeat = self._clock()

    async def wait_expired(self) -> None:
        """Return when the lease has expired."""
        while (remaining_s := self._remaining_lease_s()) > 0:
            await asyncio.sleep(remaining_s)
            if self._remaining_lease_s() <= 0:
                await asyncio.sleep(self._lease_s * LOOP_DELAY_SHARE)

    def _remaining_lease_s(self) -> float:
        return self.last_heartbeat + self._lease_s - self._clock()


async def write(context: Context, directive: pb.WorkerDirective) -> None:
    """Send a directive, within a time limit."""
    message = pb.RegisterWorkerResponse(directive=directive)
    await shielded(context.write(message), LAST_WRITE_TIMEOUT_S)
