"""The types of requests and answers."""

from typing import Annotated, Literal, NotRequired

from pydantic import AliasChoices, BeforeValidator, Field
from typing_extensions import TypedDict

from scheduler_service.frontend.http.middleware import REQUEST_ID
from scheduler_service.frontend.http.openai import protocol
from scheduler_service.frontend.http.openai.sampling import (
    MAX_UINT32,
    CacheSalt,
    JsonObject,
    ListOf,
    Strict,
    Text,
)

MAX_INPUTS = 16_384
"""Texts of one call, all of whose vectors are in memory before the first is sent."""

Texts = Annotated[ListOf[Text], Field(min_length=1, max_length=MAX_INPUTS)]
TokenLists = Annotated[ListOf[protocol.TokenIds], Field(min_length=1, max_length=MAX_INPUTS)]
Inputs = Annotated[
    Text | protocol.TokenIds | Texts | TokenLists, BeforeValidator(protocol.check_uniform)
]
Messages = Annotated[
    ListOf[protocol.ChatMessageBody], Field(min_length=1, max_length=protocol.MAX_MESSAGES)
]
Int32 = Annotated[int, Field(ge=-(2**31), le=2**31 - 1)]
Size = Annotated[int, Field(ge=1, le=2**31 - 1)]


class PoolingFields(Strict):
    """What all inputs of a call have in common."""

    model: str | None = Field(None, description="May be absent when one model does this.")
    truncate_prompt_tokens: Int32 | None = Field(
        None, description="Longer texts are cut to this; -1: to the model's limit."
    )
    truncation_side: Literal["left", "right"] | None = Field(
        None, description="Which end is cut; by default that of the model's tokenizer."
    )
    priority: Int32 | None = Field(None, description="Lower is served earlier, by that policy.")
    cache_salt: CacheSalt | None = None
    request_id: Annotated[str, Field(pattern=REQUEST_ID)] | None = None


class TextFields(PoolingFields):
    """Texts or token ids, one or several, or else a conversation by the model's chat template."""

    input: Inputs | None = None
    messages: Messages | None = None
    add_special_tokens: bool | None = Field(None, description="By default around texts only.")
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: JsonObject | None = None
    use_activation: bool | None = Field(
        None, description="Whether vectors get the length 1, and logits become probabilities."
    )


class EmbeddingsRequest(TextFields):
    """Texts whose vectors are requested."""

    dimensions: Size | None = Field(None, description="Of models trained for several lengths.")
    encoding_format: Literal["float", "base64"] = Field(
        "float", description="`base64`: of little-endian float32."
    )
    input_type: str | None = Field(
        None, description="`query`, `document`, or another prompt of the model, before texts."
    )


class ClassifyBody(TextFields):
    """Texts whose labels are requested."""


class PoolingBody(EmbeddingsRequest):
    """Texts whose vectors or labels are requested, or those of their tokens."""

    task: Literal["embed", "token_embed", "classify", "token_classify"] | None = Field(
        None, description="By default what the model is made for."
    )


class TextObject(Strict):
    """A text as an object."""

    text: Text


Side = Text | TextObject
Sides = Side | Annotated[ListOf[Side], Field(min_length=1, max_length=MAX_INPUTS)]


class ScoreFields(PoolingFields):
    """How pairs of texts get scores."""

    use_activation: bool | None = Field(None, description="False: the model's logits.")
    instruction: Text | None = Field(None, description="What some models are to judge by.")


class ScoreBody(ScoreFields):
    """Pairs of texts: one first text for all second ones, or one for each."""

    text_1: Sides = Field(
        validation_alias=AliasChoices("text_1", "queries", "data_1"),
        description="Or `queries`, or `data_1`.",
    )
    text_2: Sides = Field(
        validation_alias=AliasChoices("text_2", "documents", "items", "data_2"),
        description="Or `documents`, `items`, or `data_2`.",
    )


class RerankBody(ScoreFields):
    """Documents to sort by how well they answer a query."""

    query: Side
    documents: Sides
    top_n: int | None = Field(None, ge=0, le=MAX_UINT32, description="Results; 0: all.")
    return_documents: bool = Field(True, description="Whether results have the texts.")


NumberType = Literal["float", "int8", "uint8", "binary", "ubinary", "base64"]


class CohereEmbedBody(Strict):
    """Texts whose vectors are requested, by Cohere's interface."""

    model: str | None = Field(None, description="May be absent when one model does this.")
    texts: Texts
    input_type: str | None = Field(None, description="As of `/v1/embeddings`.")
    embedding_types: Annotated[ListOf[NumberType], Field(min_length=1)] = Field(["float"])
    output_dimension: Size | None = Field(None, description="Of models trained for several.")
    max_tokens: Size | None = Field(None, description="Of a text.")
    truncate: Literal["NONE", "START", "END"] = Field(
        "END", description="The end of longer texts that is cut; `NONE`: they are refused."
    )
    priority: Int32 | None = Field(None, description="Lower is served earlier, by that policy.")


class PoolingUsageBody(TypedDict):
    """Counts of tokens."""

    prompt_tokens: int
    total_tokens: int
    prompt_tokens_details: protocol.PromptTokensDetails


class PoolingEntry(TypedDict):
    """What an input got: `embedding` of `/v1/embeddings`, `data` of `/pooling`, `score` of
    `/score`, and the last three of `/classify`."""

    index: int
    object: NotRequired[Literal["embedding", "pooling", "score"]]
    embedding: NotRequired[list[float] | str]
    data: NotRequired[list[float] | list[list[float]] | str]
    score: NotRequired[float]
    label: NotRequired[str]
    num_classes: NotRequired[int]
    probs: NotRequired[list[float]]


class PoolingList(TypedDict):
    """What all inputs got."""

    id: str
    object: Literal["list"]
    created: int
    model: str
    usage: PoolingUsageBody
    data: list[PoolingEntry]


class RankEntry(TypedDict):
    """A document, by its index in the request."""

    index: int
    relevance_score: float
    document: NotRequired[dict[Literal["text"], str]]


class Ranks(TypedDict):
    """Documents, the best first."""

    id: str
    model: str
    usage: PoolingUsageBody
    results: list[RankEntry]


class CohereEmbeddings(TypedDict):
    """The vectors of all texts, by type."""

    id: str
    response_type: Literal["embeddings_by_type"]
    texts: list[str]
    meta: dict[str, dict[str, str | int]]
    embeddings: dict[NumberType, list[str] | list[list[float]]]


class CohereError(TypedDict):
    """Every answer at `/v2/` with a code of 400 or above."""

    message: str
