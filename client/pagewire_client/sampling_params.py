"""Sampling parameters, under vLLM's names."""

import json
import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import partial
from typing import Any, Literal, SupportsIndex, TypedDict

from google.protobuf.descriptor import FieldDescriptor

from pagewire.v1 import sampling_pb2

_MAX_UINT32 = 2**32 - 1
_MAX_UINT64 = 2**64 - 1

_COUNTS_OR_ALL = ("top_k", "truncate_prompt_tokens")
"""-1 and 0 mean no limit of their own."""
_STRUCTURED_OUTPUT = ("json_schema", "regex", "grammar", "choice")
_EARLY_STOPPING = {
    True: sampling_pb2.EARLY_STOPPING_WHEN_FULL,
    False: sampling_pb2.EARLY_STOPPING_WHEN_HOPELESS,
    "never": sampling_pb2.EARLY_STOPPING_NEVER,
}


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
    """Makes the answer repeatable. None: the server draws one and reports it."""
    stop: str | Sequence[str] | None = None
    """An answer ends before any of these texts."""
    stop_token_ids: Sequence[int] | None = None
    """An answer ends with any of these tokens."""
    bad_words: Sequence[str] | None = None
    """Texts that never appear."""
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

    def __post_init__(self) -> None:
        # Built once here, so that a wrong value is reported where it was written.
        self.to_proto()

    def to_proto(self, *, is_chat: bool = False) -> sampling_pb2.SamplingParams:
        """The message of a request. Raises ValueError naming a field with an invalid value.

        `is_chat`: `max_tokens` is as many as the model's length allows, unless it was given.
        """
        given = [name for name in _STRUCTURED_OUTPUT if getattr(self, name) is not None]
        if len(given) > 1:
            raise ValueError(f"{' and '.join(given)} are mutually exclusive")
        proto = sampling_pb2.SamplingParams()
        for name, convert in _SCALARS.items():
            if (value := getattr(self, name)) is not None:
                setattr(proto, name, convert(name, value))
        if is_chat and isinstance(self.max_tokens, _Default):
            proto.ClearField("max_tokens")
        if self.include_stop_str_in_output is not None:
            proto.include_stop_in_output = _boolean(
                "include_stop_str_in_output", self.include_stop_str_in_output
            )
        if not isinstance(self.logit_bias, Mapping | None):
            raise ValueError(f"logit_bias must map token ids to numbers, not {self.logit_bias!r}")
        for token_id, bias in (self.logit_bias or {}).items():
            proto.logit_bias.add(
                token_id=_integer("logit_bias", token_id), bias=_number("logit_bias", bias)
            )
        proto.bad_words.extend(_texts("bad_words", self.bad_words))
        proto.stop.extend(_texts("stop", [self.stop] if isinstance(self.stop, str) else self.stop))
        for token_id in _items("stop_token_ids", self.stop_token_ids, "integers", SupportsIndex):
            proto.stop_token_ids.append(_integer("stop_token_ids", token_id))
        if self.choice is not None:
            proto.choice.SetInParent()
            proto.choice.choices.extend(_texts("choice", self.choice))
        if self.thought is not None:
            if not isinstance(self.thought, Sequence) or len(self.thought) != 2:
                raise ValueError(f"thought must be a text and a list, not {self.thought!r}")
            start, ends = self.thought
            proto.thought.start = _text("thought", start)
            proto.thought.ends.extend(_texts("thought", ends))
        self._fill_beam_search(proto)
        return proto

    def _fill_beam_search(self, proto: sampling_pb2.SamplingParams) -> None:
        """Set the parameters of beam search, if there is a width."""
        if self.beam_width is None:
            for name in ("length_penalty", "early_stopping"):
                if getattr(self, name) is not None:
                    raise ValueError(f"{name} requires beam_width")
            return
        proto.beam_search.width = _integer("beam_width", self.beam_width)
        if self.length_penalty is not None:
            proto.beam_search.length_penalty = _number("length_penalty", self.length_penalty)
        if self.early_stopping is not None:
            if self.early_stopping not in _EARLY_STOPPING:
                raise ValueError(
                    f"early_stopping must be True, False or 'never', not {self.early_stopping!r}"
                )
            proto.beam_search.early_stopping = _EARLY_STOPPING[self.early_stopping]


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


def _integer(name: str, value: object, maximum: int = _MAX_UINT32, *, minimum: int = 0) -> int:
    """`value` as an int that the field can carry; accepts whatever can index a list, such as
    numpy's integers."""
    try:
        integer = operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        raise ValueError(f"{name} must be an integer, not {value!r}") from None
    if not minimum <= integer <= maximum:
        raise ValueError(f"{name} must be from {minimum} to {maximum}, not {integer}")
    return integer


def _number(name: str, value: object) -> float:
    try:
        return float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        raise ValueError(f"{name} must be a number, not {value!r}") from None


def _text(name: str, value: object) -> str:
    if not isinstance(value, str):
        raise ValueError(f"{name} must be a text, not {value!r}")
    return value


def _json(name: str, value: object) -> str:
    """JSON text as it is; anything else as JSON."""
    try:
        return value if isinstance(value, str) else json.dumps(value, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{name} must be JSON: {error}") from None


def _boolean(name: str, value: object) -> bool:
    if value not in (True, False):
        raise ValueError(f"{name} must be True or False, not {value!r}")
    return bool(value)


def _items(name: str, values: object, kind: str, item_type: type = object) -> list[Any]:
    """The items of a list of a `kind`; none for None."""
    items = [] if values is None else list(values) if isinstance(values, Iterable) else [None]
    if isinstance(values, str) or not all(isinstance(item, item_type) for item in items):
        raise ValueError(f"{name} must be a list of {kind}, not {values!r}")
    return items


_texts = partial(_items, kind="texts", item_type=str)


def _converter(field: FieldDescriptor) -> Callable[[str, Any], Any] | None:
    """The conversion of a parameter to the value of a message's field; None if there is none."""
    if field.is_repeated:
        return None
    if field.name in _COUNTS_OR_ALL:
        return lambda name, value: max(0, _integer(name, value, minimum=-1))
    if field.name == "json_schema":
        return _json
    by_type: dict[int, Callable[[str, Any], Any]] = {
        FieldDescriptor.TYPE_UINT32: _integer,
        FieldDescriptor.TYPE_UINT64: partial(_integer, maximum=_MAX_UINT64),
        FieldDescriptor.TYPE_FLOAT: _number,
        FieldDescriptor.TYPE_STRING: _text,
        FieldDescriptor.TYPE_BOOL: _boolean,
    }
    return by_type.get(field.type)


_SCALARS = {
    field.name: convert
    for field in sampling_pb2.SamplingParams.DESCRIPTOR.fields
    if field.name in {parameter.name for parameter in fields(SamplingParams)}
    and (convert := _converter(field)) is not None
}
"""The parameters that are one value, as which the message has them, too."""
