"""The worker's membership: it registers with the core and sends heartbeats.

While the model is loaded, a stream of heartbeats reports how far it is, without registering.

There is one bidirectional stream at a time. Whenever it breaks, the worker tries to open a new one,
without a limit: the weights stay loaded, and a restarted core gets its workers back.
"""

import asyncio
import logging
import random
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NoReturn

import grpc

from pagewire.connection_errors import in_words
from pagewire.v1 import scheduler_service_pb2 as pb
from pagewire.v1 import scheduler_service_pb2_grpc as pb_grpc
from pagewire.v1 import status_pb2
from service_common.cluster import Cluster
from service_common.logging_config import LogThrottle
from worker_service.errors import InvalidOption
from worker_service.service.tasks import until_first

logger = logging.getLogger(__name__)

HEARTBEATS_PER_LEASE = 4
FIRST_RETRY_S = 0.1
MAX_RETRY_S = 0.5
WELCOME_TIMEOUT_S = 10.0
"""How long the core may take to answer a registration before another is tried."""


@dataclass(kw_only=True, slots=True)
class Membership:
    """The worker's state, read again for each heartbeat."""

    registration: Callable[[], pb.WorkerRegistration]
    """Raises InvalidOption if the worker's own address cannot be determined."""

    num_steps: Callable[[], int]
    loading: Callable[[], status_pb2.WorkerLoading | None]
    """How far the model is loaded; None once it is."""
    state: status_pb2.WorkerState.ValueType = status_pb2.WORKER_STATE_READY
    changed: asyncio.Event = field(default_factory=asyncio.Event)
    """Set to send a heartbeat at once."""

    def drain(self) -> None:
        """Notify the core immediately that it must plan nothing new here."""
        self.state = status_pb2.WORKER_STATE_DRAINING
        self.changed.set()

    def heartbeat(self, *, is_first: bool) -> pb.RegisterWorkerRequest:
        """The next heartbeat."""
        if (loading := self.loading()) is not None:
            state = status_pb2.WORKER_STATE_STARTING
            return pb.RegisterWorkerRequest(
                heartbeat=pb.WorkerHeartbeat(loading=loading, state=state)
            )
        return pb.RegisterWorkerRequest(
            heartbeat=pb.WorkerHeartbeat(
                registration=self.registration() if is_first else None,
                state=self.state,
                num_steps=self.num_steps(),
            )
        )


class Registrar:
    """Keeps a worker registered with the core at one address."""

    def __init__(
        self,
        core: str,
        cluster: Cluster,
        membership: Membership,
        *,
        on_drain: Callable[[], None],
        on_stop: Callable[[str], None],
    ) -> None:
        self._core = core
        self._cluster = cluster
        self._membership = membership
        self._on_drain = on_drain
        self._on_stop = on_stop
        self._is_welcome = False
        self._is_stopped = False
        self._failures = LogThrottle()
        self._lease_s = self._heartbeat_at = self._silence_s = 0.0
        """The last heartbeat's time, and the longest pause between two of this stream."""
        self._is_absent = asyncio.Event()
        self._is_absent.set()

    @property
    def is_registered(self) -> bool:
        """Whether a core has the worker registered."""
        return not self._is_absent.is_set()

    async def wait_absent(self) -> None:
        """Wait until no core has the worker registered: the core is lost, or has stopped it."""
        await self._is_absent.wait()

    async def run(self) -> None:
        """Register, again whenever the stream breaks, until the core stops the worker."""
        retry_s = FIRST_RETRY_S
        while True:
            self._is_welcome = False
            # Each attempt reads the current certificates.
            async with self._cluster.dial(pb_grpc.SchedulerServiceStub, self._core) as stub:
                reason = await self._register_once(stub)
            self._measure_silence()
            if self._is_welcome and self._silence_s > self._lease_s:
                reason = f"the lease expired: this process sent nothing for {self._silence_s:.1f} s"
            self._is_absent.set()
            if self._is_stopped:
                return
            retry_s = FIRST_RETRY_S if self._is_welcome else min(2 * retry_s, MAX_RETRY_S)
            may_start = reason.startswith(grpc.StatusCode.UNAVAILABLE.name)
            if (level := self._failures.level(reason, may_start=may_start)) is not None:
                message = "not registered, trying until the core answers core=%s reason=%s"
                logger.log(level, message, self._core, reason)
            # Workers that lost the same core at the same time reconnect spread out.
            await asyncio.sleep(retry_s * random.uniform(0.5, 1.0))

    async def _register_once(self, stub: pb_grpc.SchedulerServiceStub) -> str:
        """One stream from registration to its end. Returns why it ended."""
        stream = stub.RegisterWorker()
        self._heartbeat_at, self._silence_s = time.monotonic(), 0.0
        try:
            await stream.write(self._membership.heartbeat(is_first=True))
            async with asyncio.timeout(WELCOME_TIMEOUT_S):
                lease_s = await self._await_welcome(stream)
            if lease_s is None:
                return "the core ended the stream"
            await until_first(self._follow(stream), self._send_heartbeats(stream, lease_s))
        except grpc.aio.AioRpcError as error:
            return f"{error.code().name}: {in_words(error.details())}"
        except TimeoutError:
            return "the core did not answer"
        except asyncio.InvalidStateError:
            return "the stream broke"
        except InvalidOption as error:
            return str(error)
        finally:
            stream.cancel()
        return "the core ended the stream"

    async def _await_welcome(self, stream: grpc.aio.StreamStreamCall) -> float | None:
        """The lease in seconds, once the core grants one; None if it ends the stream instead."""
        async for response in stream:
            self._obey(response.directive)
            if response.directive.HasField("serve"):
                self._is_welcome = True
                self._failures.end()
                lease_s = self._lease_s = response.directive.serve.lease_ms / 1000
                if self._membership.loading() is None:
                    self._is_absent.clear()
                    logger.info("registered core=%s lease_s=%.1f", self._core, lease_s)
                return lease_s
        return None

    async def _follow(self, stream: grpc.aio.StreamStreamCall) -> None:
        """Obey the core until the stream ends; raises why it broke."""
        async for response in stream:
            self._obey(response.directive)

    async def _send_heartbeats(self, stream: grpc.aio.StreamStreamCall, lease_s: float) -> NoReturn:
        """Send heartbeats, so often that the lease survives the loss of a few. Raises InvalidOption
        as `Membership.registration` does."""
        changed = self._membership.changed
        while True:
            try:
                async with asyncio.timeout(lease_s / HEARTBEATS_PER_LEASE):
                    await changed.wait()
            except TimeoutError:
                pass
            changed.clear()
            self._measure_silence()
            try:
                await stream.write(self._membership.heartbeat(is_first=False))
            except (grpc.aio.AioRpcError, asyncio.InvalidStateError):
                # The stream has ended; its reader, which reports why, ends this wait.
                await asyncio.get_running_loop().create_future()

    def _measure_silence(self) -> None:
        now = time.monotonic()
        self._silence_s = max(self._silence_s, now - self._heartbeat_at)
        self._heartbeat_at = now

    def _obey(self, directive: pb.WorkerDirective) -> None:
        if directive.HasField("drain"):
            self._on_drain()
        elif directive.HasField("stop"):
            self._is_stopped = True
            self._on_stop(directive.stop.reason)
