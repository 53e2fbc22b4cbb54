"""One worker process from start to end: listen, load, register, serve, drain, stop."""

import asyncio
import contextlib
import logging
import os

from pagewire.v1 import scheduler_service_pb2, status_pb2, worker_service_pb2
from pagewire.v1 import worker_service_pb2_grpc as pb_grpc
from service_common.cluster import Cluster
from service_common.end_signals import EndSignals, end_signals
from service_common.grpc_server import GrpcServer
from service_common.metrics_server import MetricsServer
from service_common.prometheus import make_registry
from service_common.tracing import Tracing, make_tracing
from service_common.version import VERSION
from worker_service.address import Address, advertised, parse
from worker_service.block_transfer.transfers import Peers
from worker_service.config import WorkerConfig
from worker_service.engine.engine import Engine
from worker_service.engine.executor import Executor, WorkKind
from worker_service.engine.tracing import traces_of_streams
from worker_service.errors import DeviceLost, InvalidOption, WorkerError, WorkerRejected
from worker_service.load_progress import LoadProgress
from worker_service.service.adapters import AdapterTable
from worker_service.service.block_connection import BlockConnections
from worker_service.service.metrics import WorkerCollector, WorkerFacts
from worker_service.service.registration import Membership, Registrar
from worker_service.service.servicer import WorkerServicer, model_info
from worker_service.service.tasks import until_first

_ROLES = {
    "both": scheduler_service_pb2.WORKER_ROLE_UNSPECIFIED,
    "prefill": scheduler_service_pb2.WORKER_ROLE_PREFILL,
    "decode": scheduler_service_pb2.WORKER_ROLE_DECODE,
}

logger = logging.getLogger(__name__)

SERVICE_NAME: str = worker_service_pb2.DESCRIPTOR.services_by_name["WorkerService"].full_name

IDLE_SPANS_EVERY_S = 1.0
"""Interval of the check for requests that ended without a plan that forgets them."""

REPORT_LOAD_AFTER_S = 0.2
"""Seconds that a load takes before the core gets reports of it."""

STOP_GRACE_S = 1.0
"""Seconds that short calls have to finish once no step stream is open."""


def make_worker(
    config: WorkerConfig, executor: Executor, progress: LoadProgress | None = None
) -> "Worker":
    """Make all parts of a worker, on the event loop that will run it.

    progress: of the executor's `load`. Raises InvalidOption and CannotTrace.
    """
    network = config.network
    for option in ("listen", "core", "advertise", "health_listen"):
        if (address := getattr(network, option)) is not None:
            parse(address, option)
    tracing = make_tracing("worker", VERSION, network.otlp_endpoint, network.worker_id)
    cluster = Cluster(network.cluster)
    connections = BlockConnections(cluster)
    peers = Peers(
        connect=connections.connect,
        disconnect=connections.close_idle,
        rank=config.group.layout.rank,
        world_size=config.group.layout.world_size,
    )
    engine = Engine(executor, peers, traces_of_streams(tracing, config) if tracing else None)
    server = GrpcServer(
        listen=network.listen,
        service_names=[SERVICE_NAME],
        credentials=cluster.server_credentials(),
        interceptors=[cluster.call_guard()],
        knows_callers=cluster.has_credentials,
        health_listen=network.health_listen,
    )
    adapters = AdapterTable(config, engine.model)
    progress = progress or LoadProgress(show_bar=False)
    servicer = WorkerServicer(config, engine, adapters, progress)
    pb_grpc.add_WorkerServiceServicer_to_server(servicer, server.server)
    return Worker(config, engine, adapters, cluster, server, tracing, progress)


class Worker:
    """One worker, run on one event loop."""

    def __init__(
        self,
        config: WorkerConfig,
        engine: Engine,
        adapters: AdapterTable,
        cluster: Cluster,
        server: GrpcServer,
        tracing: Tracing | None,
        progress: LoadProgress,
    ) -> None:
        """server: has the servicer of `engine`; progress: of the executor's `load`."""
        self._config = config
        core = config.network.core
        self._core = None if core is None else parse(core, "core")
        self._tracing = tracing
        self._engine = engine
        self._adapters = adapters
        self._cluster = cluster
        self._server = server
        self._progress = progress
        self._membership = Membership(
            registration=self._registration,
            num_steps=lambda: self._engine.meter.num_steps,
            loading=self._loading,
        )
        self._registrar: Registrar | None = None
        self._grace_s: float | None = config.grace_period_s
        self._failure: WorkerError | None = None
        """The error that `run` raises at the end."""
        self._end = asyncio.Event()
        self._signals = EndSignals()
        self._released = asyncio.Event()
        """Set when there is nothing to wait for."""
        self.listening = asyncio.Event()
        self.ready = asyncio.Event()
        """Set once the model is loaded."""
        self.is_stuck = False
        """After `run`: whether the model thread has not ended, and the process might not either."""

    @property
    def has_failed(self) -> bool:
        """Whether it does not end because it was asked to."""
        return self._failure is not None

    @property
    def address(self) -> str:
        """The address at which it listens; with the real port once it does."""
        return self._server.address

    async def run(self) -> None:
        """Serve until asked to end.

        Raises CannotListen, and WorkerError if it failed, was dismissed by the core, or lost its
        device.
        """
        await self._server.start()
        metrics = self._publish()
        self.listening.set()
        try:
            await self._load()
            if not self._end.is_set():
                await self._serve()
        finally:
            if metrics is not None:
                await asyncio.to_thread(metrics.close)
            await self._server.stop(STOP_GRACE_S)
            self.is_stuck = not self._engine.stop()
            if self._tracing is not None:  # exports the remaining spans, with a short timeout
                await asyncio.to_thread(self._tracing.close)
        if self._failure is not None:
            raise self._failure

    async def _load(self) -> None:
        """Load the model, unless asked to end; the core gets reports of how far it is."""
        reporting = None
        if self._core is not None:
            loop, changed = asyncio.get_running_loop(), self._membership.changed
            self._progress.on_files = lambda: loop.call_soon_threadsafe(changed.set)
            reporting = asyncio.create_task(self._report_load(self._core))
        try:
            await until_first(self._load_model(), self._end.wait())
        finally:
            if reporting is not None:
                reporting.cancel()
                await asyncio.wait([reporting])

    async def _load_model(self) -> None:
        await self._engine.model.load()
        role = self._config.network.role
        if WorkKind.GENERATION not in self._engine.model.facts.work_kinds and role != "both":
            raise InvalidOption(
                f"role: expected both for a model that returns vectors, which have no decodes, got"
                f" {role!r}"
            )
        await self._adapters.load_modules()

    async def _report_load(self, core: Address) -> None:
        await asyncio.sleep(REPORT_LOAD_AFTER_S)
        await self._make_registrar(core).run()

    def _loading(self) -> status_pb2.WorkerLoading | None:
        if self.ready.is_set():
            return None
        state, files = self._progress.state, self._progress.files
        return status_pb2.WorkerLoading(
            group_id=self._config.network.group_id,
            rank=self._config.group.layout.rank,
            model=self._config.model_name,
            phase=state.phase,
            done_bytes=state.done_bytes,
            total_bytes=state.total_bytes,
            remaining_s=state.remaining_s,
            address="" if files is None else self._own_address,
            fingerprint="" if files is None else files.fingerprint,
        )

    def _publish(self) -> MetricsServer | None:
        """Serve metrics to Prometheus if an address is configured. Raises CannotListen."""
        where = self._config.network.metrics
        if where is None:
            return None
        registry = make_registry(WorkerCollector(self._engine.meter, self._facts))
        return MetricsServer(where, registry)

    def _facts(self) -> WorkerFacts:
        """Collect the metrics; runs on the scrape's thread, so it only reads."""
        engine, network = self._engine, self._config.network
        loaded = engine.model.facts_if_loaded
        return WorkerFacts(
            is_registered=self._registrar is not None and self._registrar.is_registered,
            is_streaming=engine.is_streaming,
            is_draining=engine.is_draining,
            last_epoch=engine.last_epoch,
            busy_s=engine.model.thread.busy_s,
            num_weight_loads=engine.model.num_weight_loads,
            uses_cuda_graphs=loaded is not None and loaded.uses_cuda_graphs,
            drafter=self._config.runner.speculative,
            slot_changes={} if loaded is None else engine.model.adapters.slot_changes,
            labels=(
                network.worker_id,
                network.group_id,
                str(self._config.group.layout.rank),
                self._config.model_name,
                loaded.device if loaded else "",
                loaded.dtype if loaded else "",
                loaded.attention_backend if loaded else "",
                VERSION,
            ),
        )

    async def _end_idle_spans(self) -> None:
        while True:
            await asyncio.sleep(IDLE_SPANS_EVERY_S)
            self._engine.end_idle_spans()

    async def wait_idle(self) -> None:
        """Wait until no step stream is open."""
        await self._engine.wait_idle()

    def end(self) -> None:
        """Drain, within the grace period, and end."""
        self._end.set()

    def end_at_once(self) -> None:
        """End without waiting for the core to finish its sequences here."""
        self._released.set()
        self._end.set()
        self._engine.close_any_stream()

    def handle_signals(self) -> None:
        """Make `end_signals` end the worker, and a second request end the process at once."""
        loop = asyncio.get_running_loop()
        for number in end_signals():
            loop.add_signal_handler(number, self._handle_signal, number)

    def _handle_signal(self, number: int) -> None:
        if self._signals.is_second_request(number):
            logger.warning("asked to end a second time, running steps are lost")
            os._exit(1)
        self.end()

    async def _serve(self) -> None:
        await self._server.set_serving(True)
        self.ready.set()
        async with asyncio.TaskGroup() as tasks:
            registrar = registering = None
            watching = tasks.create_task(self._watch_device())
            ending_idle = (
                tasks.create_task(self._end_idle_spans()) if self._tracing is not None else None
            )
            if self._core is not None:
                registrar = self._registrar = self._make_registrar(self._core)
                registering = tasks.create_task(registrar.run())
            else:
                logger.info("waiting to be called, since no core was named (--core)")
            await self._end.wait()
            await self._drain(registrar)
            for task in (registering, ending_idle, watching):
                if task is not None:
                    task.cancel()

    async def _drain(self, registrar: Registrar | None) -> None:
        """Wait, within the grace period, until the core has moved or finished all sequences."""
        if not self._released.is_set():
            logger.info("draining grace_s=%s", self._grace_s)
        self._engine.is_draining = True
        self._membership.drain()
        await self._server.set_serving(False)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._grace_s):
                if registrar is not None:
                    await until_first(
                        self._released.wait(), self._engine.wait_closed(), registrar.wait_absent()
                    )
                await self._engine.wait_idle()

    def _make_registrar(self, core: Address) -> Registrar:
        return Registrar(
            str(core),
            self._cluster,
            self._membership,
            on_drain=self._on_drain,
            on_stop=self._on_stop,
        )

    def _registration(self) -> scheduler_service_pb2.WorkerRegistration:
        network, layout = self._config.network, self._config.group.layout
        return scheduler_service_pb2.WorkerRegistration(
            worker_id=network.worker_id,
            group_id=network.group_id,
            rank=layout.rank,
            world_size=layout.world_size,
            samples=layout.samples,
            address=self._own_address,
            model=model_info(self._config, self._engine.model.facts),
            last_epoch=self._engine.last_epoch,
            version=VERSION,
            adapters=self._adapters.current,
            role=_ROLES[network.role],
        )

    @property
    def _own_address(self) -> str:
        """Where the core reaches this worker. Raises InvalidOption while the core's name cannot be
        resolved, where that is needed."""
        if (advertise := self._config.network.advertise) is not None:
            return advertise
        return str(advertised(parse(self.address, "listen"), self._core))

    def _on_drain(self) -> None:
        """The core drains this worker and ends the stream when it is done, without a time limit."""
        if not self._end.is_set():
            self._grace_s = None
            self._end.set()

    def _on_stop(self, reason: str) -> None:
        """The core dismisses this worker: end at once, with an error unless it was draining."""
        if self._end.is_set():
            logger.info("the core ended this worker reason=%s", reason)
        else:
            self._failure = WorkerRejected(f"the core ended this worker: {reason}")
        self.end_at_once()

    async def _watch_device(self) -> None:
        """End once the device is lost: all further steps would fail in this process, but may
        succeed in a new one."""
        try:
            await self._engine.model.watch_device()
        except DeviceLost as error:
            logger.error("device lost error=%s", error)
            if not self._end.is_set():
                self._failure = error
            self.end_at_once()
