"""Validation of requests. Ranges are declared in the protos.

`check_request` needs the request alone; `processor.py` checks it against the model. Every error is
an InvalidArgument that names the field by its path in the request.
"""

import math
import re
from typing import Any

from google.protobuf.message import Message

from pagewire.v1 import inference_service_pb2 as inference_pb
from pagewire.v1 import sampling_pb2
from pagewire.validation import find_violation, generation_defaults, limits_of, sampling_only
from scheduler_service.errors import InvalidArgument
from scheduler_service.frontend.input.chat import check_chat
from scheduler_service.frontend.input.tool_choice import check_tool_choice
from scheduler_service.frontend.structured_output.constraint import texts_of

SAMPLING_LIMITS = limits_of(sampling_pb2.SamplingParams.DESCRIPTOR)
"""Ranges of the sampling parameters, by field."""
SAMPLING_ONLY = {
    name: generation_defaults(sampling_pb2.SamplingParams.DESCRIPTOR)[name]
    for name in sampling_only(sampling_pb2.SamplingParams.DESCRIPTOR)
}
"""Sampling parameters that beam search ignores, with the values that have no effect."""
MIN_TEMPERATURE = SAMPLING_LIMITS["temperature"].low
"""0.01 as a float32 field holds it, which is a little less."""
MAX_STRUCTURED_BYTES = 262_144
"""Maximum size of a constraint, in bytes."""

_REQUEST_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}")


def value_or(message: Message, field: str, default: Any) -> Any:
    """A field's value if it is present, else the default."""
    return getattr(message, field) if message.HasField(field) else default


def check_request_id(request: inference_pb.GenerateRequest) -> None:
    """Raise InvalidArgument unless the id, where there is one, is well formed."""
    if request.HasField("request_id"):
        _expect(
            _REQUEST_ID.fullmatch(request.request_id) is not None,
            "request_id",
            f"expected 1 to 128 characters of [A-Za-z0-9._:-], got {request.request_id[:140]!r}",
        )


def check_request(request: inference_pb.GenerateRequest) -> None:
    """Raise InvalidArgument for what is invalid whichever model the request is for."""
    check_request_id(request)
    check_limits(request)
    _check_prompt(request)
    _check_sampling(request.sampling_params)
    _check_contradictions(request.sampling_params)
    _check_resume(request)


def check_limits(message: Message) -> None:
    """Raise InvalidArgument for a field that is out of the limits that the protos declare."""
    violation = find_violation(message)
    if violation is not None:
        raise InvalidArgument(violation.path, violation.expected)


def _check_prompt(request: inference_pb.GenerateRequest) -> None:
    kind = request.WhichOneof("prompt")
    if kind == "text":
        _expect(bool(request.text), "text", "expected a text that is not empty")
    elif kind == "token_ids":
        _expect(len(request.token_ids.ids) > 0, "token_ids.ids", "expected at least one token id")
    elif kind == "chat":
        check_chat(request.chat)
        check_tool_choice(request)
    else:
        raise InvalidArgument("prompt", "expected one of text, token_ids and chat")


def _check_sampling(params: sampling_pb2.SamplingParams) -> None:
    """Rules that are not ranges."""
    seen: set[int] = set()
    for index, entry in enumerate(params.logit_bias):
        path = f"sampling_params.logit_bias[{index}].token_id"
        again = f"expected no token to occur twice, got {entry.token_id} again"
        _expect(entry.token_id not in seen, path, again)
        seen.add(entry.token_id)
    if params.HasField("beam_search"):
        value = params.beam_search.early_stopping
        is_known = value in sampling_pb2.EarlyStopping.values()
        expected = f"expected 0 to 3 (EarlyStopping), got {value}"
        _expect(is_known, "sampling_params.beam_search.early_stopping", expected)
    check_structured_output(params, f"sampling_params.{params.WhichOneof('structured_output')}")


def check_structured_output(params: sampling_pb2.SamplingParams, field: str) -> None:
    """Raise InvalidArgument, naming `field`, for a constraint that is empty or too large."""
    kind = params.WhichOneof("structured_output")
    if kind is None:
        _expect(
            not params.HasField("thought"),
            "sampling_params.thought",
            "expected to be absent without structured output, which it precedes",
        )
        return
    _expect(
        not params.allowed_token_ids,
        "sampling_params.allowed_token_ids",
        "expected to be absent with structured output and with a required call",
    )
    thought = params.thought
    starts = (thought.start, *thought.other_starts)
    _expect(
        bool(thought.start or not thought.other_starts),
        "sampling_params.thought.other_starts",
        "requires thought.start",
    )
    is_within = any(end in start for end in thought.ends for start in starts)
    _expect(not is_within, "sampling_params.thought.ends", "expected none within a start")
    if kind != "choice":
        _expect(bool(getattr(params, kind)), field, "expected a text")
    size = sum(len(text.encode()) for text in texts_of(params))
    limit = MAX_STRUCTURED_BYTES
    _expect(size <= limit, field, f"expected at most {limit} bytes, got {size}")


def _check_contradictions(params: sampling_pb2.SamplingParams) -> None:
    """Fields that are valid alone and contradict each other."""
    n = value_or(params, "n", 1)
    if params.HasField("best_of"):
        expected = f"expected at least n ({n}), got {params.best_of}"
        _expect(params.best_of >= n, "sampling_params.best_of", expected)
    if params.HasField("max_tokens"):
        _expect(
            params.min_tokens <= params.max_tokens,
            "sampling_params.min_tokens",
            f"expected at most max_tokens ({params.max_tokens}), got {params.min_tokens}",
        )
    if params.HasField("beam_search"):
        _check_with_beam_search(params, n)


def _check_with_beam_search(params: sampling_pb2.SamplingParams, n: int) -> None:
    """Beam search chooses by log probability alone and ends by tokens: other fields are invalid."""
    prefix = "sampling_params."
    width = params.beam_search.width
    _expect(width >= n, f"{prefix}beam_search.width", f"expected at least n ({n}), got {width}")
    _expect(
        params.temperature in (0, 1) or not params.HasField("temperature"),
        f"{prefix}temperature",
        f"expected to be absent, 0 or 1 with beam_search, got {params.temperature:g}",
    )
    for field, neutral in SAMPLING_ONLY.items():
        value = getattr(params, field)
        _expect(
            value == neutral or not params.HasField(field),  # type: ignore[arg-type]
            f"{prefix}{field}",
            f"expected to be absent or {neutral:g} with beam_search, got {value:g}",
        )
    _expect(
        not params.HasField("best_of"),
        f"{prefix}best_of",
        "expected to be absent with beam_search, whose width is the number of candidates, got "
        f"{params.best_of}",
    )
    _expect(
        not params.stop,
        f"{prefix}stop",
        "expected no stop strings with beam_search, which ends sequences by stop_token_ids",
    )


def _check_resume(request: inference_pb.GenerateRequest) -> None:
    if not request.resume:
        return
    params = request.sampling_params
    _expect(request.HasField("request_id"), "request_id", "required with resume")
    _expect(
        params.HasField("seed"),
        "sampling_params.seed",
        "required with resume: send the seed from Started",
    )
    n = value_or(params, "n", 1)
    seen: set[int] = set()
    for position, choice in enumerate(request.resume):
        path = f"resume[{position}]"
        _expect(choice.index < n, f"{path}.index", f"expected below n ({n}), got {choice.index}")
        again = f"expected no choice to occur twice, got {choice.index} again"
        _expect(choice.index not in seen, f"{path}.index", again)
        seen.add(choice.index)
        _check_resumed_choice(choice, path, params)


def _check_resumed_choice(
    choice: inference_pb.ResumedChoice, path: str, params: sampling_pb2.SamplingParams
) -> None:
    if choice.token_ids and params.HasField("logprobs"):
        _expect(
            choice.HasField("cumulative_logprob"),
            f"{path}.cumulative_logprob",
            "required with logprobs",
        )
    _expect(
        math.isfinite(choice.cumulative_logprob),
        f"{path}.cumulative_logprob",
        f"expected a finite number, got {choice.cumulative_logprob}",
    )


def _expect(condition: bool, path: str, expected: str) -> None:
    if not condition:
        raise InvalidArgument(path, expected)
