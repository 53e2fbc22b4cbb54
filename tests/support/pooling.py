"""Models that pool, behind a core that answers every text, and calls of one message."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from typing import Any

import grpc
import numpy as np

from pagewire.v1 import inference_service_pb2 as pb
from pagewire.v1 import model_pb2, pooling_pb2
from scheduler_service.frontend.server import Frontend
from tests.support.fake_core import FakeCore, FakeRequest, model_info
from tests.support.frontends import client_of, running_frontend

SIZE = 3
"""Numbers in a vector."""


def pooling_model(name: str = "embedder", **pooling: Any) -> model_pb2.ModelInfo:
    """A model that only pools."""
    facts: dict[str, Any] = {
        "vector_size": SIZE,
        "default_type": pooling_pb2.POOLING_TYPE_LAST,
        "types": [pooling_pb2.POOLING_TYPE_LAST, pooling_pb2.POOLING_TYPE_ALL],
        "normalize": True,
    }
    info = pooling_pb2.PoolingInfo(**(facts | pooling))
    return model_info(name, work_kinds=[model_pb2.WORK_KIND_POOLING], pooling=info)


def vector_of(token_ids: Sequence[int], size: int = SIZE) -> list[float]:
    """The vector that the core answers with."""
    return [float(token_ids[place % len(token_ids)] + place) for place in range(size)]


async def answer(request: FakeRequest) -> None:
    """Answer a text with `vector_of` its tokens, or of each of its tokens."""
    pooling = request.submit.pooling
    if pooling.type == pooling_pb2.POOLING_TYPE_ALL:
        vectors = [vector_of([token]) for token in request.prompt]
        await request.pool(*[number for vector in vectors for number in vector])
    else:
        await request.pool(*vector_of(request.prompt, pooling.dimensions or SIZE))


@asynccontextmanager
async def answering(
    core: FakeCore, answer: Callable[[FakeRequest], Awaitable[None]] = answer
) -> AsyncIterator[None]:
    """A context in which every text is answered as it arrives."""

    async def answer_all() -> None:
        while True:
            await answer(await core.next_request())

    task = asyncio.create_task(answer_all())
    try:
        yield
    finally:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task


@asynccontextmanager
async def serving(
    *models: model_pb2.ModelInfo, files: dict[str, dict[str, bytes]] | None = None, **settings: Any
) -> AsyncIterator[tuple[FakeCore, Frontend, Any]]:
    """A core that serves models, a frontend, and a client's stub."""
    async with (
        FakeCore(models=models or [pooling_model()], files=files) as core,
        running_frontend(core.address, **settings) as frontend,
        client_of(frontend) as client,
    ):
        yield core, frontend, client


def texts(*inputs: str | Sequence[int] | tuple[str, str]) -> list[pb.PoolingInput]:
    """Inputs of texts, lists of token ids, and pairs of texts."""
    made = []
    for item in inputs:
        if isinstance(item, str):
            made.append(pb.PoolingInput(text=item))
        elif isinstance(item, tuple):
            made.append(pb.PoolingInput(pair=pb.TextPair(first=item[0], second=item[1])))
        else:
            made.append(pb.PoolingInput(token_ids=pb.PromptTokens(ids=item)))
    return made


async def responses_of(call: Any, *messages: Any) -> list[Any]:
    """All responses of a call that gets these messages and ends well."""
    for message in messages:
        await call.write(message)
    await call.done_writing()
    if not hasattr(call, "read"):
        return [await call]
    responses = []
    while (response := await call.read()) is not grpc.aio.EOF:
        responses.append(response)
    return responses


def vectors_of(responses: Sequence[Any], field: str = "embeddings") -> dict[int, list[float]]:
    """The numbers of the texts that did not fail, by index."""
    found: dict[int, list[float]] = {}
    for response in responses:
        for entry in getattr(response, field):
            if not entry.HasField("error"):
                found.setdefault(entry.index, []).extend(np.frombuffer(entry.values, "<f4"))
    return found


def errors_of(responses: Sequence[Any], field: str = "embeddings") -> dict[int, pb.RequestError]:
    """The errors of the texts that failed, by index."""
    entries = (entry for response in responses for entry in getattr(response, field))
    return {entry.index: entry.error for entry in entries if entry.HasField("error")}
