"""The messages that the clients send, from what callers say."""

import uuid
from collections.abc import Sequence

from pagewire.v1 import inference_service_pb2 as pb
from pagewire.v1.status_pb2 import StatusDetail
from pagewire_client.prompts import Messages, Prompt, chat_proto, fill_prompt
from pagewire_client.sampling_params import SamplingParams

MAX_HOLD_MS = 1000
"""How long the tokens of requests that are answered as a whole may wait on their way, to come in
fewer messages. The end of an answer does not wait, unless several steps are told of at once: up to
100 ms of them."""


def generate_request(
    prompt: Prompt,
    sampling_params: SamplingParams | None = None,
    *,
    model: str | None = None,
    request_id: str | None = None,
    priority: int = 0,
    is_whole: bool = False,
) -> pb.GenerateRequest:
    """One request. It always gets an id, so that it can be continued elsewhere.

    `is_whole`: nobody looks at the answer before its end.
    """
    request = pb.GenerateRequest(
        request_id=request_id or uuid.uuid4().hex,
        model=model,
        sampling_params=(sampling_params or SamplingParams()).to_proto(),
    )
    if priority:
        request.priority = priority
    if is_whole:
        request.max_hold_ms = MAX_HOLD_MS
    fill_prompt(request, prompt)
    return request


def generate_requests(
    prompts: Sequence[Prompt],
    sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
    *,
    model: str | None = None,
    priority: int = 0,
) -> list[pb.GenerateRequest]:
    """One request per prompt, to be answered as a whole; `sampling_params` for all, or one for
    each."""
    if sampling_params is None or isinstance(sampling_params, SamplingParams):
        params: Sequence[SamplingParams | None] = [sampling_params] * len(prompts)
    else:
        params = sampling_params
    if len(params) != len(prompts):
        raise ValueError(f"{len(prompts)} prompts need as many sampling_params, not {len(params)}")
    return [
        generate_request(prompt, prompt_params, model=model, priority=priority, is_whole=True)
        for prompt, prompt_params in zip(prompts, params, strict=True)
    ]


def tokenize_request(
    text: str | Messages, *, model: str | None, add_special_tokens: bool
) -> pb.TokenizeRequest:
    """Asks for the token ids of a text or a conversation."""
    request = pb.TokenizeRequest(model=model, add_special_tokens=add_special_tokens)
    if isinstance(text, str):
        request.text = text
    else:
        request.chat.CopyFrom(chat_proto(text))
    return request


def detokenize_request(
    token_ids: Sequence[int], *, model: str | None, skip_special_tokens: bool
) -> pb.DetokenizeRequest:
    """Asks for the text of token ids."""
    return pb.DetokenizeRequest(
        model=model, token_ids=token_ids, skip_special_tokens=skip_special_tokens
    )


def watch_request(interval_s: float, detail: StatusDetail | None) -> pb.WatchStatusRequest:
    """Asks for a snapshot every `interval_s` seconds."""
    return pb.WatchStatusRequest(interval_ms=round(interval_s * 1000), detail=detail)
