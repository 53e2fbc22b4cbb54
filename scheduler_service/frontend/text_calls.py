"""Text to token ids and back, as a call of its own: the same for gRPC and HTTP."""

import asyncio
from collections.abc import Callable
from typing import Any, TypeVar

from pagewire.v1 import inference_service_pb2 as inference_pb
from scheduler_service.errors import InvalidArgument
from scheduler_service.frontend.input import validation
from scheduler_service.frontend.input.prompt import chat_tokens, check_chat
from scheduler_service.frontend.request_manager import INLINE_BYTES
from scheduler_service.frontend.served_models import ServedModel

R = TypeVar("R")


async def tokenize(
    request: inference_pb.TokenizeRequest, model: ServedModel
) -> inference_pb.TokenizeResponse:
    """Token ids of a text or a chat. Raises InvalidArgument and UnsupportedByModel."""
    kind = request.WhichOneof("input")
    if kind is None:
        raise InvalidArgument("input", "expected one of text and chat")
    if kind == "chat":
        check_chat(request.chat)
    return await _off_the_loop(request, _tokenize, model)


async def detokenize(
    request: inference_pb.DetokenizeRequest, model: ServedModel
) -> inference_pb.DetokenizeResponse:
    """Text of token ids. Raises InvalidArgument and UnsupportedByModel."""
    validation.check_token_ids("token_ids", request.token_ids, model.info.vocab_size)
    return await _off_the_loop(request, _detokenize, model)


async def _off_the_loop(request: Any, work: Callable[..., R], model: ServedModel) -> R:
    """`work(request, model)`, in a thread when the request is long."""
    if request.ByteSize() <= INLINE_BYTES:
        return work(request, model)
    return await asyncio.to_thread(work, request, model)


def _tokenize(
    request: inference_pb.TokenizeRequest, model: ServedModel
) -> inference_pb.TokenizeResponse:
    tokenizer = model.require_tokenizer("Tokenize")
    if request.HasField("chat"):
        token_ids = chat_tokens(request.chat, model)
    else:
        special = request.add_special_tokens if request.HasField("add_special_tokens") else True
        token_ids = tokenizer.encode(request.text, add_special_tokens=special)
    return inference_pb.TokenizeResponse(
        token_ids=token_ids,
        tokens=[tokenizer.token_name(token_id) for token_id in token_ids],
        max_model_len=model.info.max_model_len,
    )


def _detokenize(
    request: inference_pb.DetokenizeRequest, model: ServedModel
) -> inference_pb.DetokenizeResponse:
    tokenizer = model.require_tokenizer("Detokenize")
    skip = request.skip_special_tokens if request.HasField("skip_special_tokens") else True
    text = tokenizer.decode(request.token_ids, skip_special_tokens=skip)
    return inference_pb.DetokenizeResponse(text=text)
