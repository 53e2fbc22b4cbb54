"""What completions and chats have in common: how tokens are chosen, and where the request goes.

Declared once, as OpenAI's interface and vLLM's extensions of it name them. A field that is in
neither list is refused by its name, so that a misspelt one is no silent default.
"""

import json
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, JsonValue, model_validator
from pydantic_core import PydanticCustomError

MAX_ENTRIES = 1024
"""Of one object, where each entry is looked at."""


def _bounded(value: Any) -> Any:
    """The value as it is, unless it is an object with more entries than may be: all that are wrong
    are told of, and a body has room for a million."""
    if isinstance(value, dict) and len(value) > MAX_ENTRIES:
        raise PydanticCustomError(
            "too_many_entries", "expected at most {most} entries", {"most": MAX_ENTRIES}
        )
    return value


T = TypeVar("T")
ListOf = Annotated[list[T], Field(fail_fast=True)]
"""Only the first entry that is wrong is told of, for the same reason."""
DictOf = Annotated[dict[str, T], BeforeValidator(_bounded)]


def _told_by_json(value: Any) -> Any:
    """The value as it is, unless JSON cannot tell it: Python reads NaN and infinities, too."""
    try:
        json.dumps(value, allow_nan=False)
    except (ValueError, RecursionError):
        raise PydanticCustomError("no_json", "expected JSON, which has no NaN") from None
    return value


JsonObject = Annotated[dict[str, JsonValue], BeforeValidator(_told_by_json)]
JsonList = Annotated[list[JsonValue], BeforeValidator(_told_by_json)]

Text = Annotated[str, Field(min_length=1)]
StopText = Annotated[str, Field(min_length=1, max_length=1024)]
Stop = StopText | Annotated[ListOf[StopText], Field(max_length=16)]
TokenId = Annotated[int, Field(ge=0, le=2**31 - 1)]
MAX_UINT32 = 2**32 - 1
REQUEST_ID = r"^[A-Za-z0-9._:-]{1,100}$"
"""A little shorter than ids may be, as those of several prompts are numbered."""


class Strict(BaseModel):
    """A part of a request: unknown fields are refused, and so is a text for a number."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _check_size(cls, value: Any) -> Any:
        return _bounded(value)


class StreamOptions(Strict):
    """What a stream tells besides the text."""

    include_usage: bool = Field(
        False, description="Whether a last chunk, without choices, tells the usage."
    )
    continuous_usage_stats: bool = Field(
        False, description="With `include_usage`: every chunk tells the usage so far."
    )
    include_obfuscation: bool | None = Field(
        None, description="Ignored: chunks are not padded.", exclude=True
    )


class StructuredOutputs(Strict):
    """A constraint on the output, as vLLM names it; exactly one."""

    json_: dict[str, Any] | bool | str | None = Field(
        None, alias="json", description="A JSON schema."
    )
    regex: str | None = Field(None, description="A regular expression for the whole output.")
    choice: ListOf[str] | None = Field(None, description="The texts allowed.")
    grammar: str | None = Field(None, description="A context-free grammar in EBNF.")
    json_object: bool | None = Field(None, description="Any JSON object.")


class JsonSchema(Strict):
    """A named JSON schema."""

    name: str | None = Field(None, description="Of no effect.")
    description: str | None = Field(None, description="Of no effect.")
    schema_: dict[str, Any] = Field(alias="schema", description="The schema.")
    strict: bool | None = Field(None, description="Of no effect: schemas are always enforced.")


class TextFormat(Strict):
    """Free text."""

    type: Literal["text"]


class JsonObjectFormat(Strict):
    """Any JSON object."""

    type: Literal["json_object"]


class JsonSchemaFormat(Strict):
    """JSON that a schema allows."""

    type: Literal["json_schema"]
    json_schema: JsonSchema


ResponseFormat = Annotated[
    TextFormat | JsonObjectFormat | JsonSchemaFormat, Field(discriminator="type")
]


class SamplingFields(Strict):
    """How tokens are chosen. An absent field takes the model's own default."""

    model: str | None = Field(None, description="May be absent when one model is served.")
    n: int | None = Field(None, ge=1, le=128, description="Number of choices.")
    temperature: float | None = Field(None, ge=0, le=100, description="0 is greedy.")
    top_p: float | None = Field(None, gt=0, le=1)
    presence_penalty: float | None = Field(None, ge=-2, le=2)
    frequency_penalty: float | None = Field(None, ge=-2, le=2)
    seed: int | None = Field(
        None, ge=-(2**63), le=2**64 - 1, description="Makes the answer repeatable."
    )
    stop: Stop | None = Field(None, description="The output ends before any of these.")
    logit_bias: DictOf[Annotated[float, Field(ge=-100, le=100)]] | None = Field(
        None, max_length=MAX_ENTRIES, description="Token ids, as text, to -100 to 100."
    )
    stream: bool | None = Field(None, description="Whether to send chunks as they come.")
    stream_options: StreamOptions | None = None
    response_format: ResponseFormat | None = None

    # vLLM's.
    top_k: int | None = Field(None, ge=-1, le=MAX_UINT32, description="0 and -1: all.")
    min_p: float | None = Field(None, ge=0, le=1)
    repetition_penalty: float | None = Field(None, gt=0, le=100)
    min_tokens: int | None = Field(None, ge=0, le=MAX_UINT32)
    stop_token_ids: ListOf[TokenId] | None = Field(None, max_length=128)
    bad_words: ListOf[Text] | None = Field(None, max_length=128)
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    include_stop_str_in_output: bool | None = None
    prompt_logprobs: int | None = Field(None, ge=0, le=20)
    truncate_prompt_tokens: int | None = Field(
        None,
        ge=-1,
        le=MAX_UINT32,
        description="Most prompt tokens, of a longer prompt the last; -1: as many as leave room.",
    )
    truncation_side: Literal["left"] | None = Field(None, description="The prompt's end is kept.")
    use_beam_search: bool | None = Field(
        None, description="Beam search with `best_of`, or `n`, beams instead of sampling."
    )
    length_penalty: float | None = Field(
        None, ge=-5, le=5, description="Of beam search: scores are divided by length to this power."
    )
    priority: int | None = Field(
        None, ge=-(2**31), le=2**31 - 1, description="Lower is served earlier, by that policy."
    )
    guided_json: dict[str, Any] | str | None = None
    guided_regex: str | None = None
    guided_choice: ListOf[str] | None = None
    guided_grammar: str | None = None
    structured_outputs: StructuredOutputs | None = None
    request_id: str | None = Field(
        None, pattern=REQUEST_ID, description="As the header `X-Request-Id`, which goes before it."
    )
    return_token_ids: bool | None = Field(
        None, description="Tell the prompt's and the output's token ids."
    )
    return_tokens_as_token_ids: bool | None = Field(
        None, description="Write tokens in log probabilities as `token_id:N`."
    )

    user: str | None = Field(None, description="Ignored.")
    metadata: DictOf[str] | None = Field(None, description="Ignored.")
    service_tier: str | None = Field(None, description="Ignored.")
    safety_identifier: str | None = Field(None, description="Ignored.")
    prompt_cache_key: str | None = Field(None, description="Ignored: every prompt is cached.")
    prompt_cache_retention: str | None = Field(None, description="Ignored.")
    spaces_between_special_tokens: Literal[True] | None = None
    store: Literal[False] | None = Field(None, description="Nothing is ever stored.")
