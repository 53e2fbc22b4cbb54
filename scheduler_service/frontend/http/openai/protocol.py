"""Bodies of OpenAI's API: requests and responses of chat completions and completions."""

from typing import Annotated, Literal

from pydantic import BaseModel, Field

from scheduler_service.frontend.http.openai.sampling import (
    MAX_UINT32,
    JsonList,
    JsonObject,
    ListOf,
    SamplingFields,
    Strict,
    Text,
    TokenId,
)

MAX_PROMPTS = 4096
"""In one call."""
MAX_MESSAGES = 8192

TokenIds = Annotated[ListOf[TokenId], Field(min_length=1)]
Prompt = (
    Text
    | TokenIds
    | Annotated[ListOf[Text], Field(min_length=1, max_length=MAX_PROMPTS)]
    | Annotated[ListOf[TokenIds], Field(min_length=1, max_length=MAX_PROMPTS)]
)


class CompletionRequest(SamplingFields):
    """Prompts to continue as they are, without a chat template."""

    prompt: Prompt = Field(description="One or several, as texts or token ids.")
    max_tokens: int | None = Field(
        16, ge=0, le=MAX_UINT32, description="Most output tokens; 0 only with `echo`."
    )
    best_of: int | None = Field(None, ge=1, le=128, description="Candidates for the n best.")
    echo: bool | None = Field(None, description="Begin the text with the prompt.")
    logprobs: int | None = Field(
        None, ge=0, le=20, description="Log probabilities of this many most probable tokens."
    )
    suffix: None = Field(None, description="Text is not inserted, only continued.")
    add_special_tokens: bool | None = Field(
        None, description="False if texts contain the model's special tokens already."
    )


class LegacyLogprobsBody(BaseModel):
    """Parallel lists over the tokens."""

    text_offset: list[int]
    token_logprobs: list[float | None]
    tokens: list[str]
    top_logprobs: list[dict[str, float] | None]


class PromptLogprob(BaseModel):
    """One token at one position of the prompt."""

    logprob: float
    rank: int
    decoded_token: str


PromptLogprobsBody = list[dict[str, PromptLogprob] | None]


class PromptTokensDetails(BaseModel):
    """Of the prompt's tokens."""

    cached_tokens: int = Field(description="Found in the prefix cache.")


class UsageBody(BaseModel):
    """Counts of tokens."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails


class CompletionChoice(BaseModel):
    """One continuation."""

    index: int
    text: str
    logprobs: LegacyLogprobsBody | None
    finish_reason: Literal["stop", "length"] | None
    stop_reason: int | str | None = Field(description="The stop token or string that ended it.")
    prompt_logprobs: PromptLogprobsBody | None = None
    prompt_token_ids: list[int] | None = None
    token_ids: list[int] | None = None


class Completion(BaseModel):
    """The answer, or a chunk of a stream."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: UsageBody | None = None


class TextPart(Strict):
    """A part of a turn's content."""

    type: Literal["text"]
    text: str


class FunctionCall(Strict):
    """A function and its arguments, as JSON text."""

    name: Text
    arguments: str


class ToolCallBody(Strict):
    """A call that the model made."""

    id: str
    type: Literal["function"] = "function"
    function: FunctionCall
    index: int | None = Field(None, description="Ignored: calls are in their order.")


class ChatMessageBody(Strict):
    """One turn. Fields of an answer may be sent back, even if they are ignored."""

    role: Text = Field(description="`developer` is `system` to the model.")
    content: str | ListOf[TextPart] | None = None
    name: str | None = None
    tool_calls: ListOf[ToolCallBody] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = Field(None, description="The same by another name.")
    refusal: str | None = Field(None, description="Ignored.")
    annotations: JsonList | None = Field(None, description="Ignored.")
    audio: None = None
    function_call: None = None


class FunctionBody(Strict):
    """A function that the model may call."""

    name: Text
    description: str | None = None
    parameters: JsonObject | None = Field(None, description="JSON schema.")
    strict: bool | None = Field(None, description="Required calls are always in the schema.")


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
    reasoning_effort: str | None = Field(None, description="The template's variable of this name.")
    add_special_tokens: Literal[False] | None = Field(
        None, description="Special tokens are the ones that the template writes."
    )


class ChatRequest(ChatPrompt, SamplingFields):
    """A conversation to answer."""

    max_completion_tokens: int | None = Field(
        None, ge=1, le=MAX_UINT32, description="Most output tokens; as many as fit if absent."
    )
    max_tokens: int | None = Field(
        None, ge=1, le=MAX_UINT32, description="The same by its former name."
    )
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=20)
    tool_choice: Literal["none", "auto", "required"] | NamedToolChoice | None = None
    parallel_tool_calls: bool | None = Field(None, description="False: one call at most.")
    echo: Literal[False] | None = Field(None, description="Answers never contain the conversation.")
    modalities: ListOf[Literal["text"]] | None = None
    verbosity: str | None = Field(None, description="Ignored.")
    include_reasoning: bool | None = Field(
        None, description="Ignored: a model's reasoning is part of its text."
    )
    functions: None = Field(None, description="Use `tools`.")
    function_call: None = Field(None, description="Use `tool_choice`.")
    audio: None = None
    prediction: None = None
    web_search_options: None = None
    moderation: None = None


class TopLogprob(BaseModel):
    """One candidate token at a position."""

    token: str
    logprob: float
    bytes: list[int] | None


class TokenLogprobBody(TopLogprob):
    """The chosen token at a position."""

    top_logprobs: list[TopLogprob]


class ChatLogprobsBody(BaseModel):
    """Log probabilities of a choice's tokens."""

    content: list[TokenLogprobBody]
    refusal: None


class AnswerToolCall(BaseModel):
    """A call that the model makes."""

    id: str
    type: Literal["function"]
    function: FunctionCall


class AnswerMessage(BaseModel):
    """The message that the model writes."""

    role: Literal["assistant"]
    content: str | None
    refusal: None
    tool_calls: list[AnswerToolCall] | None = None


FinishReason = Literal["stop", "length", "tool_calls"]


class ChatChoice(BaseModel):
    """One answer."""

    index: int
    message: AnswerMessage
    logprobs: ChatLogprobsBody | None
    finish_reason: FinishReason
    stop_reason: int | str | None
    token_ids: list[int] | None = None


class ChatCompletion(BaseModel):
    """The whole answer."""

    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[ChatChoice]
    usage: UsageBody
    prompt_logprobs: PromptLogprobsBody | None = None
    prompt_token_ids: list[int] | None = None


class FunctionDelta(BaseModel):
    """The next part of a call: its name comes once, its arguments in pieces."""

    name: str | None = None
    arguments: str | None = None


class ToolCallDelta(BaseModel):
    """The next part of the call with this index."""

    index: int
    id: str | None = None
    type: Literal["function"] | None = None
    function: FunctionDelta


class Delta(BaseModel):
    """The new part of a message."""

    role: Literal["assistant"] | None = None
    content: str | None = None
    tool_calls: list[ToolCallDelta] | None = None


class ChunkChoice(BaseModel):
    """The new part of one choice."""

    index: int
    delta: Delta
    logprobs: ChatLogprobsBody | None
    finish_reason: FinishReason | None
    stop_reason: int | str | None = None
    token_ids: list[int] | None = None


class ChatCompletionChunk(BaseModel):
    """One chunk of a stream."""

    id: str
    object: Literal["chat.completion.chunk"]
    created: int
    model: str
    choices: list[ChunkChoice]
    usage: UsageBody | None = None
    prompt_logprobs: PromptLogprobsBody | None = None
    prompt_token_ids: list[int] | None = None
