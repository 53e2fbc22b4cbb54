"""`/v1/load_lora_adapter` and `/v1/unload_lora_adapter`, as in vLLM."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Response

from pagewire.v1 import inference_service_pb2 as inference_pb
from scheduler_service.errors import InvalidArgument
from scheduler_service.frontend.http.errors import ERROR_RESPONSES
from scheduler_service.frontend.http.middleware import Caller, Services
from scheduler_service.frontend.http.openai.sampling import Strict
from scheduler_service.frontend.http.request_body import describe_body, json_body
from scheduler_service.frontend.input import validation


class LoadLoRAAdapter(Strict):
    """An adapter to load."""

    lora_name: str
    lora_path: str
    base_model_name: str | None = None
    load_inplace: bool = False
    """Whether the name may mean another adapter already, which it then replaces."""


class UnloadLoRAAdapter(Strict):
    """An adapter to unload."""

    lora_name: str
    lora_int_id: int | None = None
    """Has no effect: adapters go by their names."""


Load = Annotated[LoadLoRAAdapter, Depends(json_body(LoadLoRAAdapter))]
Unload = Annotated[UnloadLoRAAdapter, Depends(json_body(UnloadLoRAAdapter))]

RESPONSES: dict[int | str, dict[str, Any]] = {
    **ERROR_RESPONSES,
    200: {"content": {"text/plain": {"schema": {"type": "string"}}}},
}

router = APIRouter(tags=["OpenAI"])


@router.post(
    "/v1/load_lora_adapter",
    summary="Load a LoRA adapter",
    responses=RESPONSES,
    response_class=Response,
    openapi_extra=describe_body(LoadLoRAAdapter),
)
async def load_lora_adapter(body: Load, services: Services, caller: Caller) -> Response:
    """Load an adapter on all workers of its model. For operators, if the frontend was started with
    `--allow-runtime-lora-updating`."""
    if not body.load_inplace and services.models.adapters.digest_of(body.lora_name) is not None:
        services.adapters.check_allowed(caller)
        raise InvalidArgument(
            "lora_name",
            f"The lora adapter '{body.lora_name}' has already been loaded. If you want to load the "
            "adapter in place, set 'load_inplace' to True.",
        )
    request = inference_pb.LoadAdapterRequest(
        name=body.lora_name,
        path=body.lora_path,
        model=body.base_model_name,
        replace=body.load_inplace,
    )
    with _named_as_here():
        validation.check_limits(request)
        await services.adapters.load(request, caller)
    return _success(f"LoRA adapter '{body.lora_name}' added")


@router.post(
    "/v1/unload_lora_adapter",
    summary="Unload a LoRA adapter",
    responses=RESPONSES,
    response_class=Response,
    openapi_extra=describe_body(UnloadLoRAAdapter),
)
async def unload_lora_adapter(body: Unload, services: Services, caller: Caller) -> Response:
    """Make an adapter's name unusable; requests that use it continue with it. For operators, if the
    frontend was started with `--allow-runtime-lora-updating`."""
    request = inference_pb.UnloadAdapterRequest(name=body.lora_name)
    with _named_as_here():
        validation.check_limits(request)
        await services.adapters.unload(request, caller)
    return _success(f"LoRA adapter '{body.lora_name}' removed")


_FIELDS = {"name": "lora_name", "path": "lora_path", "model": "base_model_name"}
"""The names of the fields of gRPC requests here."""


@contextmanager
def _named_as_here() -> Iterator[None]:
    """Let errors name the fields of the HTTP request."""
    try:
        yield
    except InvalidArgument as error:
        raise InvalidArgument(_FIELDS.get(error.field, error.field), error.expected) from None


def _success(what: str) -> Response:
    return Response(f"Success: {what} successfully.", media_type="text/plain")
