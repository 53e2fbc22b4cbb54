"""An `InferenceService` with a made-up model and scripted faults, to test clients against.

Its tokens are a pure function of prompt, seed, choice and position, as the real services' are, and
it checks a resumed request against what it would have sent.
"""

import queue
import threading
import zlib
from collections import deque
from collections.abc import Iterator
from concurrent import futures
from dataclasses import dataclass
from typing import Any, Self

import grpc
from google.protobuf import any_pb2, duration_pb2
from google.protobuf.message import Message
from google.rpc import error_details_pb2, status_pb2

from pagewire.v1 import inference_service_pb2 as pb
from pagewire.v1 import model_pb2
from pagewire.v1 import status_pb2 as engine_status_pb2
from pagewire.v1.inference_service_pb2_grpc import (
    InferenceServiceServicer,
    add_InferenceServiceServicer_to_server,
)

MODEL = "fake-model"
DRAWN_SEED = 2**63 + 11  # Larger than any signed or floating-point mistake would survive.
STOP_TOKEN = 7


@dataclass(kw_only=True, eq=False)
class Failure(Exception):
    """An error status with the details that the real services give."""

    code: grpc.StatusCode
    message: str = "scripted"
    reason: str = "SCRIPTED"
    field: str = ""
    retry_delay_ms: int | None = None

    def status(self) -> status_pb2.Status:
        details: list[Message] = []
        if self.reason:
            info = error_details_pb2.ErrorInfo(reason=self.reason, domain="pagewire")
            info.metadata["detail"] = "42"
            details.append(info)
        if self.field:
            details.append(error_details_pb2.BadRequest())
            details[-1].field_violations.add(field=self.field, description=self.message)
        if self.retry_delay_ms is not None:
            delay = duration_pb2.Duration()
            delay.FromMilliseconds(self.retry_delay_ms)
            details.append(error_details_pb2.RetryInfo(retry_delay=delay))
        status = status_pb2.Status(code=self.code.value[0], message=self.message)
        for detail in details:
            status.details.add().CopyFrom(_packed(detail))
        return status


@dataclass(frozen=True, kw_only=True)
class Break:
    """What goes wrong with one call, and after how many output tokens of it."""

    after_tokens: int = 0
    failure: Failure | None = None
    """None: the stream ends with OK, as if the answer were complete."""


UNAVAILABLE = Failure(code=grpc.StatusCode.UNAVAILABLE)


def token(prompt: str, seed: int, choice: int, position: int) -> int:
    """The made-up model."""
    return 10 + zlib.crc32(f"{prompt}|{seed}|{choice}|{position}".encode()) % 1000


def piece(token_id: int) -> str:
    """A token's text: characters of one, two and four UTF-8 bytes."""
    return f" {token_id}é🙂"


class FakeFrontend(InferenceServiceServicer):
    """A server on a free port, or on `address`; a context manager."""

    def __init__(
        self, address: str = "127.0.0.1:0", credentials: grpc.ServerCredentials | None = None
    ) -> None:
        self.breaks: deque[Break] = deque()
        """Taken one per call of Generate or GenerateMany; calls after the last one succeed."""
        self.requests: list[pb.GenerateRequest] = []
        self.generation_defaults: list[str] = []
        """Of the model, as GetModel reports them."""
        self.metadata: list[dict[str, Any]] = []
        self.details: list[engine_status_pb2.StatusDetail] = []
        self.peers: set[str] = set()
        self.num_streams = 0
        self.group_id = "worker-0"
        self.capacity = 10**6
        """Requests that a GenerateMany stream holds at once before it refuses more."""
        self.hold = threading.Event()
        """Cleared: answers stop after their second token, when the first one's text is out, until
        it is set."""
        self.hold.set()
        self.ended_early = threading.Event()
        """Set when a call is cancelled or its deadline passes."""
        self.first_token_sent = threading.Event()
        self._server = grpc.server(
            futures.ThreadPoolExecutor(16), options=[("grpc.so_reuseport", 0)]
        )
        add_InferenceServiceServicer_to_server(self, self._server)
        if credentials is None:
            port = self._server.add_insecure_port(address)
        else:
            port = self._server.add_secure_port(address, credentials)
        is_unix = address.startswith("unix:")
        self.address = address if is_unix else f"{address.rpartition(':')[0]}:{port}"

    def __enter__(self) -> Self:
        self._server.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def stop(self) -> None:
        self._server.stop(0).wait()  # cancels the calls; answers that are held see that and end

    def Generate(self, request: pb.GenerateRequest, context: Any) -> Iterator[pb.GenerateResponse]:
        self._note(request, context)
        context.add_callback(lambda: None if context.code() else self.ended_early.set())
        scripted = self.breaks.popleft() if self.breaks else None
        num_tokens = 0
        try:
            for response in self._answer(request, context):
                if scripted and num_tokens >= scripted.after_tokens:
                    if scripted.failure:
                        raise scripted.failure
                    return
                num_tokens += sum(len(choice.token_ids) for choice in response.choices)
                yield response
                if num_tokens:
                    self.first_token_sent.set()
        except Failure as failure:
            _abort(context, failure)

    def GenerateMany(
        self, request_iterator: Iterator[pb.GenerateManyRequest], context: Any
    ) -> Iterator[pb.GenerateManyResponse]:
        self.num_streams += 1
        scripted = self.breaks.popleft() if self.breaks else None
        arrived: queue.SimpleQueue[pb.GenerateRequest | None] = queue.SimpleQueue()
        reader = threading.Thread(target=_read, args=(request_iterator, arrived), daemon=True)
        reader.start()
        live: dict[str, Iterator[pb.GenerateResponse]] = {}
        num_tokens = 0
        is_open = True
        while live or is_open:
            while is_open and (not live or not arrived.empty()):
                request = arrived.get()
                if request is None:
                    is_open = False
                    break
                self._note(request, context)
                if len(live) >= self.capacity:
                    full = Failure(code=grpc.StatusCode.RESOURCE_EXHAUSTED, retry_delay_ms=10)
                    yield _error(request.request_id, full)
                else:
                    live[request.request_id] = self._answer(request, context)
            for request_id in list(live):
                if scripted and num_tokens >= scripted.after_tokens:
                    if scripted.failure:
                        _abort(context, scripted.failure)
                    return
                try:
                    response = next(live[request_id])
                except Failure as failure:
                    del live[request_id]
                    yield _error(request_id, failure)
                else:
                    num_tokens += sum(len(choice.token_ids) for choice in response.choices)
                    if response.HasField("usage"):
                        del live[request_id]
                    yield pb.GenerateManyResponse(response=response)
                    if num_tokens:
                        self.first_token_sent.set()

    def Abort(self, request: pb.AbortRequest, context: Any) -> pb.AbortResponse:
        if request.request_id not in [seen.request_id for seen in self.requests]:
            _abort(context, Failure(code=grpc.StatusCode.NOT_FOUND, reason="UNKNOWN_REQUEST"))
        return pb.AbortResponse()

    def Tokenize(self, request: pb.TokenizeRequest, context: Any) -> pb.TokenizeResponse:
        text = request.text or "".join(message.content for message in request.chat.messages)
        ids = [1] * request.add_special_tokens + [ord(character) for character in text]
        return pb.TokenizeResponse(token_ids=ids, max_model_len=100)

    def Detokenize(self, request: pb.DetokenizeRequest, context: Any) -> pb.DetokenizeResponse:
        return pb.DetokenizeResponse(text="".join(map(chr, request.token_ids)))

    def GetModel(self, request: pb.GetModelRequest, context: Any) -> pb.GetModelResponse:
        self._check_model(request.model, context)
        return pb.GetModelResponse(
            model=model_pb2.ModelInfo(
                name=MODEL,
                max_model_len=100,
                vocab_size=1000,
                generation_defaults=self.generation_defaults,
            )
        )

    def GetStatus(self, request: pb.GetStatusRequest, context: Any) -> pb.GetStatusResponse:
        self.details.append(request.detail)
        return pb.GetStatusResponse(status=_engine_status(1.0, self.group_id))

    def WatchStatus(
        self, request: pb.WatchStatusRequest, context: Any
    ) -> Iterator[pb.WatchStatusResponse]:
        self.details.append(request.detail)
        scripted = self.breaks.popleft() if self.breaks else None
        for number in range(100):
            if scripted and scripted.failure and number == scripted.after_tokens:
                _abort(context, scripted.failure)
            yield pb.WatchStatusResponse(status=_engine_status(float(number), self.group_id))

    def _note(self, request: pb.GenerateRequest, context: Any) -> None:
        self.requests.append(request)
        self.metadata.append(dict(context.invocation_metadata()))
        self.peers.add(context.peer())

    def _check_model(self, model: str, context: Any) -> None:
        if model not in ("", MODEL):
            message = f"no model {model!r} is served"
            _abort(
                context,
                Failure(code=grpc.StatusCode.NOT_FOUND, message=message, reason="UNKNOWN_MODEL"),
            )

    def _answer(self, request: pb.GenerateRequest, context: Any) -> Iterator[pb.GenerateResponse]:
        self._check_model(request.model, context)
        if request.WhichOneof("prompt") == "text" and not request.text:
            raise Failure(
                code=grpc.StatusCode.INVALID_ARGUMENT, message="expected a text", field="text"
            )
        params = request.sampling_params
        seed = params.seed if params.HasField("seed") else DRAWN_SEED
        choices = [
            _Choice(request, seed, index, resumed)
            for index, resumed in _resumed_by_index(request, params.n or 1).items()
        ]
        yield pb.GenerateResponse(
            request_id=request.request_id,
            started=pb.Started(seed=seed, model=MODEL, prompt_token_ids=_prompt_ids(request)),
        )
        if params.HasField("prompt_logprobs"):
            yield pb.GenerateResponse(
                request_id=request.request_id, prompt_logprobs=_prompt_logprobs(request)
            )
        while deltas := [delta for choice in choices if (delta := choice.next_delta())]:
            yield pb.GenerateResponse(request_id=request.request_id, choices=deltas)
            while choices[0].position > 1 and not self.hold.wait(0.02) and context.is_active():
                pass
        usage = pb.Usage(
            prompt_tokens=len(_prompt_ids(request)),
            completion_tokens=sum(choice.position for choice in choices),
        )
        timings = pb.Timings(total_us=100, forward_us=90, wire_us=10)
        yield pb.GenerateResponse(request_id=request.request_id, usage=usage, timings=timings)


class _Choice:
    """One choice's tokens. The text of a token comes with the token after it."""

    def __init__(
        self, request: pb.GenerateRequest, seed: int, index: int, resumed: pb.ResumedChoice
    ) -> None:
        self._request = request
        self._params = request.sampling_params
        self._seed = seed
        self._index = index
        self._finished = False
        self.position = len(resumed.token_ids)
        expected = [self._token(position) for position in range(self.position)]
        if list(resumed.token_ids) != expected:
            raise Failure(code=grpc.StatusCode.INVALID_ARGUMENT, field="resume.token_ids")
        self._sent = resumed.num_chars
        if self._sent > len(self._text()):
            raise Failure(code=grpc.StatusCode.INVALID_ARGUMENT, field="resume.num_chars")
        self._sum = resumed.cumulative_logprob

    def next_delta(self) -> pb.ChoiceDelta | None:
        if self._finished:
            return None
        delta = pb.ChoiceDelta(index=self._index)
        if self.position < self._params.max_tokens:
            token_id = self._token(self.position)
            delta.token_ids.append(token_id)
            if self._params.HasField("logprobs"):
                delta.logprobs.append(_logprobs(token_id))
                self._sum += delta.logprobs[0].token.logprob
            text = self._text()
            self.position += 1
        if self.position == self._params.max_tokens:
            self._finished = True
            text = self._text()
            delta.finish_reason = pb.FINISH_REASON_LENGTH
            if STOP_TOKEN in self._params.stop_token_ids:
                delta.finish_reason = pb.FINISH_REASON_STOP
                delta.stop_token_id = STOP_TOKEN
            if self._params.HasField("logprobs"):
                delta.cumulative_logprob = self._sum
        delta.text = text[self._sent :]
        self._sent = len(text)
        return delta

    def _token(self, position: int) -> int:
        return token(self._request.text, self._seed, self._index, position)

    def _text(self) -> str:
        """Of all tokens so far."""
        return "".join(piece(self._token(position)) for position in range(self.position))


def _resumed_by_index(request: pb.GenerateRequest, n: int) -> dict[int, pb.ResumedChoice]:
    by_index = {resumed.index: resumed for resumed in request.resume}
    return {index: by_index.get(index, pb.ResumedChoice(index=index)) for index in range(n)}


def _prompt_ids(request: pb.GenerateRequest) -> list[int]:
    return list(request.token_ids.ids) or [ord(character) for character in request.text] or [1]


def _logprobs(token_id: int) -> pb.TokenLogprobs:
    own = pb.TokenLogprob(token_id=token_id, logprob=-token_id / 1024, rank=2, text=piece(token_id))
    best = pb.TokenLogprob(token_id=3, logprob=-0.001, rank=1, text=piece(3))
    return pb.TokenLogprobs(token=own, top=[best])


def _prompt_logprobs(request: pb.GenerateRequest) -> list[pb.TokenLogprobs]:
    first, *others = _prompt_ids(request)
    start = pb.TokenLogprobs(token=pb.TokenLogprob(token_id=first, text=piece(first)))
    return [start, *(_logprobs(token_id) for token_id in others)]


def _engine_status(uptime_s: float, group_id: str) -> engine_status_pb2.EngineStatus:
    group = engine_status_pb2.WorkerGroupStatus(
        group_id=group_id,
        state=engine_status_pb2.WORKER_STATE_READY,
        model=MODEL,
        address="unix:/worker",
        num_gpu_blocks=100,
        num_free_gpu_blocks=75,
        cache_groups=[
            engine_status_pb2.CacheGroupStatus(
                lifetime="growing",
                block_tokens=64,
                num_used_blocks=17,
                num_cached=20,
                num_queried_tokens=1000,
                num_found_tokens=640,
            ),
            engine_status_pb2.CacheGroupStatus(
                lifetime="state",
                num_state_blocks=4,
                num_used_blocks=8,
                num_cached=5,
                num_host_cached=3,
                num_queried_tokens=1000,
                num_found_tokens=512,
            ),
        ],
    )
    return engine_status_pb2.EngineStatus(
        uptime_s=uptime_s,
        version="1.2.3",
        models=[MODEL],
        num_running=2,
        num_finished=7,
        num_worker_losses=4,
        groups=[group],
        worker_losses=[
            engine_status_pb2.WorkerLoss(group_id=name, lost_at_s=uptime_s - age_s, model=MODEL)
            for name, age_s in (("old", 301), ("gone", 90), ("gone", 12), (group_id, 3))
        ],
    )


def _read(
    requests: Iterator[pb.GenerateManyRequest],
    arrived: "queue.SimpleQueue[pb.GenerateRequest | None]",
) -> None:
    try:
        for message in requests:
            arrived.put(message.request)
    except Exception:  # gRPC raises a bare Exception here when the call was cancelled.
        pass
    finally:
        arrived.put(None)


def _error(request_id: str, failure: Failure) -> pb.GenerateManyResponse:
    error = pb.RequestError(
        request_id=request_id,
        code=failure.code.value[0],
        message=failure.message,
        status=failure.status().SerializeToString(),
    )
    return pb.GenerateManyResponse(error=error)


def _packed(detail: Message) -> any_pb2.Any:
    packed = any_pb2.Any()
    packed.Pack(detail)
    return packed


def _abort(context: Any, failure: Failure) -> None:
    details = failure.status().SerializeToString()
    context.set_trailing_metadata((("grpc-status-details-bin", details),))
    context.abort(failure.code, failure.message)
