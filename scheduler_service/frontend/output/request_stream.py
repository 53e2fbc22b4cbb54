"""One open request and its choices: their outputs, merged until its reader takes them, and the
request's span.

A stream has no queue of messages. What has not been read is the tail of each choice's tokens and
text, so that a slow reader costs no more memory than the tokens themselves, and gets them in one
message.
"""

import asyncio
import struct
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from pagewire.columns import pack
from pagewire.v1 import inference_service_pb2 as inference_pb
from pagewire.v1 import scheduler_service_pb2 as scheduler_pb
from pagewire.v1.sampling_pb2 import SamplingParams
from scheduler_service.errors import GenerationFailed, InvalidArgument, PagewireError
from scheduler_service.frontend.input.processor import ResolvedRequest
from scheduler_service.frontend.metrics import CANCELLED, OK, ModelCounts, RequestSummary
from scheduler_service.frontend.output.logprobs import PromptLogprobs, token_logprobs
from scheduler_service.frontend.output.stop_strings import StopMatcher
from scheduler_service.frontend.timings import PARTS, Stopwatch
from service_common.metadata import TRACEPARENT
from service_common.tracing import Tracing

_FIRST_FLOAT = struct.Struct("<f")


@dataclass(frozen=True, slots=True)
class Finish:
    """How a choice ended."""

    reason: inference_pb.FinishReason.ValueType
    stop_string: str | None = None
    stop_token_id: int | None = None


class ChoiceStream:
    """Tokens, message and end of one choice.

    Tokens count up to the one that completes a stop string, or up to the end that the core reports;
    later ones are dropped. A stop string may end within a token: that token counts, and the text of
    `token_ids` is then longer than the text that was sent.

    A stop or end-of-sequence token is one of the tokens; its text is included only on request.
    """

    def __init__(self, index: int, request: ResolvedRequest) -> None:
        self.index = index
        self.token_ids: list[int] = []
        """All tokens that count, those of a resumed stream included."""
        self.cumulative_logprob = 0.0
        self.finish: Finish | None = None
        self.num_reasoning_tokens = 0
        self._num_reasoning_sent = 0
        self._request = request
        self._detokenizer = request.make_detokenizer()
        self._matcher = (
            StopMatcher(request.stop, include_stop=request.include_stop) if request.stop else None
        )
        self.received_token_ids: list[int] = []
        """Tokens that the core has sent and `advance` has not processed, which may be appended."""
        self.received_logprobs: list[scheduler_pb.ChoiceLogprobs] = []
        """Log probabilities of the same tokens, in their order."""
        self._received_finish: Finish | None = None
        self._message = request.make_message(index)
        self._logprobs: list[scheduler_pb.ChoiceLogprobs] = []
        """Log probabilities of the tokens not sent yet."""
        self._num_sent = 0
        self._finish_sent = False

    # From the core.

    def receive_finish(self, finished: scheduler_pb.ChoiceFinished) -> None:
        """Record that the core has ended the choice."""
        token = finished.stop_token_id if finished.HasField("stop_token_id") else None
        reported = token if token in self._request.reported_stop_token_ids else None
        self._received_finish = Finish(finished.reason, stop_token_id=reported)

    def advance(self) -> bool:
        """Process what was received; True if a stop string ended the choice before the core did."""
        token_ids, self.received_token_ids = self.received_token_ids, []
        logprobs, self.received_logprobs = self.received_logprobs, []
        if self.finish is not None:
            return False
        num_before = len(self.token_ids)
        self._take_tokens(token_ids)
        if self._request.has_logprobs:
            self._take_logprobs(logprobs[: len(self.token_ids) - num_before])
        if self.finish is None and self._received_finish is not None:
            self._end(self._received_finish)
            return False
        return self.finish is not None and self._received_finish is None

    def restore(self, resumed: inference_pb.ResumedChoice, field: str) -> None:
        """Start from what a client already has; `field` names it in errors.

        Raises InvalidArgument if the request cannot have produced such a choice.
        """
        self._take_tokens(resumed.token_ids)
        self._end_if_complete()
        if len(self.token_ids) < len(resumed.token_ids):
            raise InvalidArgument(
                f"{field}.token_ids", f"the choice ends after {len(self.token_ids)} of them"
            )
        self.cumulative_logprob = resumed.cumulative_logprob
        self._mark_sent(resumed, field)

    def skip(self, resumed: inference_pb.ResumedChoice, field: str) -> None:
        """Omit what a client already has of this choice, which has ended and of which nothing has
        been taken; `field` names it in errors.

        Raises InvalidArgument if the choice does not begin with it.
        """
        num_received = len(resumed.token_ids)
        if self.token_ids[:num_received] != list(resumed.token_ids):
            raise InvalidArgument(f"{field}.token_ids", "expected tokens of this very request")
        self._logprobs = self._logprobs[num_received:]
        self._mark_sent(resumed, field)

    def _mark_sent(self, resumed: inference_pb.ResumedChoice, field: str) -> None:
        """Mark the output that the client already has as sent."""
        self._message.skip(resumed, field)
        self._num_sent = len(resumed.token_ids)
        self._num_reasoning_sent = self.num_reasoning_tokens

    def _take_tokens(self, token_ids: Iterable[int]) -> None:
        request = self._request
        for token_id in token_ids:
            if self.finish is not None or self._is_complete():
                return
            self.token_ids.append(token_id)
            if token_id in request.stop_token_ids and not request.include_stop:
                continue
            self._show(self._detokenizer.push(token_id))
            self.num_reasoning_tokens += self._message.in_reasoning
            if self.finish is not None:
                self._message.finish()

    def _show(self, text: str) -> None:
        """Pass text on as far as stop strings allow; a match ends the choice."""
        matcher = self._matcher
        if matcher is not None:
            text = matcher.push(text, may_stop=len(self.token_ids) > self._request.min_tokens)
            if matcher.matched is not None:
                self.finish = Finish(inference_pb.FINISH_REASON_STOP, stop_string=matcher.matched)
        if text:
            self._message.push(text)

    def _is_complete(self) -> bool:
        """Whether the choice must end after the tokens so far."""
        if len(self.token_ids) >= self._request.max_tokens:
            return True
        return bool(self.token_ids) and self.token_ids[-1] in self._request.stop_token_ids

    def _end_if_complete(self) -> None:
        """End a restored choice that had ended when its stream broke."""
        if self.finish is not None or not self._is_complete():
            return
        last = self.token_ids[-1]
        if last in self._request.stop_token_ids:
            reported = last if last in self._request.reported_stop_token_ids else None
            self._end(Finish(inference_pb.FINISH_REASON_STOP, stop_token_id=reported))
        else:
            self._end(Finish(inference_pb.FINISH_REASON_LENGTH))

    def _end(self, finish: Finish) -> None:
        """End with the core's reason, unless the last of the text completes a stop string."""
        self._show(self._detokenizer.flush())
        if self.finish is None:
            if self._matcher is not None and (rest := self._matcher.flush()):
                self._message.push(rest)
            self.finish = finish
        self._message.finish()

    def _take_logprobs(self, entries: list[scheduler_pb.ChoiceLogprobs]) -> None:
        if self._request.num_logprobs is not None:
            self._logprobs += entries
        for entry in entries:
            self.cumulative_logprob += _FIRST_FLOAT.unpack_from(entry.logprobs)[0]

    # To the core, after a reconnect.

    def generated(self) -> scheduler_pb.GeneratedTokens:
        """The state that the core needs in order to continue."""
        return scheduler_pb.GeneratedTokens(
            choice_index=self.index,
            token_ids=pack(self.token_ids),
            cumulative_logprob=self.cumulative_logprob,
            finished=self.finish is not None,
        )

    # To the client.

    @property
    def has_output(self) -> bool:
        """Whether `take` would return anything new."""
        return bool(
            len(self.token_ids) > self._num_sent
            or self._message.has_pending
            or (self.finish is not None and not self._finish_sent)
        )

    def take(self, max_tokens: int, index: int) -> list[inference_pb.ChoiceDelta]:
        """Remove at most `max_tokens` new tokens; the message and the finish come with the last of
        them. `index` is the client's number of the choice."""
        until = min(len(self.token_ids), self._num_sent + max_tokens)
        new = self.token_ids[self._num_sent : until]
        delta = inference_pb.ChoiceDelta(index=index, token_ids=new)
        if self._request.num_logprobs is not None:
            entries, self._logprobs = self._logprobs[: len(new)], self._logprobs[len(new) :]
            delta.logprobs.extend(
                token_logprobs(entry, self._request.token_text) for entry in entries
            )
        self._num_sent = until
        if until < len(self.token_ids):
            return [delta]
        delta.reasoning_tokens = self.num_reasoning_tokens - self._num_reasoning_sent
        self._num_reasoning_sent = self.num_reasoning_tokens
        deltas = self._message.write(delta)
        if self.finish is not None:
            self._write_finish(deltas[-1], self.finish)
        return deltas

    def _write_finish(self, delta: inference_pb.ChoiceDelta, finish: Finish) -> None:
        self._finish_sent = True
        delta.finish_reason = finish.reason
        if finish.stop_string is not None:
            delta.stop_string = finish.stop_string
        elif finish.stop_token_id is not None:
            delta.stop_token_id = finish.stop_token_id
        if self._request.num_logprobs is not None:
            delta.cumulative_logprob = self.cumulative_logprob


def best_choices(
    candidates: Sequence[ChoiceStream], request: ResolvedRequest
) -> list[ChoiceStream]:
    """The candidates to return, best first, without what a resumed request's client already has.

    Candidates of `best_of` are ranked by the sum of their tokens' log probabilities; equal ones
    keep their order. Raises InvalidArgument if this request cannot have produced what the client
    has.
    """
    returned = list(candidates)
    if request.is_ranked:
        returned.sort(key=lambda choice: choice.cumulative_logprob, reverse=True)
        del returned[request.num_returned :]
    for position, resumed in enumerate(request.resume):
        returned[resumed.index].skip(resumed, f"resume[{position}]")
    return returned


class RequestSpan:
    """The span of a request, from its arrival to its end, below its client's span if it has one."""

    def __init__(self, tracing: Tracing, stream: "RequestStream") -> None:
        self._tracing = tracing
        self._span = tracing.start(
            "pagewire.generate",
            TRACEPARENT.get(),
            stream.stopwatch.arrived,
            {"pagewire.request_id": stream.request_id, "pagewire.tenant": stream.tenant},
        )
        self.traceparent = tracing.traceparent_of(self._span)
        """Passed to the core; empty if the trace is not recorded."""

    def end(self, request: RequestSummary) -> None:
        """End the span with the request's outcome."""
        if not self.traceparent:
            return
        span = self._span
        self._add_times(request.stopwatch, span)
        span.set_attribute("pagewire.outcome", request.outcome)
        if request.outcome not in (OK, CANCELLED):
            self._tracing.mark_failed(span)
        span.set_attribute("pagewire.num_worker_losses", request.num_worker_losses)
        if request.model_name is not None:
            span.set_attribute("gen_ai.request.model", request.model_name)
        if request.error is not None:
            span.set_attribute("error.type", request.error.reason)
        if request.usage is not None:
            span.set_attribute("gen_ai.usage.input_tokens", request.usage.prompt_tokens)
            span.set_attribute("gen_ai.usage.output_tokens", request.usage.completion_tokens)
        if request.timings is not None:
            for part in PARTS:
                name = f"{part}_us"
                span.set_attribute(f"pagewire.{name}", getattr(request.timings, name))
        span.end()

    def _add_times(self, watch: Stopwatch, span: Any) -> None:
        if watch.tokenize_s:
            began = watch.arrived + watch.model_wait_s
            self._tracing.add("tokenize", self.traceparent, began, began + watch.tokenize_s)
        if watch.first_token_at is not None:
            self._tracing.add_event(span, "first token", watch.first_token_at)
        for lost_at in watch.core_losses:
            self._tracing.add_event(span, "core lost", lost_at)


MAX_LOGPROBS_PER_RESPONSE = 32_768
"""Bounds the size of one response (about 1 MB) for a slow reader with log probabilities."""


class RequestStream:
    """One request from its arrival to its last response.

    It is made on arrival and begins with `begin`, when it is resolved. The core's outputs come
    through the `receive_…` methods and are processed by `advance`; the reader calls `take` until
    `is_done`. `fail` ends it at any point.
    """

    def __init__(
        self,
        request_id: str,
        deadline: float | None,
        on_update: Callable[[], object],
        tenant: str,
    ) -> None:
        """`deadline` is on the monotonic clock; `on_update` is called when there may be something
        new to `take`, or an error."""
        self.request_id = request_id
        self.tenant = tenant
        """Name of the tenant that sent it."""
        self.priority = 0
        self.hold_s = 0.0
        """How long tokens may wait for others before the reader is notified of them."""
        self._hold: asyncio.TimerHandle | None = None
        """The timer that ends the wait of tokens."""
        self.deadline = deadline
        self.stopwatch = Stopwatch()
        self.counts: ModelCounts | None = None
        """The counts of its model, once it is known."""
        self.trace: RequestSpan | None = None
        """Its span, if spans are exported."""
        self.usage: inference_pb.Usage | None = None
        """Set, like `timings`, when the last response has been taken."""
        self.timings: inference_pb.Timings | None = None
        self.error: PagewireError | None = None
        """Why the stream ended early; what came before may still be taken."""
        self.is_done = False
        """Whether the last response was taken."""
        self.is_closed = False
        """Whether its reader has released it."""
        self.handle = 0
        """Number of the first choice on the stream to the core; 0 before it is submitted."""
        self.num_worker_losses = 0
        """Workers that died while computing it, as its cores have reported."""
        self.num_lone_worker_losses = 0
        """Those of them that died in steps that it had to itself, since its last output."""
        self.choices: list[ChoiceStream] = []
        """The choices in the order of the core."""
        self.has_ended_at_core = False
        """Whether the core has reported its end."""
        self._on_update = on_update
        self._request: ResolvedRequest | None = None
        self._returned: list[ChoiceStream] = []
        """The choices that the client gets, in its order; empty until they are known."""
        self._prompt_logprobs: PromptLogprobs | None = None
        self.is_accepted = False
        """Whether a core has ever accepted it."""
        self.was_accepted = False
        """Whether a core has ever accepted it, or the earlier attempt that it replaces."""
        self.first_arrived = self.stopwatch.arrived
        """When the first attempt arrived, on the monotonic clock."""
        self._started_sent = False
        self._finished: scheduler_pb.RequestFinished | None = None

    @property
    def resolved(self) -> ResolvedRequest:
        """The request with its defaults, once it has begun."""
        assert self._request is not None
        return self._request

    @property
    def model_name(self) -> str:
        """The model that the request was resolved for."""
        return self.resolved.model.info.name

    def take_over(self, former: "RequestStream") -> None:
        """Replace an earlier attempt at the request: keep its place and its history at the core."""
        self.was_accepted = former.was_accepted
        self.first_arrived = former.first_arrived
        self.num_worker_losses = former.num_worker_losses
        self.num_lone_worker_losses = former.num_lone_worker_losses

    def begin(self, request: ResolvedRequest) -> None:
        """Set up the choices, with what a resumed request brings.

        Raises InvalidArgument if this request cannot have produced it. Detokenizes what was
        resumed, which takes a while for long outputs; call it off the loop then.
        """
        choices = [ChoiceStream(index, request) for index in range(request.num_choices)]
        if request.is_streamed:
            self._returned = choices
            for position, resumed in enumerate(request.resume):
                choices[resumed.index].restore(resumed, f"resume[{position}]")
        if request.wants_prompt_logprobs:
            self._prompt_logprobs = PromptLogprobs(request.prompt_token_ids, request.token_text)
        self._request, self.choices = request, choices

    def client_field(self, field: str) -> str:
        """The path, in the client's request, of a field that the core refuses."""
        if field == "num_choices" and self._request is not None:
            field = "best_of" if self._request.is_ranked else "n"
        is_sampling = field.partition(".")[0] in SamplingParams.DESCRIPTOR.fields_by_name
        return f"sampling_params.{field}" if is_sampling else field

    def summary(self) -> RequestSummary:
        """The request at its end."""
        return RequestSummary(
            request_id=self.request_id,
            tenant=self.tenant,
            priority=self.priority,
            stopwatch=self.stopwatch,
            model_name=self.model_name if self.handle else None,
            counts=self.counts,
            usage=self.usage,
            timings=self.timings,
            error=self.error,
            num_tokens=sum(len(choice.token_ids) for choice in self.choices),
            num_worker_losses=self.num_worker_losses,
        )

    # From the core.

    def receive_accepted(self) -> None:
        """Record that the core has accepted the request."""
        self.stopwatch.accepted()
        if not self.is_accepted:
            self.is_accepted = self.was_accepted = True
            self._on_update()

    def receive_prompt_logprobs(self, update: scheduler_pb.PromptLogprobsUpdate) -> None:
        """Log probabilities of the next part of the prompt."""
        if self._prompt_logprobs is not None:
            self._prompt_logprobs.receive(update)

    def advance(self) -> Iterable[ChoiceStream]:
        """Detokenize the tokens received; return the choices that a stop string has just ended."""
        began = time.perf_counter()
        stopped = []
        num_tokens = num_choices = 0
        for choice in self.choices:
            num_before = len(choice.token_ids)
            if choice.advance():
                stopped.append(choice)
            num_new = len(choice.token_ids) - num_before
            num_tokens += num_new
            num_choices += num_new > 0
        if num_tokens:
            self._count_tokens(num_tokens, num_choices)
        self.stopwatch.last_text_s = time.perf_counter() - began
        if not self.hold_s:
            self._on_update()
        elif self._hold is None:
            self._hold = asyncio.get_running_loop().call_later(self.hold_s, self._on_update)
        return stopped

    def _count_tokens(self, num_tokens: int, num_choices: int) -> None:
        """Count `num_tokens` new tokens, of `num_choices` choices."""
        gap_s = self.stopwatch.note_tokens()
        counts = self.counts
        if counts is None:
            return
        counts.num_generated_tokens += num_tokens
        if gap_s is None:
            counts.num_prompt_tokens += len(self.resolved.prompt_token_ids)
            counts.first_token.observe(self.stopwatch.first_token_s)
        else:  # several tokens of a choice that arrive together share the time equally
            counts.token_gap.observe(gap_s * num_choices / num_tokens, num_tokens)

    def receive_finished(self, finished: scheduler_pb.RequestFinished) -> None:
        """Record that all choices have ended."""
        self.has_ended_at_core = True
        if any(choice.finish is None for choice in self.choices):
            self.fail(GenerationFailed("the request ended before all of its choices had"))
            return
        if not self.resolved.is_streamed:
            try:
                self._returned = best_choices(self.choices, self.resolved)
            except InvalidArgument as error:
                self.fail(error)
                return
        self._finished = finished
        self._on_update()

    def receive_failed(self, error: PagewireError) -> None:
        """The core has refused the request or ended it with an error."""
        self.has_ended_at_core = True
        self.fail(error)

    def fail(self, error: PagewireError) -> None:
        """End early; only the first error counts, and only before the end."""
        if self.error is None and self._finished is None:
            self.error = error
            self._on_update()

    # To the client.

    def take(self) -> inference_pb.GenerateResponse | None:
        """All that is new, in one response; None if nothing is."""
        if self._hold is not None:
            self._hold.cancel()
            self._hold = None
        if not self.is_accepted or self.is_done:
            return None
        response = inference_pb.GenerateResponse(request_id=self.request_id)
        has_output = self._write_started(response)
        has_output = self._write_prompt_logprobs(response) or has_output
        has_output = self._write_choices(response) or has_output
        has_output = self._write_end(response) or has_output
        return response if has_output else None

    def _write_started(self, response: inference_pb.GenerateResponse) -> bool:
        if self._started_sent or self._request is None:
            return False
        self._started_sent = True
        response.started.seed = self._request.seed
        response.started.model = self.model_name
        response.started.prompt_token_ids.extend(self._request.prompt_token_ids)
        return True

    def _write_prompt_logprobs(self, response: inference_pb.GenerateResponse) -> bool:
        if self._prompt_logprobs is None or not self._prompt_logprobs.is_complete:
            return False
        response.prompt_logprobs.extend(self._prompt_logprobs.positions)
        self._prompt_logprobs = None
        return True

    def _write_choices(self, response: inference_pb.GenerateResponse) -> bool:
        room = self._max_tokens_per_response()
        for index, choice in enumerate(self._returned):
            if choice.has_output and room > 0:
                deltas = choice.take(room, index)
                room -= len(deltas[0].token_ids)
                response.choices.extend(deltas)
        if room <= 0:
            self._on_update()  # there may be more
        return bool(response.choices)

    def _max_tokens_per_response(self) -> int:
        num_logprobs = self.resolved.num_logprobs
        return MAX_LOGPROBS_PER_RESPONSE // (1 + (num_logprobs or 0))

    def _write_end(self, response: inference_pb.GenerateResponse) -> bool:
        if self._finished is None or any(choice.has_output for choice in self._returned):
            return False
        response.usage.prompt_tokens = len(self.resolved.prompt_token_ids)
        response.usage.cached_tokens = self._finished.cached_tokens
        response.usage.completion_tokens = sum(len(choice.token_ids) for choice in self.choices)
        response.usage.reasoning_tokens = sum(
            choice.num_reasoning_tokens for choice in self.choices
        )
        response.timings.CopyFrom(self.stopwatch.total(self._finished.timings))
        self.is_done = True
        self.usage, self.timings = response.usage, response.timings
        if self.counts is not None:
            finishes = [choice.finish.reason for choice in self._returned if choice.finish]
            self.counts.count_finished(
                self.stopwatch,
                response.timings,
                response.usage,
                finishes,
                longest=max(len(choice.token_ids) for choice in self.choices),
                max_tokens=self.resolved.submit.generation.max_tokens,
            )
        return True
