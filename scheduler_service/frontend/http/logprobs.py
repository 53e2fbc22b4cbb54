"""Log probabilities in the shapes of OpenAI's two interfaces, and in vLLM's for prompts."""

from collections.abc import Iterable, Sequence
from typing import Any

from pagewire.v1 import inference_service_pb2 as inference_pb

LEAST = -9999.0
"""Stands for minus infinity, which JSON cannot tell; vLLM's choice."""


def token_name(token: inference_pb.TokenLogprob, *, as_id: bool) -> str:
    """A token's text, or its id where texts would not tell tokens apart."""
    return f"token_id:{token.token_id}" if as_id else token.text


def finite(logprob: float) -> float:
    """A log probability that JSON can tell."""
    return max(logprob, LEAST)


class LegacyLogprobs:
    """`logprobs` of /v1/completions: parallel lists over the tokens of one choice."""

    def __init__(self, *, as_ids: bool) -> None:
        self._as_ids = as_ids
        self._offset = 0

    def write(self, positions: Iterable[inference_pb.TokenLogprobs]) -> dict[str, Any]:
        """The lists for the next positions; offsets count from the choice's first token."""
        lists: dict[str, list[Any]] = {
            "text_offset": [],
            "token_logprobs": [],
            "tokens": [],
            "top_logprobs": [],
        }
        for position in positions:
            token = position.token
            lists["text_offset"].append(self._offset)
            lists["tokens"].append(token_name(token, as_id=self._as_ids))
            is_known = token.HasField("logprob")
            lists["token_logprobs"].append(finite(token.logprob) if is_known else None)
            lists["top_logprobs"].append(self._top(position) if is_known else None)
            self._offset += len(token.text)
        return lists

    def _top(self, position: inference_pb.TokenLogprobs) -> dict[str, float]:
        """The most probable tokens, and the one that stands there; of several tokens with one text
        the most probable counts."""
        found: dict[str, float] = {}
        for token in (*position.top, position.token):
            found.setdefault(token_name(token, as_id=self._as_ids), finite(token.logprob))
        return found


def chat_logprobs(
    positions: Iterable[inference_pb.TokenLogprobs], *, as_ids: bool
) -> dict[str, Any]:
    """`logprobs` of /v1/chat/completions."""
    content = [
        _chat_token(position.token, as_ids)
        | {"top_logprobs": [_chat_token(token, as_ids) for token in position.top]}
        for position in positions
    ]
    return {"content": content, "refusal": None}


def _chat_token(token: inference_pb.TokenLogprob, as_id: bool) -> dict[str, Any]:
    """`bytes` are those of the text; None where the token is part of a character."""
    is_whole = "\ufffd" not in token.text
    return {
        "token": token_name(token, as_id=as_id),
        "logprob": finite(token.logprob),
        "bytes": list(token.text.encode()) if is_whole else None,
    }


def prompt_logprobs(
    positions: Sequence[inference_pb.TokenLogprobs],
) -> list[dict[str, dict[str, Any]] | None]:
    """vLLM's `prompt_logprobs`: by token id, the prompt's own token first; None for the first."""
    return [
        {
            str(token.token_id): {
                "logprob": finite(token.logprob),
                "rank": token.rank,
                "decoded_token": token.text,
            }
            for token in (position.token, *position.top)
        }
        if position.token.HasField("logprob")
        else None
        for position in positions
    ]
