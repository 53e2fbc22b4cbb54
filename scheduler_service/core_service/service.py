"""The scheduler core as a running service: its composition and orderly shutdown."""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from functools import partial
from typing import NoReturn, Self

from pagewire.v1.scheduler_service_pb2_grpc import add_SchedulerServiceServicer_to_server
from pagewire.v1.worker_service_pb2_grpc import WorkerServiceStub
from scheduler_service.core.core import SchedulerCore
from scheduler_service.core_service import tracing
from scheduler_service.core_service.adapters.directory import AdapterDirectory
from scheduler_service.core_service.config import CoreServiceConfig
from scheduler_service.core_service.counters import CoreCounters
from scheduler_service.core_service.driver import CoreDriver
from scheduler_service.core_service.frontend_streams import FrontendStreams
from scheduler_service.core_service.metrics import CoreMetrics
from scheduler_service.core_service.model_assets import AssetCache
from scheduler_service.core_service.servicer import SchedulerServicer
from scheduler_service.core_service.status import StatusBoard
from scheduler_service.core_service.workers.worker_registry import WorkerRegistry
from scheduler_service.errors import Unavailable
from scheduler_service.service_runner import ServiceRunner
from scheduler_service.tasks import run_until_first, until_failure
from service_common.cluster import Cluster
from service_common.garbage import survivors_exempted
from service_common.prometheus import LoopCollector, make_registry, published
from service_common.tracing import Tracing, make_tracing
from service_common.version import VERSION

logger = logging.getLogger(__name__)

SERVICE_NAME = "pagewire.v1.SchedulerService"

FLUSH_S = 1.0
"""Time limit for streams to send their last status, in seconds."""


async def serve(config: CoreServiceConfig) -> None:
    """Run the scheduler core until SIGTERM or SIGINT; raises CannotListen and CannotRecord."""
    async with (
        make_core_service(config) as service,
        published(make_registry(LoopCollector(service.metrics.collect)), config.metrics),
    ):
        with survivors_exempted():
            await run_until_first(
                service.runner.wait_for_signal(service.frontends.refuse_requests), service.failed()
            )
            await service.finish_requests(config.grace_period_s)


@dataclass(eq=False)
class ModelAnnouncer:
    """Announces the served models to frontends and the health service, and to frontends their
    adapters, and how far other workers are with loading theirs."""

    registry: WorkerRegistry
    adapters: AdapterDirectory
    frontends: FrontendStreams
    set_serving: Callable[[bool], Awaitable[None]]
    changed: asyncio.Event
    """Set when there may be something new."""

    def __post_init__(self) -> None:
        self._announced: tuple[list[object], ...] = ([], [], [], [])

    def announce(self) -> None:
        """Notify the frontends of what has changed since the last call."""
        models, loading = self.registry.served_models(), self.registry.loading()
        names, adapters = self.registry.registered_names(), self.adapters.announced()
        if (models, names, loading, adapters) != self._announced:
            self._announced = (list(models), list(names), list(loading), list(adapters))
            self.frontends.announce_models(models, names, loading, adapters)

    async def run(self) -> NoReturn:
        """Announce whatever changes."""
        names: list[str] | None = None
        while True:
            await self.changed.wait()
            self.changed.clear()
            self.announce()
            served = [model.name for model in self.registry.served_models()]
            if served != (names or []):
                names = served
                logger.info("served models changed models=%s", names)
                await self.set_serving(bool(names))


@dataclass(eq=False, kw_only=True)
class CoreService:
    """An asynchronous context manager: listening when entered, ended when left.

    The health service answers NOT_SERVING, for the process as a whole too, until a worker group is
    ready: a core without workers accepts requests, but they can only wait.
    """

    driver: CoreDriver
    frontends: FrontendStreams
    registry: WorkerRegistry
    assets: AssetCache
    status: StatusBoard
    metrics: CoreMetrics
    counters: CoreCounters
    runner: ServiceRunner
    tracing: Tracing | None
    announcer: "ModelAnnouncer"
    adapters: AdapterDirectory
    close_core: Callable[[], None]
    """Completes the recording, if there is one."""
    _background: list[asyncio.Task[None]] = field(default_factory=list)

    @property
    def address(self) -> str:
        """The address at which the service listens."""
        return self.runner.address

    async def __aenter__(self) -> Self:
        try:
            await self.runner.start()
        except BaseException:
            self.close_core()
            raise
        self._background = [
            asyncio.create_task(self.announcer.run()),
            asyncio.create_task(self.adapters.run()),
            asyncio.create_task(self.status.log_summaries()),
        ]
        return self

    async def __aexit__(self, *_: object) -> None:
        self.frontends.close(Unavailable("the scheduler is shutting down", reason="SHUTTING_DOWN"))
        self.registry.close()
        await self.runner.stop(FLUSH_S)
        await self.assets.close()
        for task in self._background:
            task.cancel()
        await asyncio.gather(*self._background, return_exceptions=True)
        self.driver.close()
        if self.tracing is not None:
            await asyncio.to_thread(self.tracing.close)
        self.close_core()

    async def failed(self) -> None:
        """Wait until a background task fails, and raise its error: without these tasks, frontends
        would not be notified of models."""
        await until_failure(self._background)

    async def finish_requests(self, grace_period_s: float) -> None:
        """Wait until the accepted requests have ended or time is up."""
        try:
            async with asyncio.timeout(grace_period_s):
                await self.driver.wait_idle()
        except TimeoutError:
            logger.warning("grace period over grace_period_s=%g", grace_period_s)


def _make_core(config: CoreServiceConfig) -> tuple[SchedulerCore, Callable[[], None]]:
    """The core, and what to call when it is no longer used."""
    if config.record is None:
        return SchedulerCore(config.scheduler), lambda: None
    from scheduler_service.replay.recorder import RecordingCore  # imports pydantic
    from scheduler_service.replay.recording_file import RecordingWriter

    writer = RecordingWriter(config.record)
    core = RecordingCore(config.scheduler, writer, with_plans=config.record_plans)
    return core, core.close


def make_core_service(config: CoreServiceConfig) -> CoreService:
    """The service with all its parts, on the running event loop."""
    cluster = Cluster(config.cluster)
    dial = partial(cluster.dial, WorkerServiceStub)
    core, close_core = _make_core(config)
    driver = CoreDriver(core)
    spans = make_tracing("scheduler", VERSION, config.otlp_endpoint)
    if spans is not None:
        driver.on_traced = partial(tracing.export, spans)
    counters = CoreCounters()
    frontends = FrontendStreams(driver, counters.counts)
    workers_changed = asyncio.Event()
    adapters = AdapterDirectory(
        driver, dial, on_change=workers_changed.set, settle_s=config.lease_ms / 1000
    )
    registry = WorkerRegistry(
        driver,
        lease_s=config.lease_ms / 1000,
        scheduler_config=config.scheduler,
        step_timeout=config.step_timeout,
        on_change=workers_changed.set,
        dial=dial,
        counters=counters,
        joined=adapters.joined,
    )
    assets = AssetCache(registry, dial)
    status = StatusBoard(driver, registry, frontends)
    runner = ServiceRunner(
        listen=config.listen,
        service_names=[SERVICE_NAME],
        grace_period_s=config.grace_period_s,
        credentials=cluster.server_credentials(),
        interceptors=[cluster.call_guard()],
        knows_callers=cluster.has_credentials,
        health_listen=config.health_listen,
    )
    announcer = ModelAnnouncer(registry, adapters, frontends, runner.set_serving, workers_changed)
    servicer = SchedulerServicer(
        driver, frontends, registry, assets, status, adapters, announcer.announce
    )
    add_SchedulerServiceServicer_to_server(servicer, runner.server)
    return CoreService(
        driver=driver,
        frontends=frontends,
        registry=registry,
        assets=assets,
        status=status,
        metrics=CoreMetrics(
            driver=driver,
            registry=registry,
            frontends=frontends,
            counters=counters,
            adapters=adapters,
        ),
        counters=counters,
        runner=runner,
        tracing=spans,
        announcer=announcer,
        adapters=adapters,
        close_core=close_core,
    )
