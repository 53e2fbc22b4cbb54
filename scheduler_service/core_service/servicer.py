"""The gRPC servicer of `SchedulerService`, which only awaits and translates."""

from collections.abc import Callable
from typing import Any, TypeAlias

import grpc

from pagewire.v1 import scheduler_service_pb2 as pb
from pagewire.v1.scheduler_service_pb2_grpc import SchedulerServiceServicer
from scheduler_service.core_service import frontend_streams
from scheduler_service.core_service.adapters.directory import AdapterDirectory, served_name
from scheduler_service.core_service.driver import CoreDriver
from scheduler_service.core_service.model_assets import AssetCache, chunks_of
from scheduler_service.core_service.status import StatusBoard, to_detail
from scheduler_service.core_service.status_watchers import StatusWatchers
from scheduler_service.core_service.workers.worker_registry import WorkerRegistry
from scheduler_service.errors import InvalidArgument, UnknownModel
from scheduler_service.status_codes import rpc

DEFAULT_INTERVAL_MS = 1000
MIN_INTERVAL_MS = 100
MAX_INTERVAL_MS = 60_000

Context: TypeAlias = grpc.aio.ServicerContext[Any, Any]


class SchedulerServicer(SchedulerServiceServicer):
    """One method per RPC; the proto documents the contract of each. The two long-lived streams are
    served by the classes that own them."""

    Attach: Any
    RegisterWorker: Any

    def __init__(
        self,
        driver: CoreDriver,
        frontends: frontend_streams.FrontendStreams,
        workers: WorkerRegistry,
        assets: AssetCache,
        status: StatusBoard,
        adapters: AdapterDirectory,
        announce: Callable[[], None],
    ) -> None:
        """announce: notifies the frontends of what has changed."""
        self._driver = driver
        self._workers = workers
        self._assets = assets
        self._status = status
        self._adapters = adapters
        self._announce = announce
        self._watchers = StatusWatchers(status)
        self.Attach = frontends.serve
        self.RegisterWorker = workers.serve

    # The stubs know generators only; a coroutine reads and writes through its context instead.

    @rpc
    async def GetModelAssets(  # type: ignore[override]
        self, request: pb.SchedulerServiceGetModelAssetsRequest, context: Context
    ) -> None:
        for chunk in chunks_of(await self._assets.get(request.model, request.fingerprint)):
            await context.write(pb.SchedulerServiceGetModelAssetsResponse(chunk=chunk))

    @rpc
    async def Abort(
        self, request: pb.SchedulerServiceAbortRequest, context: Context
    ) -> pb.SchedulerServiceAbortResponse:
        self._driver.abort(request.tenant, request.request_id)
        return pb.SchedulerServiceAbortResponse()

    @rpc
    async def GetStatus(
        self, request: pb.SchedulerServiceGetStatusRequest, context: Context
    ) -> pb.SchedulerServiceGetStatusResponse:
        status = self._status.snapshot(to_detail(request.detail))
        return pb.SchedulerServiceGetStatusResponse(status=status)

    @rpc
    async def WatchStatus(  # type: ignore[override]
        self, request: pb.SchedulerServiceWatchStatusRequest, context: Context
    ) -> None:
        interval_s = _interval_ms(request) / 1000
        await self._watchers.serve(context, to_detail(request.detail), interval_s)

    @rpc
    async def DrainWorker(
        self, request: pb.DrainWorkerRequest, context: Context
    ) -> pb.DrainWorkerResponse:
        self._workers.drain(request.group_id)
        return pb.DrainWorkerResponse()

    @rpc
    async def LoadAdapter(
        self, request: pb.SchedulerServiceLoadAdapterRequest, context: Context
    ) -> pb.SchedulerServiceLoadAdapterResponse:
        infos = self._workers.served_models()
        name = request.model if request.HasField("model") else None
        try:
            model = served_name(infos, name)
        except UnknownModel as error:
            self._adapters.require_settled(str(error))
            raise
        names = [name for info in infos for name in (info.name, *info.aliases)]
        adapter = await self._adapters.load(
            request.name, request.path, model, replace=request.replace, names=names
        )
        self._announce()
        return pb.SchedulerServiceLoadAdapterResponse(adapter=adapter, model=model)

    @rpc
    async def UnloadAdapter(
        self, request: pb.SchedulerServiceUnloadAdapterRequest, context: Context
    ) -> pb.SchedulerServiceUnloadAdapterResponse:
        num_requests = await self._adapters.unload(request.name)
        self._announce()
        return pb.SchedulerServiceUnloadAdapterResponse(num_requests=num_requests)

    @rpc
    async def ListAdapters(
        self, request: pb.SchedulerServiceListAdaptersRequest, context: Context
    ) -> pb.SchedulerServiceListAdaptersResponse:
        return pb.SchedulerServiceListAdaptersResponse(models=self._adapters.announced())


def _interval_ms(request: pb.SchedulerServiceWatchStatusRequest) -> int:
    if not request.HasField("interval_ms"):
        return DEFAULT_INTERVAL_MS
    if not MIN_INTERVAL_MS <= request.interval_ms <= MAX_INTERVAL_MS:
        raise InvalidArgument("interval_ms", f"expected {MIN_INTERVAL_MS} to {MAX_INTERVAL_MS}")
    return request.interval_ms
