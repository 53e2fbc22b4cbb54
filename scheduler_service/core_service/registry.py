"""Which workers there are: registration, lease, and the end of either.

A worker's `RegisterWorker` stream is its registration; heartbeats on it renew its lease. As long as
the lease holds, the worker's link dials it and keeps it busy. One worker stands for its group: the
latest to register replaces a former one of the same group, which is told to stop.
"""

import asyncio
import logging
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import TypeAlias

import grpc

from pagewire.v1 import model_pb2, status_pb2
from pagewire.v1 import scheduler_service_pb2 as pb
from scheduler_service.core.config import SchedulerConfig
from scheduler_service.core_service.driver import CoreDriver
from scheduler_service.core_service.worker_link import CannotServe, WorkerLink
from scheduler_service.errors import InvalidArgument, Unavailable, UnknownWorkerGroup
from scheduler_service.tasks import run_until_first

logger = logging.getLogger(__name__)

Context: TypeAlias = grpc.aio.ServicerContext[pb.RegisterWorkerRequest, pb.RegisterWorkerResponse]

HELD_UP_SHARE = 0.1
"""Share of the lease granted on top: a loop that was held up reads waiting heartbeats in it."""

FAREWELL_TIMEOUT_S = 1.0
"""For a last message to a worker that may not listen any more."""


class Worker:
    """A registered worker, from its first message to the end of its stream."""

    def __init__(self, registration: pb.WorkerRegistration, link: WorkerLink, now: float) -> None:
        self.registration = registration
        self.link = link
        self.last_heartbeat = now
        self.stop_reason: str | None = None
        """Why the process shall end, when it shall."""
        self.dismissed = asyncio.Event()
        """Set when the stream is to end, by our wish."""
        self.ended = asyncio.Event()
        """Set when nothing of the link is left."""
        self.directives: asyncio.Queue[pb.WorkerDirective] = asyncio.Queue()

    @property
    def is_ready(self) -> bool:
        """Whether requests for the worker's model can be served by it now."""
        return self.link.state == status_pb2.WORKER_STATE_READY

    def dismiss(self, stop_reason: str | None) -> None:
        """End the stream; with a reason, tell the process to end."""
        self.stop_reason = stop_reason
        self.dismissed.set()


class WorkerRegistry:
    """All registered workers, one per group."""

    def __init__(
        self,
        driver: CoreDriver,
        *,
        lease_s: float,
        scheduler_config: SchedulerConfig,
        on_change: Callable[[], None],
    ) -> None:
        """`on_change` is called when a worker became ready or is no longer."""
        self._driver = driver
        self._lease_s = lease_s
        self._scheduler_config = scheduler_config
        self._on_change = on_change
        self._workers: dict[str, Worker] = {}

    def __iter__(self) -> Iterator[Worker]:
        """The workers by group id."""
        return iter([self._workers[group_id] for group_id in sorted(self._workers)])

    def served_models(self) -> list[model_pb2.ModelInfo]:
        """What can be served now, by name; of several groups' lengths the one that fits all."""
        models: dict[str, model_pb2.ModelInfo] = {}
        for worker in self:
            model = worker.registration.model
            known = models.get(model.name)
            if worker.is_ready and (known is None or model.max_model_len < known.max_model_len):
                models[model.name] = model
        return [models[name] for name in sorted(models)]

    def workers_with(self, model: str) -> list[Worker]:
        """Workers that have a model loaded, ready ones first."""
        holders = [worker for worker in self if worker.registration.model.name == model]
        return sorted(holders, key=lambda worker: not worker.is_ready)

    def drain(self, group_id: str) -> None:
        """Let a group finish what runs, then tell its worker to stop.

        Raises UnknownWorkerGroup.
        """
        worker = self._workers.get(group_id)
        if worker is None:
            raise UnknownWorkerGroup(
                f"no worker group {group_id!r} is registered", details={"group_id": group_id}
            )
        self._drain(worker)

    def _drain(self, worker: Worker) -> None:
        if not worker.link.is_draining:
            logger.info("draining group_id=%s", worker.registration.group_id)
            worker.directives.put_nowait(pb.WorkerDirective(drain=pb.Drain()))
            worker.link.drain()

    def close(self) -> None:
        """End every worker's stream; the processes go on and look for another core."""
        for worker in self:
            worker.dismiss(None)

    async def serve(self, context: Context) -> None:
        """Run one worker's stream to its end.

        Raises InvalidArgument for a malformed registration and Unavailable when the lease ends.
        """
        registration = await self._read_registration(context)
        refusal = self._why_refused(registration)
        if refusal is not None:
            logger.warning("worker refused worker_id=%s reason=%s", registration.worker_id, refusal)
            await _write(context, pb.WorkerDirective(stop=pb.Stop(reason=refusal)))
            return
        worker, former = self._join(registration)
        try:
            await run_until_first(
                worker.dismissed.wait(),
                self._read_heartbeats(worker, context),
                self._write_directives(worker, context),
                self._watch_lease(worker),
                self._run_link(worker, former),
            )
        finally:
            self._leave(worker)
        if worker.stop_reason is not None:
            with suppress(TimeoutError, asyncio.InvalidStateError):
                async with asyncio.timeout(FAREWELL_TIMEOUT_S):
                    stop = pb.Stop(reason=worker.stop_reason)
                    await _write(context, pb.WorkerDirective(stop=stop))

    async def _read_registration(self, context: Context) -> pb.WorkerRegistration:
        try:
            async with asyncio.timeout(self._lease_s):
                first = await context.read()
        except TimeoutError:
            raise InvalidArgument("registration", "expected within the lease's time") from None
        if first is grpc.aio.EOF or not first.heartbeat.HasField("registration"):
            raise InvalidArgument("registration", "expected in the stream's first message")
        registration = first.heartbeat.registration
        for field in ("worker_id", "group_id", "address"):
            if not getattr(registration, field):
                raise InvalidArgument(f"registration.{field}", "expected a value")
        for field in ("name", "fingerprint", "max_model_len", "vocab_size", "block_size"):
            if not getattr(registration.model, field):
                raise InvalidArgument(f"registration.model.{field}", "expected a value")
        return registration

    def _why_refused(self, registration: pb.WorkerRegistration) -> str | None:
        """Why the worker cannot join, or None. A worker it would replace does not count."""
        if registration.world_size > 1 or registration.rank > 0:
            return (
                f"rank {registration.rank} of {registration.world_size}: "
                "this core serves groups of one rank only"
            )
        model = registration.model
        for other in self.workers_with(model.name):
            if other.registration.group_id == registration.group_id:
                continue
            for fact in ("fingerprint", "dtype"):
                theirs, ours = getattr(model, fact), getattr(other.registration.model, fact)
                if theirs != ours:
                    return (
                        f"model {model.name!r} is served with {fact} {ours} by group "
                        f"{other.registration.group_id!r}; this worker has {theirs}"
                    )
        return None

    def _join(self, registration: pb.WorkerRegistration) -> tuple[Worker, Worker | None]:
        """The worker and the one it replaces, if any."""
        former = self._workers.get(registration.group_id)
        if former is not None:
            is_same = former.registration.worker_id == registration.worker_id
            former.dismiss(
                None if is_same else f"replaced in its group by worker {registration.worker_id}"
            )
        link = WorkerLink(registration, self._driver, self._scheduler_config, self._on_change)
        worker = Worker(registration, link, self._driver.clock())
        worker.directives.put_nowait(
            pb.WorkerDirective(serve=pb.Serve(lease_ms=round(self._lease_s * 1000)))
        )
        self._workers[registration.group_id] = worker
        logger.info(
            "worker registered worker_id=%s group_id=%s address=%s model=%s version=%s",
            registration.worker_id,
            registration.group_id,
            registration.address,
            registration.model.name,
            registration.version,
        )
        return worker, former

    def _leave(self, worker: Worker) -> None:
        worker_id, group_id = worker.registration.worker_id, worker.registration.group_id
        if self._workers.get(group_id) is worker:
            del self._workers[group_id]
        worker.ended.set()
        self._on_change()
        if worker.dismissed.is_set() or worker.stop_reason is not None:
            logger.info("worker left worker_id=%s group_id=%s", worker_id, group_id)
        else:
            logger.warning("worker lost worker_id=%s group_id=%s", worker_id, group_id)

    async def _read_heartbeats(self, worker: Worker, context: Context) -> None:
        while (request := await context.read()) is not grpc.aio.EOF:
            worker.last_heartbeat = self._driver.clock()
            if request.heartbeat.state == status_pb2.WORKER_STATE_DRAINING:
                self._drain(worker)

    async def _write_directives(self, worker: Worker, context: Context) -> None:
        while True:
            await _write(context, await worker.directives.get())

    async def _watch_lease(self, worker: Worker) -> None:
        while (left_s := self._lease_left(worker)) > 0:
            await asyncio.sleep(left_s)
            if self._lease_left(worker) <= 0:
                await asyncio.sleep(self._lease_s * HELD_UP_SHARE)
        logger.warning("lease expired worker_id=%s", worker.registration.worker_id)
        raise Unavailable(f"no heartbeat for {self._lease_s:g} s", reason="LEASE_EXPIRED")

    def _lease_left(self, worker: Worker) -> float:
        return worker.last_heartbeat + self._lease_s - self._driver.clock()

    async def _run_link(self, worker: Worker, former: Worker | None) -> None:
        if former is not None:
            await former.ended.wait()
        try:
            await worker.link.run()
        except CannotServe as error:
            logger.warning(
                "worker unusable group_id=%s reason=%s", worker.registration.group_id, error
            )
            worker.stop_reason = str(error)
        else:
            worker.stop_reason = "drained"


async def _write(context: Context, directive: pb.WorkerDirective) -> None:
    await context.write(pb.RegisterWorkerResponse(directive=directive))
