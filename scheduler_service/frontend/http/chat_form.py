"""Words answers as `/v1/chat/completions` does."""

import time
from collections.abc import Iterable, Sequence
from typing import Any

from pagewire.v1 import inference_service_pb2 as inference_pb
from scheduler_service.frontend.http.chat_schema import ChatRequest
from scheduler_service.frontend.http.completion_form import FINISH_REASONS, UsageSum, stop_reason
from scheduler_service.frontend.http.logprobs import chat_logprobs, prompt_logprobs
from scheduler_service.frontend.http.message import Message, Piece
from scheduler_service.frontend.http.tool_choice import ToolPlan


class ChatForm:
    """Answers to a conversation; see `AnswerForm`."""

    def __init__(self, request: ChatRequest, request_id: str, plan: ToolPlan) -> None:
        self._request = request
        self._plan = plan
        self._as_ids = bool(request.return_tokens_as_token_ids)
        one_call = request.parallel_tool_calls is False
        self._messages = [Message(plan, one_call=one_call) for _ in range(request.n or 1)]
        self._logprobs: list[list[inference_pb.TokenLogprobs]] = [[] for _ in self._messages]
        self._ends: list[dict[str, Any]] = [{} for _ in self._messages]
        self._prompt_logprobs: Sequence[inference_pb.TokenLogprobs] = ()
        self._usage = UsageSum()
        self._head = {
            "id": f"chatcmpl-{request_id}",
            "object": "chat.completion.chunk" if request.stream else "chat.completion",
            "created": int(time.time()),
            "model": request.model or "",
        }

    # AnswerForm.

    def chunks(self, index: int, response: inference_pb.GenerateResponse) -> Iterable[Any]:
        """The roles first; then what is new of each choice."""
        if response.HasField("started"):
            self._take(response)
            for number in range(len(self._messages)):
                yield self._chunk(number, {"role": "assistant", "content": ""})
        else:
            self._take(response)
        for delta in response.choices:
            yield from self._delta_chunks(delta)

    def last_chunks(self) -> Iterable[Any]:
        """The usage, where it was asked for."""
        if self._request.wants_usage_chunk:
            yield self._head | {"choices": [], "usage": self._usage.body()}

    def add(self, index: int, response: inference_pb.GenerateResponse) -> None:
        """Join what is new to what was there."""
        self._take(response)
        for delta in response.choices:
            self._messages[delta.index].push(delta.text)
            self._logprobs[delta.index].extend(delta.logprobs)
            if delta.finish_reason:
                self._messages[delta.index].finish()
                self._ends[delta.index] = self._end(delta)

    def whole(self) -> Any:
        """All choices, and the usage."""
        answer: dict[str, Any] = self._head | {
            "choices": [self._choice(index) for index in range(len(self._messages))],
            "usage": self._usage.body(),
        }
        if self._request.prompt_logprobs is not None:
            answer["prompt_logprobs"] = prompt_logprobs(self._prompt_logprobs)
        return answer

    # Parts.

    def _take(self, response: inference_pb.GenerateResponse) -> None:
        """What is the same for all choices."""
        if response.HasField("started"):
            self._head["model"] = response.started.model
        if response.prompt_logprobs:
            self._prompt_logprobs = response.prompt_logprobs
        if response.HasField("usage"):
            self._usage.add(response.usage)

    def _choice(self, index: int) -> dict[str, Any]:
        logprobs = None
        if self._request.logprobs:
            logprobs = chat_logprobs(self._logprobs[index], as_ids=self._as_ids)
        message = self._messages[index].body()
        return {"index": index, "message": message, "logprobs": logprobs} | self._ends[index]

    def _delta_chunks(self, delta: inference_pb.ChoiceDelta) -> Iterable[Any]:
        """A chunk per piece of the message; log probabilities and the end go with the last."""
        message = self._messages[delta.index]
        pieces: list[Piece] = message.push(delta.text) if delta.text else []
        if delta.finish_reason:
            pieces += message.finish()
        rest: dict[str, Any] = {}
        if self._request.logprobs and delta.logprobs:
            rest["logprobs"] = chat_logprobs(delta.logprobs, as_ids=self._as_ids)
        if delta.finish_reason:
            rest |= self._end(delta)
        if rest and not pieces:
            pieces = [{}]
        for place, piece in enumerate(pieces):
            is_last = place == len(pieces) - 1
            yield self._chunk(delta.index, piece, **(rest if is_last else {}))

    def _end(self, delta: inference_pb.ChoiceDelta) -> dict[str, Any]:
        reason = FINISH_REASONS[delta.finish_reason]
        has_calls = self._messages[delta.index].has_calls and not self._plan.is_named
        if reason == "stop" and has_calls:
            reason = "tool_calls"
        return {"finish_reason": reason, "stop_reason": stop_reason(delta)}

    def _chunk(self, index: int, delta: Piece, **rest: Any) -> dict[str, Any]:
        choice: dict[str, Any] = {
            "index": index,
            "delta": delta,
            "logprobs": None,
            "finish_reason": None,
        }
        chunk: dict[str, Any] = self._head | {"choices": [choice | rest]}
        if self._request.wants_usage_chunk:
            chunk["usage"] = None
        return chunk
