"""Bodies of OpenAI's API: requests and responses of chat completions and completions.

Requests are models, which validate. Responses are typed dictionaries: the endpoints build them, the
type checker compares both, and the OpenAPI document describes the same types.
"""

import json
from typing import Annotated, Any, Literal, NotRequired

from pydantic import BeforeValidator, Field
from pydantic_core import PydanticCustomError
from typing_extensions import TypedDict

from scheduler_service.frontend.http.openai.sampling import (
    MAX_UINT32,
    JsonObject,
    ListOf,
    SamplingFields,
    Strict,
    Text,
    TokenId,
    proto_range,
)

MAX_PROMPTS = 4096
"""Maximum number of prompts in one call."""
MAX_MESSAGES = 8192

TokenIds = Annotated[ListOf[TokenId], Field(min_length=1)]


def check_uniform(value: Any) -> Any:
    """The value, unless it is a list of several kinds of entries."""
    if isinstance(value, list) and len(set(map(type, value))) > 1:
        raise PydanticCustomError(
            "mixed", "expected a text, token ids, a list of texts, or a list of lists of token ids"
        )
    return value


Prompt = Annotated[
    Text
    | TokenIds
    | Annotated[ListOf[Text], Field(min_length=1, max_length=MAX_PROMPTS)]
    | Annotated[ListOf[TokenIds], Field(min_length=1, max_length=MAX_PROMPTS)],
    BeforeValidator(check_uniform),
]


class CompletionRequest(SamplingFields):
    """Prompts to continue as they are, without a chat template."""

    prompt: Prompt = Field(description="One or several, as texts or token ids.")
    max_tokens: int | None = Field(
        16,
        ge=-1,
        le=MAX_UINT32,
        description="Most output tokens; 0 only with `echo`; -1: as many as fit.",
    )
    best_of: Annotated[int, proto_range("best_of")] | None = Field(
        None, description="Candidates for the n best."
    )
    echo: bool | None = Field(None, description="Begin the text with the prompt.")
    logprobs: Annotated[int, proto_range("logprobs")] | None = Field(
        None, description="Log probabilities of this many most probable tokens."
    )
    add_special_tokens: bool | None = Field(
        None, description="False if texts contain the model's special tokens already."
    )


class AnswerHead(TypedDict):
    """The fields that every answer and every chunk has."""

    id: str
    created: int
    model: str


class LegacyLogprobsBody(TypedDict):
    """Parallel lists over the tokens."""

    text_offset: list[int]
    token_logprobs: list[float | None]
    tokens: list[str]
    top_logprobs: list[dict[str, float] | None]


class PromptLogprob(TypedDict):
    """One token at one position of the prompt."""

    logprob: float
    rank: int
    decoded_token: str


PromptLogprobsBody = list[dict[str, PromptLogprob] | None]


class PromptTokensDetails(TypedDict):
    """Details of the prompt's tokens."""

    cached_tokens: Annotated[int, Field(description="Found in the prefix cache.")]


class CompletionTokensDetails(TypedDict, total=False):
    """Details of the output's tokens: the reasoning in chats, and the drafts of speculative
    decoding that were computed, if there were any."""

    reasoning_tokens: Annotated[int, Field(description="The model's reasoning.")]
    accepted_prediction_tokens: Annotated[int, Field(description="Drafts that became output.")]
    rejected_prediction_tokens: Annotated[
        int, Field(description="The other drafts, which `completion_tokens` does not count.")
    ]


class UsageBody(TypedDict):
    """Counts of tokens."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    completion_tokens_details: NotRequired[CompletionTokensDetails]


Timings = Annotated[
    list[dict[str, int]],
    Field(description="With `return_timings`: of each prompt, microseconds by what took them."),
]


class UsageFields(TypedDict, total=False):
    """The usage, of a chunk null or the usage so far if it was requested, and the timings, of a
    stream in its last chunk."""

    usage: UsageBody | None
    timings: Timings


class PromptFields(TypedDict, total=False):
    """The requested fields of the prompt of a chat."""

    prompt_logprobs: PromptLogprobsBody
    prompt_token_ids: list[int]


class CompletionChoice(TypedDict):
    """One continuation."""

    index: int
    text: str
    logprobs: LegacyLogprobsBody | None
    finish_reason: Literal["stop", "length"] | None
    stop_reason: Annotated[
        int | str | None, Field(description="The stop token or string that ended it.")
    ]
    prompt_logprobs: NotRequired[PromptLogprobsBody | None]
    prompt_token_ids: NotRequired[list[int] | None]
    token_ids: NotRequired[list[int] | None]


class Completion(AnswerHead, UsageFields):
    """The answer, or a chunk of a stream."""

    object: Literal["text_completion"]
    choices: list[CompletionChoice]


class TextPart(Strict):
    """A part of a turn's content."""

    type: Literal["text"]
    text: str


def refusal_as_text(part: Any) -> Any:
    """A part of an earlier answer that refuses, as the text that the model sees."""
    if isinstance(part, dict) and part.get("type") == "refusal":
        others = {name: value for name, value in part.items() if name != "refusal"}
        return others | {"type": "text", "text": part.get("refusal")}
    return part


def _as_text_part(part: Any) -> Any:
    """A text part that is a text alone, or has its name at `/v1/responses`, as vLLM allows."""
    if isinstance(part, str):
        return {"type": "text", "text": part}
    if isinstance(part, dict) and part.get("type") in ("input_text", "output_text"):
        return part | {"type": "text"}
    return refusal_as_text(part)


def _as_json_text(value: Any) -> Any:
    """Arguments as JSON text, where they are the object that templates see."""
    return json.dumps(value, ensure_ascii=False) if isinstance(value, dict) else value


class FunctionCall(Strict):
    """A function and its arguments, as JSON text or the object itself."""

    name: Text
    arguments: Annotated[str, BeforeValidator(_as_json_text)] = ""


class ToolCallBody(Strict):
    """A call that the model made."""

    id: str = Field("", description="A call without one has none in the template.")
    type: Literal["function"] = "function"
    function: FunctionCall


class ChatMessageBody(Strict):
    """One turn. Fields of an answer may be sent back, even if they are ignored."""

    role: Text = Field(description="`developer` is `system` to the model.")
    content: str | ListOf[Annotated[TextPart, BeforeValidator(_as_text_part)]] | None = None
    name: str | None = None
    tool_calls: ListOf[ToolCallBody] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = Field(None, description="The same by another name.")


class FunctionBody(Strict):
    """A function that the model may call."""

    name: Text
    description: str | None = None
    parameters: JsonObject | None = Field(None, description="JSON schema.")
    strict: bool | None = Field(
        None,
        description="Required calls always follow the schema. `false`: its objects may have "
        "properties that it does not name; else only where it says so.",
    )


class ToolBody(Strict):
    """A tool; functions are the only ones."""

    type: Literal["function"]
    function: FunctionBody


class NamedFunction(Strict):
    """A function, by its name."""

    name: Text


class NamedToolChoice(Strict):
    """The function that must be called."""

    type: Literal["function"]
    function: NamedFunction


ReasoningEffort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]


class ChatPrompt(Strict):
    """A conversation, and how the model's chat template renders it."""

    messages: Annotated[ListOf[ChatMessageBody], Field(min_length=1, max_length=MAX_MESSAGES)]
    tools: ListOf[ToolBody] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: JsonObject | None = Field(
        None, description="Further variables for the template."
    )
    documents: ListOf[JsonObject] | None = Field(
        None, description="The template's variable of this name."
    )
    reasoning_effort: ReasoningEffort | None = Field(
        None, description="The template's variable of this name; `none`: no thinking."
    )
    add_special_tokens: Literal[False] | None = Field(
        None, description="Special tokens are the ones that the template writes."
    )


class ChatRequest(ChatPrompt, SamplingFields):
    """A conversation to answer."""

    max_completion_tokens: int | None = Field(
        None, ge=1, le=MAX_UINT32, description="Most output tokens; as many as fit if absent."
    )
    max_tokens: int | None = Field(
        None, ge=-1, le=MAX_UINT32, description="The same by its former name; -1: absent."
    )
    logprobs: bool | None = None
    top_logprobs: Annotated[int, proto_range("logprobs")] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedToolChoice | None = None
    parallel_tool_calls: bool | None = Field(None, description="False: one call at most.")
    include_reasoning: bool | None = Field(
        None, description="False: the answer does not contain the model's reasoning."
    )


class TopLogprob(TypedDict):
    """One candidate token at a position."""

    token: str
    logprob: float
    bytes: list[int] | None


class TokenLogprobBody(TopLogprob):
    """The chosen token at a position."""

    top_logprobs: list[TopLogprob]


class ChatLogprobsBody(TypedDict):
    """Log probabilities of a choice's tokens."""

    content: list[TokenLogprobBody]
    refusal: None


class AnswerFunction(TypedDict):
    """A function and its arguments, as JSON text."""

    name: str
    arguments: str


class AnswerToolCall(TypedDict):
    """A call that the model makes."""

    id: str
    type: Literal["function"]
    function: AnswerFunction


class AnswerMessage(TypedDict):
    """The message that the model writes."""

    role: Literal["assistant"]
    content: str | None
    refusal: None
    reasoning_content: NotRequired[str]
    reasoning: NotRequired[Annotated[str, Field(description="The same by another name.")]]
    tool_calls: NotRequired[list[AnswerToolCall]]


FinishReason = Literal["stop", "length", "tool_calls"]


class ChatChoice(TypedDict):
    """One answer."""

    index: int
    message: AnswerMessage
    logprobs: ChatLogprobsBody | None
    finish_reason: FinishReason | None
    stop_reason: int | str | None
    token_ids: NotRequired[list[int]]


class ChatCompletion(AnswerHead, PromptFields):
    """The whole answer."""

    object: Literal["chat.completion"]
    choices: list[ChatChoice]
    usage: UsageBody
    timings: NotRequired[Timings]


class FunctionDelta(TypedDict):
    """The next part of a call: its name comes once, its arguments in pieces."""

    name: NotRequired[str]
    arguments: NotRequired[str]


class ToolCallDelta(TypedDict):
    """The next part of the call with this index."""

    index: int
    id: NotRequired[str]
    type: NotRequired[Literal["function"]]
    function: FunctionDelta


class Delta(TypedDict):
    """The new part of a message."""

    role: NotRequired[Literal["assistant"]]
    content: NotRequired[str]
    reasoning_content: NotRequired[str]
    reasoning: NotRequired[str]
    tool_calls: NotRequired[list[ToolCallDelta]]


class ChoiceFields(TypedDict, total=False):
    """The fields of a choice besides its text: its end, and what was requested of its tokens."""

    logprobs: ChatLogprobsBody | None
    token_ids: list[int]
    finish_reason: FinishReason | None
    stop_reason: int | str | None


class ChunkChoice(TypedDict):
    """The new part of one choice."""

    index: int
    delta: Delta
    logprobs: ChatLogprobsBody | None
    finish_reason: FinishReason | None
    stop_reason: NotRequired[int | str | None]
    token_ids: NotRequired[list[int]]


class ChatCompletionChunk(AnswerHead, UsageFields, PromptFields):
    """One chunk of a stream."""

    object: Literal["chat.completion.chunk"]
    choices: list[ChunkChoice]
