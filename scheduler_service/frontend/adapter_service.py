"""Operators' calls that load and unload adapters."""

import asyncio
from dataclasses import dataclass

import grpc

from pagewire.v1 import inference_service_pb2 as inference_pb
from pagewire.v1 import scheduler_service_pb2 as scheduler_pb
from scheduler_service.errors import PermissionDenied, Unavailable
from scheduler_service.frontend.auth import Principal
from scheduler_service.frontend.core_client import CoreConnection
from scheduler_service.frontend.models.served_models import ModelDirectory
from scheduler_service.status_codes import from_call

LOAD_TIMEOUT_S = 660.0
"""How long the core may take to load an adapter on all workers."""

ANNOUNCED_TIMEOUT_S = 5.0
"""How long the core's announcement of a change may take after its answer."""


@dataclass(eq=False)
class AdapterService:
    """What operators call to change adapters."""

    models: ModelDirectory
    core: CoreConnection
    allows_changes: bool
    """Whether this frontend changes adapters at all."""

    async def load(
        self, request: inference_pb.LoadAdapterRequest, tenant: Principal
    ) -> inference_pb.LoadAdapterResponse:
        """Load an adapter on all workers; the name can be used when this returns."""
        self.check_allowed(tenant)
        message = scheduler_pb.SchedulerServiceLoadAdapterRequest(
            name=request.name, path=request.path, replace=request.replace
        )
        if request.HasField("model"):
            message.model = request.model
        try:
            answer = await self.core.stub.LoadAdapter(message, timeout=LOAD_TIMEOUT_S)
        except grpc.aio.AioRpcError as error:
            raise from_call(error) from error
        await self._await_announced(answer.adapter.name, answer.adapter.digest)
        return inference_pb.LoadAdapterResponse(adapter=answer.adapter, model=answer.model)

    async def unload(
        self, request: inference_pb.UnloadAdapterRequest, tenant: Principal
    ) -> inference_pb.UnloadAdapterResponse:
        """Make a name unusable."""
        self.check_allowed(tenant)
        message = scheduler_pb.SchedulerServiceUnloadAdapterRequest(name=request.name)
        try:
            answer = await self.core.stub.UnloadAdapter(message, timeout=LOAD_TIMEOUT_S)
        except grpc.aio.AioRpcError as error:
            raise from_call(error) from error
        await self._await_announced(request.name, None)
        return inference_pb.UnloadAdapterResponse(num_requests=answer.num_requests)

    def list(self, tenant: Principal) -> inference_pb.ListAdaptersResponse:
        """The adapters that a tenant may use."""
        response = inference_pb.ListAdaptersResponse()
        for model, adapters in self.models.adapters.by_model():
            entry = response.models.add(model=model)
            entry.adapters.adapters.extend(
                a for a in adapters if tenant.may_use_lora(a.name, model)
            )
        return response

    def check_allowed(self, tenant: Principal) -> None:
        """Raise PermissionDenied unless the frontend lets this caller change adapters."""
        tenant.check_operator()
        if not self.allows_changes:
            raise PermissionDenied(
                "this frontend changes no adapters: it was started without "
                "--allow-runtime-lora-updating",
                reason="LORA_UPDATING_OFF",
            )

    async def _await_announced(self, name: str, digest: bytes | None) -> None:
        """Wait until a name means a content here, or nothing."""
        try:
            async with asyncio.timeout(ANNOUNCED_TIMEOUT_S):
                while self.models.adapters.digest_of(name) != digest:
                    await self.models.changed.wait()
        except TimeoutError:
            raise Unavailable(
                f"the adapter {name!r} has changed, but the core has not announced it yet",
                reason="NOT_ANNOUNCED",
            ) from None
