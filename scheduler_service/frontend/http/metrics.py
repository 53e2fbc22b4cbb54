"""What Prometheus asks for."""

import asyncio

from fastapi import APIRouter, Request, Response
from prometheus_client.exposition import choose_encoder

from scheduler_service.frontend.http.callers import Caller
from scheduler_service.frontend.http.services import HttpServices


def make_router(services: HttpServices) -> APIRouter:
    """`/metrics`, of this frontend alone: docs/observability.md tells how to scrape several."""
    router = APIRouter(tags=["Operation"])

    @router.get(
        "/metrics",
        summary="Metrics for Prometheus",
        response_class=Response,
        responses={200: {"content": {"text/plain": {"schema": {"type": "string"}}}}},
    )
    async def metrics(request: Request, caller: Caller) -> Response:
        """In Prometheus' text format, or OpenMetrics where the caller accepts it. They tell what
        all tenants do: with keys in force, it takes an operator's."""
        caller.check_operator()
        encode, content_type = choose_encoder(request.headers.get("accept", ""))
        text = await asyncio.to_thread(encode, services.registry)
        return Response(text, headers={"Content-Type": content_type})

    return router
