"""A frontend as a process: composition, start and orderly shutdown."""

import asyncio
import gc
import logging
import os
import socket
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import grpc

from pagewire.v1 import inference_service_pb2, scheduler_service_pb2
from pagewire.v1.inference_service_pb2_grpc import add_InferenceServiceServicer_to_server
from scheduler_service.errors import Unavailable
from scheduler_service.frontend import auth
from scheduler_service.frontend.adapter_service import AdapterService
from scheduler_service.frontend.capacity import RequestCapacity
from scheduler_service.frontend.config import FrontendConfig, public_server_options
from scheduler_service.frontend.core_client import CoreClient, CoreConnection
from scheduler_service.frontend.http.middleware import HttpServices
from scheduler_service.frontend.http.server import HttpServer, http_context
from scheduler_service.frontend.input.message_limits import check_message
from scheduler_service.frontend.metrics import FrontendMetrics
from scheduler_service.frontend.models.served_models import ModelDirectory
from scheduler_service.frontend.pooling.service import PoolingService
from scheduler_service.frontend.request_manager import RequestManager
from scheduler_service.frontend.servicer import InferenceServicer
from scheduler_service.frontend.structured_output.constraint import ConstraintChecker
from scheduler_service.service_runner import ServiceRunner
from scheduler_service.tasks import run_until_first, until_failure
from service_common.cluster import Cluster
from service_common.grpc_server import warn_if_exposed
from service_common.interceptors import HEALTH, REFLECTION, CallGuard
from service_common.metadata import authorization
from service_common.prometheus import LoopCollector, make_registry, published
from service_common.tls import server_credentials, warn_of_files
from service_common.tracing import make_tracing
from service_common.version import VERSION
from service_common.watched_files import WatchedFiles

logger = logging.getLogger(__name__)

SERVICE_NAME = inference_service_pb2.DESCRIPTOR.services_by_name["InferenceService"].full_name
ASSETS_TIMEOUT_S = 60.0
"""Timeout for fetching a model's files; the largest tokenizers have about 30 MB."""
GARBAGE_THRESHOLD = 10_000
"""Objects after which garbage is collected, instead of 700: each collection looks at all open
requests again, which are not garbage."""
FLUSH_S = 2.0
"""Time for calls to write their final status after their requests have been ended."""


@dataclass(eq=False, kw_only=True)
class Frontend:
    """All parts of one frontend. Call `start`, then `stop`; `serve` does both around a signal."""

    config: FrontendConfig
    core: CoreConnection
    core_client: CoreClient
    models: ModelDirectory
    requests: RequestManager
    runner: ServiceRunner
    http: HttpServer | None
    http_services: HttpServices

    def __post_init__(self) -> None:
        self._tasks: list[asyncio.Task[None]] = []

    async def start(self) -> None:
        """Listen, and connect to the core. Raises CannotListen."""
        if self.http is not None:
            self.http.bind()
            has_tls, knows_callers = self.config.tls is not None, self.config.knows_callers
            warn_if_exposed(self.http.address, has_tls=has_tls, knows_callers=knows_callers)
        await self.runner.start()
        self._tasks = [
            asyncio.create_task(self.core_client.run()),
            asyncio.create_task(self._report_health()),
        ]

    async def stop(self) -> None:
        """Stop listening for HTTP, let open requests finish within the grace period, then end the
        rest as UNAVAILABLE. gRPC goes on listening, because its refusals say to clients that it is
        worth waiting or calling elsewhere."""
        http_has_left = asyncio.sleep(0) if self.http is None else self.http.leave()
        await self.requests.drain(self.runner.grace_period_s, http_has_left)
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        listeners = (self.runner, self.http)
        await asyncio.gather(*(server.stop(FLUSH_S) for server in listeners if server is not None))
        await self.models.close()
        self.requests.checker.close()
        await self.core.close()
        if self.requests.tracing is not None:
            await asyncio.to_thread(self.requests.tracing.close)

    async def failed(self) -> None:
        """Wait until a background task fails, and raise its error: the frontend cannot serve
        without it."""
        await until_failure(self._tasks)

    async def _report_health(self) -> None:
        """Report SERVING while a model can be served; start HTTP."""
        if self.http is not None:
            await self.http.start(self.http_services)
        while True:
            changed = self.models.changed
            await self.runner.set_serving(self.models.is_serving)
            await changed.wait()


def make_frontend(config: FrontendConfig) -> Frontend:
    """A frontend and its parts. Call this on the event loop."""
    authentication = authentication_of(config)
    core = CoreConnection(Cluster(config.cluster), config.core)
    models = ModelDirectory(partial(_fetch_assets, core))
    frontend_id = _frontend_id()
    core_client = CoreClient(core, frontend_id, models.update)
    metrics = FrontendMetrics()
    requests = RequestManager(
        core_client,
        models,
        ConstraintChecker(),
        capacity=RequestCapacity(config.max_concurrent_requests, config.tenant_share),
        default_timeout_s=config.default_timeout_s,
        metrics=metrics,
        tracing=make_tracing("frontend", VERSION, config.otlp_endpoint, frontend_id),
    )
    collector = LoopCollector(
        lambda: metrics.collect(
            num_open=len(requests),
            is_attached=core_client.is_attached,
            num_core_losses=core_client.num_core_losses,
        )
    )
    runner = _runner_of(config, authentication)
    pooling = PoolingService(requests)
    adapters = AdapterService(models, core, allows_changes=config.allow_runtime_lora_updating)
    servicer = InferenceServicer(requests, models, core, authentication, pooling, adapters)
    add_InferenceServiceServicer_to_server(servicer, runner.server)
    return Frontend(
        config=config,
        core=core,
        core_client=core_client,
        models=models,
        requests=requests,
        runner=runner,
        http=_http_server_of(config),
        http_services=HttpServices(
            requests=requests,
            pooling=pooling,
            adapters=adapters,
            models=models,
            core=core,
            authentication=authentication,
            registry=make_registry(collector),
            allowed_hosts=config.allowed_hosts,
            sse_keep_alive_s=config.sse_keep_alive_s,
        ),
    )


async def serve(config: FrontendConfig) -> None:
    """Run a frontend until SIGTERM or SIGINT. Raises CannotListen, or a background task's error."""
    frontend = make_frontend(config)
    async with published(frontend.http_services.registry, config.metrics):
        await frontend.start()
        gc.freeze()
        gc.set_threshold(GARBAGE_THRESHOLD)
        try:
            await run_until_first(frontend.runner.wait_for_signal(), frontend.failed())
        finally:
            await frontend.stop()


def _runner_of(config: FrontendConfig, authentication: auth.Authentication) -> ServiceRunner:
    """The gRPC server and its signals."""
    if config.tls is not None:
        warn_of_files(config.tls)
    guard = CallGuard(
        check_caller=lambda metadata: auth.PRINCIPAL.set(
            authentication.authenticate(authorization(metadata))
        ),
        open_services=(HEALTH, REFLECTION),
        check_message=check_message,
    )
    return ServiceRunner(
        listen=config.listen,
        service_names=[SERVICE_NAME],
        grace_period_s=config.grace_period_s,
        options=public_server_options(max_connections=config.max_connections),
        credentials=None if config.tls is None else server_credentials(config.tls),
        interceptors=[guard],
        knows_callers=config.knows_callers,
        health_listen=config.health_listen,
    )


def _http_server_of(config: FrontendConfig) -> HttpServer | None:
    if not config.http:
        return None
    return HttpServer(
        config.http,
        share_port=config.http_share_port,
        tls=None if config.tls is None else http_context(config.tls),
        max_connections=config.max_connections,
    )


def authentication_of(config: FrontendConfig) -> auth.Authentication:
    """Authentication by API keys, if there are any."""
    if config.api_keys is not None:
        path = config.api_keys
        return auth.ApiKeys(WatchedFiles([path], lambda: _current_keys(path)).get)
    if config.api_key:
        keys = auth.shared_keys(config.api_key)
        return auth.ApiKeys(lambda: keys)
    return auth.Authentication()


def _current_keys(path: Path) -> auth.Keys:
    keys = auth.read_keys(path)
    if not keys:  # revoked, since the configuration requires one
        logger.warning("no API keys are left, so every call is refused file=%s", path)
    return keys


async def _fetch_assets(core: CoreConnection, name: str, fingerprint: str) -> Mapping[str, bytes]:
    """A model's files by name; raises Unavailable if no worker can send them now."""
    request = scheduler_service_pb2.SchedulerServiceGetModelAssetsRequest(
        model=name, fingerprint=fingerprint
    )
    files: dict[str, bytearray] = {}
    try:
        async for response in core.stub.GetModelAssets(request, timeout=ASSETS_TIMEOUT_S):
            files.setdefault(response.chunk.file_name, bytearray()).extend(response.chunk.data)
    except grpc.aio.AioRpcError as error:
        raise Unavailable(f"{error.code().name}: {error.details()}") from error
    return {file_name: bytes(data) for file_name, data in files.items()}


def _frontend_id() -> str:
    """A name that is unique per process and readable in the core's log."""
    return f"{socket.gethostname()}-{os.getpid()}-{uuid.uuid4().hex[:8]}"
