"""Words answers as `/v1/completions` does."""

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from pagewire.v1 import inference_service_pb2 as inference_pb
from scheduler_service.frontend.http.completion_schema import CompletionRequest, usage_body
from scheduler_service.frontend.http.logprobs import LegacyLogprobs, prompt_logprobs

FINISH_REASONS = {
    inference_pb.FINISH_REASON_UNSPECIFIED: None,
    inference_pb.FINISH_REASON_STOP: "stop",
    inference_pb.FINISH_REASON_LENGTH: "length",
}


@dataclass(slots=True)
class UsageSum:
    """What all requests of one call have used."""

    prompt: int = 0
    cached: int = 0
    completion: int = 0

    def add(self, usage: inference_pb.Usage) -> None:
        """Count one request in."""
        self.prompt += usage.prompt_tokens
        self.cached += usage.cached_tokens
        self.completion += usage.completion_tokens

    def body(self) -> dict[str, Any]:
        """As answers tell it."""
        return usage_body(self.prompt, self.cached, self.completion)


def stop_reason(delta: inference_pb.ChoiceDelta) -> int | str | None:
    """vLLM's field: what ended the choice, if it was no end-of-sequence token."""
    kind = delta.WhichOneof("stop_reason")
    return getattr(delta, kind) if kind is not None else None


@dataclass(slots=True)
class _Prompt:
    """What is known of one prompt."""

    started: inference_pb.Started | None = None
    logprobs: Sequence[inference_pb.TokenLogprobs] = ()
    is_echoed: bool = False


@dataclass(slots=True)
class _Choice:
    text: str = ""
    logprobs: dict[str, list[Any]] | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    prompt_logprobs: Any = None
    offsets: LegacyLogprobs = field(default_factory=lambda: LegacyLogprobs(as_ids=False))


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
        self._as_ids = bool(request.return_tokens_as_token_ids)
        self._prompts = [_Prompt() for _ in range(num_prompts)]
        self._choices = [
            _Choice(offsets=LegacyLogprobs(as_ids=self._as_ids))
            for _ in range(num_prompts * self._n)
        ]
        self._usage = UsageSum()
        self._head = {
            "id": f"cmpl-{request_id}",
            "object": "text_completion",
            "created": int(time.time()),
            "model": request.model or "",
        }

    # AnswerForm.

    def chunks(self, index: int, response: inference_pb.GenerateResponse) -> Iterable[Any]:
        """One per choice that has something new."""
        return [self._chunk([choice]) for choice in self._news(index, response)]

    def last_chunks(self) -> Iterable[Any]:
        """The usage, where it was asked for."""
        if self._request.wants_usage_chunk:
            yield self._head | {"choices": [], "usage": self._usage.body()}

    def add(self, index: int, response: inference_pb.GenerateResponse) -> None:
        """Join what is new to what was there."""
        for news in self._news(index, response):
            choice = self._choices[news["index"]]
            choice.text += news["text"]
            if news["logprobs"] is not None:
                choice.logprobs = _joined(choice.logprobs, news["logprobs"])
            choice.prompt_logprobs = news.get("prompt_logprobs", choice.prompt_logprobs)
            if news["finish_reason"] is not None:
                choice.finish_reason = news["finish_reason"]
                choice.stop_reason = news["stop_reason"]

    def whole(self) -> Any:
        """All choices, and the usage."""
        choices = [
            self._choice_body(index, choice.text, choice.logprobs)
            | {"finish_reason": choice.finish_reason, "stop_reason": choice.stop_reason}
            | self._told_prompt_logprobs(choice.prompt_logprobs)
            for index, choice in enumerate(self._choices)
        ]
        return self._head | {"choices": choices, "usage": self._usage.body()}

    # What is new.

    def _news(
        self, index: int, response: inference_pb.GenerateResponse
    ) -> Iterable[dict[str, Any]]:
        """What one response tells of each choice, in the shape of a chunk's choice."""
        prompt = self._prompts[index]
        if response.HasField("started"):
            prompt.started = response.started
            self._head["model"] = response.started.model
        if response.prompt_logprobs:
            prompt.logprobs = response.prompt_logprobs
        if response.HasField("usage"):
            if not self._has_output:
                response.usage.completion_tokens = 0
            self._usage.add(response.usage)
        yield from self._prompt_news(index, prompt)
        for delta in response.choices:
            yield self._delta_news(index * self._n + delta.index, delta)

    def _prompt_news(self, index: int, prompt: _Prompt) -> Iterable[dict[str, Any]]:
        """The prompt itself, once all that is to be told of it is known."""
        is_told = bool(self._request.echo) or self._request.prompt_logprobs is not None
        needs_logprobs = self._asks_prompt_logprobs() and not prompt.logprobs
        if not is_told or prompt.is_echoed or needs_logprobs or prompt.started is None:
            return
        prompt.is_echoed = True
        text = self._prompt_text(index, prompt.started) if self._request.echo else ""
        for choice_index in range(index * self._n, (index + 1) * self._n):
            logprobs = None
            if self._request.echo and self._request.logprobs is not None:
                logprobs = self._choices[choice_index].offsets.write(prompt.logprobs)
            told = None
            if self._request.prompt_logprobs is not None:
                told = prompt_logprobs(prompt.logprobs)
            yield self._choice_body(choice_index, text, logprobs) | self._told_prompt_logprobs(told)

    def _asks_prompt_logprobs(self) -> bool:
        request = self._request
        is_echoed = bool(request.echo) and request.logprobs is not None
        return is_echoed or request.prompt_logprobs is not None

    def _delta_news(self, index: int, delta: inference_pb.ChoiceDelta) -> dict[str, Any]:
        if not self._has_output:  # the token that had to be generated is nobody's wish
            finish = "length" if delta.finish_reason else None
            return self._choice_body(index, "", None) | {"finish_reason": finish}
        logprobs = None
        if self._request.logprobs is not None:
            logprobs = self._choices[index].offsets.write(delta.logprobs)
        return self._choice_body(index, delta.text, logprobs) | {
            "finish_reason": FINISH_REASONS[delta.finish_reason],
            "stop_reason": stop_reason(delta),
        }

    def _choice_body(
        self, index: int, text: str, logprobs: dict[str, list[Any]] | None
    ) -> dict[str, Any]:
        return {
            "index": index,
            "text": text,
            "logprobs": logprobs,
            "finish_reason": None,
            "stop_reason": None,
        }

    def _told_prompt_logprobs(self, told: Any) -> dict[str, Any]:
        return {} if self._request.prompt_logprobs is None else {"prompt_logprobs": told}

    def _chunk(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        chunk = self._head | {"choices": choices}
        if self._request.wants_usage_chunk:
            chunk["usage"] = None
        return chunk


def _joined(former: dict[str, list[Any]] | None, new: dict[str, list[Any]]) -> dict[str, list[Any]]:
    if former is None:
        return new
    for name, values in new.items():
        former[name].extend(values)
    return former
