"""`/v1/models`: the served models."""

import time
from typing import Any, Literal

from fastapi import APIRouter
from pydantic import BaseModel

from scheduler_service.errors import UnknownModel
from scheduler_service.frontend.http.errors import ERROR_RESPONSES
from scheduler_service.frontend.http.middleware import Caller
from scheduler_service.frontend.http.services import HttpServices


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

    def describe(name: str, max_model_len: int) -> dict[str, Any]:
        return {
            "id": name,
            "object": "model",
            "created": started,
            "owned_by": "pagewire",
            "root": name,
            "parent": None,
            "max_model_len": max_model_len,
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
            describe(info.name, info.max_model_len)
            for info in services.models.served
            if caller.may_use(info.name)
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
            if info.name == name and caller.may_use(name):
                return describe(name, info.max_model_len)
        raise UnknownModel(f"no model named {name!r} is served")

    return router
