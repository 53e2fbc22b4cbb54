"""One request's answer as it grows, and the request that continues it.

Responses go in, deltas come out, and at any point `next_request()` is the request that continues
from there. Both clients, and batches of requests, use it.
"""

from collections.abc import Iterable

from pagewire.v1 import inference_service_pb2 as pb
from pagewire_client import errors
from pagewire_client.outputs import (
    CompletionOutput,
    FinishReason,
    Logprob,
    OutputDelta,
    OutputToolCall,
    PositionLogprobs,
    RequestOutput,
)

_FINISH_REASONS: dict[int, FinishReason] = {
    pb.FINISH_REASON_STOP: "stop",
    pb.FINISH_REASON_LENGTH: "length",
}


class StreamState:
    """Folds the responses to one request into a `RequestOutput`.

    Invariant: a choice's `token_ids`, `text`, `reasoning`, `tool_calls` and `logprobs` contain
    everything that was received, over all connections, exactly once.
    """

    def __init__(self, request: pb.GenerateRequest) -> None:
        """`request` as first sent; it must have a request_id, or it could not be continued."""
        assert request.request_id, "a request needs an id to be continued"
        self._request = request
        self._started = False
        self._num_attempts = 0
        self._lora_digest = b""
        """Content of the adapter with which the answer began."""
        prompt = request.text if request.WhichOneof("prompt") == "text" else None
        self.output = RequestOutput(request_id=request.request_id, prompt=prompt)

    def next_request(self) -> pb.GenerateRequest:
        """The request for the rest of the answer. Each call makes a later attempt, which takes over
        from the one before if that is still live."""
        request = pb.GenerateRequest()
        request.CopyFrom(self._request)
        request.attempt = self._num_attempts
        self._num_attempts += 1
        if not self._started:
            return request
        assert self.output.seed is not None
        request.sampling_params.seed = self.output.seed
        if self.output.lora is None:
            request.model = self.output.model
        request.lora_digest = self._lora_digest
        del request.resume[:]
        request.resume.extend(
            _resumed(choice) for choice in self.output.outputs if choice.token_ids
        )
        return request

    def receive(self, response: pb.GenerateResponse) -> list[OutputDelta]:
        """Add `response` to `output`; returns the deltas."""
        if response.HasField("started"):
            self._start(response.started)
        if response.prompt_logprobs and self.output.prompt_logprobs is None:
            self.output.prompt_logprobs = _prompt_logprobs(response.prompt_logprobs)
        deltas = []
        for choice_delta in response.choices:
            choice = self._choice(choice_delta.index)
            # After a reconnect the server reports again why a finished choice ended.
            if not choice.finished:
                deltas.append(_append(choice, choice_delta))
        if response.HasField("usage"):
            self._finish(response)
        return deltas

    def require_finished(self) -> None:
        """Raise Unavailable if the stream ended before the answer was complete."""
        if not self.output.finished:
            raise errors.Unavailable("the server ended the stream before the answer was complete")

    def _start(self, started: pb.Started) -> None:
        self._started = True
        self.output.seed = started.seed
        self.output.model = started.model
        self.output.lora = started.lora or None
        self._lora_digest = started.lora_digest
        self.output.prompt_token_ids = list(started.prompt_token_ids)

    def _choice(self, index: int) -> CompletionOutput:
        outputs = self.output.outputs
        # Indexes are dense, but choices may begin in any order.
        while len(outputs) <= index:
            outputs.append(CompletionOutput(index=len(outputs)))
        return outputs[index]

    def _finish(self, response: pb.GenerateResponse) -> None:
        if not all(choice.finished for choice in self.output.outputs):
            raise errors.ServerError("the server ended the answer before one of its choices")
        self.output.finished = True
        self.output.usage = response.usage
        self.output.timings = response.timings


def _append(choice: CompletionOutput, delta: pb.ChoiceDelta) -> OutputDelta:
    """Add `delta` to `choice`; returns it as an `OutputDelta`."""
    choice.text += delta.text
    choice.reasoning += delta.reasoning
    for call in delta.tool_calls:
        if call.index == len(choice.tool_calls):
            choice.tool_calls.append(OutputToolCall(id=call.id, name=call.name))
        choice.tool_calls[call.index].arguments += call.arguments
    choice.token_ids.extend(delta.token_ids)
    logprobs = None
    if delta.logprobs:
        logprobs = [_position_logprobs(position) for position in delta.logprobs]
        choice.logprobs = choice.logprobs or []
        choice.logprobs.extend(logprobs)
        # One by one, as the server adds them: the sum must not depend on how deltas were split.
        for position in delta.logprobs:
            choice.cumulative_logprob = (choice.cumulative_logprob or 0.0) + position.token.logprob
    if delta.HasField("cumulative_logprob"):
        choice.cumulative_logprob = delta.cumulative_logprob
    choice.finish_reason = _FINISH_REASONS.get(delta.finish_reason)
    stop_reason = delta.WhichOneof("stop_reason")
    choice.stop_reason = getattr(delta, stop_reason) if stop_reason else None
    return OutputDelta(
        index=choice.index,
        text=delta.text,
        token_ids=list(delta.token_ids),
        logprobs=logprobs,
        finish_reason=choice.finish_reason,
        stop_reason=choice.stop_reason,
        reasoning=delta.reasoning,
        tool_calls=list(delta.tool_calls),
    )


def _resumed(choice: CompletionOutput) -> pb.ResumedChoice:
    return pb.ResumedChoice(
        index=choice.index,
        token_ids=choice.token_ids,
        num_chars=len(choice.text),  # Python's characters are Unicode code points.
        cumulative_logprob=choice.cumulative_logprob,
        num_reasoning_chars=len(choice.reasoning),
        num_tool_calls=len(choice.tool_calls),
        num_argument_chars=sum(len(call.arguments) for call in choice.tool_calls),
    )


def _prompt_logprobs(positions: Iterable[pb.TokenLogprobs]) -> list[PositionLogprobs | None]:
    return [
        _position_logprobs(position) if position.token.HasField("logprob") else None
        for position in positions
    ]


def _position_logprobs(position: pb.TokenLogprobs) -> PositionLogprobs:
    return {
        token.token_id: Logprob(logprob=token.logprob, rank=token.rank, decoded_token=token.text)
        for token in (position.token, *position.top)
    }
