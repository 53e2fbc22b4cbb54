"""`/v1/models`: the served models."""

import time
from collections.abc import Iterator
from typing import Any, Literal

from fastapi import APIRouter
from pydantic import BaseModel

from scheduler_service.frontend.auth import Principal
from scheduler_service.frontend.http.errors import ERROR_RESPONSES
from scheduler_service.frontend.http.middleware import Caller, HttpServices, Services
from scheduler_service.frontend.models.frontend_model import max_input_len, may_use


class Model(BaseModel):
    """One served model."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    root: str
    parent: str | None
    max_model_len: int


class ModelList(BaseModel):
    """All served models that the caller may use."""

    object: Literal["list"]
    data: list[Model]


STARTED = int(time.time())

router = APIRouter(tags=["OpenAI"])


@router.get(
    "/v1/models", summary="List models", responses=ERROR_RESPONSES, response_model=ModelList
)
async def list_models(services: Services, caller: Caller) -> dict[str, Any]:
    """The models that are served now."""
    return {"object": "list", "data": list(_usable(services, caller))}


@router.get(
    "/v1/models/{name:path}", summary="One model", responses=ERROR_RESPONSES, response_model=Model
)
async def get_model(name: str, services: Services, caller: Caller) -> dict[str, Any]:
    """One model by its name, which may contain slashes."""
    for model in _usable(services, caller):
        if model["id"] == name:
            return model
    raise services.models.unknown_model(name, caller)


def _usable(services: HttpServices, caller: Principal) -> Iterator[dict[str, Any]]:
    """The served models that a caller may use, under each of their names, and their adapters."""
    for info in services.models.served:
        for name in (info.name, *info.aliases) if may_use(caller, info) else ():
            yield {
                "id": name,
                "object": "model",
                "created": STARTED,
                "owned_by": "pagewire",
                "root": info.name,
                "parent": None,
                "max_model_len": max_input_len(info),
            }
    lengths = {info.name: max_input_len(info) for info in services.models.served}
    for model, adapters in services.models.adapters.by_model():
        for adapter in adapters if model in lengths else ():
            if caller.may_use_lora(adapter.name, model):
                yield {
                    "id": adapter.name,
                    "object": "model",
                    "created": STARTED,
                    "owned_by": "pagewire",
                    "root": adapter.path,
                    "parent": model,
                    "max_model_len": lengths[model],
                }
