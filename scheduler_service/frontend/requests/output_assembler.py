"""The responses to one request: the outputs of its choices, merged until its reader takes them."""

from collections.abc import Sequence
from typing import NamedTuple

from pagewire.v1 import inference_service_pb2 as inference_pb
from pagewire.v1 import scheduler_service_pb2 as scheduler_pb
from scheduler_service.errors import GenerationFailed
from scheduler_service.frontend.input.processor import ResolvedRequest
from scheduler_service.frontend.output.logprobs import PromptLogprobs
from scheduler_service.frontend.requests.choice_stream import ChoiceStream, best_choices
from scheduler_service.frontend.timings import Stopwatch

MAX_LOGPROBS_PER_RESPONSE = 32_768
"""Bounds the size of one response (about 1 MB) for a slow reader with log probabilities."""


class Progress(NamedTuple):
    """What the latest outputs of the core have added."""

    stopped: Sequence[ChoiceStream]
    """Choices that a stop string has just ended."""
    num_tokens: int
    num_choices: int
    """Choices with new tokens."""


class OutputAssembler:
    """Text, ends and log probabilities of a request's choices."""

    def __init__(self, request: ResolvedRequest) -> None:
        """Set up the choices, with what a resumed request brings.

        Raises InvalidArgument if this request cannot have produced it. Detokenizes what was
        resumed, which takes a while for long outputs; call it off the loop then.
        """
        self.request = request
        self.choices = [ChoiceStream(index, request) for index in range(request.num_choices)]
        """The choices in the order of the core."""
        self.returned: list[ChoiceStream] = []
        """The choices that the client gets, in its order; empty until they are known."""
        self.usage: inference_pb.Usage | None = None
        """Set, like `timings`, when the last response has been taken."""
        self.timings: inference_pb.Timings | None = None
        self.finished: scheduler_pb.RequestFinished | None = None
        """The core's account, once all choices have ended."""
        self._started_sent = False
        self._prompt_logprobs: PromptLogprobs | None = None
        if request.is_streamed:
            self.returned = self.choices
            for position, resumed in enumerate(request.resume):
                self.choices[resumed.index].restore(resumed, f"resume[{position}]")
        if request.wants_prompt_logprobs:
            self._prompt_logprobs = PromptLogprobs(
                request.prompt_token_ids, request.token_text, request.num_virtual_tokens
            )

    # From the core.

    def receive_prompt_logprobs(self, update: scheduler_pb.PromptLogprobsUpdate) -> None:
        """Log probabilities of the next part of the prompt."""
        if self._prompt_logprobs is not None:
            self._prompt_logprobs.receive(update)

    def advance(self) -> Progress:
        """Detokenize the tokens received."""
        stopped = []
        num_tokens = num_choices = 0
        for choice in self.choices:
            num_before = len(choice.token_ids)
            if choice.advance():
                stopped.append(choice)
            num_new = len(choice.token_ids) - num_before
            num_tokens += num_new
            num_choices += num_new > 0
        return Progress(stopped, num_tokens, num_choices)

    def finish(self, finished: scheduler_pb.RequestFinished) -> None:
        """Record that all choices have ended. Raises GenerationFailed if one has not, and
        InvalidArgument if this request cannot have produced what a resumed one brought."""
        if any(choice.finish is None for choice in self.choices):
            raise GenerationFailed("the request ended before all of its choices had")
        if not self.request.is_streamed:
            self.returned = best_choices(self.choices, self.request)
        self.finished = finished

    # To the client.

    @property
    def num_tokens(self) -> int:
        """Number of output tokens of all choices."""
        return sum(len(choice.token_ids) for choice in self.choices)

    @property
    def is_complete(self) -> bool:
        """Whether all output was taken, and only the end is left."""
        return self.finished is not None and not any(choice.has_output for choice in self.returned)

    def write(self, response: inference_pb.GenerateResponse) -> bool:
        """Write what is new to a response; return whether it is full, and there may be more."""
        if not self._started_sent:
            self._started_sent = True
            response.started.seed = self.request.seed
            response.started.model = self.request.model.info.name
            if (adapter := self.request.adapter) is not None:
                response.started.lora = adapter.name
                response.started.lora_digest = adapter.digest
            response.started.prompt_token_ids.extend(self.request.prompt_token_ids)
        if self._prompt_logprobs is not None and self._prompt_logprobs.is_complete:
            response.prompt_logprobs.extend(self._prompt_logprobs.positions)
            self._prompt_logprobs = None
        room = MAX_LOGPROBS_PER_RESPONSE // (1 + (self.request.num_logprobs or 0))
        for index, choice in enumerate(self.returned):
            while choice.has_output and room > 0:
                deltas = choice.take(room, index)
                room -= sum(len(delta.token_ids) for delta in deltas)
                response.choices.extend(deltas)
        return room <= 0

    def write_end(self, response: inference_pb.GenerateResponse, stopwatch: Stopwatch) -> None:
        """Write the account of a complete output."""
        assert self.finished is not None
        usage = response.usage
        usage.prompt_tokens = self.request.num_prompt_tokens
        usage.cached_tokens = self.finished.cached_tokens
        usage.completion_tokens = self.num_tokens
        usage.reasoning_tokens = sum(choice.num_reasoning_tokens for choice in self.choices)
        response.timings.CopyFrom(stopwatch.total(self.finished.timings))
        self.usage, self.timings = usage, response.timings
