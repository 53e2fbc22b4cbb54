"""The contents of a recording: a header, then an entry per input to the core, each a line of JSON.

    {"format":"pagewire recording","format_version":1,"software_version":"0.1.0",…,"config":{…}}
    {"do":"add_worker_group","capacity":{"worker_group_id":"g0",…},"now":815.2}
    {"do":"submit","request":{…},"now":815.9}
    {"do":"schedule","worker_group_id":"g0","now":815.9,"chain":"6d2f…"}
    {"do":"update","worker_group_id":"g0","result":{"step_id":1,"token_ids":[17]},"now":816.1}
    {"do":"pop_outboxes","chain":"93b0…"}

`do` is the method of `SchedulerCore`; its arguments follow, under the names that the method
declares. Then comes the outcome: `raised`, the class and the message of an error, or `chain`, if
the method returned a plan or outputs. Plans have one chain and outputs another; each value is the
hash of the one before it and of what was returned, so that equal values mean that everything so far
was equal. Errors in outputs are hashed by class, as messages may be reworded.

Lines are models that pydantic derives from the annotations of the core: a field that is added to
`Request` or `StepResult` is in recordings from then on. Fields that have their default are left
out, so that the text, and with it its hash, stays the same when a field is added. Recordings of
another format version are refused.
"""

import base64
import json
import typing
from collections.abc import Callable
from dataclasses import dataclass, field, make_dataclass, replace
from functools import reduce
from operator import or_
from typing import Annotated, Any, Literal, TypeVar

import xxhash
from google.protobuf.message import Message
from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from pagewire.v1.pooling_pb2 import PoolingParams
from pagewire.v1.sampling_pb2 import SamplerParams
from scheduler_service.core import EngineOutputs, SchedulerConfig, SchedulerCore, StepPlan
from scheduler_service.core.request import Pooling
from service_common.version import VERSION

FORMAT = "pagewire recording"
FORMAT_VERSION = 1

INPUTS = (
    "add_worker_group",
    "remove_worker_group",
    "fail_worker_group",
    "drain_worker_group",
    "set_adapters",
    "submit",
    "cancel",
    "abort",
    "stop_choice",
    "remove_frontend",
    "expire",
    "schedule",
    "add_plan_time",
    "update",
    "pop_outboxes",
)
"""The methods of the core that change it."""


class Unreadable(ValueError):
    """JSON that does not match the type; says where, and what was expected."""


def _parameters_of(method: str) -> dict[str, Any]:
    hints = typing.get_type_hints(getattr(SchedulerCore, method))
    return {name: kind for name, kind in hints.items() if name != "return"}


PARAMETERS = {method: _parameters_of(method) for method in INPUTS}
"""Names and types of each input's arguments."""

FrontendOutputs = dict[str, EngineOutputs]
"""Outputs by frontend id."""

DecodeSampling = Callable[[Any], Any]
"""Returns the sampling parameters, which the core does not read, from what stands for them."""

_CONFIG = ConfigDict(
    arbitrary_types_allowed=True,
    extra="forbid",
    ser_json_bytes="base64",
    ser_json_inf_nan="constants",
    strict=True,
    val_json_bytes="base64",
)


class Header(BaseModel):
    """The first line."""

    model_config = _CONFIG

    format: str = FORMAT
    format_version: int = FORMAT_VERSION
    software_version: str
    recorded_at: str
    """UTC, ISO 8601; entries use the core's clock, whose zero is arbitrary."""
    config: SchedulerConfig
    """In the file with all fields: defaults may change later."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Entry:
    """One input and its outcome."""

    line: int
    do: str
    """One of INPUTS."""
    arguments: dict[str, Any]
    raised: list[str] | None = None
    """Class and message of the error."""
    chain: str | None = None
    """The chain of plans or of outputs; None if the core returned none."""
    plan: StepPlan | None = None
    """The plan, in recordings with plans."""

    @property
    def now(self) -> float | None:
        """The time passed to the core, in seconds; None if the method takes none."""
        now: float | None = self.arguments.get("now")
        return now


def _make_type(name: str, *fields: Any) -> type:
    """A dataclass, which takes less time to make than a model of pydantic's."""
    return make_dataclass(name, fields, kw_only=True, namespace={"__pydantic_config__": _CONFIG})


def _line_type(do: str) -> type:
    outcomes = {"raised": list[str] | None, "chain": str | None, "plan": StepPlan | None}
    return _make_type(
        do,
        ("do", Literal[do]),
        *PARAMETERS[do].items(),
        *((name, kind, field(default=None)) for name, kind in outcomes.items()),
    )


LINES = {do: _line_type(do) for do in INPUTS}
"""The classes of lines by their input: its name, its arguments and its outcome."""

_RETURNED = {
    StepPlan: _make_type("Plan", ("returned", StepPlan)),
    dict: _make_type("Outputs", ("returned", FrontendOutputs)),
}

_AnyLine: Any = Annotated[reduce(or_, LINES.values()), Field(discriminator="do")]
_LINE: TypeAdapter[Any] = TypeAdapter(_AnyLine)
_ADAPTERS: dict[type, TypeAdapter[Any]] = {
    kind: TypeAdapter(kind) for kind in (*LINES.values(), *_RETURNED.values())
}


def to_json(line: Any) -> bytes:
    """Compact JSON of what does not have its default.

    Sampling parameters are protobuf messages, whose bytes preserve unknown fields. Raises
    PydanticSerializationError for what a recording cannot hold.
    """
    return _ADAPTERS[type(line)].dump_json(
        line, exclude_defaults=True, fallback=_of_other_type, warnings="error"
    )


def _of_other_type(value: Any) -> str:
    if isinstance(value, Exception):
        return type(value).__name__
    if isinstance(value, Message):
        return base64.b64encode(value.SerializeToString(deterministic=True)).decode()
    raise TypeError(f"a recording cannot hold a {type(value).__name__}")


AnyMessage = TypeVar("AnyMessage", bound=Message)


def decode_sampling(data: Any) -> SamplerParams:
    """Return the message from base64; raises Unreadable."""
    return _decode_message(SamplerParams, data)


def _decode_message(kind: type[AnyMessage], data: Any) -> AnyMessage:
    try:
        return kind.FromString(base64.b64decode(data, validate=True))
    except Exception as error:  # protobuf's own class differs between its implementations
        raise Unreadable(f"expected {kind.__name__} in base64: {error}") from error


def decode_header(text: str | bytes) -> Header:
    """Decode the first line; raises Unreadable."""
    try:
        data = json.loads(text)
    except ValueError as error:
        raise Unreadable(f"not JSON: {error}") from error
    if not isinstance(data, dict) or data.get("format") != FORMAT:
        raise Unreadable(f"not a recording: expected an object with the format {FORMAT!r}")
    if (version := data.get("format_version")) != FORMAT_VERSION:
        raise Unreadable(
            f"format version {version!r} is unknown: this software ({VERSION}) reads version"
            f" {FORMAT_VERSION}"
        )
    return validated(Header.model_validate_json, text)


def decode_entry(
    line: int, text: str | bytes, decode_sampling: DecodeSampling = decode_sampling
) -> Entry:
    """Decode another line, of this number; raises Unreadable."""
    data = validated(_LINE.validate_json, text)
    arguments = {name: getattr(data, name) for name in PARAMETERS[data.do]}
    if (request := arguments.get("request")) is not None:
        work = request.work
        if isinstance(work, Pooling):
            work = replace(work, pooling=_decode_message(PoolingParams, work.pooling))
        else:
            work = replace(work, sampling=decode_sampling(work.sampling))
        arguments["request"] = replace(request, work=work)
    return Entry(
        line=line,
        do=data.do,
        arguments=arguments,
        raised=data.raised,
        chain=data.chain,
        plan=data.plan,
    )


def validated(validate: Callable[[Any], Any], data: Any) -> Any:
    """What pydantic makes of `data`; raises Unreadable, naming the field."""
    try:
        return validate(data)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = ".".join(map(str, first["loc"]))
        found = first["input"] if isinstance(first["input"], bool | int | float | str) else None
        got = f", got {found!r:.80}" if where and found is not None else ""
        raise Unreadable(f"{where}: {first['msg']}{got}".removeprefix(": ")) from error


class Outcomes:
    """The hash chains of one core's plans and of its outputs.

    A value hashes what was returned and the value before it: 128 bits, in hexadecimal digits.
    """

    def __init__(self) -> None:
        self._digests = dict.fromkeys(_RETURNED, b"")

    def chain_with(self, returned: StepPlan | FrontendOutputs | None) -> str | None:
        """The chain's value with this plan or these outputs; None without any."""
        if not returned:
            return None
        kind = StepPlan if isinstance(returned, StepPlan) else dict
        data = to_json(_RETURNED[kind](returned=returned))
        digest = self._digests[kind] = xxhash.xxh3_128_digest(self._digests[kind] + data)
        return digest.hex()

    @staticmethod
    def of_error(error: Exception) -> list[str]:
        """Class and message of an error."""
        return [type(error).__name__, str(error)]
