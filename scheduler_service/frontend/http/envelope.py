"""What is around the choices of every answer: its id, the model, and what was used."""

import time
from collections.abc import Iterable, Sequence
from typing import Any

from pagewire.v1 import inference_service_pb2 as inference_pb
from scheduler_service.frontend.http.openai.sampling import SamplingFields


class UsageSum:
    """What all requests of one call have used, from their first response on."""

    def __init__(self, *, has_output: bool) -> None:
        """`has_output`: whether output tokens are anybody's wish, and counted."""
        self._has_output = has_output
        self._by_request: dict[int, inference_pb.Usage] = {}

    def take(self, index: int, response: inference_pb.GenerateResponse) -> None:
        """Count one more response of request `index`. What its tokens add up to is told at its end:
        those of candidates that are not returned count too."""
        usage = self._by_request.setdefault(index, inference_pb.Usage())
        if response.HasField("started"):
            usage.prompt_tokens = len(response.started.prompt_token_ids)
        usage.completion_tokens += sum(len(delta.token_ids) for delta in response.choices)
        if response.HasField("usage"):
            usage.CopyFrom(response.usage)
        if not self._has_output:
            usage.completion_tokens = 0

    def body(self) -> dict[str, Any]:
        """As answers tell it."""
        prompt, cached, completion = (
            sum(getattr(usage, name) for usage in self._by_request.values())
            for name in ("prompt_tokens", "cached_tokens", "completion_tokens")
        )
        return {
            "prompt_tokens": prompt,
            "completion_tokens": completion,
            "total_tokens": prompt + completion,
            "prompt_tokens_details": {"cached_tokens": cached},
        }


class Envelope:
    """Puts the choices of one call's answer, or of a chunk of it, into what is around them."""

    def __init__(
        self, request: SamplingFields, answer_id: str, kind: str, *, has_output: bool = True
    ) -> None:
        options = request.stream_options
        self._tells_usage = options is not None and options.include_usage
        self._tells_usage_so_far = options is not None and options.continuous_usage_stats
        self._usage = UsageSum(has_output=has_output)
        self._head = {
            "id": answer_id,
            "object": kind,
            "created": int(time.time()),
            "model": request.model or "",
        }

    def take(self, index: int, response: inference_pb.GenerateResponse) -> None:
        """Count one more response of request `index`."""
        if response.HasField("started"):
            self._head["model"] = response.started.model
        self._usage.take(index, response)

    def chunk(self, choice: dict[str, Any]) -> dict[str, Any]:
        """A part of a stream."""
        chunk: dict[str, Any] = self._head | {"choices": [choice]}
        if self._tells_usage:
            chunk["usage"] = self._usage.body() if self._tells_usage_so_far else None
        return chunk

    def last_chunks(self) -> Iterable[dict[str, Any]]:
        """The usage, where it was asked for."""
        if self._tells_usage:
            yield self.whole([])

    def whole(self, choices: Sequence[dict[str, Any]]) -> dict[str, Any]:
        """All choices and the usage."""
        return self._head | {"choices": list(choices), "usage": self._usage.body()}
