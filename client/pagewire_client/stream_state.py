"""One request's answer as it grows, and what to say to continue it elsewhere.

Responses go in, deltas come out, and at any point `next_request()` is the request
that continues from here. Clients of either kind, and streams of many requests, share it.
"""

from collections.abc import Iterable

from pagewire.v1 import inference_service_pb2 as pb
from pagewire_client import errors
from pagewire_client.outputs import (
    CompletionOutput,
    FinishReason,
    Logprob,
    OutputDelta,
    PositionLogprobs,
    RequestOutput,
    Timings,
    Usage,
)

_FINISH_REASONS: dict[int, FinishReason] = {
    pb.FINISH_REASON_STOP: "stop",
    pb.FINISH_REASON_LENGTH: "length",
}
_TIMINGS = tuple(field.name for field in pb.Timings.DESCRIPTOR.fields)


class StreamState:
    """Folds the responses to one request into a `RequestOutput`.

    Invariant: a choice's `token_ids`, `text` and `logprobs` hold exactly what was received of it,
    over all connections, each piece once.
    """

    def __init__(self, request: pb.GenerateRequest) -> None:
        """`request` as first sent; it must have a request_id, or it could not be continued."""
        assert request.request_id, "a request needs an id to be continued"
        self._request = request
        self._started = False
        self._num_attempts = 0
        prompt = request.text if request.WhichOneof("prompt") == "text" else None
        self.output = RequestOutput(request_id=request.request_id, prompt=prompt)

    def next_request(self) -> pb.GenerateRequest:
        """What to send to get the rest; each time it is a later attempt, which takes the request
        over from the one before, should that still be live."""
        request = pb.GenerateRequest()
        request.CopyFrom(self._request)
        request.attempt = self._num_attempts
        self._num_attempts += 1
        if not self._started:
            return request
        assert self.output.seed is not None
        request.sampling_params.seed = self.output.seed
        request.model = self.output.model
        del request.resume[:]
        request.resume.extend(
            _resumed(choice) for choice in self.output.outputs if choice.token_ids
        )
        return request

    def receive(self, response: pb.GenerateResponse) -> list[OutputDelta]:
        """What `response` adds, after adding it to `output`."""
        if response.HasField("started"):
            self._start(response.started)
        if response.prompt_logprobs and self.output.prompt_logprobs is None:
            self.output.prompt_logprobs = _prompt_logprobs(response.prompt_logprobs)
        deltas = []
        for choice_delta in response.choices:
            choice = self._choice(choice_delta.index)
            # After a reconnect the server tells again why a choice ended that had ended before.
            if not choice.finished:
                deltas.append(_append(choice, choice_delta))
        if response.HasField("usage"):
            self._finish(response)
        return deltas

    def require_finished(self) -> None:
        """Raises Unavailable if the stream ended without its end: it must not look complete."""
        if not self.output.finished:
            raise errors.Unavailable("the server ended the stream before the answer was complete")

    def _start(self, started: pb.Started) -> None:
        self._started = True
        self.output.seed = started.seed
        self.output.model = started.model
        self.output.prompt_token_ids = list(started.prompt_token_ids)

    def _choice(self, index: int) -> CompletionOutput:
        outputs = self.output.outputs
        # Indexes are dense, but a later choice's first token may come first.
        while len(outputs) <= index:
            outputs.append(CompletionOutput(index=len(outputs)))
        return outputs[index]

    def _finish(self, response: pb.GenerateResponse) -> None:
        if not all(choice.finished for choice in self.output.outputs):
            raise errors.ServerError("the server ended the answer before one of its choices")
        self.output.finished = True
        self.output.usage = Usage(
            prompt_tokens=response.usage.prompt_tokens,
            cached_tokens=response.usage.cached_tokens,
            completion_tokens=response.usage.completion_tokens,
        )
        self.output.timings = Timings(
            **{name: getattr(response.timings, name) for name in _TIMINGS}
        )


def _append(choice: CompletionOutput, delta: pb.ChoiceDelta) -> OutputDelta:
    """Adds `delta` to `choice` and returns it in our own words."""
    choice.text += delta.text
    choice.token_ids.extend(delta.token_ids)
    logprobs = None
    if delta.logprobs:
        logprobs = [_position_logprobs(position) for position in delta.logprobs]
        choice.logprobs = choice.logprobs or []
        choice.logprobs.extend(logprobs)
        # One by one, as the server does: the last bits must not depend on how deltas were cut.
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
    )


def _resumed(choice: CompletionOutput) -> pb.ResumedChoice:
    return pb.ResumedChoice(
        index=choice.index,
        token_ids=choice.token_ids,
        num_chars=len(choice.text),  # Python's characters are Unicode code points.
        cumulative_logprob=choice.cumulative_logprob,
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
