"""`/v1/completions`: prompts continued as they are."""

from collections.abc import Sequence
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from pagewire.v1 import inference_service_pb2 as inference_pb
from pagewire.v1 import sampling_pb2
from scheduler_service.errors import InvalidArgument
from scheduler_service.frontend.authentication import Tenant
from scheduler_service.frontend.http.callers import Caller
from scheduler_service.frontend.http.completion_schema import Completion, CompletionRequest
from scheduler_service.frontend.http.errors import ERROR_RESPONSES
from scheduler_service.frontend.http.generate import make_request, streamed_or_whole
from scheduler_service.frontend.http.openai.serving import Answer, request_id_of
from scheduler_service.frontend.http.openai.serving_completion import CompletionForm
from scheduler_service.frontend.http.sampling import constraint_field, sampling_params
from scheduler_service.frontend.http.services import HttpServices
from scheduler_service.frontend.public_options import MAX_PUBLIC_MESSAGE_BYTES

PromptValue = str | Sequence[int]

MAX_PROMPTS = 4096
"""Of one call: as many requests as a frontend may have open, unless it is told otherwise."""
MAX_CHOICES = 16_384
"""Of all of them together."""


def make_router(services: HttpServices) -> APIRouter:
    """The endpoint."""
    router = APIRouter(tags=["OpenAI"])

    @router.post(
        "/v1/completions",
        summary="Continue prompts",
        responses=ERROR_RESPONSES | streamed_or_whole(Completion),
        response_model=None,
    )
    async def create(body: CompletionRequest, http_request: Request, caller: Caller) -> Response:
        """Texts or token ids as they are, one or several. With `echo` and `logprobs` it tells how
        likely the prompts are, as evaluation harnesses ask."""
        request_id = request_id_of(http_request, body)
        prompts = _prompts(body)
        requests = generate_requests(body, prompts)
        form = CompletionForm(body, request_id, len(prompts), _prompt_text(services, body, caller))
        return Answer(
            services,
            requests,
            form,
            tenant=caller,
            request_id=request_id,
            stream=bool(body.stream),
            constraint_field=constraint_field(body),
        )

    return router


def generate_requests(
    body: CompletionRequest, prompts: Sequence[PromptValue]
) -> list[inference_pb.GenerateRequest]:
    """What a gRPC client would send, one request per prompt. Raises InvalidArgument."""
    common = make_request(body, completion_params(body))
    _check_room(len(prompts), common)
    requests = []
    for prompt in prompts:
        request = inference_pb.GenerateRequest()
        request.CopyFrom(common)
        if isinstance(prompt, str):
            request.text = prompt
            if body.add_special_tokens is not None:
                request.add_special_tokens = body.add_special_tokens
        else:
            request.token_ids.ids.extend(prompt)
        requests.append(request)
    return requests


def _check_room(num_prompts: int, common: inference_pb.GenerateRequest) -> None:
    """Each prompt's request has all that they have in common, so a short body could take up much
    memory. Raises InvalidArgument."""
    params, size = common.sampling_params, max(1, common.ByteSize())
    num_choices = max(1, params.n, params.best_of, params.beam_search.width)
    most = min(MAX_PROMPTS, MAX_CHOICES // num_choices, MAX_PUBLIC_MESSAGE_BYTES // size)
    if num_prompts > max(1, most):
        raise InvalidArgument(
            "prompt",
            f"expected at most {max(1, most)} prompts, where each has {num_choices} choices and "
            f"{size} bytes of parameters",
        )


def completion_params(body: CompletionRequest) -> sampling_pb2.SamplingParams:
    """The sampling parameters. A prompt's log probabilities alone still take one token, as a
    request without output is none; it is dropped. Raises InvalidArgument."""
    params = sampling_params(body)
    if body.max_tokens == 0 and not body.echo:
        raise InvalidArgument("max_tokens", "expected at least 1 without echo")
    if body.max_tokens is not None:
        params.max_tokens = max(body.max_tokens, 1)
    if body.best_of is not None and body.use_beam_search:
        params.beam_search.width = body.best_of
    elif body.best_of is not None:
        params.best_of = body.best_of
    if body.logprobs is not None:
        params.logprobs = body.logprobs
        if body.echo:
            params.prompt_logprobs = max(body.logprobs, params.prompt_logprobs)
    return params


def _prompts(body: CompletionRequest) -> list[PromptValue]:
    """As a list, however many there are."""
    prompt: Any = body.prompt
    if isinstance(prompt, str) or isinstance(prompt[0], int):
        return [prompt]
    return list(prompt)


def _prompt_text(services: HttpServices, body: CompletionRequest, tenant: Tenant) -> Any:
    prompts = _prompts(body)

    def text_of(index: int, started: inference_pb.Started) -> str:
        """The prompt as the client wrote it, or as the tokens taken of it read."""
        prompt = prompts[index]
        if isinstance(prompt, str) and body.truncate_prompt_tokens is None:
            return prompt
        tokenizer = services.models.current(started.model, tenant).tokenizer
        if tokenizer is None:
            return ""
        skips = body.skip_special_tokens is not False
        return tokenizer.decode(started.prompt_token_ids, skip_special_tokens=skips)

    return text_of
