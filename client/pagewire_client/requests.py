"""Prompts (text, token ids, conversations), and the request messages built from them."""

import difflib
import uuid
from collections.abc import Mapping, Sequence
from numbers import Integral
from typing import Any, TypeAlias, TypedDict, TypeVar, Unpack

from pagewire.v1 import inference_service_pb2 as pb
from pagewire_client.batch import OnProgress
from pagewire_client.chat import ChatOptions, ChatPrompt, Messages, chat_proto, encodable
from pagewire_client.sampling_params import SamplingOptions, SamplingParams, message_of


class TextPrompt(TypedDict):
    """A prompt as text."""

    prompt: str


class TokensPrompt(TypedDict):
    """A prompt as token ids."""

    prompt_token_ids: Sequence[int]


Text: TypeAlias = str | Sequence[int]
"""A text, or its token ids."""
Prompt: TypeAlias = str | Sequence[int] | TextPrompt | TokensPrompt | Messages | ChatPrompt


class CallOptions(SamplingOptions, total=False):
    """Keyword arguments of all methods that generate, besides sampling parameters."""

    model: str | None
    """May be left out when the deployment serves one model."""
    lora: str | None
    """The name of an adapter of the model; `model` may name the adapter instead. None: the model as
    it is."""
    num_speculative_tokens: int | None
    """Most tokens drafted for a step; 0 switches speculative decoding off, None is the
    deployment's. The answer is the same."""
    cache_salt: str | None
    """Prefixes are shared only with requests of the same salt: random, secret text. None: with all
    that have none."""
    timeout: float | None
    """Seconds, for the whole call. None: the client's own."""


class GenerateOptions(CallOptions, total=False):
    """Options of methods for one prompt."""

    request_id: str | None
    """The id that `abort` takes. None: a random one."""
    priority: int
    """Lower values are served earlier if the scheduler's policy is `priority`."""


class ChatCallOptions(ChatOptions, GenerateOptions, total=False):
    """Options of methods for one conversation."""


class ChatBatchOptions(ChatOptions, SamplingOptions, total=False):
    """Options of methods for several conversations."""


class BatchOptions(CallOptions, total=False):
    """Options of methods for many prompts."""

    priority: int | Sequence[int]
    """As for one prompt; of all, or a list with one for each."""
    max_in_flight: int | None
    """Most requests sent and unfinished."""
    on_progress: OnProgress | None
    """Called for every message received."""


class StatusOptions(TypedDict, total=False):
    """The parts of a status in addition to counts."""

    include_requests: bool
    """Live requests, and those that ended most recently."""
    include_blocks: bool
    """The owners of KV blocks; with requests, their block tables."""
    max_requests: int | None
    """Most live requests to list. None: 256."""


_KEYWORDS = ChatCallOptions.__annotations__ | BatchOptions.__annotations__ | {"messages": Messages}
T = TypeVar("T")

_EXPECTED = (
    "a text, a list of token ids, a list of chat messages, "
    '{"prompt": text}, {"prompt_token_ids": ids} or {"messages": list, "tools": list}'
)


def fill_prompt(request: pb.GenerateRequest, prompt: Prompt) -> None:
    """Set the request's prompt. Raises ValueError if `prompt` cannot be one."""
    if isinstance(prompt, str):
        request.text = encodable(prompt)
    elif isinstance(prompt, Mapping):
        _fill_from_mapping(request, prompt)
    elif isinstance(prompt, Sequence) and prompt and isinstance(prompt[0], Mapping):
        request.chat.CopyFrom(chat_proto(prompt))  # type: ignore[arg-type]
    else:
        _fill_token_ids(request, prompt)


def without_chat_options(options: Mapping[str, Any]) -> tuple[ChatOptions, dict[str, Any]]:
    """The options of a conversation itself, and all others."""
    names = options.keys() & ChatOptions.__annotations__.keys()
    chat: Any = {name: options[name] for name in names}
    return chat, {name: value for name, value in options.items() if name not in names}


def prompt_list(prompts: Any) -> list[Any]:
    """The prompts or conversations of a list of them; a list of one for a single one."""
    if isinstance(prompts, str | bytes | Mapping):
        return [prompts]
    prompts = list(prompts)
    first = prompts[0] if prompts else None
    if isinstance(first, Integral) or (isinstance(first, Mapping) and "role" in first):
        return [prompts]
    return prompts


def _fill_from_mapping(request: pb.GenerateRequest, prompt: Mapping[str, Any]) -> None:
    keys = set(prompt)
    if keys == {"prompt"} and isinstance(prompt["prompt"], str):
        request.text = encodable(prompt["prompt"])
    elif keys == {"prompt_token_ids"}:
        _fill_token_ids(request, prompt["prompt_token_ids"])
    elif "messages" in keys and keys <= set(ChatPrompt.__annotations__):
        request.chat.CopyFrom(chat_proto(**prompt))
    else:
        raise ValueError(f"prompt must be {_EXPECTED}, not a mapping of {sorted(keys)}")


def _fill_token_ids(request: pb.GenerateRequest, token_ids: Any) -> None:
    try:
        # An empty list arrives as a prompt of no tokens, not as an absent prompt.
        request.token_ids.CopyFrom(token_ids_proto(token_ids))
    except (TypeError, ValueError):
        is_several = isinstance(token_ids, list | tuple) and not isinstance(token_ids[0], int)
        hint = "; generate_many takes several prompts" if is_several else ""
        raise ValueError(
            f"prompt must be {_EXPECTED}, with token ids from 0 to 2**32 - 1; "
            f"got {type(token_ids).__name__}{hint}"
        ) from None


def token_ids_proto(token_ids: Any) -> pb.PromptTokens:
    """The message of token ids. Raises TypeError or ValueError for anything else."""
    if isinstance(token_ids, bytes | bytearray):
        raise TypeError("bytes are neither text nor token ids")
    tokens = pb.PromptTokens()
    tokens.ids.extend(token_ids)
    return tokens


MAX_HOLD_MS = 1000
"""How long the server may hold back the tokens of a request that is answered as a whole, to send
fewer messages. The end of an answer is not held back, unless a message reports several steps: then
for up to 100 ms."""

PROMPT_LOGPROBS = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0)
"""Parameters of requests for the log probabilities of their prompts."""


def generate_request(
    prompt: Prompt,
    sampling_params: SamplingParams | None = None,
    *,
    is_whole: bool = False,
    **options: Unpack[GenerateOptions],
) -> pb.GenerateRequest:
    """One request. It always has an id, so that another frontend can continue it.

    `is_whole`: the answer is not read before its end.
    """
    params = _given_params(sampling_params, options, GenerateOptions)
    if not isinstance(params, SamplingParams):
        raise TypeError(f"sampling_params must be SamplingParams, not {type(params).__name__}")
    values = {
        "request_id": options.get("request_id") or uuid.uuid4().hex,
        "model": options.get("model"),
        "lora": options.get("lora"),
        "priority": options.get("priority") or None,
        "num_speculative_tokens": options.get("num_speculative_tokens"),
        "cache_salt": options.get("cache_salt"),
        "max_hold_ms": MAX_HOLD_MS if is_whole else None,
    }
    request = message_of(pb.GenerateRequest, values)
    fill_prompt(request, prompt)
    request.sampling_params.CopyFrom(params.to_proto(is_chat=request.HasField("chat")))
    return request


def generate_requests(
    prompts: Prompt | Sequence[Prompt],
    sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
    **options: Unpack[BatchOptions],
) -> list[pb.GenerateRequest]:
    """One request per prompt, to be answered as a whole; `sampling_params` for all, or one for
    each. Raises ValueError that names the wrong prompt."""
    prompts = prompt_list(prompts)
    given: SamplingParams | Sequence[SamplingParams]
    given = _given_params(sampling_params, options, BatchOptions)
    params = [given] * len(prompts) if isinstance(given, SamplingParams) else given
    if len(params) != len(prompts):
        raise ValueError(f"{len(prompts)} prompts need as many sampling_params, not {len(params)}")
    priorities = options.get("priority", 0)
    if isinstance(priorities, str) or not isinstance(priorities, Sequence):
        priorities = [priorities] * len(prompts)
    if len(priorities) != len(prompts):
        raise ValueError(f"{len(prompts)} prompts need as many priorities, not {len(priorities)}")
    shared: GenerateOptions = {
        "model": options.get("model"),
        "lora": options.get("lora"),
        "num_speculative_tokens": options.get("num_speculative_tokens"),
        "cache_salt": options.get("cache_salt"),
    }
    requests = []
    for position, (prompt, own, priority) in enumerate(
        zip(prompts, params, priorities, strict=True)
    ):
        shared["priority"] = priority
        try:
            request = generate_request(prompt, own, is_whole=True, **shared)
        except ValueError as error:
            raise ValueError(f"prompts[{position}]: {error}") from None
        requests.append(request)
    return requests


def _given_params(params: T | None, options: Mapping[str, Any], kind: type) -> T | SamplingParams:
    """The sampling parameters of a call: `params`, or keyword arguments instead.

    Raises TypeError if both are given, or for a name that `kind` of options does not have.
    """
    for name in options:
        if name not in kind.__annotations__:
            known = kind.__annotations__ if name in _KEYWORDS else _KEYWORDS
            begins = [word for word in known if name.startswith(f"{word}_")]  # vLLM's lora_request
            nearest, *_ = begins or difflib.get_close_matches(name, known, n=1, cutoff=0)
            raise TypeError(f"unknown argument {name!r}; the nearest known one is {nearest!r}")
    sampling: Any = {
        name: value for name, value in options.items() if name in SamplingOptions.__annotations__
    }
    if params is None:
        return SamplingParams(**sampling)
    if isinstance(params, Mapping | str) or not isinstance(params, SamplingParams | Sequence):
        raise TypeError(f"sampling_params must be SamplingParams, not {type(params).__name__}")
    if sampling:
        raise TypeError(
            "sampling_params and sampling parameters as keyword arguments "
            f"({', '.join(sampling)}) are mutually exclusive: put all into sampling_params"
        )
    return params


def tokenize_request(
    text: str | Messages | ChatPrompt, model: str | None, add_special_tokens: bool
) -> pb.TokenizeRequest:
    """The request for the token ids of a text or a conversation."""
    request = pb.TokenizeRequest(model=model, add_special_tokens=add_special_tokens)
    if isinstance(text, str):
        request.text = encodable(text)
    elif isinstance(text, Mapping):
        request.chat.CopyFrom(chat_proto(**text))
    else:
        request.chat.CopyFrom(chat_proto(text))
    return request
