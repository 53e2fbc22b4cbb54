"""Log probabilities, from the core's columns to entries with token texts."""

import struct
from collections.abc import Callable, Sequence

from pagewire.v1 import inference_service_pb2 as inference_pb
from pagewire.v1 import scheduler_service_pb2 as scheduler_pb
from scheduler_service.columns import from_column

TokenText = Callable[[int], str]


def token_logprobs(
    entry: scheduler_pb.ChoiceLogprobs, token_text: TokenText
) -> inference_pb.TokenLogprobs:
    """One output token's log probabilities."""
    return _position(
        from_column(entry.token_ids, "token_ids"), _floats(entry.logprobs), entry.rank, token_text
    )


class PromptLogprobs:
    """Collects the log probabilities of one prompt, which arrive in pieces."""

    def __init__(
        self, prompt_token_ids: Sequence[int], token_text: TokenText, start: int = 0
    ) -> None:
        """start: position of the prompt at the core."""
        self._prompt, self._start = prompt_token_ids, start
        self._token_text = token_text
        first = inference_pb.TokenLogprob(
            token_id=prompt_token_ids[0], text=token_text(prompt_token_ids[0])
        )
        self.positions = [inference_pb.TokenLogprobs(token=first)]
        """The entries so far, from that of the first token, which has no log probability."""

    @property
    def is_complete(self) -> bool:
        """Whether every position is known."""
        return len(self.positions) == len(self._prompt)

    def receive(self, update: scheduler_pb.PromptLogprobsUpdate) -> None:
        """Append the next positions; those before the prompt, and those that a repeated prefill
        sends again, are skipped."""
        token_ids = from_column(update.token_ids, "token_ids")
        logprobs = _floats(update.logprobs)
        ranks = from_column(update.ranks, "ranks")
        width = update.width
        for row in range(self._start + len(self.positions) - update.start, len(ranks)):
            columns = slice(row * width, (row + 1) * width)
            self.positions.append(
                _position(token_ids[columns], logprobs[columns], ranks[row], self._token_text)
            )


def _position(
    token_ids: Sequence[int], logprobs: Sequence[float], rank: int, token_text: TokenText
) -> inference_pb.TokenLogprobs:
    """One position: the actual token is first in the columns, then the most probable ones."""
    return inference_pb.TokenLogprobs(
        token=_token(token_ids[0], logprobs[0], rank, token_text),
        top=[
            _token(token_ids[place], logprobs[place], place, token_text)
            for place in range(1, len(token_ids))
        ],
    )


def _token(
    token_id: int, logprob: float, rank: int, token_text: TokenText
) -> inference_pb.TokenLogprob:
    return inference_pb.TokenLogprob(
        token_id=token_id, logprob=logprob, rank=rank, text=token_text(token_id)
    )


def _floats(data: bytes) -> Sequence[float]:
    """A column of little-endian float32."""
    return struct.unpack(f"<{len(data) // 4}f", data)
