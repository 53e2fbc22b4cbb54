"""`/v1/models`: the served models."""

import time
from typing import Any, Literal

from fastapi import APIRouter
from pydantic import BaseModel

from pagewire.v1.model_pb2 import ModelInfo
from scheduler_service.frontend.http.errors import ERROR_RESPONSES
from scheduler_service.frontend.http.middleware import Caller, HttpServices
from scheduler_service.frontend.served_models import may_use


class Model(BaseModel):
    """One served model."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    root: str
    parent: None
    max_model_len: int


class ModelList(BaseModel):
    """All served models that the caller may use."""

    object: Literal["list"]
    data: list[Model]


def make_router(services: HttpServices) -> APIRouter:
    """`/v1/models` and one model of it."""
    router = APIRouter(tags=["OpenAI"])
    started = int(time.time())

    def describe(name: str, info: ModelInfo) -> dict[str, Any]:
        return {
            "id": name,
            "object": "model",
            "created": started,
            "owned_by": "pagewire",
            "root": info.name,
            "parent": None,
            "max_model_len": min(info.max_model_len, info.max_cached_tokens or info.max_model_len),
        }

    @router.get(
        "/v1/models",
        summary="List models",
        responses=ERROR_RESPONSES,
        response_model=ModelList,
    )
    async def list_models(caller: Caller) -> dict[str, Any]:
        """The models that are served now."""
        data = [
            describe(name, info)
            for info in services.models.served
            if may_use(caller, info)
            for name in (info.name, *info.aliases)
        ]
        return {"object": "list", "data": data}

    @router.get(
        "/v1/models/{name:path}",
        summary="One model",
        responses=ERROR_RESPONSES,
        response_model=Model,
    )
    async def get_model(name: str, caller: Caller) -> dict[str, Any]:
        """One model by its name, which may contain slashes."""
        for info in services.models.served:
            if name in (info.name, *info.aliases) and may_use(caller, info):
                return describe(name, info)
        raise services.models.unknown_model(name, caller)

    return router
