"""`/health`, `/ping` and `/metrics`."""

import asyncio
from typing import Any, Literal

from fastapi import APIRouter, Response
from fastapi.responses import JSONResponse
from pydantic import BaseModel

from scheduler_service.errors import Unavailable
from scheduler_service.frontend.http.errors import ERROR_RESPONSES, ErrorResponse, error_response
from scheduler_service.frontend.http.middleware import Caller, Services
from service_common.metrics_server import CONTENT_TYPE, metrics_text

NOT_NOW: dict[int | str, dict[str, Any]] = {
    503: {"model": ErrorResponse, "description": "No model can be served, or shutting down"}
}


class Health(BaseModel):
    """The answer if a model can be served."""

    status: Literal["serving"]


router = APIRouter(tags=["Operation"])


@router.head("/health", include_in_schema=False)
@router.api_route("/ping", methods=["GET", "HEAD", "POST"], include_in_schema=False)
@router.get(
    "/health", summary="Whether a model can be served", responses=NOT_NOW, response_model=Health
)
async def health(services: Services) -> Response:
    """200 when a model can be served; 503 before, and while shutting down."""
    if services.requests.capacity.is_draining.is_set():
        return error_response(Unavailable("shutting down", reason="SHUTTING_DOWN"))
    if not services.models.is_serving:
        return error_response(services.models.unavailable("no model is served"))
    return JSONResponse({"status": "serving"})


@router.get(
    "/metrics",
    summary="Metrics for Prometheus",
    response_class=Response,
    responses=ERROR_RESPONSES | {200: {"content": {"text/plain": {"schema": {"type": "string"}}}}},
)
async def metrics(services: Services, caller: Caller) -> Response:
    """In Prometheus' text format. With API keys, only operators may read them, because they
    cover all tenants."""
    caller.check_operator()
    text = await asyncio.to_thread(metrics_text, services.registry)
    return Response(text, headers={"Content-Type": CONTENT_TYPE})
