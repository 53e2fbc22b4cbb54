"""Sampling parameters, under vLLM's names."""

import difflib
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, Literal, Self, TypedDict, TypeVar

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message

from pagewire.v1 import sampling_pb2

M = TypeVar("M", bound=Message)

_STRUCTURED_OUTPUT = ("json_schema", "regex", "grammar", "choice")
_EARLY_STOPPING = {
    True: sampling_pb2.EARLY_STOPPING_WHEN_FULL,
    False: sampling_pb2.EARLY_STOPPING_WHEN_HOPELESS,
    "never": sampling_pb2.EARLY_STOPPING_NEVER,
}
_MAXIMA = {FieldDescriptor.TYPE_UINT32: 2**32 - 1, FieldDescriptor.TYPE_UINT64: 2**64 - 1}
_RANGES = {
    field.name: f"an integer from 0 to {_MAXIMA[field.type]}"
    for field in sampling_pb2.SamplingParams.DESCRIPTOR.fields
    if field.type in _MAXIMA and not field.is_repeated
}
"""The numbers that the fields of counts can hold."""
_RANGES["beam_width"] = _RANGES["n"]
_RANGES["top_k"] = f"an integer from -1 to {_MAXIMA[FieldDescriptor.TYPE_UINT32]}"
_RANGES["truncate_prompt_tokens"] = f"-1 or {_RANGES['n'].replace('from 0', 'from 1')}"
_RANGES["seed"] = f"an integer from {-(2**63)} to {_MAXIMA[FieldDescriptor.TYPE_UINT64]}"
_NUMBERS = (int | None, float | None)
_ANSWER_FORMS = "json_schema, regex, grammar or choice"
_OF_VLLM = {
    **dict.fromkeys(("guided_decoding", "structured_outputs"), f"use {_ANSWER_FORMS}"),
    "guided_json": "use json_schema",
    "guided_regex": "use regex",
    "guided_grammar": "use grammar",
    "guided_choice": "use choice",
    "use_beam_search": "use beam_width",
    "logprob_token_ids": "use logprobs, which has the most probable tokens",
    "logits_processors": "requests cannot contain code; use logit_bias, bad_words or"
    f" allowed_token_ids, or {_ANSWER_FORMS}",
}
"""What stands for parameters of vLLM that have no field of the same name."""
_MODULES = re.compile(r"collections\.abc\.|typing\.")


class _Default(int):
    """A default, distinguishable from the same number given by the caller."""


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """How the next token is chosen, and when an answer ends.

    None takes the model's own generation default where it has one, else the default that
    `protos/pagewire/v1/sampling.proto` gives. Ranges are checked by the server, whose
    `InvalidArgument` names the field; only values that a field cannot hold are refused here.
    """

    n: int | None = None
    """Number of answers."""
    best_of: int | None = None
    """Number of candidates, of which the `n` most probable are returned."""
    temperature: float | None = None
    """Sampling temperature; 0 is greedy."""
    top_p: float | None = None
    """Sample from the most probable tokens whose probabilities reach this sum."""
    top_k: int | None = None
    """Sample from the N most probable tokens; 0 and -1 mean all."""
    min_p: float | None = None
    """Sample from tokens whose probability is at least this share of the largest."""
    repetition_penalty: float | None = None
    """Above 1 makes tokens of prompt and output less probable."""
    presence_penalty: float | None = None
    """Above 0 makes tokens of the output less probable."""
    frequency_penalty: float | None = None
    """Above 0 makes tokens of the output less probable, in proportion to their count."""
    logit_bias: Mapping[int, float] | None = None
    """Added to the logits of these token ids."""
    seed: int | None = None
    """Makes the answer repeatable. It may be negative. None and, as in vLLM, -1: the server draws
    one and reports it."""
    stop: str | Sequence[str] | None = None
    """An answer ends before any of these texts."""
    stop_token_ids: Sequence[int] | None = None
    """An answer ends with any of these tokens."""
    bad_words: Sequence[str] | None = None
    """Texts that never appear."""
    allowed_token_ids: Sequence[int] | None = None
    """The answer contains no other tokens."""
    min_tokens: int | None = None
    """Fewest tokens per answer."""
    max_tokens: int | None = _Default(16)
    """Most tokens per answer; by default 16, but in a chat as many as the model's length allows.
    None: as many as the model's length allows."""
    ignore_eos: bool | None = None
    """Continue after end-of-sequence tokens."""
    logprobs: int | None = None
    """Report log probabilities of each output token and of this many alternatives."""
    prompt_logprobs: int | None = None
    """The same for the prompt."""
    truncate_prompt_tokens: int | None = None
    """Keep the last N tokens of a longer prompt; -1: as many as fit, with room for `max_tokens`.
    None: a prompt that is too long is refused."""
    skip_special_tokens: bool | None = None
    """Leave special tokens out of the text."""
    include_stop_str_in_output: bool | None = None
    """Keep the stop string or stop token in the text."""
    beam_width: int | None = None
    """Use beam search with N beams instead of sampling."""
    length_penalty: float | None = None
    """Beam search: scores are divided by length to this power."""
    early_stopping: bool | Literal["never"] | None = None
    """Beam search: when it ends, as in transformers."""
    json_schema: str | Mapping[str, Any] | None = None
    """The answer is a JSON text that this schema allows; `{"type": "object"}` allows any object."""
    regex: str | None = None
    """The whole answer matches this regular expression."""
    grammar: str | None = None
    """The whole answer matches this context-free grammar's `start`, in Lark's notation."""
    choice: Sequence[str] | None = None
    """The answer is one of these texts."""
    thought: tuple[str, Sequence[str]] | None = None
    """With one of the last four: what precedes the answer and is not constrained, as the text that
    it begins with (empty if the prompt ends inside it) and the texts that end it."""

    def __new__(cls, *_: object, **given: object) -> Self:
        """Raises TypeError for an unknown name, with what stands for it if it is one of vLLM's."""
        known = cls.__dataclass_fields__
        for name in given:
            if name not in known:
                [nearest] = difflib.get_close_matches(name, known, n=1, cutoff=0)
                hint = _OF_VLLM.get(name) or f"the nearest known one is {nearest!r}"
                raise TypeError(f"SamplingParams: unknown parameter {name!r}: {hint}")
        return super().__new__(cls)

    def __post_init__(self) -> None:
        # Built once here, so that a wrong value is reported where it was written.
        self.to_proto()

    def to_proto(self, *, is_chat: bool = False) -> sampling_pb2.SamplingParams:
        """The message of a request. Raises ValueError naming a field with an invalid value.

        `is_chat`: `max_tokens` is as many as the model's length allows, unless it was given.
        """
        values = ((field, getattr(self, field.name)) for field in fields(self))
        given = {field.name: (field.type, value) for field, value in values if value is not None}
        if is_chat and isinstance(self.max_tokens, _Default):
            del given["max_tokens"]
        if len(several := [name for name in _STRUCTURED_OUTPUT if name in given]) > 1:
            raise ValueError(f"{', '.join(several)}: expected at most one of them")
        for name in ("length_penalty", "early_stopping"):
            if name in given and self.beam_width is None:
                raise ValueError(f"{name}: expected beam_width with it")
        proto = sampling_pb2.SamplingParams()
        for name, (kind, value) in given.items():
            try:
                if kind == bool | None and value not in (True, False):
                    raise TypeError("expected True or False")
                if kind in _NUMBERS and isinstance(value, bool):
                    raise TypeError("expected a number")
                _set(proto, name, value)
            except (TypeError, ValueError, LookupError, AttributeError) as error:
                allowed = _RANGES.get(name) or f"{_MODULES.sub('', str(kind))} ({error})"
                raise ValueError(f"{name}: expected {allowed}, got {value!r}") from None
        return proto


def _set(proto: sampling_pb2.SamplingParams, name: str, value: Any) -> None:
    """Set the field of a parameter, whose type and range protobuf checks."""
    match name:
        case "include_stop_str_in_output":
            proto.include_stop_in_output = value
        case "logit_bias":
            for token_id, bias in value.items():
                proto.logit_bias.add(token_id=token_id, bias=bias)
        case "top_k":
            proto.top_k = 0 if value == -1 else value
        case "truncate_prompt_tokens":
            if value == 0:  # in the message, as many as fit
                raise ValueError("expected at least one token")
            proto.truncate_prompt_tokens = 0 if value == -1 else value
        case "seed":
            if value != -1:
                proto.seed = value + 2**64 if -(2**63) <= value < 0 else value
        case "stop":
            proto.stop.extend([value] if isinstance(value, str) else value)
        case "stop_token_ids":
            proto.stop_token_ids.extend(value)
        case "allowed_token_ids":
            if len(value) == 0:
                raise ValueError("expected at least one")
            proto.allowed_token_ids.extend(value)
        case "bad_words":
            proto.bad_words.extend(_texts(value))
        case "choice":
            proto.choice.CopyFrom(sampling_pb2.ChoiceList(choices=_texts(value)))
        case "thought":
            start, ends = value
            proto.thought.CopyFrom(sampling_pb2.Thought(start=start, ends=_texts(ends)))
        case "json_schema":
            text = value if isinstance(value, str) else json.dumps(value, allow_nan=False)
            proto.json_schema = text
        case "beam_width":
            proto.beam_search.width = value
        case "length_penalty":
            proto.beam_search.length_penalty = value
        case "early_stopping":
            proto.beam_search.early_stopping = _EARLY_STOPPING[value]
        case _:
            setattr(proto, name, value)


def message_of(kind: Callable[..., M], values: Mapping[str, Any]) -> M:
    """A message with these fields; those that are None stay absent. Raises ValueError that names
    the field which cannot hold its value."""
    message = kind()
    for name, value in values.items():
        try:
            message.MergeFrom(kind(**{name: value}))
        except (TypeError, ValueError) as error:
            field = message.DESCRIPTOR.fields_by_name[name]
            is_text = field.type == field.TYPE_STRING and not field.is_repeated
            why = "expected a text" if is_text and not isinstance(value, str) else error
            raise ValueError(f"{name} cannot be {value!r}: {why}") from None
    return message


def _texts(values: Any) -> Any:
    """A list of texts, not one text, which protobuf would take for a list of its characters."""
    if isinstance(values, str):
        raise TypeError("expected a list of texts")
    return values


class SamplingOptions(TypedDict, total=False):
    """The fields of `SamplingParams`, as keyword arguments of methods."""

    n: int | None
    best_of: int | None
    temperature: float | None
    top_p: float | None
    top_k: int | None
    min_p: float | None
    repetition_penalty: float | None
    presence_penalty: float | None
    frequency_penalty: float | None
    logit_bias: Mapping[int, float] | None
    seed: int | None
    stop: str | Sequence[str] | None
    stop_token_ids: Sequence[int] | None
    bad_words: Sequence[str] | None
    allowed_token_ids: Sequence[int] | None
    min_tokens: int | None
    max_tokens: int | None
    ignore_eos: bool | None
    logprobs: int | None
    prompt_logprobs: int | None
    truncate_prompt_tokens: int | None
    skip_special_tokens: bool | None
    include_stop_str_in_output: bool | None
    beam_width: int | None
    length_penalty: float | None
    early_stopping: bool | Literal["never"] | None
    json_schema: str | Mapping[str, Any] | None
    regex: str | None
    grammar: str | None
    choice: Sequence[str] | None
    thought: tuple[str, Sequence[str]] | None
