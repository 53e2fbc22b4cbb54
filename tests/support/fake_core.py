"""A scheduler core whose every word a test decides, behind a real channel.

async with FakeCore() as core:
    ...a frontend attaches to core.address, a client calls it...
    request = await core.next_request()
    await request.accept()
    await request.send_tokens([5, 6])
    await request.finish()
"""

import asyncio
from collections.abc import Callable, Sequence
from typing import Any, Self

import grpc

from pagewire.columns import pack, pack_floats
from pagewire.v1 import inference_service_pb2 as inference_pb
from pagewire.v1 import model_pb2, status_pb2
from pagewire.v1 import scheduler_service_pb2 as pb
from pagewire.v1 import scheduler_service_pb2_grpc as pb_grpc
from scheduler_service.columns import from_column
from tests.support.tokenizers import EOS, byte_level, model_files

VOCAB_SIZE = 405
"""A little more than `byte_level()` has tokens, as models are padded."""

TIMEOUT_S = 60
"""After which a test that waits has failed."""


def model_info(name: str = "tiny", **fields: Any) -> model_pb2.ModelInfo:
    """A model whose tokenizer is `byte_level()`."""
    facts: dict[str, Any] = {
        "fingerprint": f"{name}-1",
        "max_model_len": 256,
        "vocab_size": VOCAB_SIZE,
        "eos_token_ids": pack([byte_level().token_to_id(EOS)]),
    }
    return model_pb2.ModelInfo(name=name, **(facts | fields))


class FakeRequest:
    """One submission as the core sees it."""

    def __init__(self, attachment: "FakeAttachment", submit: pb.Submit) -> None:
        self.attachment = attachment
        self.submit = submit
        self.handle = submit.handle

    @property
    def prompt(self) -> list[int]:
        return from_column(self.submit.prompt_token_ids, "prompt")

    def generated(self, choice: int = 0) -> list[int]:
        """The tokens it was submitted with."""
        for entry in self.submit.generation.generated:
            if entry.choice_index == choice:
                return from_column(entry.token_ids, "generated")
        return []

    async def accept(self) -> None:
        await self.attachment.send(accepted=pack([self.handle]))

    async def send_tokens(self, token_ids: Sequence[int], choice: int = 0, **fields: Any) -> None:
        await self.attachment.send(
            token_handles=pack([self.handle + choice] * len(token_ids)),
            token_ids=pack(token_ids),
            **fields,
        )

    async def finish_choice(
        self,
        choice: int = 0,
        reason: Any = inference_pb.FINISH_REASON_LENGTH,
        stop_token_id: int | None = None,
    ) -> None:
        finished = pb.ChoiceFinished(
            handle=self.handle + choice, reason=reason, stop_token_id=stop_token_id
        )
        await self.attachment.send(choices_finished=[finished])

    async def finish(self, **fields: Any) -> None:
        """End the request; its choices must have ended."""
        await self.attachment.send(
            requests_finished=[pb.RequestFinished(handle=self.handle, **fields)]
        )

    async def complete(self, token_ids: Sequence[int]) -> None:
        """Accept, send, and end by length."""
        await self.accept()
        await self.send_tokens(token_ids)
        await self.finish_choice()
        await self.finish()

    async def send_vectors(self, *numbers: float, first_token: int = 0) -> None:
        """Its vector, or the vectors of some of its tokens."""
        vector = pb.PooledVector(
            handle=self.handle, values=pack_floats(numbers), first_token=first_token
        )
        await self.attachment.send(vectors=[vector])

    async def pool(self, *numbers: float, **fields: Any) -> None:
        """Accept it, and end it with a vector."""
        await self.accept()
        await self.send_vectors(*numbers)
        await self.finish(**fields)

    async def fail(
        self, code: grpc.StatusCode, reason: str, message: str = "no", **fields: Any
    ) -> None:
        failed = pb.RequestFailed(
            handle=self.handle, code=code.value[0], reason=reason, message=message, **fields
        )
        await self.attachment.send(requests_failed=[failed])

    async def cancelled(self) -> None:
        """Wait until the frontend takes the request back."""
        await self.attachment.core.until(lambda: self.handle in self.attachment.cancels)


class FakeAttachment:
    """One `Attach` stream and what the frontend has said on it."""

    def __init__(self, core: "FakeCore", context: Any) -> None:
        self.core = core
        self.messages: list[pb.FrontendMessage] = []
        self.requests: list[FakeRequest] = []
        self.cancels: list[int] = []
        self.stops: list[pb.StopChoice] = []
        self.is_open = True
        self._context = context
        self._broken = asyncio.Event()
        self._writing = asyncio.Lock()

    async def send(self, **fields: Any) -> None:
        message = pb.SchedulerMessage(**fields)
        async with self._writing:
            await self._context.write(pb.AttachResponse(message=message))

    async def announce_models(self, models: Sequence[model_pb2.ModelInfo]) -> None:
        await self.send(models=pb.ServedModels(models=models))

    def break_off(self) -> None:
        """End the stream as a dying core does."""
        self._broken.set()

    async def serve(self) -> None:
        reader = asyncio.create_task(self._read())
        broken = asyncio.create_task(self._broken.wait())
        try:
            await asyncio.wait({reader, broken}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            reader.cancel()
            broken.cancel()
            self.is_open = False
            await self.core.changed()
        if self._broken.is_set():
            await self._context.abort(grpc.StatusCode.UNAVAILABLE, "broken off")

    async def _read(self) -> None:
        while (request := await self._context.read()) is not grpc.aio.EOF:
            message = request.message
            self.messages.append(message)
            submitted = [FakeRequest(self, submit) for submit in message.submits]
            self.requests += submitted
            self.core.requests += submitted
            self.cancels += from_column(message.cancels, "cancels")
            self.stops += message.stops
            await self.core.changed()


class FakeCore(pb_grpc.SchedulerServiceServicer):
    """Serves `models`, each with the files in `files` by name."""

    def __init__(
        self,
        models: Sequence[model_pb2.ModelInfo] | None = None,
        files: dict[str, dict[str, bytes]] | None = None,
    ) -> None:
        self.models = [model_info()] if models is None else list(models)
        self.files = files or {}
        self.attachments: list[FakeAttachment] = []
        self.requests: list[FakeRequest] = []
        """Over all streams, as they came."""
        self.elsewhere: set[str] = set()
        self.num_fetches = 0
        self.address = ""
        self._num_taken = 0
        self._changed = asyncio.Condition()
        self._server: grpc.aio.Server | None = None

    async def __aenter__(self) -> Self:
        await self.start("127.0.0.1:0")
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()

    async def start(self, address: str) -> None:
        """Serve; `address` may have port 0."""
        self._server = grpc.aio.server(options=[("grpc.so_reuseport", 0)])
        pb_grpc.add_SchedulerServiceServicer_to_server(self, self._server)
        port = self._server.add_insecure_port(address)
        self.address = f"127.0.0.1:{port}"
        await self._server.start()

    async def stop(self) -> None:
        """End at once, all streams with it."""
        assert self._server is not None
        await self._server.stop(None)

    async def changed(self) -> None:
        async with self._changed:
            self._changed.notify_all()

    async def until(self, condition: Callable[[], object]) -> None:
        """Wait until what frontends did makes `condition` true."""
        async with asyncio.timeout(TIMEOUT_S), self._changed:
            await self._changed.wait_for(condition)

    async def attachment(self, index: int = 0) -> FakeAttachment:
        """The stream that was opened as number `index`."""
        await self.until(lambda: len(self.attachments) > index)
        return self.attachments[index]

    async def next_request(self) -> FakeRequest:
        """The next submission, over all streams."""
        await self.until(lambda: len(self.requests) > self._num_taken)
        self._num_taken += 1
        return self.requests[self._num_taken - 1]

    # The service.

    async def Attach(self, _: Any, context: Any) -> None:
        attachment = FakeAttachment(self, context)
        await attachment.announce_models(self.models)
        self.attachments.append(attachment)
        await self.changed()
        await attachment.serve()

    async def GetModelAssets(self, request: Any, context: Any) -> None:
        self.num_fetches += 1
        await self.changed()
        files = self.files.get(request.model, model_files(byte_level()))
        for name, data in files.items():
            half = len(data) // 2
            for piece in (data[:half], data[half:]):
                chunk = model_pb2.ModelAssetChunk(file_name=name, data=piece)
                await context.write(pb.SchedulerServiceGetModelAssetsResponse(chunk=chunk))

    async def Abort(self, request: Any, context: Any) -> pb.SchedulerServiceAbortResponse:
        """Requests of other frontends are those in `elsewhere`."""
        if request.request_id not in self.elsewhere:
            await context.abort(grpc.StatusCode.NOT_FOUND, "no such request")
        self.elsewhere.remove(request.request_id)
        return pb.SchedulerServiceAbortResponse()

    async def GetStatus(self, request: Any, context: Any) -> pb.SchedulerServiceGetStatusResponse:
        status = status_pb2.EngineStatus(num_running=7, models=[m.name for m in self.models])
        if request.detail.include_requests:
            status.requests.add(number=1, num_prompt_tokens=request.detail.max_requests)
        return pb.SchedulerServiceGetStatusResponse(status=status)

    async def WatchStatus(self, request: Any, context: Any) -> None:
        for count in range(3):
            status = status_pb2.EngineStatus(num_running=count, num_waiting=request.interval_ms)
            await context.write(pb.SchedulerServiceWatchStatusResponse(status=status))
