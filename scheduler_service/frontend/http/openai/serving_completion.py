"""Words answers as `/v1/completions` does."""

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from pagewire.v1 import inference_service_pb2 as inference_pb
from scheduler_service.frontend.http.completion_schema import CompletionRequest
from scheduler_service.frontend.http.ending import FINISH_REASONS, stop_reason
from scheduler_service.frontend.http.envelope import Envelope
from scheduler_service.frontend.http.logprobs import LegacyLogprobs, prompt_logprobs

Piece = dict[str, Any]
"""What is new of a choice, in its shape; None stands for nothing new."""


@dataclass(slots=True)
class _Prompt:
    """What is known of one prompt."""

    started: inference_pb.Started | None = None
    logprobs: Sequence[inference_pb.TokenLogprobs] = ()
    is_told: bool = False


class CompletionForm:
    """Text completions; see `AnswerForm`. Choice i of prompt p has the index p * n + i."""

    def __init__(
        self,
        request: CompletionRequest,
        request_id: str,
        num_prompts: int,
        prompt_text: Callable[[int, inference_pb.Started], str],
    ) -> None:
        """`prompt_text` gives a prompt's text by its index, for `echo`."""
        self._request = request
        self._n = request.n or 1
        self._prompt_text = prompt_text
        self._has_output = request.max_tokens != 0
        self._envelope = Envelope(
            request, f"cmpl-{request_id}", "text_completion", has_output=self._has_output
        )
        self._prompts = [_Prompt() for _ in range(num_prompts)]
        as_ids = bool(request.return_tokens_as_token_ids)
        self._logprobs = defaultdict[int, LegacyLogprobs](lambda: LegacyLogprobs(as_ids=as_ids))
        self._whole: dict[int, Piece] = {}
        """The choices of which something has come."""

    # AnswerForm.

    def chunks(self, index: int, response: inference_pb.GenerateResponse) -> Iterable[Any]:
        """One per choice that has something new."""
        return [self._envelope.chunk(piece) for piece in self._pieces(index, response)]

    def last_chunks(self) -> Iterable[Any]:
        """The usage, where it was asked for."""
        return self._envelope.last_chunks()

    def add(self, index: int, response: inference_pb.GenerateResponse) -> None:
        """Join what is new to what was there."""
        for piece in self._pieces(index, response):
            whole = self._whole.setdefault(piece["index"], self._piece(piece["index"]))
            for name, value in piece.items():
                if name != "index" and value is not None:
                    whole[name] = _joined(whole[name], value)

    def whole(self) -> Any:
        """All choices, and the usage."""
        return self._envelope.whole([self._whole[index] for index in sorted(self._whole)])

    # What is new.

    def _pieces(self, index: int, response: inference_pb.GenerateResponse) -> Iterable[Piece]:
        """What one response tells of each choice."""
        prompt = self._prompts[index]
        self._envelope.take(index, response)
        if response.HasField("started"):
            prompt.started = response.started
        if response.prompt_logprobs:
            prompt.logprobs = response.prompt_logprobs
        yield from self._prompt_pieces(index, prompt)
        for delta in response.choices:
            yield self._output_piece(index * self._n + delta.index, delta)

    def _prompt_pieces(self, index: int, prompt: _Prompt) -> Iterable[Piece]:
        """The prompt itself, once all that is to be told of it is known."""
        request = self._request
        tells_logprobs = request.prompt_logprobs is not None
        echoes_logprobs = bool(request.echo) and request.logprobs is not None
        is_asked = bool(request.echo) or tells_logprobs or bool(request.return_token_ids)
        is_missing = (tells_logprobs or echoes_logprobs) and not prompt.logprobs
        if not is_asked or prompt.is_told or is_missing or prompt.started is None:
            return
        prompt.is_told = True
        told: Piece = {"text": self._prompt_text(index, prompt.started) if request.echo else ""}
        if tells_logprobs:
            told["prompt_logprobs"] = prompt_logprobs(prompt.logprobs)
        if request.return_token_ids:
            told["prompt_token_ids"] = list(prompt.started.prompt_token_ids)
        for choice in range(index * self._n, (index + 1) * self._n):
            if echoes_logprobs:
                told["logprobs"] = self._logprobs[choice].write(prompt.logprobs)
            yield self._piece(choice, **told)

    def _output_piece(self, index: int, delta: inference_pb.ChoiceDelta) -> Piece:
        if not self._has_output:  # the token that had to be generated is nobody's wish
            return self._piece(index, finish_reason="length" if delta.finish_reason else None)
        told: Piece = {
            "text": delta.text,
            "finish_reason": FINISH_REASONS[delta.finish_reason],
            "stop_reason": stop_reason(delta),
        }
        if self._request.logprobs is not None:
            told["logprobs"] = self._logprobs[index].write(delta.logprobs)
        if self._request.return_token_ids:
            told["token_ids"] = list(delta.token_ids)
        return self._piece(index, **told)

    def _piece(self, index: int, **told: Any) -> Piece:
        """Every key that the request has answers have."""
        piece: Piece = {"index": index, "text": "", "logprobs": None}
        piece |= {"finish_reason": None, "stop_reason": None}
        if self._request.prompt_logprobs is not None:
            piece["prompt_logprobs"] = None
        if self._request.return_token_ids:
            piece |= {"prompt_token_ids": None, "token_ids": None}
        return piece | told


def _joined(former: Any, new: Any) -> Any:
    """Texts, lists, and the lists of a dictionary, with what is new behind; the rest comes once."""
    if former is None:
        return new
    if isinstance(former, dict):
        for name, values in new.items():
            former[name].extend(values)
        return former
    former += new
    return former
