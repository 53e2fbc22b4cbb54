"""Sampling parameters over HTTP: their fields in a body, and as the protobuf message."""

import json
import math
from functools import lru_cache
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar, get_args

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message
from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    JsonValue,
    create_model,
    model_validator,
)
from pydantic_core import PydanticCustomError

from pagewire.v1 import sampling_pb2
from pagewire.v1.inference_service_pb2 import GenerateRequest
from pagewire.validation import limits_of
from scheduler_service.errors import InvalidArgument
from scheduler_service.frontend.http.inert_fields import document_ignored, without_inert
from scheduler_service.frontend.http.middleware import REQUEST_ID
from scheduler_service.frontend.input.validation import MIN_TEMPERATURE, SAMPLING_LIMITS
from scheduler_service.frontend.structured_output.schemas import closed, moved

MAX_ENTRIES = 1024
"""Entries of one object that are validated one by one."""


def _bounded(value: Any) -> Any:
    """The value, unless it is an object with too many entries: every invalid entry would be an
    error, and a body has room for a million."""
    if isinstance(value, dict) and len(value) > MAX_ENTRIES:
        raise PydanticCustomError(
            "too_many_entries", "expected at most {most} entries", {"most": MAX_ENTRIES}
        )
    return value


T = TypeVar("T")
ListOf = Annotated[list[T], Field(fail_fast=True)]
"""Only the first invalid entry is reported, for the same reason."""

MAX_JSON_VALUES = 1 << 16
"""Values in one JSON object of any content: a schema, or a variable of the template."""


def _check_json(value: Any) -> Any:
    """The value as it is, unless it has too many parts or numbers that JSON does not have."""
    num_left, pending = MAX_JSON_VALUES, [value]
    while pending:
        part = pending.pop()
        if isinstance(part, dict | list):
            num_left -= len(part)
            if num_left < 0:
                raise PydanticCustomError(
                    "too_many_values", "expected at most {most} values", {"most": MAX_JSON_VALUES}
                )
            pending += part.values() if isinstance(part, dict) else part
        elif isinstance(part, float) and not math.isfinite(part):
            raise PydanticCustomError("no_json", "expected numbers that are finite")
    return value


JsonObject = Annotated[dict[str, JsonValue], BeforeValidator(_check_json)]

Text = Annotated[str, Field(min_length=1)]
STOP = SAMPLING_LIMITS["stop"]
StopText = Annotated[str, Field(min_length=STOP.min_length, max_length=STOP.max_length)]
Stop = StopText | Annotated[ListOf[StopText], Field(max_length=STOP.max_items)]
_SALT = limits_of(GenerateRequest.DESCRIPTOR)["cache_salt"]
CacheSalt = Annotated[
    str,
    Field(
        min_length=_SALT.min_length,
        max_length=_SALT.max_length,
        description="Prefixes are shared only with requests of the same salt, a secret.",
    ),
]
TokenId = Annotated[int, Field(ge=0, le=2**31 - 1)]
MAX_UINT32 = 2**32 - 1


def proto_range(field: str, message: type[Message] = sampling_pb2.SamplingParams) -> Any:
    """The range that the protos declare for a field, as an annotation."""
    limits = limits_of(message.DESCRIPTOR)[field]
    least = limits.low if limits.or_equal is None else limits.or_equal
    low, high = round(least, 6) if least % 1 else int(least), int(limits.high)
    return Field(gt=low, le=high) if limits.low_is_open else Field(ge=low, le=high)


class Strict(BaseModel):
    """A body, or a part of one: unknown fields and texts in place of numbers are refused; null, and
    values that ask for nothing, are absent fields; 1.0 is a whole number."""

    model_config = ConfigDict(
        extra="forbid", strict=True, allow_inf_nan=False, json_schema_extra=document_ignored
    )

    @model_validator(mode="before")
    @classmethod
    def _drop_inert(cls, value: Any) -> Any:
        if not isinstance(value, dict):
            return value
        whole = _whole_numbers(cls)
        return {
            name: int(item)
            if isinstance(item, float) and item.is_integer() and name in whole
            else item
            for name, item in without_inert(cls, _bounded(value)).items()
        }


@lru_cache
def _whole_numbers(kind: type[BaseModel]) -> frozenset[str]:
    """The fields of a body or part that are whole numbers."""
    return frozenset(
        field.alias or name
        for name, field in kind.model_fields.items()
        if {int, float} & _types_of(field.annotation) == {int}
    )


def _types_of(annotation: Any) -> set[Any]:
    return {annotation}.union(*map(_types_of, get_args(annotation)))


class StreamOptions(Strict):
    """Further contents of a stream."""

    include_usage: bool = Field(
        False, description="Whether a last chunk, without choices, reports the usage."
    )
    continuous_usage_stats: bool = Field(
        False, description="With `include_usage`: every chunk reports the usage so far."
    )


class StructuredOutputs(Strict):
    """A constraint on the output, as vLLM names it; exactly one."""

    json_: JsonObject | bool | str | None = Field(None, alias="json", description="A JSON schema.")
    regex: str | None = Field(None, description="A regular expression for the whole output.")
    choice: ListOf[str] | None = Field(None, description="The texts allowed.")
    grammar: str | None = Field(None, description="A context-free grammar in EBNF.")
    json_object: bool | None = Field(None, description="Any JSON object.")


_NO_OUTPUTS = StructuredOutputs.model_validate({})


class JsonSchema(Strict):
    """A named JSON schema."""

    schema_: JsonObject = Field(alias="schema", description="The schema.")
    strict: bool | None = Field(
        None, description="Whether objects are closed, unless false; always enforced."
    )


class TextFormat(Strict):
    """Free text."""

    type: Literal["text"]


class JsonObjectFormat(Strict):
    """Any JSON object, or one that a schema allows, as in llama.cpp."""

    type: Literal["json_object"]
    schema_: JsonObject | None = Field(None, alias="schema", description="The schema.")


class JsonSchemaFormat(Strict):
    """JSON that a schema allows."""

    type: Literal["json_schema"]
    json_schema: JsonSchema


ResponseFormat = Annotated[
    TextFormat | JsonObjectFormat | JsonSchemaFormat, Field(discriminator="type")
]

_DIFFERENT = {"best_of", "max_tokens", "logprobs", "include_stop_in_output"}
"""Sampling parameters that differ between endpoints, or are named differently over HTTP."""
MAX_ID_DIGITS = 20
"""Python refuses to read a number of thousands of digits."""
_KINDS = {
    FieldDescriptor.TYPE_FLOAT: float,
    FieldDescriptor.TYPE_UINT32: int,
    FieldDescriptor.TYPE_BOOL: bool,
}


def _declared_parameters() -> dict[str, Any]:
    """A body's field for every sampling parameter that is a number or a boolean, as the protos
    declare it; `SamplingFields` replaces those of which more is to be said."""
    declared: dict[str, Any] = {}
    for field in sampling_pb2.SamplingParams.DESCRIPTOR.fields:
        kind = _KINDS.get(field.type)
        if kind is None or field.is_repeated or field.name in _DIFFERENT:
            continue
        annotation: Any = kind
        if field.name in SAMPLING_LIMITS:
            annotation = Annotated[kind, proto_range(field.name)]
        elif kind is int:
            annotation = Annotated[int, Field(ge=0, le=MAX_UINT32)]
        declared[field.name] = (annotation | None, None)
    return declared


if TYPE_CHECKING:
    _Parameters = Strict
else:
    _Parameters = create_model("_Parameters", __base__=Strict, **_declared_parameters())


class SamplingFields(_Parameters):
    """How tokens are chosen. An absent field takes the model's own default. Those that are not
    written here are declared in `sampling.proto`."""

    model: str | None = Field(None, description="May be absent when one model is served.")
    n: Annotated[int, proto_range("n")] | None = Field(None, description="Number of choices.")
    temperature: float | None = Field(None, ge=0, le=100, description="0 is greedy.")
    seed: int | None = Field(
        None,
        ge=-(2**63),
        le=2**64 - 1,
        description="Makes the answer repeatable; -1: as if absent, as in vLLM.",
    )
    stop: Stop | None = Field(None, description="The output ends before any of these.")
    logit_bias: Annotated[
        dict[str, Annotated[float, proto_range("bias", sampling_pb2.LogitBias)]] | None,
        BeforeValidator(_bounded),
    ] = Field(None, description="Token ids, as text, to -100 to 100.")
    stream: bool | None = Field(None, description="Whether to send chunks as they come.")
    stream_options: StreamOptions | None = None
    response_format: ResponseFormat | None = None

    # vLLM's.
    top_k: int | None = Field(None, ge=-1, le=MAX_UINT32, description="0 and -1: all.")
    stop_token_ids: ListOf[TokenId] | None = Field(
        None, max_length=SAMPLING_LIMITS["stop_token_ids"].max_items
    )
    allowed_token_ids: ListOf[TokenId] | None = Field(
        None,
        min_length=1,
        max_length=SAMPLING_LIMITS["allowed_token_ids"].max_items,
        description="The output contains no other tokens.",
    )
    bad_words: ListOf[Text] | None = Field(None, max_length=SAMPLING_LIMITS["bad_words"].max_items)
    skip_special_tokens: bool | None = None
    include_stop_str_in_output: bool | None = None
    prompt_logprobs: Annotated[int, proto_range("prompt_logprobs")] | None = None
    truncate_prompt_tokens: int | None = Field(
        None,
        ge=-1,
        le=MAX_UINT32,
        description="Keep this many last tokens of a longer prompt; -1: as many as fit.",
    )
    use_beam_search: bool | None = Field(
        None, description="Beam search with `best_of`, or `n`, beams instead of sampling."
    )
    length_penalty: (
        Annotated[float, proto_range("length_penalty", sampling_pb2.BeamSearch)] | None
    ) = Field(None, description="Of beam search: scores are divided by length to this power.")
    priority: int | None = Field(
        None, ge=-(2**31), le=2**31 - 1, description="Lower is served earlier, by that policy."
    )
    num_speculative_tokens: (
        Annotated[int, proto_range("num_speculative_tokens", GenerateRequest)] | None
    ) = Field(None, description="Most tokens drafted for a step; 0: no speculative decoding.")
    cache_salt: CacheSalt | None = None
    guided_json: JsonObject | str | None = None
    guided_regex: str | None = None
    guided_choice: ListOf[str] | None = None
    guided_grammar: str | None = None
    structured_outputs: StructuredOutputs | None = None
    request_id: str | None = Field(
        None,
        pattern=REQUEST_ID,
        description="As the header `X-Request-Id`, which takes precedence.",
    )
    return_token_ids: bool | None = Field(
        None, description="Return the token ids of prompt and output."
    )
    return_tokens_as_token_ids: bool | None = Field(
        None, description="Write tokens in log probabilities as `token_id:N`."
    )
    return_timings: bool | None = Field(
        None, description="Return where the time went, for each prompt; in a stream at the end."
    )


_CONVERTED = {"temperature", "top_k", "truncate_prompt_tokens", "seed", "stop", "logit_bias"}
_SAME = [
    name
    for name in SamplingFields.model_fields
    if name in sampling_pb2.SamplingParams.DESCRIPTOR.fields_by_name and name not in _CONVERTED
]
"""Fields with the same name and meaning in the protos."""

ANY_OBJECT = '{"type":"object"}'


def sampling_params(fields: SamplingFields) -> sampling_pb2.SamplingParams:
    """The sampling parameters; the endpoint adds lengths and log probabilities.

    Raises InvalidArgument for invalid combinations, which the declarations do not cover.
    """
    same = {name: getattr(fields, name) for name in _SAME}
    params = sampling_pb2.SamplingParams(
        **{name: value for name, value in same.items() if value is not None}
    )
    if fields.temperature is not None:
        params.temperature = _temperature(fields.temperature)
    if fields.top_k is not None:
        params.top_k = max(fields.top_k, 0)
    if fields.truncate_prompt_tokens is not None:
        params.truncate_prompt_tokens = _prompt_length(fields.truncate_prompt_tokens)
    if fields.seed is not None:
        params.seed = fields.seed % 2**64
    if fields.include_stop_str_in_output is not None:
        params.include_stop_in_output = fields.include_stop_str_in_output
    if fields.stop:
        params.stop.extend([fields.stop] if isinstance(fields.stop, str) else fields.stop)
    for token_id, bias in (fields.logit_bias or {}).items():
        params.logit_bias.append(_logit_bias(token_id, bias))
    _set_beam_search(params, fields)
    _set_structured_output(params, fields)
    return params


def _temperature(asked: float) -> float:
    """Clients send 1e-6 for greedy; as in vLLM, smaller temperatures are raised to the minimum."""
    return max(asked, MIN_TEMPERATURE) if asked > 0 else asked


def _prompt_length(asked: int) -> int:
    """-1 (as many as fit) is 0 over gRPC; 0 would leave no prompt."""
    if asked == 0:
        raise InvalidArgument("truncate_prompt_tokens", "expected -1 or at least 1, got 0")
    return max(asked, 0)


def _set_beam_search(params: sampling_pb2.SamplingParams, fields: SamplingFields) -> None:
    """As many beams as choices; the endpoint may have a field for more."""
    if fields.use_beam_search:
        params.beam_search.width = fields.n or 1
        if fields.length_penalty is not None:
            params.beam_search.length_penalty = fields.length_penalty
    elif fields.length_penalty not in (None, 1):
        raise InvalidArgument("length_penalty", "requires use_beam_search")


def _logit_bias(token_id: str, bias: float) -> sampling_pb2.LogitBias:
    is_number = token_id.isascii() and token_id.isdecimal() and len(token_id) <= MAX_ID_DIGITS
    if not is_number or int(token_id) >= 2**31:
        raise InvalidArgument("logit_bias", f"expected token ids as keys, got {token_id[:40]!r}")
    return sampling_pb2.LogitBias(token_id=int(token_id), bias=bias)


def _set_structured_output(params: sampling_pb2.SamplingParams, fields: SamplingFields) -> None:
    """Set the constraint, whichever field it comes in. Raises InvalidArgument if there are two."""
    asked = _constraints(fields)
    if len(asked) > 1:
        raise InvalidArgument(
            asked[1][0], f"only one constraint is allowed, and {asked[0][0]} is given"
        )
    for _, kind, value in asked:
        if kind == "choice":
            params.choice.choices.extend(value)
            params.choice.SetInParent()
        elif kind == "json_schema":
            params.json_schema = _schema_text(value, is_open=_is_open(fields))
        else:
            setattr(params, kind, value)


def constraint_field(fields: SamplingFields) -> str | None:
    """The field that constrains the output, as the client names it."""
    return next((name for name, _, _ in _constraints(fields)), None)


def _constraints(fields: SamplingFields) -> list[tuple[str, str, Any]]:
    """The requested constraints: the field of the body, the field of the message and its value."""
    own = fields.structured_outputs or _NO_OUTPUTS
    rows = [
        ("response_format", "json_schema", _format_schema(fields)),
        ("guided_json", "json_schema", fields.guided_json),
        ("guided_regex", "regex", fields.guided_regex),
        ("guided_choice", "choice", fields.guided_choice),
        ("guided_grammar", "grammar", fields.guided_grammar),
        ("structured_outputs.json", "json_schema", own.json_),
        ("structured_outputs.regex", "regex", own.regex),
        ("structured_outputs.choice", "choice", own.choice),
        ("structured_outputs.grammar", "grammar", own.grammar),
        ("structured_outputs.json_object", "json_schema", ANY_OBJECT if own.json_object else None),
    ]
    return [row for row in rows if row[2] is not None]


def _format_schema(fields: SamplingFields) -> Any:
    wanted = fields.response_format
    if isinstance(wanted, JsonSchemaFormat):
        return wanted.json_schema.schema_
    if isinstance(wanted, JsonObjectFormat):
        return wanted.schema_ or ANY_OBJECT
    return None


def _is_open(fields: SamplingFields) -> bool:
    wanted = fields.response_format
    return isinstance(wanted, JsonSchemaFormat) and wanted.json_schema.strict is False


def _schema_text(schema: Any, *, is_open: bool) -> str:
    """A schema, which is JSON text or its value, as text, with its objects closed unless they are
    to stay open."""
    if isinstance(schema, str):
        try:
            return json.dumps(closed(json.loads(schema)))
        except (ValueError, RecursionError):
            return schema  # the check of constraints says what is wrong with it
    return json.dumps(moved(schema) if is_open else closed(schema))
