"""Requests and answers of `/v1/completions`, as the OpenAPI document tells them."""

from typing import Annotated, Literal

from pydantic import BaseModel, Field

from scheduler_service.frontend.http.openai.sampling import (
    MAX_UINT32,
    ListOf,
    SamplingFields,
    Text,
    TokenId,
)

TokenIds = Annotated[ListOf[TokenId], Field(min_length=1)]
Prompt = (
    Text
    | TokenIds
    | Annotated[ListOf[Text], Field(min_length=1)]
    | Annotated[ListOf[TokenIds], Field(min_length=1)]
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
        None, ge=0, le=20, description="Log probabilities of so many most probable tokens."
    )
    suffix: None = Field(None, description="Text is not inserted, only continued.")
    add_special_tokens: bool | None = Field(
        None, description="False: texts have the model's special tokens already."
    )


class LegacyLogprobsBody(BaseModel):
    """Parallel lists over the tokens."""

    text_offset: list[int]
    token_logprobs: list[float | None]
    tokens: list[str]
    top_logprobs: list[dict[str, float] | None]


class PromptLogprob(BaseModel):
    """One token at one place of the prompt."""

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
    """The answer; in a stream, each chunk."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: UsageBody | None = None
