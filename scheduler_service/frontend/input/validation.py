"""What a request may say. Ranges are told in sampling.proto and inference_service.proto.

Checks come in two rounds: `check_request` needs the request alone, `check_against_model` also the
model. Every complaint is an InvalidArgument that names the field by its path in the request.
"""

import math
import re
from collections.abc import Collection, Sequence
from struct import pack, unpack

from google.protobuf.message import Message

from pagewire.v1 import inference_service_pb2 as inference_pb
from pagewire.v1 import model_pb2, sampling_pb2, status_pb2
from scheduler_service.errors import InvalidArgument, UnsupportedByModel
from scheduler_service.frontend.input.prompt import check_chat
from scheduler_service.frontend.structured_output.constraint import texts_of

MIN_TEMPERATURE = unpack("f", pack("f", 0.01))[0]
"""0.01 as a float32 field holds it, which is a little less."""
MAX_CHOICES = 128
MAX_LOGPROBS = 20
MAX_LOGIT_BIAS = 1024
MAX_STOP_STRINGS = 16
MAX_STOP_STRING_CHARS = 1024
MAX_STOP_TOKENS = 128
MAX_BAD_WORDS = 128
MAX_BAD_WORD_CHARS = 1024
MAX_BEAM_WIDTH = 64
MAX_LENGTH_PENALTY = 5
"""Either way; length to this power stays within float32."""
MIN_STATUS_INTERVAL_MS, MAX_STATUS_INTERVAL_MS = 100, 60_000
MAX_STATUS_REQUESTS = 4096

MAX_HOLD_MS = 60_000
CHUNK_TOKENS = 1 << 16
MAX_STRUCTURED_BYTES = 262_144
"""Of what an output is to match."""
MAX_STRUCTURED_CHOICES = 1024

_REQUEST_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}")


def check_request_id(request: inference_pb.GenerateRequest) -> None:
    """Raise InvalidArgument unless the id, where there is one, is well formed."""
    if request.HasField("request_id"):
        _expect(
            _REQUEST_ID.fullmatch(request.request_id) is not None,
            "request_id",
            "expected 1 to 128 characters of [A-Za-z0-9._:-]",
        )


def check_request(request: inference_pb.GenerateRequest) -> None:
    """Raise InvalidArgument for whatever no model could make right."""
    check_request_id(request)
    _check_prompt(request)
    _expect(
        request.max_hold_ms <= MAX_HOLD_MS,
        "max_hold_ms",
        f"expected at most {MAX_HOLD_MS}, got {request.max_hold_ms}",
    )
    _check_sampling(request.sampling_params)
    _check_contradictions(request.sampling_params)
    _check_resume(request)


def check_against_model(request: inference_pb.GenerateRequest, info: model_pb2.ModelInfo) -> None:
    """Raise InvalidArgument for token ids that the model does not have, and UnsupportedByModel for
    structured output where its workers have none."""
    params = request.sampling_params
    check_token_ids("token_ids.ids", request.token_ids.ids, info.vocab_size)
    check_token_ids("sampling_params.stop_token_ids", params.stop_token_ids, info.vocab_size)
    for index, bias in enumerate(params.logit_bias):
        path = f"sampling_params.logit_bias[{index}].token_id"
        _expect(bias.token_id < info.vocab_size, path, _below_vocab(info.vocab_size))
    if params.HasField("structured_output") and not info.structured_output:
        raise UnsupportedByModel(
            "the model's workers do not support structured output",
            reason="NO_STRUCTURED_OUTPUT",
        )
    for index, choice in enumerate(request.resume):
        check_token_ids(f"resume[{index}].token_ids", choice.token_ids, info.vocab_size)


def check_token_ids(path: str, token_ids: Sequence[int], vocab_size: int) -> None:
    """Raise InvalidArgument naming the first id that is out of the vocabulary."""
    for start in range(0, len(token_ids), CHUNK_TOKENS):  # other threads run between the chunks
        chunk = token_ids[start : start + CHUNK_TOKENS]
        if max(chunk) >= vocab_size:
            index, found = next((i, id) for i, id in enumerate(chunk, start) if id >= vocab_size)
            raise InvalidArgument(f"{path}[{index}]", f"{_below_vocab(vocab_size)}, got {found}")


def check_status_interval(request: inference_pb.WatchStatusRequest) -> None:
    """Raise InvalidArgument for an interval out of range."""
    _check_range(request, "interval_ms", MIN_STATUS_INTERVAL_MS, MAX_STATUS_INTERVAL_MS, prefix="")


def check_status_detail(detail: status_pb2.StatusDetail) -> None:
    """Raise InvalidArgument for a number of requests out of range."""
    _check_range(detail, "max_requests", 1, MAX_STATUS_REQUESTS, prefix="detail.")


def _check_prompt(request: inference_pb.GenerateRequest) -> None:
    kind = request.WhichOneof("prompt")
    if kind == "text":
        _expect(bool(request.text), "text", "expected a text that is not empty")
    elif kind == "token_ids":
        _expect(len(request.token_ids.ids) > 0, "token_ids.ids", "expected at least one token id")
    elif kind == "chat":
        check_chat(request.chat)
    else:
        raise InvalidArgument("prompt", "expected one of text, token_ids and chat")


def _check_sampling(params: sampling_pb2.SamplingParams) -> None:
    _check_range(params, "n", 1, MAX_CHOICES)
    _check_range(params, "best_of", 1, MAX_CHOICES)
    if params.temperature != 0:
        _check_range(params, "temperature", MIN_TEMPERATURE, 100, note=", or 0")
    _check_range(params, "top_p", 0, 1, low_open=True)
    _check_range(params, "min_p", 0, 1)
    _check_range(params, "repetition_penalty", 0, 100, low_open=True)
    _check_range(params, "presence_penalty", -2, 2)
    _check_range(params, "frequency_penalty", -2, 2)
    _check_range(params, "max_tokens", 1, math.inf)
    _check_range(params, "logprobs", 0, MAX_LOGPROBS)
    _check_range(params, "prompt_logprobs", 0, MAX_LOGPROBS)
    _check_logit_bias(params.logit_bias)
    _check_texts(params.stop, "stop", MAX_STOP_STRINGS, MAX_STOP_STRING_CHARS)
    _check_texts(params.bad_words, "bad_words", MAX_BAD_WORDS, MAX_BAD_WORD_CHARS)
    _check_count(params.stop_token_ids, "stop_token_ids", MAX_STOP_TOKENS)
    _check_beam_search(params)
    _check_structured_output(params)


def _check_logit_bias(entries: Collection[sampling_pb2.LogitBias]) -> None:
    _check_count(entries, "logit_bias", MAX_LOGIT_BIAS)
    seen: set[int] = set()
    for index, entry in enumerate(entries):
        path = f"sampling_params.logit_bias[{index}]"
        _expect(-100 <= entry.bias <= 100, f"{path}.bias", "expected a number from -100 to 100")
        _expect(entry.token_id not in seen, f"{path}.token_id", "expected no token to occur twice")
        seen.add(entry.token_id)


def _check_texts(texts: Collection[str], field: str, max_count: int, max_chars: int) -> None:
    _check_count(texts, field, max_count)
    for index, text in enumerate(texts):
        path = f"sampling_params.{field}[{index}]"
        _expect(bool(text), path, "expected a text that is not empty")
        _expect(len(text) <= max_chars, path, f"expected at most {max_chars} characters")


def _check_beam_search(params: sampling_pb2.SamplingParams) -> None:
    if params.HasField("beam_search"):
        beam = params.beam_search
        prefix = "sampling_params.beam_search."
        _expect(
            1 <= beam.width <= MAX_BEAM_WIDTH,
            f"{prefix}width",
            f"expected 1 to {MAX_BEAM_WIDTH}",
        )
        most = MAX_LENGTH_PENALTY
        _check_range(beam, "length_penalty", -most, most, prefix=prefix)
        known = beam.early_stopping in sampling_pb2.EarlyStopping.values()
        _expect(known, f"{prefix}early_stopping", "expected a known value")


def _check_structured_output(params: sampling_pb2.SamplingParams) -> None:
    kind = params.WhichOneof("structured_output")
    if kind == "choice":
        path, count = "sampling_params.choice.choices", len(params.choice.choices)
        _expect(1 <= count <= MAX_STRUCTURED_CHOICES, path, _one_to(MAX_STRUCTURED_CHOICES))
        for index, text in enumerate(params.choice.choices):
            path = f"sampling_params.choice.choices[{index}]"
            _expect(bool(text), path, "expected a text that is not empty")
    elif kind is not None:
        _expect(bool(getattr(params, kind)), f"sampling_params.{kind}", "expected a text")
    if kind is not None:
        size = sum(len(text.encode()) for text in texts_of(params))
        limit = MAX_STRUCTURED_BYTES
        _expect(size <= limit, f"sampling_params.{kind}", f"expected at most {limit} bytes")


def _check_contradictions(params: sampling_pb2.SamplingParams) -> None:
    """Fields that are fine alone and senseless together."""
    n = params.n if params.HasField("n") else 1
    if params.HasField("best_of"):
        _expect(params.best_of >= n, "sampling_params.best_of", f"expected at least n ({n})")
    if params.HasField("max_tokens"):
        _expect(
            params.min_tokens <= params.max_tokens,
            "sampling_params.min_tokens",
            f"expected at most max_tokens ({params.max_tokens})",
        )
    if params.HasField("beam_search"):
        _check_beside_beam_search(params, n)


def _check_beside_beam_search(params: sampling_pb2.SamplingParams, n: int) -> None:
    """Beam search chooses by log probability alone, and ends by tokens."""
    prefix = "sampling_params."
    width = params.beam_search.width
    _expect(width >= n, f"{prefix}beam_search.width", f"expected at least n ({n})")
    _expect(
        params.temperature in (0, 1) or not params.HasField("temperature"),
        f"{prefix}temperature",
        "expected to be absent, 0 or 1 with beam_search",
    )
    for field, neutral in (("top_p", 1), ("top_k", 0), ("min_p", 0)):
        is_absent = not params.HasField(field)  # type: ignore[arg-type]
        is_neutral = is_absent or getattr(params, field) == neutral
        _expect(
            is_neutral,
            f"{prefix}{field}",
            f"expected to be absent or {neutral} with beam_search",
        )
    _expect(
        not params.HasField("best_of"),
        f"{prefix}best_of",
        "expected to be absent with beam_search, whose width is the number of candidates",
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
        params.HasField("seed"), "sampling_params.seed", "required with resume, as Started told it"
    )
    n = params.n if params.HasField("n") else 1
    seen: set[int] = set()
    for position, choice in enumerate(request.resume):
        path = f"resume[{position}]"
        _expect(choice.index < n, f"{path}.index", f"expected below n ({n})")
        _expect(choice.index not in seen, f"{path}.index", "expected no choice to occur twice")
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
        "expected a finite number",
    )


def _expect(condition: bool, path: str, expected: str) -> None:
    if not condition:
        raise InvalidArgument(path, expected)


def _check_count(values: Collection[object], field: str, most: int) -> None:
    _expect(len(values) <= most, f"sampling_params.{field}", f"expected at most {most} entries")


def _check_range(
    message: Message,
    field: str,
    low: float,
    high: float,
    *,
    low_open: bool = False,
    note: str = "",
    prefix: str = "sampling_params.",
) -> None:
    """Raise unless the field is absent or a finite number in its range."""
    if not message.HasField(field):
        return
    value = getattr(message, field)
    within = (low < value if low_open else low <= value) and value <= high
    if math.isfinite(value) and within:
        return
    bounds = [
        f"above {low:g}" if low_open else f"at least {low:g}" if math.isfinite(low) else "",
        f"at most {high:g}" if math.isfinite(high) else "",
    ]
    wanted = " and ".join(filter(None, bounds)) or "a finite number"
    raise InvalidArgument(f"{prefix}{field}", f"expected {wanted}{note}, got {value:g}")


def _one_to(most: int) -> str:
    return f"expected 1 to {most}"


def _below_vocab(vocab_size: int) -> str:
    return f"expected a token id below the vocabulary size {vocab_size}"
