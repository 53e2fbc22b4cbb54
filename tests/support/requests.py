"""Requests and answers without the client library: plain stubs and messages."""

from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field

import grpc
from google.protobuf.message import Message
from google.rpc import error_details_pb2
from grpc_status import rpc_status

from pagewire.v1 import inference_service_pb2 as pb
from pagewire.v1 import inference_service_pb2_grpc as services
from pagewire.v1 import sampling_pb2


@dataclass
class Choice:
    """One choice of an answer, folded from its deltas."""

    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[pb.TokenLogprobs] = field(default_factory=list)
    finish_reason: int = pb.FINISH_REASON_UNSPECIFIED


@dataclass
class Answer:
    """A whole answer, folded from a stream."""

    choices: dict[int, Choice] = field(default_factory=dict)
    started: pb.Started | None = None
    prompt_logprobs: list[pb.TokenLogprobs] = field(default_factory=list)
    usage: pb.Usage | None = None
    timings: pb.Timings | None = None
    num_responses: int = 0

    def add(self, response: pb.GenerateResponse) -> None:
        self.num_responses += 1
        if response.HasField("started"):
            self.started = response.started
        self.prompt_logprobs.extend(response.prompt_logprobs)
        for delta in response.choices:
            choice = self.choices.setdefault(delta.index, Choice())
            choice.text += delta.text
            choice.token_ids.extend(delta.token_ids)
            choice.logprobs.extend(delta.logprobs)
            choice.finish_reason = delta.finish_reason or choice.finish_reason
        if response.HasField("usage"):
            self.usage, self.timings = response.usage, response.timings

    @property
    def token_ids(self) -> list[int]:
        return self.choices[0].token_ids

    @property
    def text(self) -> str:
        return self.choices[0].text


@contextmanager
def inference_stub(address: str) -> Iterator[services.InferenceServiceStub]:
    """A stub on a channel of its own."""
    with grpc.insecure_channel(address) as channel:
        yield services.InferenceServiceStub(channel)


def request_for(
    prompt: str | Sequence[int], *, request_id: str | None = None, **sampling: object
) -> pb.GenerateRequest:
    """A request for a text or for token ids, with `SamplingParams` fields as keywords."""
    params = sampling_pb2.SamplingParams(**sampling)  # type: ignore[arg-type]
    request = pb.GenerateRequest(sampling_params=params)
    if isinstance(prompt, str):
        request.text = prompt
    else:
        request.token_ids.ids.extend(prompt)
    if request_id is not None:
        request.request_id = request_id
    return request


def fold(responses: Iterable[pb.GenerateResponse]) -> Answer:
    """The whole answer of a stream."""
    answer = Answer()
    for response in responses:
        answer.add(response)
    return answer


def generate(
    stub: services.InferenceServiceStub, request: pb.GenerateRequest, timeout_s: float = 60
) -> Answer:
    """Run one request to its end."""
    return fold(stub.Generate(request, timeout=timeout_s))


def generate_together(
    stub: services.InferenceServiceStub, requests: Sequence[pb.GenerateRequest]
) -> list[Answer]:
    """Run requests at the same time; answers in their order."""
    streams = [stub.Generate(request, timeout=120) for request in requests]
    with ThreadPoolExecutor(len(streams)) as pool:
        return list(pool.map(fold, streams))


def detail(error: grpc.RpcError, kind: type[Message]) -> Message | None:
    """The error's `google.rpc` detail of a kind, if it carries one."""
    status = rpc_status.from_call(error)
    for packed in status.details if status else ():
        message = kind()
        if packed.Unpack(message):
            return message
    return None


def bad_field(error: grpc.RpcError) -> str | None:
    """The field that a `BadRequest` names."""
    message = detail(error, error_details_pb2.BadRequest)
    return message.field_violations[0].field if message else None  # type: ignore[attr-defined]


def reason(error: grpc.RpcError) -> str | None:
    """The reason that an `ErrorInfo` gives."""
    message = detail(error, error_details_pb2.ErrorInfo)
    return message.reason if message else None  # type: ignore[attr-defined]
