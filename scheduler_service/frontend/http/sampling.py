"""OpenAI's sampling fields to ours."""

import json
from collections.abc import Callable
from typing import Any

from pagewire.v1 import sampling_pb2
from scheduler_service.errors import InvalidArgument
from scheduler_service.frontend.http.openai.sampling import (
    JsonObjectFormat,
    JsonSchemaFormat,
    SamplingFields,
)
from scheduler_service.frontend.input.validation import MIN_TEMPERATURE

_SAME = (
    "n",
    "top_p",
    "presence_penalty",
    "frequency_penalty",
    "min_p",
    "repetition_penalty",
    "min_tokens",
    "stop_token_ids",
    "bad_words",
    "ignore_eos",
    "skip_special_tokens",
    "prompt_logprobs",
)
"""Fields that mean the same under the same name."""

ANY_OBJECT = '{"type":"object"}'


def sampling_params(fields: SamplingFields) -> sampling_pb2.SamplingParams:
    """How tokens are chosen; lengths and log probabilities are the endpoint's to add.

    Raises InvalidArgument for what the declarations cannot tell.
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
    """Clients say 1e-6 for greedy; as with vLLM, what is less than the least is the least."""
    return max(asked, MIN_TEMPERATURE) if asked > 0 else asked


def _prompt_length(asked: int) -> int:
    """-1, as much as fits, is 0 in ours; nothing at all would be no prompt."""
    if asked == 0:
        raise InvalidArgument("truncate_prompt_tokens", "expected -1 or at least 1")
    return max(asked, 0)


def _set_beam_search(params: sampling_pb2.SamplingParams, fields: SamplingFields) -> None:
    """As many beams as answers, unless the endpoint has a field for candidates."""
    if fields.use_beam_search:
        params.beam_search.width = fields.n or 1
        if fields.length_penalty is not None:
            params.beam_search.length_penalty = fields.length_penalty
    elif fields.length_penalty not in (None, 1):
        raise InvalidArgument("length_penalty", "expected use_beam_search beside it")


def _logit_bias(token_id: str, bias: float) -> sampling_pb2.LogitBias:
    if not (token_id.isascii() and token_id.isdecimal() and int(token_id) < 2**31):
        raise InvalidArgument("logit_bias", f"expected token ids as keys, got {token_id[:40]!r}")
    return sampling_pb2.LogitBias(token_id=int(token_id), bias=bias)


def _set_structured_output(params: sampling_pb2.SamplingParams, fields: SamplingFields) -> None:
    """At most one constraint, whichever of the names it comes by."""
    asked = _constraints(fields)
    if len(asked) > 1:
        raise InvalidArgument(asked[1][0], f"expected to be absent beside {asked[0][0]}")
    for _, write in asked:
        write(params)


def constraint_field(fields: SamplingFields) -> str | None:
    """The field by which the output is constrained, as the client calls it."""
    return next((name for name, _ in _constraints(fields)), None)


Writer = Callable[[sampling_pb2.SamplingParams], None]


def _constraints(fields: SamplingFields) -> list[tuple[str, Writer]]:
    """The constraints asked for, by the field that asks for them."""
    own = fields.structured_outputs
    asked = [
        ("response_format", _write_json(_format_schema(fields))),
        ("guided_json", _write_json(fields.guided_json)),
        ("guided_regex", _write_text("regex", fields.guided_regex)),
        ("guided_choice", _write_choice(fields.guided_choice)),
        ("guided_grammar", _write_text("grammar", fields.guided_grammar)),
    ]
    if own is not None:
        asked += [
            ("structured_outputs.json", _write_json(own.json_)),
            ("structured_outputs.regex", _write_text("regex", own.regex)),
            ("structured_outputs.choice", _write_choice(own.choice)),
            ("structured_outputs.grammar", _write_text("grammar", own.grammar)),
            (
                "structured_outputs.json_object",
                _write_json(ANY_OBJECT if own.json_object else None),
            ),
        ]
    return [(name, write) for name, write in asked if write is not None]


def _format_schema(fields: SamplingFields) -> Any:
    wanted = fields.response_format
    if isinstance(wanted, JsonSchemaFormat):
        return wanted.json_schema.schema_
    return ANY_OBJECT if isinstance(wanted, JsonObjectFormat) else None


def _write_json(schema: Any) -> Writer | None:
    """`schema` is JSON text, or what it stands for."""
    if schema is None:
        return None
    text = schema if isinstance(schema, str) else json.dumps(schema)

    def write(params: sampling_pb2.SamplingParams) -> None:
        params.json_schema = text

    return write


def _write_text(kind: str, text: str | None) -> Writer | None:
    if text is None:
        return None

    def write(params: sampling_pb2.SamplingParams) -> None:
        setattr(params, kind, text)

    return write


def _write_choice(texts: list[str] | None) -> Writer | None:
    if texts is None:
        return None

    def write(params: sampling_pb2.SamplingParams) -> None:
        params.choice.choices.extend(texts)
        params.choice.SetInParent()

    return write
