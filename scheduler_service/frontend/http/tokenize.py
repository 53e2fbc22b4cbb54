"""`/tokenize`, `/detokenize`, `/tokenizer_info` and `/version`, as in vLLM."""

from typing import Annotated, Any

from fastapi import APIRouter, Depends, Request, Response
from pydantic import BaseModel, Field
from pydantic_core import to_json
from typing_extensions import TypedDict

from pagewire.v1 import inference_service_pb2 as inference_pb
from scheduler_service.errors import InvalidArgument
from scheduler_service.frontend.http.errors import ERROR_RESPONSES
from scheduler_service.frontend.http.middleware import Caller, Services
from scheduler_service.frontend.http.openai.protocol import ChatPrompt
from scheduler_service.frontend.http.openai.sampling import ListOf, Strict, TokenId
from scheduler_service.frontend.http.openai.serving_chat import chat_of
from scheduler_service.frontend.http.request_body import convert, describe_body, json_body
from scheduler_service.frontend.input import processor
from service_common.version import VERSION


class TokenizeText(Strict):
    """A text."""

    model: str | None = None
    prompt: str
    add_special_tokens: bool = True
    return_token_strs: bool | None = None


class TokenizeChat(ChatPrompt):
    """A conversation, by the model's chat template."""

    model: str | None = None
    return_token_strs: bool | None = None


class Tokens(TypedDict):
    """Token ids, and their entries in the vocabulary if those were requested."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None


class DetokenizeBody(Strict):
    """Token ids."""

    model: str | None = None
    tokens: ListOf[TokenId]
    skip_special_tokens: bool = Field(False, description="Leave special tokens out, as in answers.")


class Detokenized(BaseModel):
    """The text of the tokens."""

    prompt: str


class Version(BaseModel):
    """The version of the frontend."""

    version: str


TokenizeAny = Annotated[
    TokenizeText | TokenizeChat, Depends(json_body(TokenizeText | TokenizeChat))
]
DetokenizeIds = Annotated[DetokenizeBody, Depends(json_body(DetokenizeBody))]

router = APIRouter(tags=["Tokens"])


@router.post(
    "/tokenize",
    summary="Text to token ids",
    responses=ERROR_RESPONSES | {200: {"model": Tokens}},
    response_model=None,
    openapi_extra=describe_body(TokenizeText, TokenizeChat),
)
async def tokenize(
    body: TokenizeAny, http_request: Request, services: Services, caller: Caller
) -> Response:
    """Tokenize a text, or a conversation rendered with the model's chat template."""
    request = await convert(http_request, lambda: _tokenize_request(body))
    model = services.models.current(body.model, caller)
    answer = await processor.tokenize(request, model)
    tokens: Tokens = {
        "count": len(answer.token_ids),
        "max_model_len": answer.max_model_len,
        "tokens": list(answer.token_ids),
        "token_strs": list(answer.tokens) if body.return_token_strs else None,
    }
    return Response(to_json(tokens), media_type="application/json")


@router.post(
    "/detokenize",
    summary="Token ids to text",
    responses=ERROR_RESPONSES,
    response_model=Detokenized,
    openapi_extra=describe_body(DetokenizeBody),
)
async def detokenize(
    body: DetokenizeIds, http_request: Request, services: Services, caller: Caller
) -> dict[str, str]:
    """Bytes that do not form a whole character become U+FFFD."""
    skips = body.skip_special_tokens
    request = await convert(
        http_request,
        lambda: inference_pb.DetokenizeRequest(token_ids=body.tokens, skip_special_tokens=skips),
    )
    model = services.models.current(body.model, caller)
    try:
        answer = await processor.detokenize(request, model)
    except InvalidArgument as error:
        field = error.field.replace("token_ids", "tokens")
        raise InvalidArgument(field, error.expected) from None
    return {"prompt": answer.text}


@router.get(
    "/tokenizer_info",
    summary="The tokenizer's configuration",
    responses=ERROR_RESPONSES,
    response_model=dict[str, Any],
)
async def tokenizer_info(
    services: Services, caller: Caller, model: str | None = None
) -> dict[str, Any]:
    """The model's tokenizer_config.json, with the chat template in effect."""
    tokenizer = services.models.current(model, caller).require_tokenizer("/tokenizer_info")
    return {**tokenizer.config, "chat_template": tokenizer.tool_template_source}


@router.get("/version", summary="Version", responses=ERROR_RESPONSES, response_model=Version)
async def version(caller: Caller) -> dict[str, str]:
    """The version of this software."""
    return {"version": VERSION}


def _tokenize_request(body: TokenizeText | TokenizeChat) -> inference_pb.TokenizeRequest:
    """The request that a gRPC client would send."""
    if isinstance(body, TokenizeChat):
        return inference_pb.TokenizeRequest(chat=chat_of(body))
    return inference_pb.TokenizeRequest(
        text=body.prompt, add_special_tokens=body.add_special_tokens
    )
