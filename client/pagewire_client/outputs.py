"""Answers and their deltas, under vLLM's names. Counts and times of a finished answer, and parts of
tool calls, are the protos' messages: `Usage`, `Timings`, `ToolCallDelta`."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from pagewire.v1.inference_service_pb2 import Timings, ToolCallDelta, Usage
from pagewire_client.chat import ChatMessage

FinishReason = Literal["stop", "length"]
"""`stop`: an end-of-sequence token, a stop token or a stop string; `length`: `max_tokens` or the
model's length."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Logprob:
    """One token's log probability under the model, before penalties and temperature."""

    logprob: float
    """Natural logarithm, at most 0."""
    rank: int
    """1 for the most probable token."""
    decoded_token: str
    """The token's text; incomplete characters appear as U+FFFD."""


PositionLogprobs = Mapping[int, Logprob]
"""Log probabilities at one position by token id: the token at this position first, then the most
probable ones."""


@dataclass(kw_only=True, slots=True)
class OutputToolCall:
    """A call of a function that the model requests, as received so far."""

    id: str
    name: str
    arguments: str = ""
    """The text of a JSON object, as the model wrote it; cut off if the answer is."""


@dataclass(frozen=True, kw_only=True, slots=True)
class OutputDelta:
    """An increment of one choice; all of them together give its `CompletionOutput`."""

    index: int
    """Index of the choice."""
    text: str
    """Text to append: whole characters, possibly empty. In a chat, without reasoning and calls."""
    token_ids: list[int]
    """Tokens to append. Their text may arrive later."""
    logprobs: list[PositionLogprobs] | None = None
    """One entry per token, if requested."""
    finish_reason: FinishReason | None = None
    """Why the choice ended; None while it continues."""
    stop_reason: str | int | None = None
    """The stop string or stop token that ended it; None for end-of-sequence tokens."""
    reasoning: str = ""
    """Text to append to the reasoning, in a chat."""
    tool_calls: list[ToolCallDelta] = field(default_factory=list)
    """Calls that begin or continue, in a chat with tools; their arguments are to be appended."""


@dataclass(kw_only=True, slots=True)
class CompletionOutput:
    """One choice of an answer, as received so far."""

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    cumulative_logprob: float | None = None
    """Sum over the output tokens, if log probabilities were requested."""
    logprobs: list[PositionLogprobs] | None = None
    """One entry per token, if requested."""
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None
    reasoning: str = ""
    """What the model thought before it answered, in a chat."""
    tool_calls: list[OutputToolCall] = field(default_factory=list)
    """Calls that it requests, in a chat with tools."""

    @property
    def message(self) -> ChatMessage:
        """The choice as a turn of the conversation, to continue it."""
        message = ChatMessage(role="assistant", content=self.text)
        if self.reasoning:
            message["reasoning_content"] = self.reasoning
        if self.tool_calls:
            message["tool_calls"] = [
                {"id": call.id, "function": {"name": call.name, "arguments": call.arguments}}
                for call in self.tool_calls
            ]
        return message

    @property
    def finished(self) -> bool:
        """Whether the choice is complete."""
        return self.finish_reason is not None


@dataclass(kw_only=True, slots=True)
class RequestOutput:
    """A request and its answer, as received so far."""

    request_id: str
    model: str = ""
    """The name of the model that answers; empty until the server has accepted the request."""
    lora: str | None = None
    """The name of the adapter in effect; None without one."""
    seed: int | None = None
    """The seed in effect; None until the server has accepted the request."""
    prompt: str | None = None
    """The prompt, if it was given as text."""
    prompt_token_ids: list[int] = field(default_factory=list)
    prompt_logprobs: list[PositionLogprobs | None] | None = None
    """One entry per prompt token, if requested; None for the first token."""
    outputs: list[CompletionOutput] = field(default_factory=list)
    """The choices, by index."""
    finished: bool = False
    usage: Usage | None = None
    """None until the answer is complete."""
    timings: Timings | None = None
    """None until the answer is complete. After a reconnect, of the last connection only."""

    @property
    def text(self) -> str:
        """The first choice's text."""
        return self.outputs[0].text if self.outputs else ""


@dataclass(frozen=True, kw_only=True, slots=True)
class TextLogprobs:
    """How probable a given text is under the model."""

    token_ids: list[int]
    logprobs: list[float | None]
    """One per token; None for a token that nothing precedes."""

    @property
    def logprob(self) -> float:
        """The sum over the tokens."""
        return sum(logprob for logprob in self.logprobs if logprob is not None)


def logprobs_of(output: RequestOutput, start: int) -> TextLogprobs:
    """The log probabilities of an answer's prompt from token `start` on."""
    token_ids = output.prompt_token_ids[start:]
    positions = (output.prompt_logprobs or [])[start:]
    logprobs = [
        None if position is None else position[token_id].logprob
        for token_id, position in zip(token_ids, positions, strict=True)
    ]
    return TextLogprobs(token_ids=token_ids, logprobs=logprobs)
