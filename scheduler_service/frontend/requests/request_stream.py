"""One open request: at its core a `Submission`, for its reader an `OutputAssembler`.

A stream has no queue of messages. What has not been read is the tail of each choice's tokens and
text, so that a slow reader costs no more memory than the tokens themselves, and gets them in one
message.
"""

import asyncio
import time
from collections.abc import Callable, Iterable, Sequence

from pagewire.v1 import inference_service_pb2 as inference_pb
from pagewire.v1 import scheduler_service_pb2 as scheduler_pb
from pagewire.v1.sampling_pb2 import SamplingParams
from scheduler_service.errors import NoCandidates, PagewireError
from scheduler_service.frontend.input.processor import ResolvedRequest
from scheduler_service.frontend.metrics import ModelCounts, RequestSummary
from scheduler_service.frontend.requests.choice_stream import ChoiceStream
from scheduler_service.frontend.requests.output_assembler import OutputAssembler
from scheduler_service.frontend.requests.request_span import RequestSpan
from scheduler_service.frontend.requests.submission import Submission
from scheduler_service.frontend.timings import Stopwatch


class RequestStream:
    """One request from its arrival to its last response.

    It is made on arrival and begins with `begin`, when it is resolved. The core's outputs come
    through the `receive_…` methods and are processed by `advance`; the reader calls `take` until
    `is_done`. `fail` ends it at any point.
    """

    def __init__(
        self, request_id: str, deadline: float | None, on_update: Callable[[], object], tenant: str
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
        self.stopwatch = Stopwatch()
        self.submission = Submission(self.stopwatch.arrived, deadline)
        self.outputs: OutputAssembler | None = None
        """Its choices, once it has begun."""
        self.excluding: Sequence[str] = ()
        """The client's fields that exclude tokens, as a user names them."""
        self.counts: ModelCounts | None = None
        """The counts of its model, once it is known."""
        self.span: RequestSpan | None = None
        """Its span, if spans are exported."""
        self.error: PagewireError | None = None
        """Why the stream ended early; what came before may still be taken."""
        self.is_done = False
        """Whether the last response was taken."""
        self.is_closed = False
        """Whether its reader has released it."""
        self._on_update = on_update

    @property
    def choices(self) -> Sequence[ChoiceStream]:
        """The choices in the order of the core; none before it has begun."""
        return () if self.outputs is None else self.outputs.choices

    @property
    def model_name(self) -> str:
        """The model that the request was resolved for."""
        return self._begun.request.model.info.name

    @property
    def _begun(self) -> OutputAssembler:
        assert self.outputs is not None
        return self.outputs

    def begin(self, request: ResolvedRequest) -> None:
        """Set up the choices; see `OutputAssembler`. Raises InvalidArgument."""
        self.outputs = OutputAssembler(request)

    def submit_message(self) -> scheduler_pb.Submit:
        """The message that submits the request to a core, the first or a later one."""
        submit = self.submission.message(self._begun.request.submit, self.choices)
        submit.tenant = self.tenant
        if self.span is not None:
            submit.traceparent = self.span.traceparent
        self.stopwatch.submitted()
        return submit

    def client_field(self, field: str) -> str:
        """The path, in the client's request, of a field that the core refuses."""
        if field == "num_choices" and self.outputs is not None:
            field = "best_of" if self.outputs.request.is_ranked else "n"
        is_sampling = field.partition(".")[0] in SamplingParams.DESCRIPTOR.fields_by_name
        return f"sampling_params.{field}" if is_sampling else field

    def summary(self) -> RequestSummary:
        """The request at its end."""
        outputs = self.outputs
        return RequestSummary(
            request_id=self.request_id,
            tenant=self.tenant,
            priority=self.priority,
            stopwatch=self.stopwatch,
            model_name=self.model_name if self.submission.handle else None,
            counts=self.counts,
            lora=""
            if outputs is None or not outputs.request.adapter
            else outputs.request.adapter.name,
            usage=None if outputs is None else outputs.usage,
            timings=None if outputs is None else outputs.timings,
            error=self.error,
            num_tokens=0 if outputs is None else outputs.num_tokens,
            num_worker_losses=self.submission.num_worker_losses,
        )

    # From the core.

    def record_loss(self) -> None:
        """Record that the core is lost, or does not accept the request yet."""
        self.stopwatch.lost()

    def receive_accepted(self) -> None:
        """Record that the core has accepted the request."""
        self.stopwatch.accepted()
        if not self.submission.is_accepted:
            self.submission.is_accepted = self.submission.was_accepted = True
            self._on_update()

    def receive_prompt_logprobs(self, update: scheduler_pb.PromptLogprobsUpdate) -> None:
        """Log probabilities of the next part of the prompt."""
        self._begun.receive_prompt_logprobs(update)

    def advance(self) -> Iterable[ChoiceStream]:
        """Detokenize the tokens received; return the choices that a stop string has just ended."""
        began = time.perf_counter()
        stopped, num_tokens, num_choices = self._begun.advance()
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
        gap_s = self.stopwatch.record_tokens()
        counts = self.counts
        if counts is None:
            return
        counts.num_generated_tokens += num_tokens
        if gap_s is None:
            counts.num_prompt_tokens += self._begun.request.num_prompt_tokens
            counts.first_token.observe(self.stopwatch.first_token_s)
        else:  # several tokens of a choice that arrive together share the time equally
            counts.token_gap.observe(gap_s * num_choices / num_tokens, num_tokens)

    def receive_finished(self, finished: scheduler_pb.RequestFinished) -> None:
        """Record that all choices have ended."""
        self.submission.has_ended = True
        try:
            self._begun.finish(finished)
        except PagewireError as error:
            self.fail(error)
        else:
            self._on_update()

    def receive_failed(self, error: PagewireError) -> None:
        """The core has refused the request or ended it with an error."""
        self.submission.has_ended = True
        if isinstance(error, NoCandidates) and self.excluding:
            fields = " and ".join(self.excluding)
            error = NoCandidates(f"no token can come next: all are excluded by {fields}")
        self.fail(error)

    def fail(self, error: PagewireError) -> None:
        """End early; only the first error counts, and only before the end."""
        is_finished = self.outputs is not None and self.outputs.finished is not None
        if self.error is None and not is_finished:
            self.error = error
            self._on_update()

    # To the client.

    def take(self) -> inference_pb.GenerateResponse | None:
        """All that is new, in one response; None if nothing is."""
        if self._hold is not None:
            self._hold.cancel()
            self._hold = None
        if not self.submission.is_accepted or self.is_done:
            return None
        response = inference_pb.GenerateResponse(request_id=self.request_id)
        outputs = self._begun
        if outputs.write(response):
            self._on_update()  # there may be more
        if outputs.is_complete:
            outputs.write_end(response, self.stopwatch)
            self.is_done = True
            self._count_finished(outputs, response)
        has_output = len(response.ListFields()) > 1  # besides the id
        return response if has_output else None

    def _count_finished(
        self, outputs: OutputAssembler, response: inference_pb.GenerateResponse
    ) -> None:
        if self.counts is not None:
            self.counts.count_finished(
                self.stopwatch,
                response.timings,
                response.usage,
                [choice.finish.reason for choice in outputs.returned if choice.finish],
                longest=max(len(choice.token_ids) for choice in outputs.choices),
                max_tokens=outputs.request.submit.generation.max_tokens,
            )
