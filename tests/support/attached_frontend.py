"""A frontend without clients: plain messages on an `Attach` stream."""

import asyncio
from array import array
from collections import defaultdict
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any, Self

import grpc

from pagewire.v1 import context_pb2, pooling_pb2, sampling_pb2, status_pb2
from pagewire.v1 import scheduler_service_pb2 as pb
from pagewire.v1.scheduler_service_pb2_grpc import SchedulerServiceStub
from tests.support.waiting import until


def submission(
    frontend_id: str,
    handle: int,
    prompt: Sequence[int],
    *,
    max_tokens: int = 8,
    model: str = "counter",
    num_choices: int = 1,
    timeout_s: float | None = None,
    generated: Mapping[int, Sequence[int]] | None = None,
    max_hold_ms: int = 0,
    pooling: pooling_pb2.PoolingParams | None = None,
    context: Sequence[context_pb2.ContextPart] = (),
) -> pb.Submit:
    """A request for greedy tokens, or for a vector; its id is made of frontend and handle."""
    submit = pb.Submit(
        handle=handle,
        request_id=f"{frontend_id}-{handle}",
        model=model,
        prompt_token_ids=array("i", prompt).tobytes(),
        timeout_us=None if timeout_s is None else round(timeout_s * 1e6),
        context=context,
        generation=pb.Generation(
            num_choices=num_choices,
            max_tokens=max_tokens,
            sampling=sampling_pb2.SamplerParams(temperature=0, top_p=1, repetition_penalty=1),
            generated=[
                pb.GeneratedTokens(choice_index=index, token_ids=array("i", tokens).tobytes())
                for index, tokens in (generated or {}).items()
            ],
            max_hold_ms=max_hold_ms,
        ),
    )
    if pooling is not None:
        submit.pooling.CopyFrom(pooling)
    return submit


class AttachedFrontend:
    """One stream, and all that came on it folded together; an asynchronous context manager."""

    def __init__(self, core_address: str, frontend_id: str = "frontend-1") -> None:
        self.frontend_id = frontend_id
        self.accepted: list[int] = []
        self.tokens: dict[int, list[int]] = defaultdict(list)
        """By choice handle."""
        self.vectors: dict[int, list[float]] = {}
        self.finish_reasons: dict[int, int] = {}
        self.finished: dict[int, pb.RequestFinished] = {}
        self.failed: dict[int, pb.RequestFailed] = {}
        self.models: list[str] | None = None
        self.known_models: list[str] = []
        self.loading: list[int] = []
        """Bytes that each worker which is loading its model has done."""
        self.num_messages = 0
        self.end: grpc.aio.AioRpcError | None = None
        """The error that ended the stream."""
        self._channel = grpc.aio.insecure_channel(core_address)
        self._call: Any = None
        self._reading: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        self._call = SchedulerServiceStub(self._channel).Attach(wait_for_ready=True)
        self._reading = asyncio.create_task(self._read())
        await self.send(pb.FrontendMessage(frontend_id=self.frontend_id))
        await until(lambda: self.models is not None or self.end, "the first message came")
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.leave()

    async def leave(self) -> None:
        """Break the stream."""
        if self._reading is not None:
            self._reading.cancel()
            with suppress(asyncio.CancelledError):
                await self._reading
        await self._channel.close()

    async def half_close(self) -> None:
        """Say that nothing more comes."""
        await self._call.done_writing()

    async def send(self, message: pb.FrontendMessage) -> None:
        await self._call.write(pb.AttachRequest(message=message))

    async def status(self) -> status_pb2.EngineStatus:
        """What the core counts at present."""
        stub = SchedulerServiceStub(self._channel)
        return (await stub.GetStatus(pb.SchedulerServiceGetStatusRequest())).status

    async def submit(self, handle: int, prompt: Sequence[int], **options: Any) -> None:
        """Submit a request; `options` as for `submission`."""
        submit = submission(self.frontend_id, handle, prompt, **options)
        await self.send(pb.FrontendMessage(submits=[submit]))

    async def cancel(self, handle: int) -> None:
        await self.send(pb.FrontendMessage(cancels=array("i", [handle]).tobytes()))

    async def stop_choice(self, handle: int, num_tokens: int) -> None:
        stop = pb.StopChoice(handle=handle, num_tokens=num_tokens)
        await self.send(pb.FrontendMessage(stops=[stop]))

    async def wait_finished(self, *handles: int, timeout_s: float = 60) -> None:
        """Wait until these requests have ended well; fails at once if one fails."""

        def all_finished() -> bool:
            if all(handle in self.finished for handle in handles):
                return True
            assert not self.failed, self.failed
            assert self.end is None, self.end
            return False

        await until(all_finished, f"requests {handles} finished", timeout_s)

    async def wait_failed(self, handle: int) -> pb.RequestFailed:
        await until(lambda: handle in self.failed, f"request {handle} failed")
        return self.failed.pop(handle)

    async def wait_tokens(self, handle: int, number: int) -> None:
        await until(lambda: len(self.tokens[handle]) >= number, f"{number} tokens of {handle}")

    async def _read(self) -> None:
        try:
            async for response in self._call:
                self.fold(response.message)
        except grpc.aio.AioRpcError as error:
            self.end = error

    def fold(self, message: pb.SchedulerMessage) -> None:
        """Add a message to all that came."""
        self.num_messages += 1
        if message.HasField("models"):
            self.models = [model.name for model in message.models.models]
            self.known_models = list(message.models.known_models)
            self.loading = [load.done_bytes for load in message.models.loading]
        self.accepted += array("i", message.accepted).tolist()
        handles = array("i", message.token_handles)
        for handle, token in zip(handles, array("i", message.token_ids), strict=True):
            self.tokens[handle].append(token)
        for vector in message.vectors:
            self.vectors[vector.handle] = array("f", vector.values).tolist()
        for choice in message.choices_finished:
            self.finish_reasons[choice.handle] = choice.reason
        for finished in message.requests_finished:
            self.finished[finished.handle] = finished
        for failed in message.requests_failed:
            self.failed[failed.handle] = failed
