"""What Prometheus asks for."""

import asyncio

from fastapi import APIRouter, Response

from scheduler_service.frontend.http.callers import Caller
from scheduler_service.frontend.http.errors import ERROR_RESPONSES
from scheduler_service.frontend.http.services import HttpServices
from service_common.metrics_server import CONTENT_TYPE, metrics_text


def make_router(services: HttpServices) -> APIRouter:
    """`/metrics`, of this frontend alone: docs/observability.md tells how to scrape several."""
    router = APIRouter(tags=["Operation"])

    @router.get(
        "/metrics",
        summary="Metrics for Prometheus",
        response_class=Response,
        responses=ERROR_RESPONSES
        | {200: {"content": {"text/plain": {"schema": {"type": "string"}}}}},
    )
    async def metrics(caller: Caller) -> Response:
        """In Prometheus' text format. They tell what all tenants do: with keys in force, it takes
        an operator's."""
        caller.check_operator()
        text = await asyncio.to_thread(metrics_text, services.registry)
        return Response(text, headers={"Content-Type": CONTENT_TYPE})

    return router
