"""Registered workers: their registration, their lease, and how both end.

A worker's `RegisterWorker` stream is its registration; heartbeats on it renew its lease. As long as
the leases of all ranks of a group hold, the group's session connects to them and keeps them busy. A
worker that registers as a rank of a group replaces the previous one, which is stopped.
"""

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import grpc

from pagewire.v1 import model_pb2, status_pb2
from pagewire.v1 import scheduler_service_pb2 as pb
from scheduler_service.core.config import SchedulerConfig
from scheduler_service.core_service.counters import CoreCounters
from scheduler_service.core_service.driver import CoreDriver
from scheduler_service.core_service.workers import models
from scheduler_service.core_service.workers.step_watchdog import StepTimeout
from scheduler_service.core_service.workers.worker import Context, Worker, write
from scheduler_service.core_service.workers.worker_group import WorkerGroup
from scheduler_service.core_service.workers.worker_session import (
    MAX_EPOCH,
    Dial,
    Joined,
    WorkerSession,
)
from scheduler_service.errors import InvalidArgument, Unavailable, UnknownWorkerGroup
from scheduler_service.status_codes import rpc
from scheduler_service.tasks import run_until_first

logger = logging.getLogger(__name__)

MAX_LOSSES = 32
"""Losses kept for status pages."""


@dataclass(frozen=True, slots=True)
class WorkerLoss:
    """A worker that was lost, and when."""

    group_id: str
    rank: int
    model: str
    at: float


@dataclass(eq=False)
class WorkerRegistry:
    """All registered workers, by group."""

    driver: CoreDriver
    lease_s: float
    scheduler_config: SchedulerConfig
    step_timeout: StepTimeout
    on_change: Callable[[], None]
    """Called when a worker becomes ready or stops being ready."""
    dial: Dial
    counters: CoreCounters
    joined: Joined
    """As in WorkerSession."""

    def __post_init__(self) -> None:
        self._groups: dict[str, WorkerGroup] = {}
        self._loading: dict[Context, status_pb2.WorkerLoading] = {}
        """Reports of workers that load their model, by their stream."""
        self.losses: deque[WorkerLoss] = deque(maxlen=MAX_LOSSES)
        """The most recently lost workers, in order."""
        self.num_losses = 0
        """Workers lost so far."""

    def __iter__(self) -> Iterator[WorkerGroup]:
        """The groups by group id."""
        return iter([self._groups[group_id] for group_id in sorted(self._groups)])

    def loading(self) -> list[status_pb2.WorkerLoading]:
        """Reports of the workers that load their model, by group and rank."""
        return sorted(self._loading.values(), key=lambda report: (report.group_id, report.rank))

    def served_models(self) -> list[model_pb2.ModelInfo]:
        """Models that can be served now, by name, each with the greatest length of its groups,
        because the core places a request where it fits, and the aliases of all of them."""
        return models.served_models(self, self.scheduler_config)

    def registered_names(self) -> list[str]:
        """The names of the models of all groups, ready or not, in order."""
        infos = (group.registration.model for group in self)
        return sorted({name for info in infos for name in (info.name, *info.aliases)})

    def groups_with(self, model: str) -> list[WorkerGroup]:
        """Groups that have a model loaded, ready ones first."""
        holders = [group for group in self if group.registration.model.name == model]
        return sorted(holders, key=lambda group: not group.is_ready)

    def drain(self, group_id: str) -> None:
        """Move a group's requests to other groups of its model, then stop its workers. Without
        another group, running requests finish first.

        Returns at once; raises UnknownWorkerGroup.
        """
        group = self._groups.get(group_id)
        if group is None:
            raise UnknownWorkerGroup(
                f"no worker group {group_id!r} is registered; there is: "
                f"{', '.join(sorted(self._groups)) or 'none'}",
                details={"group_id": group_id},
            )
        self._drain(group)

    def _drain(self, group: WorkerGroup) -> None:
        if not group.is_draining:
            logger.info("draining group_id=%s", group.group_id)
            self.counters.counts.num_drains += 1
            group.drain()

    def close(self) -> None:
        """End every worker's stream; the processes continue and look for another core."""
        for group in self:
            for worker in group.workers:
                worker.dismiss(None)

    @rpc
    async def serve(self, _requests: object, context: Context) -> None:
        """The RPC `RegisterWorker`: run one worker's stream to its end.

        Raises InvalidArgument for a malformed registration and Unavailable when the lease ends.
        """
        first = await self._read_first(context)
        if first.HasField("loading"):
            await self._follow_load(first, context)
            return
        registration = _checked(first)
        refusal = self._refusal_of(registration)
        if refusal is not None:
            logger.warning("worker refused worker_id=%s reason=%s", registration.worker_id, refusal)
            await write(context, pb.WorkerDirective(stop=pb.Stop(reason=refusal)))
            return
        worker, group = self._join(registration)
        try:
            await run_until_first(
                worker.wait_dismissed(),
                self._read_heartbeats(worker, group, context),
                worker.write_directives(context),
                self._watch_lease(worker),
                group.step(),
            )
        finally:
            self._leave(worker, group)

    async def _read_first(self, context: Context) -> pb.WorkerHeartbeat:
        try:
            async with asyncio.timeout(self.lease_s):
                first = await context.read()
        except TimeoutError:
            raise InvalidArgument("registration", "required within the lease's time") from None
        if first is grpc.aio.EOF:
            raise InvalidArgument("registration", "required in the stream's first message")
        heartbeat: pb.WorkerHeartbeat = first.heartbeat
        return heartbeat

    async def _follow_load(self, heartbeat: pb.WorkerHeartbeat, context: Context) -> None:
        """Keep a worker's reports of its load until its stream ends or is silent."""
        first = heartbeat.loading
        logger.info("worker loading group_id=%s rank=%d", first.group_id, first.rank)
        await write(context, self._lease())
        try:
            while True:
                self._loading[context] = heartbeat.loading
                self.on_change()
                async with asyncio.timeout(self.lease_s):
                    request = await context.read()
                if request is grpc.aio.EOF:
                    return
                heartbeat = request.heartbeat
        except TimeoutError:
            raise Unavailable(
                f"no heartbeat for {self.lease_s:g} s", reason="LEASE_EXPIRED"
            ) from None
        finally:
            self._loading.pop(context, None)
            self.on_change()

    def _lease(self) -> pb.WorkerDirective:
        return pb.WorkerDirective(serve=pb.Serve(lease_ms=round(self.lease_s * 1000)))

    def _refusal_of(self, registration: pb.WorkerRegistration) -> str | None:
        """The reason why a worker cannot join, or None; does not count a worker that it would
        replace."""
        group = self._groups.get(registration.group_id) or self._make_group(registration)
        namesakes = self.groups_with(registration.model.name)
        return group.refusal_of(registration) or models.refusal_of(registration, namesakes)

    def _join(self, registration: pb.WorkerRegistration) -> tuple[Worker, WorkerGroup]:
        """Add a worker; returns it and its group."""
        worker = Worker(registration, self.lease_s, self.driver.clock)
        worker.send(self._lease())
        group = self._groups.get(registration.group_id)
        if group is None:
            group = self._groups[registration.group_id] = self._make_group(registration)
        group.join(worker)
        self.on_change()
        if limit := models.text_limit(registration.model, self.scheduler_config):
            logger.warning(
                "texts are limited to a step's tokens: to take longer ones, set"
                " max_num_batched_tokens to the model's length model=%s max_num_batched_tokens=%d"
                " max_model_len=%d",
                registration.model.name,
                limit,
                registration.model.max_model_len,
            )
        self.counters.counts.num_registrations += 1
        logger.info(
            "worker registered worker_id=%s group_id=%s rank=%d world_size=%d address=%s model=%s"
            " version=%s",
            registration.worker_id,
            registration.group_id,
            registration.rank,
            group.world_size,
            registration.address,
            registration.model.name,
            registration.version,
        )
        return worker, group

    def _make_group(self, registration: pb.WorkerRegistration) -> WorkerGroup:
        return WorkerGroup(
            registration,
            lambda ranks: WorkerSession(
                ranks,
                driver=self.driver,
                config=self.scheduler_config,
                on_change=self.on_change,
                step_timeout=self.step_timeout,
                dial=self.dial,
                counters=self.counters,
                joined=self.joined,
            ),
        )

    def _leave(self, worker: Worker, group: WorkerGroup) -> None:
        group.leave(worker)
        if group.is_empty and self._groups.get(group.group_id) is group:
            del self._groups[group.group_id]
        self.on_change()
        worker_id, rank = worker.registration.worker_id, worker.registration.rank
        if worker.dismissed.is_set() or group.is_draining:
            logger.info(
                "worker left worker_id=%s group_id=%s rank=%d", worker_id, group.group_id, rank
            )
        else:
            self._record_loss(worker)
            logger.warning(
                "worker lost worker_id=%s group_id=%s rank=%d", worker_id, group.group_id, rank
            )

    def _record_loss(self, worker: Worker) -> None:
        of = worker.registration
        self.num_losses += 1
        self.losses.append(WorkerLoss(of.group_id, of.rank, of.model.name, self.driver.clock()))

    async def _read_heartbeats(self, worker: Worker, group: WorkerGroup, context: Context) -> None:
        while (request := await context.read()) is not grpc.aio.EOF:
            worker.renew_lease()
            is_draining = request.heartbeat.state == status_pb2.WORKER_STATE_DRAINING
            if is_draining and not worker.dismissed.is_set():  # else another may have its place
                self._drain(group)

    async def _watch_lease(self, worker: Worker) -> None:
        await worker.wait_expired()
        self.counters.counts.num_lease_expiries += 1
        logger.warning("lease expired worker_id=%s", worker.registration.worker_id)
        raise Unavailable(f"no heartbeat for {self.lease_s:g} s", reason="LEASE_EXPIRED")


def _checked(first: pb.WorkerHeartbeat) -> pb.WorkerRegistration:
    """The registration in a stream's first message. Raises InvalidArgument."""
    if not first.HasField("registration"):
        raise InvalidArgument("registration", "required in the stream's first message")
    registration = first.registration
    for field in ("worker_id", "group_id", "address"):
        if not getattr(registration, field):
            raise InvalidArgument(f"registration.{field}", "required")
    model = registration.model
    for field in ("name", "fingerprint", "max_model_len", "vocab_size", "cache_groups"):
        if not getattr(model, field) and not (field == "cache_groups" and model.whole_prompt):
            raise InvalidArgument(f"registration.model.{field}", "required")
    if registration.last_epoch > MAX_EPOCH:
        raise InvalidArgument("registration.last_epoch", f"expected at most {MAX_EPOCH}")
    return registration
