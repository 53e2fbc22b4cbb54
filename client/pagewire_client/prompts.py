"""What may be asked for: text, token ids, or a conversation."""

from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias, TypedDict

from pagewire.v1 import inference_service_pb2 as pb


class TextPrompt(TypedDict):
    """A prompt as text."""

    prompt: str


class TokensPrompt(TypedDict):
    """A prompt as token ids."""

    prompt_token_ids: Sequence[int]


class ChatMessage(TypedDict):
    """One turn of a conversation."""

    role: str
    content: str


Messages: TypeAlias = Sequence[ChatMessage] | Sequence[Mapping[str, str]]
Prompt: TypeAlias = str | Sequence[int] | TextPrompt | TokensPrompt | Messages | pb.Chat

_EXPECTED = (
    "a text, a list of token ids, a list of chat messages, "
    '{"prompt": text} or {"prompt_token_ids": ids}'
)


def chat_proto(messages: Messages, *, add_generation_prompt: bool = True) -> pb.Chat:
    """A conversation as the server takes it. Raises ValueError naming the wrong message."""
    chat = pb.Chat(add_generation_prompt=add_generation_prompt)
    for position, message in enumerate(messages):
        role, content = _role_and_content(position, message)
        chat.messages.add(role=role, content=content)
    return chat


def fill_prompt(request: pb.GenerateRequest, prompt: Prompt) -> None:
    """Set the request's prompt. Raises ValueError if `prompt` is nothing that can be one."""
    if isinstance(prompt, str):
        request.text = _encodable(prompt)
    elif isinstance(prompt, pb.Chat):
        request.chat.CopyFrom(prompt)
    elif isinstance(prompt, Mapping):
        _fill_from_mapping(request, prompt)
    elif isinstance(prompt, Sequence) and prompt and isinstance(prompt[0], Mapping):
        request.chat.CopyFrom(chat_proto(prompt))  # type: ignore[arg-type]
    else:
        _fill_token_ids(request, prompt)


def prompt_list(prompts: Any) -> list[Any]:
    """The prompts, or the conversations, of a list of them; a list of one for one alone."""
    if isinstance(prompts, str | Mapping | pb.Chat):
        return [prompts]
    prompts = list(prompts)
    first = prompts[0] if prompts else None
    if isinstance(first, int) or (isinstance(first, Mapping) and "role" in first):
        return [prompts]
    return prompts


def _fill_from_mapping(request: pb.GenerateRequest, prompt: Mapping[str, Any]) -> None:
    keys = set(prompt)
    if keys == {"prompt"} and isinstance(prompt["prompt"], str):
        request.text = _encodable(prompt["prompt"])
    elif keys == {"prompt_token_ids"}:
        _fill_token_ids(request, prompt["prompt_token_ids"])
    else:
        raise ValueError(f"prompt must be {_EXPECTED}, not a mapping of {sorted(keys)}")


def _fill_token_ids(request: pb.GenerateRequest, token_ids: Any) -> None:
    try:
        request.token_ids.ids.extend(token_ids)
    except (TypeError, ValueError):
        raise ValueError(
            f"prompt must be {_EXPECTED}, with token ids from 0 to 2**32 - 1; "
            f"got {type(token_ids).__name__}"
        ) from None
    # An empty list must be seen as a prompt of no tokens, not as no prompt.
    request.token_ids.SetInParent()


def _encodable(text: str) -> str:
    """The text; raises ValueError for halves of characters, such as undecodable input leaves."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(
            f"prompt must be Unicode text; position {error.start} holds half a character"
        ) from None
    return text


def _role_and_content(position: int, message: Mapping[str, Any]) -> tuple[str, str]:
    if isinstance(message, Mapping) and set(message) == {"role", "content"}:
        role, content = message["role"], message["content"]
        if isinstance(role, str) and isinstance(content, str):
            return role, _encodable(content)
    raise ValueError(f'messages[{position}] must be {{"role": text, "content": text}}')
