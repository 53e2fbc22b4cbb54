"""The input processor: a request with its prompt as token ids and every default resolved, as the
core gets it.

Also a request's fingerprint, and tokenizing and detokenizing without a generation.
"""

import asyncio
import secrets
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any, TypeVar

from google.protobuf.message import Message

from pagewire.columns import pack
from pagewire.v1 import context_pb2, model_pb2, sampling_pb2
from pagewire.v1 import inference_service_pb2 as inference_pb
from pagewire.v1 import scheduler_service_pb2 as scheduler_pb
from scheduler_service.errors import InvalidArgument, PromptTooLong, UnsupportedByModel
from scheduler_service.frontend.input import validation
from scheduler_service.frontend.input.chat import chat_text, check_chat
from scheduler_service.frontend.input.tool_choice import AnswerFormat, answer_format
from scheduler_service.frontend.input.validation import value_or
from scheduler_service.frontend.models.adapters import RequestAdapter
from scheduler_service.frontend.models.frontend_model import (
    FrontendModel,
    max_input_len,
    max_servable_len,
)
from scheduler_service.frontend.models.tokenizer import ModelTokenizer, TooManyTokens
from scheduler_service.frontend.output.detokenizer import ByteLevelDetokenizer, Detokenizer
from scheduler_service.frontend.output.message import MessageStream
from scheduler_service.frontend.output.stop_strings import StopStrings
from scheduler_service.frontend.structured_output.constraint import constraint_of, only_tokens

FINGERPRINT_BYTES = 16

_NOT_HASHED: tuple[Any, ...] = (
    *("request_id", "attempt", "resume", "priority", "max_hold_ms", "num_speculative_tokens"),
    "model",  # may be absent; the core compares the models
    *("lora", "lora_digest"),  # the adapter may be named in `model`, and its content be unknown
)


def fingerprint(request: inference_pb.GenerateRequest, lora: str = "") -> bytes:
    """A hash of the prompt, the salt, the adapter's name, and all parameters that tokens depend on,
    except the seed and the adapter's content, which a client may learn only from the first
    response."""
    reduced = inference_pb.GenerateRequest()
    reduced.CopyFrom(request)
    for field in _NOT_HASHED:
        reduced.ClearField(field)
    reduced.sampling_params.ClearField("seed")
    if not reduced.sampling_params.ByteSize():  # present only for the seed, if at all
        reduced.ClearField("sampling_params")
    if lora:
        reduced.lora = lora
    data = reduced.SerializeToString(deterministic=True)
    return blake2b(data, digest_size=FINGERPRINT_BYTES).digest()


INLINE_BYTES = 4096
"""Requests up to this size are resolved on the event loop, in about a millisecond at most; handing
them to a thread would cost more than it saves."""

CHUNK_TOKENS = 1 << 16
"""Token ids that are checked in one piece."""

T = TypeVar("T")

SEED_BITS = 53
"""Drawn seeds are exact as a double, so that clients in any language can send one back."""


def draw_request_id() -> str:
    """An id for a request that has none."""
    return uuid.uuid4().hex


@dataclass(frozen=True, kw_only=True, slots=True)
class ResolvedRequest:
    """A request without open defaults: what its stream needs, and what is submitted to the core."""

    submit: scheduler_pb.Submit
    """Complete except for handle, timeout, generated tokens and the request's history."""
    model: FrontendModel
    adapter: RequestAdapter | None
    prompt_token_ids: Sequence[int]
    """Those of the client. Virtual tokens of the adapter precede them at the core."""
    num_choices: int
    """Choices that the core generates."""
    num_returned: int
    """Choices that the client gets: fewer where the best of all candidates are returned."""
    seed: int
    min_tokens: int
    max_tokens: int
    stop_token_ids: frozenset[int]
    """All tokens that end a choice."""
    reported_stop_token_ids: frozenset[int]
    """The tokens that are reported as stop reasons: all but end-of-sequence tokens."""
    stop: StopStrings
    include_stop: bool
    continues_prompt: bool
    """Whether the output goes on with the prompt's text; an answer begins a text of its own,
    without the space of its first token unless a constraint decides about that."""
    skip_special_tokens: bool
    answer: AnswerFormat
    num_logprobs: int | None
    wants_prompt_logprobs: bool
    resume: Sequence[inference_pb.ResumedChoice]

    @property
    def num_virtual_tokens(self) -> int:
        """Tokens before the prompt whose embeddings are the adapter's."""
        return 0 if self.adapter is None else self.adapter.num_virtual_tokens

    @property
    def num_prompt_tokens(self) -> int:
        """Tokens before the output, virtual ones included."""
        return self.num_virtual_tokens + len(self.prompt_token_ids)

    @property
    def is_ranked(self) -> bool:
        """Whether the choices are candidates, of which the most probable are returned."""
        return self.num_choices > self.num_returned

    @property
    def is_streamed(self) -> bool:
        """Whether tokens go to the client as they come. Otherwise the choices are known only when
        all have ended; the client gets nothing before, and a resumed request starts again."""
        return not (self.is_ranked or self.submit.generation.HasField("beam_search"))

    @property
    def has_logprobs(self) -> bool:
        """Whether each token comes with its log probability."""
        return self.is_ranked or self.num_logprobs is not None

    def make_detokenizer(self) -> Detokenizer:
        """A new detokenizer for one choice."""
        if self.model.tokenizer is None:
            return ByteLevelDetokenizer(lambda _: b"")
        return self.model.tokenizer.detokenizer(
            skip_special_tokens=self.skip_special_tokens,
            kept=self.answer.kept_tokens,
            follows=self.prompt_token_ids if self.continues_prompt else (),
        )

    def make_message(self, choice: int) -> MessageStream:
        """The reader of the text of one choice."""
        return MessageStream(
            self.answer.make_parser(),
            self.submit.request_id,
            choice,
            include_reasoning=self.answer.include_reasoning,
            max_calls=self.answer.max_calls,
            has_only_calls=self.answer.has_only_calls,
        )

    def token_text(self, token_id: int) -> str:
        """One token's text; empty without a tokenizer."""
        tokenizer = self.model.tokenizer
        return "" if tokenizer is None else tokenizer.token_text(token_id)


def resolve_request(
    request: inference_pb.GenerateRequest,
    request_id: str,
    model: FrontendModel,
    adapter: RequestAdapter | None = None,
) -> ResolvedRequest:
    """Tokenize the prompt of a checked request and fill in what the request leaves open.

    Takes a while for a long text: call this in a thread for large requests. Raises InvalidArgument
    or UnsupportedByModel for what this model cannot do, and PromptTooLong.
    """
    check_against_model(request, model.info)
    virtual_tokens = [0] * (0 if adapter is None else adapter.num_virtual_tokens)
    text, prompt = resolve_prompt(request, model, len(virtual_tokens))
    params = request.sampling_params
    max_tokens = _max_tokens(params, model, len(virtual_tokens) + len(prompt))
    stop_token_ids, reported = _stop_tokens(params, model)
    seed = params.seed if params.HasField("seed") else secrets.randbits(SEED_BITS)
    if params.stop:
        model.require_tokenizer("sampling_params.stop")
    n = value_or(params, "n", 1)
    num_choices = value_or(params, "best_of", n)
    answer = answer_format(request, text, model.chat_format)
    return ResolvedRequest(
        submit=scheduler_pb.Submit(
            request_id=request_id,
            model=model.info.name,
            priority=request.priority,
            prompt_token_ids=pack([*virtual_tokens, *prompt]),
            attempt=request.attempt,
            fingerprint=fingerprint(request, "" if adapter is None else adapter.name),
            generation=scheduler_pb.Generation(
                num_choices=num_choices,
                max_tokens=max_tokens,
                stop_token_ids=pack(sorted(stop_token_ids)),
                beam_search=_beam_search(params),
                sampling=_sampler_params(params, model, seed, stop_token_ids, answer),
                # Stop strings are matched in this process: while tokens were held back, the worker
                # would compute tokens that are then discarded.
                max_hold_ms=0 if params.stop else request.max_hold_ms,
                num_speculative_tokens=value_or(request, "num_speculative_tokens", None),
            ),
            context=[
                *salt_context(request),
                *(() if adapter is None else (adapter.context_part,)),
            ],
        ),
        model=model,
        adapter=adapter,
        prompt_token_ids=prompt,
        num_choices=num_choices,
        num_returned=n,
        seed=seed,
        min_tokens=params.min_tokens,
        max_tokens=max_tokens,
        stop_token_ids=stop_token_ids,
        reported_stop_token_ids=reported,
        stop=StopStrings(params.stop),
        include_stop=params.include_stop_in_output,
        continues_prompt=(
            not request.HasField("chat")
            or request.chat.continue_final_message
            or params.HasField("structured_output")
        ),
        skip_special_tokens=value_or(params, "skip_special_tokens", True),
        answer=answer,
        num_logprobs=value_or(params, "logprobs", None),
        wants_prompt_logprobs=params.HasField("prompt_logprobs"),
        resume=request.resume,
    )


def salt_context(
    request: inference_pb.GenerateRequest | inference_pb.PoolingOptions,
) -> list[context_pb2.ContextPart]:
    """The client's salt as a part; the digest of a tenant's has another domain."""
    if not request.HasField("cache_salt"):
        return []
    digest = blake2b(request.cache_salt.encode(), digest_size=32, person=b"cache_salt").digest()
    return [context_pb2.ContextPart(kind=context_pb2.CONTEXT_KIND_SALT, digest=digest)]


def check_against_model(request: inference_pb.GenerateRequest, info: model_pb2.ModelInfo) -> None:
    """Raise InvalidArgument for token ids that the model does not have, and UnsupportedByModel for
    structured output where its workers have none."""
    params = request.sampling_params
    check_token_ids("token_ids.ids", request.token_ids.ids, info.vocab_size)
    for field in ("stop_token_ids", "allowed_token_ids"):
        check_token_ids(f"sampling_params.{field}", getattr(params, field), info.vocab_size)
    for index, bias in enumerate(params.logit_bias):
        if bias.token_id >= info.vocab_size:
            path = f"sampling_params.logit_bias[{index}].token_id"
            expected = f"{_below_vocab(info.vocab_size)}, got {bias.token_id}"
            raise InvalidArgument(path, expected)
    is_constrained = params.HasField("structured_output") or params.allowed_token_ids
    if is_constrained and not info.structured_output:
        raise UnsupportedByModel(
            "the model's workers do not support structured output", reason="NO_STRUCTURED_OUTPUT"
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


def _below_vocab(vocab_size: int) -> str:
    return f"expected a token id below the vocabulary size {vocab_size}"


def resolve_prompt(
    request: inference_pb.GenerateRequest, model: FrontendModel, num_virtual_tokens: int = 0
) -> tuple[str, list[int]]:
    """The prompt's text, empty if it was given as token ids, and its tokens.

    num_virtual_tokens: those that precede them. Raises PromptTooLong for a prompt that is longer
    than the model allows and not to be truncated.
    """
    params = request.sampling_params
    keep = None
    if params.HasField("truncate_prompt_tokens"):
        keep = params.truncate_prompt_tokens or _fitting(params, model, num_virtual_tokens)
    kind = request.WhichOneof("prompt")
    if kind == "token_ids":
        ids = request.token_ids.ids
        if keep is None:
            check_prompt_length(len(ids), model)
        return "", list(ids if keep is None else ids[-keep:])
    tokenizer = model.require_tokenizer(f"{kind} prompt")
    text, field, adds_special_tokens = _text_of(request, model)
    tokens = _encode(tokenizer, text, model, keep, add_special_tokens=adds_special_tokens)
    if not tokens:
        raise InvalidArgument(field, "expected a prompt of at least one token; this one has none")
    if (token_id := max(tokens)) >= model.info.vocab_size:
        name = tokenizer.token_name(token_id)
        raise InvalidArgument(field, f"contains the token {name!r}, which the model does not have")
    return text, tokens


def _text_of(
    request: inference_pb.GenerateRequest | inference_pb.TokenizeRequest, model: FrontendModel
) -> tuple[str, str, bool]:
    """The text of a text or of a checked chat, its field, and whether special tokens are added."""
    if request.HasField("chat"):
        return chat_text(request.chat, model), "chat.messages", False
    return request.text, "text", value_or(request, "add_special_tokens", True)


def _encode(
    tokenizer: ModelTokenizer,
    text: str,
    model: FrontendModel,
    keep: int | None,
    *,
    add_special_tokens: bool,
) -> list[int]:
    """A prompt's tokens; the last `keep` of them, if it is not None."""
    if keep is not None:
        return tokenizer.encode_end(text, keep, add_special_tokens=add_special_tokens)
    try:
        return tokenizer.encode(
            text, add_special_tokens=add_special_tokens, max_tokens=model.info.max_model_len
        )
    except TooManyTokens as error:
        check_prompt_length(error.number, model, is_exact=error.is_exact)
        raise


def check_prompt_length(num_tokens: int, model: FrontendModel, *, is_exact: bool = True) -> None:
    """Raise PromptTooLong unless a prompt of `num_tokens` leaves room for one more."""
    max_model_len = model.info.max_model_len
    if num_tokens >= max_model_len:
        at_least = "" if is_exact else "at least "
        raise PromptTooLong(
            f"the prompt has {at_least}{num_tokens} tokens; prompt and output together are "
            f"limited to {max_model_len}",
            details={"prompt_tokens": num_tokens, "max_model_len": max_model_len},
        )


def _fitting(
    params: sampling_pb2.SamplingParams, model: FrontendModel, num_virtual_tokens: int
) -> int:
    """Maximum number of prompt tokens that leaves room for the output's max_tokens."""
    max_model_len = max_servable_len(model.info) - num_virtual_tokens
    num_output = value_or(params, "max_tokens", 1)
    if num_output >= max_model_len:
        raise InvalidArgument(
            "sampling_params.max_tokens",
            f"expected to leave room for a prompt within {max_model_len} tokens, got {num_output}",
        )
    return max_model_len - num_output


def _max_tokens(params: sampling_pb2.SamplingParams, model: FrontendModel, num_prompt: int) -> int:
    """The request's maximum within the length that the prompt leaves, or without one the model's
    own, within what the largest KV cache leaves, too: nobody counts on a larger one then."""
    check_prompt_length(num_prompt, model)
    if params.HasField("max_tokens"):
        return min(params.max_tokens, model.info.max_model_len - num_prompt)
    room = max(1, max_servable_len(model.info) - num_prompt)  # the core refuses longer prompts
    return min(model.defaults.max_tokens or room, room)


def _stop_tokens(
    params: sampling_pb2.SamplingParams, model: FrontendModel
) -> tuple[frozenset[int], frozenset[int]]:
    """All stop tokens, and those of them that are reported as stop reasons."""
    asked = frozenset(params.stop_token_ids)
    ignores_end = params.ignore_eos and not params.HasField("structured_output")
    end = frozenset() if ignores_end else model.eos_token_ids
    return asked | end, asked - end


def _constraint(
    params: sampling_pb2.SamplingParams,
    model: FrontendModel,
    stop_token_ids: frozenset[int],
    answer: AnswerFormat,
) -> sampling_pb2.Constraint:
    """The constraint of the output, after the thought that the request or the model's format has.
    End-of-sequence tokens that are ignored still end an output that cannot continue otherwise."""
    if not stop_token_ids:
        raise InvalidArgument(
            "sampling_params.stop_token_ids",
            "expected at least one with structured output: the model has no end of sequence",
        )
    ignored = model.eos_token_ids if params.ignore_eos else frozenset()
    ends = stop_token_ids - (ignored - frozenset(params.stop_token_ids))
    constraint = constraint_of(params, end_token_ids=ends, last_token_ids=ignored)
    if answer.thought is not None and not params.HasField("thought"):
        constraint.thought.CopyFrom(answer.thought)
    return constraint


_AS_GIVEN = {
    field.name
    for field in sampling_pb2.SamplerParams.DESCRIPTOR.fields
    if field.name in sampling_pb2.SamplingParams.DESCRIPTOR.fields_by_name
} - {"seed", "bad_words"}
"""Parameters that a worker gets as the client states them; zero if they are absent."""


def _sampler_params(
    params: sampling_pb2.SamplingParams,
    model: FrontendModel,
    seed: int,
    stop_token_ids: frozenset[int],
    answer: AnswerFormat,
) -> sampling_pb2.SamplerParams:
    defaults = model.defaults.sampling
    values: dict[str, Any] = {name: value_or(params, name, defaults[name]) for name in defaults}
    values["top_k"] = min(values["top_k"], model.info.vocab_size)
    if params.HasField("beam_search"):
        values |= validation.SAMPLING_ONLY | {"temperature": 0.0}
    given = {field.name: value for field, value in params.ListFields()}
    values = {name: given[name] for name in _AS_GIVEN & given.keys()} | values
    sampler = sampling_pb2.SamplerParams(**values, seed=seed, bad_words=_bad_words(params, model))
    if params.HasField("structured_output"):
        sampler.constraint.CopyFrom(_constraint(params, model, stop_token_ids, answer))
    elif params.allowed_token_ids:
        allowed = frozenset(params.allowed_token_ids)
        sampler.constraint.CopyFrom(only_tokens(allowed, allowed & stop_token_ids))
    elif params.min_tokens:
        sampler.suppressed_token_ids = pack(sorted(stop_token_ids))
    if not params.HasField("logprobs") and params.best_of > value_or(params, "n", 1):
        sampler.logprobs = 0  # candidates are ranked by the log probabilities of their tokens
    if _searches(params):
        # The best `width` continuations may all be of one beam, and all of its stop tokens may be
        # more probable than they are.
        num_candidates = max(params.beam_search.width + len(stop_token_ids), params.logprobs)
        sampler.num_candidates = min(num_candidates, model.info.vocab_size)
    return sampler


def _searches(params: sampling_pb2.SamplingParams) -> bool:
    """Whether there are several beams; a single one is greedy decoding, as in transformers."""
    return params.beam_search.width > 1


def _beam_search(params: sampling_pb2.SamplingParams) -> sampling_pb2.BeamSearch | None:
    if not _searches(params):
        return None
    asked = params.beam_search
    return sampling_pb2.BeamSearch(
        width=asked.width,
        length_penalty=value_or(asked, "length_penalty", 1.0),
        early_stopping=asked.early_stopping or sampling_pb2.EARLY_STOPPING_WHEN_HOPELESS,
    )


def _bad_words(
    params: sampling_pb2.SamplingParams, model: FrontendModel
) -> list[sampling_pb2.TokenSequence]:
    if not params.bad_words:
        return []
    tokenizer = model.require_tokenizer("sampling_params.bad_words")
    return [
        sampling_pb2.TokenSequence(token_ids=pack(token_ids))
        for word in params.bad_words
        for token_ids in tokenizer.bad_word_sequences(word)
    ]


async def tokenize(
    request: inference_pb.TokenizeRequest, model: FrontendModel
) -> inference_pb.TokenizeResponse:
    """Token ids of a text or a chat. Raises InvalidArgument and UnsupportedByModel."""
    kind = request.WhichOneof("input")
    if kind is None:
        raise InvalidArgument("input", "expected one of text and chat")
    return await off_the_loop(request, lambda: _tokenize(request, model))


async def detokenize(
    request: inference_pb.DetokenizeRequest, model: FrontendModel
) -> inference_pb.DetokenizeResponse:
    """Text of token ids. Raises InvalidArgument and UnsupportedByModel."""
    return await off_the_loop(request, lambda: _detokenize(request, model))


async def off_the_loop(request: Message, work: Callable[[], T]) -> T:
    """The result of work whose time grows with `request`, in a thread if the request is large."""
    if request.ByteSize() <= INLINE_BYTES:
        return work()
    return await asyncio.to_thread(work)


MAX_TOKENIZED = 1 << 18
"""Token ids that a call without a generation may have, if the model allows fewer."""


def _most_tokens(model: FrontendModel) -> int:
    return max(model.info.max_model_len, MAX_TOKENIZED)


def _tokenize(
    request: inference_pb.TokenizeRequest, model: FrontendModel
) -> inference_pb.TokenizeResponse:
    tokenizer = model.require_tokenizer("Tokenize")
    most = _most_tokens(model)
    if request.HasField("chat"):
        validation.check_limits(request)
        check_chat(request.chat)
    text, field, special = _text_of(request, model)
    try:
        token_ids = tokenizer.encode(text, add_special_tokens=special, max_tokens=most)
    except TooManyTokens:
        raise InvalidArgument(field, f"expected at most {most} tokens") from None
    return inference_pb.TokenizeResponse(
        token_ids=token_ids,
        tokens=[tokenizer.token_name(token_id) for token_id in token_ids],
        max_model_len=max_input_len(model.info),
    )


def _detokenize(
    request: inference_pb.DetokenizeRequest, model: FrontendModel
) -> inference_pb.DetokenizeResponse:
    tokenizer = model.require_tokenizer("Detokenize")
    number, most = len(request.token_ids), _most_tokens(model)
    if number > most:
        raise InvalidArgument("token_ids", f"expected at most {most} token ids, got {number}")
    check_token_ids("token_ids", request.token_ids, model.info.vocab_size)
    skip = value_or(request, "skip_special_tokens", True)
    text = tokenizer.decode(request.token_ids, skip_special_tokens=skip)
    return inference_pb.DetokenizeResponse(text=text)
