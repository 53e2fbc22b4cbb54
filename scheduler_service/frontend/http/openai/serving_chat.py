"""Words answers as `/v1/chat/completions` does."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from pagewire.v1 import inference_service_pb2 as inference_pb
from scheduler_service.frontend.http.ending import FINISH_REASONS, stop_reason
from scheduler_service.frontend.http.envelope import Envelope
from scheduler_service.frontend.http.logprobs import chat_logprobs, prompt_logprobs
from scheduler_service.frontend.http.message import Message, Piece
from scheduler_service.frontend.http.openai.protocol import ChatRequest
from scheduler_service.frontend.http.tool_choice import ToolPlan


@dataclass(slots=True)
class _Choice:
    message: Message
    logprobs: list[inference_pb.TokenLogprobs] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    end: dict[str, Any] = field(default_factory=dict)


class ChatForm:
    """Answers to a conversation; see `AnswerForm`."""

    def __init__(self, request: ChatRequest, request_id: str, plan: ToolPlan) -> None:
        self._request = request
        self._plan = plan
        kind = "chat.completion.chunk" if request.stream else "chat.completion"
        self._envelope = Envelope(request, f"chatcmpl-{request_id}", kind)
        one_call = request.parallel_tool_calls is False
        self._choices = [_Choice(Message(plan, one_call=one_call)) for _ in range(request.n or 1)]
        self._of_prompt: dict[str, Any] = {}
        """What is to be told of the prompt: in a stream, with the next chunk."""

    # AnswerForm.

    def chunks(self, index: int, response: inference_pb.GenerateResponse) -> Iterable[Any]:
        """The roles first; then what is new of each choice."""
        self._take(index, response)
        if response.HasField("started"):
            for number in range(len(self._choices)):
                yield self._chunk(number, {"role": "assistant", "content": ""})
        for delta in response.choices:
            yield from self._delta_chunks(delta)

    def last_chunks(self) -> Iterable[Any]:
        """The usage, where it was asked for."""
        return self._envelope.last_chunks()

    def add(self, index: int, response: inference_pb.GenerateResponse) -> None:
        """Join what is new to what was there."""
        self._take(index, response)
        for delta in response.choices:
            choice = self._choices[delta.index]
            choice.message.push(delta.text)
            choice.logprobs.extend(delta.logprobs)
            choice.token_ids.extend(delta.token_ids)
            if delta.finish_reason:
                choice.message.finish()
                choice.end = self._end(delta)

    def whole(self) -> Any:
        """All choices, and the usage."""
        choices = [
            {"index": index, "message": choice.message.body(), "logprobs": None}
            | self._of_tokens(choice.logprobs, choice.token_ids)
            | choice.end
            for index, choice in enumerate(self._choices)
        ]
        return self._envelope.whole(choices) | self._of_prompt

    # Parts.

    def _take(self, index: int, response: inference_pb.GenerateResponse) -> None:
        """What is the same for all choices."""
        self._envelope.take(index, response)
        if response.HasField("started") and self._request.return_token_ids:
            self._of_prompt["prompt_token_ids"] = list(response.started.prompt_token_ids)
        if response.prompt_logprobs:
            self._of_prompt["prompt_logprobs"] = prompt_logprobs(response.prompt_logprobs)

    def _delta_chunks(self, delta: inference_pb.ChoiceDelta) -> Iterable[Any]:
        """A chunk per piece of the message; what its tokens are and its end go with the last."""
        message = self._choices[delta.index].message
        pieces: list[Piece] = message.push(delta.text) if delta.text else []
        if delta.finish_reason:
            pieces += message.finish()
        rest = self._of_tokens(delta.logprobs, delta.token_ids) if delta.token_ids else {}
        if delta.finish_reason:
            rest |= self._end(delta)
        if rest and not pieces:
            pieces = [{}]
        for place, piece in enumerate(pieces):
            is_last = place == len(pieces) - 1
            yield self._chunk(delta.index, piece, **(rest if is_last else {}))

    def _of_tokens(
        self, logprobs: Iterable[inference_pb.TokenLogprobs], token_ids: Iterable[int]
    ) -> dict[str, Any]:
        """What was asked for of output tokens besides their text."""
        told: dict[str, Any] = {}
        if self._request.logprobs:
            as_ids = bool(self._request.return_tokens_as_token_ids)
            told["logprobs"] = chat_logprobs(logprobs, as_ids=as_ids)
        if self._request.return_token_ids:
            told["token_ids"] = list(token_ids)
        return told

    def _end(self, delta: inference_pb.ChoiceDelta) -> dict[str, Any]:
        reason = FINISH_REASONS[delta.finish_reason]
        has_calls = self._choices[delta.index].message.has_calls and not self._plan.is_named
        if reason == "stop" and has_calls:
            reason = "tool_calls"
        return {"finish_reason": reason, "stop_reason": stop_reason(delta)}

    def _chunk(self, index: int, delta: Piece, **rest: Any) -> dict[str, Any]:
        choice = {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}
        of_prompt, self._of_prompt = self._of_prompt, {}
        return self._envelope.chunk(choice | rest) | of_prompt
