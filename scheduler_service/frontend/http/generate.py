"""What both ways to generate have in common: the request around its prompt, and its answers."""

from typing import Any

from pydantic import BaseModel

from pagewire.v1 import inference_service_pb2 as inference_pb
from pagewire.v1 import sampling_pb2
from scheduler_service.errors import InvalidArgument
from scheduler_service.frontend.http.openai.sampling import SamplingFields

HOLD_MS = 1000
"""Where the answer is sent as a whole, tokens may come to the frontend in fewer messages."""


def make_request(
    body: SamplingFields, params: sampling_pb2.SamplingParams
) -> inference_pb.GenerateRequest:
    """The request without its prompt. Raises InvalidArgument."""
    if body.stream_options is not None and not body.stream:
        raise InvalidArgument("stream_options", "expected stream beside it")
    request = inference_pb.GenerateRequest(sampling_params=params)
    if body.model is not None:
        request.model = body.model
    if body.priority is not None:
        request.priority = body.priority
    if not body.stream:
        request.max_hold_ms = HOLD_MS
    return request


def streamed_or_whole(answer: type[BaseModel], chunk: type[BaseModel] | None = None) -> Any:
    """How the OpenAPI document tells of an answer that is JSON, or chunks with `stream`."""
    told = (chunk or answer).__name__
    event_stream = {
        "schema": {
            "type": "string",
            "description": f"Server-sent events: `data:` and a {told} each, at last `[DONE]`.",
        }
    }
    return {
        200: {
            "model": answer,
            "description": "The answer; with `stream`, chunks as they come",
            "content": {"text/event-stream": event_stream},
        }
    }
