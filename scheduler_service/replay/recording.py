"""The contents of a recording: a header, then an entry per input to the core, each a line of JSON.

    {"format":"pagewire recording","format_version":1,"software_version":"0.1.0",…,"config":{…}}
    {"do":"add_worker_group","capacity":{"worker_group_id":"g0",…},"now":815.2}
    {"do":"submit","request":{…},"now":815.9}
    {"do":"schedule","worker_group_id":"g0","now":815.9,"chain":"6d2f…"}
    {"do":"update","worker_group_id":"g0","result":{"step_id":1,"token_ids":[17]},"now":816.1}
    {"do":"take_outboxes","chain":"93b0…"}

`do` is the method of `SchedulerCore`; its arguments follow, under the names that the method
declares. Then comes the outcome: `raised`, the class and the message of an error, or `chain`, if
the method returned a plan or outputs. Plans have one chain and outputs another; each value is the
hash of the one before it and of what was returned, so that equal values mean that everything so far
was equal. Errors in outputs are hashed by class, as messages may be reworded.

Recordings of another format version are refused.
"""

import base64
import json
import marshal
import typing
from dataclasses import dataclass
from typing import Any

import xxhash

from pagewire.v1.sampling_pb2 import SamplerParams
from scheduler_service.core import EngineOutputs, SchedulerConfig, SchedulerCore, StepPlan
from scheduler_service.replay.codec import Codec, Unreadable
from service_common.version import VERSION

FORMAT = "pagewire recording"
FORMAT_VERSION = 1

INPUTS = (
    "add_worker_group",
    "remove_worker_group",
    "drain_worker_group",
    "submit",
    "cancel",
    "abort",
    "stop_choice",
    "remove_frontend",
    "expire",
    "schedule",
    "add_plan_time",
    "update",
    "take_outboxes",
)
"""The methods of the core that change it."""

OUTCOMES = ("raised", "chain", "plan")

_MARSHAL_VERSION = 2
"""The last without references between objects, which would let equal values differ."""


def _parameters_of(method: str) -> dict[str, Any]:
    hints = typing.get_type_hints(getattr(SchedulerCore, method))
    return {name: kind for name, kind in hints.items() if name != "return"}


PARAMETERS = {method: _parameters_of(method) for method in INPUTS}
"""Names and types of each input's arguments."""

FrontendOutputs = dict[str, EngineOutputs]
"""Outputs by frontend id."""


def _encode_sampling(sampling: Any) -> str:
    data: bytes = sampling.SerializeToString(deterministic=True)
    return base64.b64encode(data).decode()


def _decode_sampling(text: str) -> SamplerParams:
    try:
        return SamplerParams.FromString(base64.b64decode(text, validate=True))
    except Exception as error:  # protobuf's own class differs between its implementations
        raise Unreadable(f"expected SamplerParams in base64: {error}") from error


CODEC = Codec(_encode_sampling, _decode_sampling)
"""Sampling parameters are protobuf messages, whose bytes preserve unknown fields."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Header:
    """The first line."""

    format: str = FORMAT
    format_version: int = FORMAT_VERSION
    software_version: str
    recorded_at: str
    """UTC, ISO 8601; entries use the core's clock, whose zero is arbitrary."""
    config: SchedulerConfig


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


def encode_header(codec: Codec, header: Header) -> dict[str, Any]:
    """The header for `json`, with the whole configuration: defaults may change later."""
    data: dict[str, Any] = codec.encode(Header, header)
    kinds = typing.get_type_hints(SchedulerConfig)
    config = {
        name: codec.encode(kind, getattr(header.config, name)) for name, kind in kinds.items()
    }
    return (
        {"format": header.format, "format_version": header.format_version}
        | data
        | {"config": config}
    )


def decode_header(codec: Codec, data: Any) -> Header:
    """Decode the first line's JSON; raises Unreadable."""
    if not isinstance(data, dict) or data.get("format") != FORMAT:
        raise Unreadable(f"not a recording: expected an object with the format {FORMAT!r}")
    if data.get("format_version") != FORMAT_VERSION:
        raise Unreadable(
            f"format version {data.get('format_version')!r} is unknown: this software "
            f"({VERSION}) reads version {FORMAT_VERSION}"
        )
    header: Header = codec.decode(Header, data)
    return header


def decode_entry(codec: Codec, line: int, data: Any) -> Entry:
    """Decode another line's JSON; raises Unreadable."""
    if not isinstance(data, dict) or data.get("do") not in PARAMETERS:
        raise Unreadable('expected an object whose "do" is an input of the scheduler core')
    do: str = data["do"]
    parameters = PARAMETERS[do]
    if missing := parameters.keys() - data.keys():
        raise Unreadable(f"{do} lacks {', '.join(sorted(missing))}")
    if unknown := data.keys() - parameters.keys() - {"do", *OUTCOMES}:
        raise Unreadable(f"{do} has no argument {', '.join(sorted(unknown))} in this version")
    return Entry(
        line=line,
        do=do,
        arguments={
            name: codec.decode(kind, data[name], f"{do}.{name}")
            for name, kind in parameters.items()
        },
        raised=codec.decode(list[str] | None, data.get("raised"), "raised"),
        chain=codec.decode(str | None, data.get("chain"), "chain"),
        plan=codec.decode(StepPlan | None, data.get("plan"), "plan"),
    )


to_text = json.JSONEncoder(separators=(",", ":")).encode
"""Compact JSON in ASCII."""


class Outcomes:
    """The hash chains of one core's plans and of its outputs.

    A value hashes what was returned and the value before it: 128 bits, in hexadecimal digits.
    """

    def __init__(self, codec: Codec) -> None:
        self._codec = codec
        self._digests: dict[Any, bytes] = {StepPlan: b"", FrontendOutputs: b""}

    def chain_with(self, returned: StepPlan | FrontendOutputs | None) -> str | None:
        """The chain's value with this plan or these outputs; None without any.

        It hashes marshal's bytes, which take a fifth of the time of JSON text.
        """
        if not returned:
            return None
        kind: Any = StepPlan if isinstance(returned, StepPlan) else FrontendOutputs
        data = marshal.dumps(self._codec.encode(kind, returned), _MARSHAL_VERSION)
        digest = self._digests[kind] = xxhash.xxh3_128_digest(self._digests[kind] + data)
        return digest.hex()

    @staticmethod
    def of_error(error: Exception) -> list[str]:
        """Class and message of an error."""
        return [type(error).__name__, str(error)]
