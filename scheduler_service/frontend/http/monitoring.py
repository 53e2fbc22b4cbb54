"""Whether requests should be sent here."""

from typing import Any, Literal

from fastapi import APIRouter, Response
from fastapi.responses import JSONResponse
from pydantic import BaseModel

from scheduler_service.errors import Unavailable
from scheduler_service.frontend.http.errors import ErrorResponse, error_response
from scheduler_service.frontend.http.services import HttpServices

NOT_NOW: dict[int | str, dict[str, Any]] = {
    503: {"model": ErrorResponse, "description": "No model can be served, or shutting down"}
}


class Health(BaseModel):
    """The answer where a model can be served."""

    status: Literal["serving"]


def make_router(services: HttpServices) -> APIRouter:
    """`/health` and `/ping`, as load balancers and orchestrators ask."""
    router = APIRouter(tags=["Operation"])

    @router.get("/ping", include_in_schema=False)
    @router.get(
        "/health",
        summary="Whether a model can be served",
        responses=NOT_NOW,
        response_model=Health,
    )
    async def health() -> Response:
        """200 when a model can be served; 503 before, and while shutting down."""
        if services.requests.is_draining.is_set():
            return error_response(Unavailable("shutting down", reason="SHUTTING_DOWN"))
        if not services.models.is_serving:
            return error_response(Unavailable("no model is served", reason="NO_MODEL_SERVED"))
        return JSONResponse({"status": "serving"})

    return router
