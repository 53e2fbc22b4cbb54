"""The application: every router, the errors' shape, the limits that hold for all."""

from collections.abc import Callable

from fastapi import APIRouter, FastAPI

from scheduler_service.frontend.http import chat, completions, metrics, monitoring, tokenize
from scheduler_service.frontend.http.callers import OPEN_PATHS, Authenticate
from scheduler_service.frontend.http.dashboard import router as dashboard
from scheduler_service.frontend.http.document import correct_document
from scheduler_service.frontend.http.errors import handle_errors
from scheduler_service.frontend.http.middleware import BodyLimit
from scheduler_service.frontend.http.openai import models
from scheduler_service.frontend.http.services import HttpServices
from scheduler_service.frontend.http.trace_context import TraceContext
from scheduler_service.frontend.public_options import MAX_PUBLIC_MESSAGE_BYTES
from service_common.version import VERSION

ROUTERS: tuple[Callable[[HttpServices], APIRouter], ...] = (
    monitoring.make_router,
    metrics.make_router,
    models.make_router,
    completions.make_router,
    chat.make_router,
    tokenize.make_router,
    dashboard.make_router,
)


def make_app(services: HttpServices) -> FastAPI:
    """The ASGI application of one frontend.

    The pages that FastAPI makes of the OpenAPI document are off, as they load scripts from
    elsewhere; the document itself is at `/openapi.json`.
    """
    app = FastAPI(
        title="Pagewire",
        version=VERSION,
        summary="An LLM serving engine, by OpenAI's interface",
        docs_url=None,
        redoc_url=None,
    )
    for make_router in ROUTERS:
        app.include_router(make_router(services))
    handle_errors(app)
    correct_document(app, asks_for_key=services.authentication.asks_for_key)
    app.add_middleware(BodyLimit, max_bytes=MAX_PUBLIC_MESSAGE_BYTES)
    app.add_middleware(TraceContext)
    app.add_middleware(
        Authenticate,
        authentication=services.authentication,
        open_paths=(*OPEN_PATHS, *dashboard.FILE_PATHS),
    )
    return app
