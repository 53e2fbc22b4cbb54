"""`/v1/chat/completions`: conversations answered, with tools where there are some."""

from fastapi import APIRouter, Request
from starlette.responses import Response

from pagewire.v1 import inference_service_pb2 as inference_pb
from pagewire.v1 import sampling_pb2
from scheduler_service.errors import InvalidArgument
from scheduler_service.frontend.authentication import Tenant
from scheduler_service.frontend.http.callers import Caller
from scheduler_service.frontend.http.chat_prompt import chat_of
from scheduler_service.frontend.http.errors import ERROR_RESPONSES
from scheduler_service.frontend.http.generate import make_request, streamed_or_whole
from scheduler_service.frontend.http.openai.protocol import (
    ChatCompletion,
    ChatCompletionChunk,
    ChatRequest,
)
from scheduler_service.frontend.http.openai.serving import Answer, request_id_of
from scheduler_service.frontend.http.openai.serving_chat import ChatForm
from scheduler_service.frontend.http.sampling import constraint_field, sampling_params
from scheduler_service.frontend.http.services import HttpServices
from scheduler_service.frontend.http.tool_choice import ToolPlan, plan_tools
from scheduler_service.frontend.http.tool_parsers.formats import ToolCallFormat, detect_format


def make_router(services: HttpServices) -> APIRouter:
    """The endpoint."""
    router = APIRouter(tags=["OpenAI"])

    def format_of(name: str | None, tenant: Tenant) -> ToolCallFormat:
        tokenizer = services.models.current(name, tenant).tokenizer
        return detect_format(tokenizer.tool_template_source if tokenizer is not None else None)

    @router.post(
        "/v1/chat/completions",
        summary="Answer a conversation",
        responses=ERROR_RESPONSES | streamed_or_whole(ChatCompletion, ChatCompletionChunk),
        response_model=None,
    )
    async def create(body: ChatRequest, http_request: Request, caller: Caller) -> Response:
        """A conversation, by the model's chat template."""
        request_id = request_id_of(http_request, body)
        plan = plan_tools(body, lambda: format_of(body.model, caller))
        return Answer(
            services,
            [generate_request(body, plan)],
            ChatForm(body, request_id, plan),
            tenant=caller,
            request_id=request_id,
            stream=bool(body.stream),
            constraint_field="tools" if plan.json_schema else constraint_field(body),
        )

    return router


def generate_request(body: ChatRequest, plan: ToolPlan) -> inference_pb.GenerateRequest:
    """What a gRPC client would send for the same. Raises InvalidArgument."""
    request = make_request(body, chat_params(body, plan))
    request.chat.CopyFrom(chat_of(body, with_tools=plan.shows_tools))
    return request


def chat_params(body: ChatRequest, plan: ToolPlan) -> sampling_pb2.SamplingParams:
    """The sampling parameters. Raises InvalidArgument."""
    params = sampling_params(body)
    max_tokens = body.max_completion_tokens or body.max_tokens
    if max_tokens is not None:
        params.max_tokens = max_tokens
    if body.logprobs:
        params.logprobs = body.top_logprobs or 0
    elif body.top_logprobs:
        raise InvalidArgument("top_logprobs", "expected logprobs beside it")
    if plan.json_schema is not None:
        kind = params.WhichOneof("structured_output")
        if kind is not None:
            raise InvalidArgument("tool_choice", "expected no other constraint on the output")
        params.json_schema = plan.json_schema
    if plan.keeps_special_tokens and body.skip_special_tokens is None:
        params.skip_special_tokens = False
    return params
