"""A frontend in the test's own process, served on a real port, and a client of it."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import grpc
from google.rpc import error_details_pb2, status_pb2

from pagewire.v1 import inference_service_pb2 as pb
from pagewire.v1 import inference_service_pb2_grpc as pb_grpc
from scheduler_service.frontend.config import FrontendConfig
from scheduler_service.frontend.server import Frontend, make_frontend
from tests.support.fake_core import TIMEOUT_S


@asynccontextmanager
async def running_frontend(core: str, **settings: Any) -> AsyncIterator[Frontend]:
    """A started frontend; stopped at the end unless the test has."""
    settings = {"grace_period_s": 0.0} | settings
    frontend = make_frontend(FrontendConfig(core=core, listen="127.0.0.1:0", **settings))
    await frontend.start()
    try:
        yield frontend
    finally:
        await frontend.stop()


@asynccontextmanager
async def client_of(frontend: Frontend, *options: tuple[str, Any]) -> AsyncIterator[Any]:
    """A stub on a channel of its own."""
    everything = [("grpc.use_local_subchannel_pool", 1), *options]
    async with grpc.aio.insecure_channel(frontend.runner.address, options=everything) as channel:
        yield pb_grpc.InferenceServiceStub(channel)


def generate_request(prompt: Any = "hello", **fields: Any) -> pb.GenerateRequest:
    """A request; keyword arguments that are no field of it go to its sampling parameters."""
    own = {name: fields.pop(name) for name in list(fields) if name in _REQUEST_FIELDS}
    request = pb.GenerateRequest(sampling_params=fields, **own)
    if isinstance(prompt, str):
        request.text = prompt
    elif prompt is not None:
        request.token_ids.ids.extend(prompt)
    return request


_REQUEST_FIELDS = pb.GenerateRequest.DESCRIPTOR.fields_by_name


async def read_all(call: Any) -> list[pb.GenerateResponse]:
    """All responses of a call that ends well."""
    responses = []
    while (response := await call.read()) is not grpc.aio.EOF:
        responses.append(response)
    return responses


async def read_until_error(call: Any) -> tuple[list[Any], grpc.aio.AioRpcError]:
    """The responses of a stream that ends badly, and how it does."""
    responses = []
    try:
        while (response := await call.read()) is not grpc.aio.EOF:
            responses.append(response)
    except grpc.aio.AioRpcError as error:
        return responses, error
    raise AssertionError("the call ended well")


async def eventually(condition: Callable[[], bool]) -> None:
    """Wait for something that nobody announces."""
    async with asyncio.timeout(TIMEOUT_S):
        while not condition():  # noqa: ASYNC110 - there is no event to wait for
            await asyncio.sleep(0.005)


async def model_ready(frontend: Frontend, *, ready: bool = True) -> None:
    """Wait until the frontend has a model to serve, or none any more."""
    while frontend.models.is_serving is not ready:
        await frontend.models.changed.wait()


async def error_of(call: Any) -> grpc.aio.AioRpcError:
    """The error that a call ends with."""
    if hasattr(call, "read"):
        return (await read_until_error(call))[1]
    try:
        await call
    except grpc.aio.AioRpcError as error:
        return error
    raise AssertionError("the call ended well")


def error_info(error: grpc.aio.AioRpcError | bytes) -> error_details_pb2.ErrorInfo:
    """The ErrorInfo among an error's details."""
    return detail(error, error_details_pb2.ErrorInfo)


def bad_field(error: grpc.aio.AioRpcError | bytes) -> str:
    """The field that an INVALID_ARGUMENT complains about."""
    return detail(error, error_details_pb2.BadRequest).field_violations[0].field


def detail(error: grpc.aio.AioRpcError | bytes, kind: Any) -> Any:
    """The detail of one kind; `error` may be a serialized google.rpc.Status."""
    if not isinstance(error, bytes):
        error = dict(error.trailing_metadata() or ())["grpc-status-details-bin"]
    for packed in status_pb2.Status.FromString(error).details:
        if packed.Is(kind.DESCRIPTOR):
            found = kind()
            packed.Unpack(found)
            return found
    raise AssertionError(f"no {kind.__name__} among the details")


def text_of(responses: list[pb.GenerateResponse], choice: int = 0) -> str:
    """All text of one choice."""
    return "".join(
        delta.text for response in responses for delta in response.choices if delta.index == choice
    )


def tokens_of(responses: list[pb.GenerateResponse], choice: int = 0) -> list[int]:
    """All tokens of one choice."""
    return [
        token_id
        for response in responses
        for delta in response.choices
        if delta.index == choice
        for token_id in delta.token_ids
    ]
