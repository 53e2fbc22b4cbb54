"""What `/v1/responses` and `/v1/messages` have in common: calls that become chat completions, and
answers that are lists of parts."""

from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal, TypeAlias

from fastapi.exceptions import RequestValidationError
from pydantic import ValidationError

from pagewire.v1 import inference_service_pb2 as inference_pb
from scheduler_service.errors import InvalidArgument
from scheduler_service.frontend.http.openai.protocol import ChatRequest, FunctionBody
from scheduler_service.frontend.http.openai.serving import Envelope, ResponseBuilder

Kind: TypeAlias = Literal["reasoning", "text", "call"]


def chat_request_of(fields: Mapping[str, Any]) -> ChatRequest:
    """A chat completion that another endpoint asks for. Raises RequestValidationError."""
    try:
        return ChatRequest.model_validate(fields)
    except ValidationError as error:
        raise RequestValidationError(error.errors(include_url=False)) from None


def chat_tools(tools: Sequence[FunctionBody]) -> list[dict[str, Any]]:
    """The `tools` of a chat completion; types are not fields of a function."""
    return [{"type": "function", "function": tool.model_dump(exclude={"type"})} for tool in tools]


def named_choice(name: str | None, tools: Sequence[FunctionBody]) -> dict[str, Any]:
    """The `tool_choice` of one function, as another endpoint names it. Raises InvalidArgument."""
    names = sorted(tool.name for tool in tools)
    if name not in names:
        raise InvalidArgument("tool_choice.name", f"expected one of {names}, got {name!r}")
    return {"type": "function", "function": {"name": name}}


def required(part: Any, field: str, where: str) -> Any:
    """A field that `part`, at the path `where`, must have. Raises InvalidArgument."""
    value = getattr(part, field)
    if value is None:
        raise InvalidArgument(f"{where}.{field}", f"required with the type {part.type!r}")
    return value


class PartsBuilder(ResponseBuilder):
    """An answer as a list of parts (thoughts, texts, calls), the last of which grows. Events have
    names, and the last one ends a stream."""

    end = b""

    def __init__(self, chat: ChatRequest, answer_id: str) -> None:
        self.envelope = Envelope(chat, answer_id)
        self.parts: list[Any] = []
        self._open: Kind | None = None
        """The kind of the last part, while it may grow."""

    def chunks(
        self, index: int, response: inference_pb.GenerateResponse
    ) -> Iterator[dict[str, Any]]:
        """The answer's start, then parts that begin, grow and end."""
        self.envelope.count(index, response)
        if response.HasField("started"):
            yield from self.start()
        for delta in response.choices:
            self.record_tokens(delta)
            yield from self._delta_events(delta)
            if delta.finish_reason:
                self.record_end(delta)
                yield from self._close()

    def event(self, chunk: Any) -> bytes:
        """A server-sent event with its name."""
        return b"event: " + chunk["type"].encode() + b"\n" + super().event(chunk)

    @abstractmethod
    def start(self) -> Iterator[dict[str, Any]]:
        """The events before the first part."""

    @abstractmethod
    def begin_part(
        self, kind: Kind, call: inference_pb.ToolCallDelta | None
    ) -> Iterator[dict[str, Any]]:
        """Append an empty part, of a `call` if it is one."""

    @abstractmethod
    def grow_part(self, kind: Kind, text: str) -> dict[str, Any]:
        """Append to the last part: of a call, to its arguments."""

    @abstractmethod
    def end_part(self, kind: Kind) -> Iterator[dict[str, Any]]:
        """Complete the last part."""

    def record_tokens(self, delta: inference_pb.ChoiceDelta) -> None:
        """Record the tokens of new output, if the answer reports any."""

    @abstractmethod
    def record_end(self, delta: inference_pb.ChoiceDelta) -> None:
        """Record why the answer ends."""

    def _delta_events(self, delta: inference_pb.ChoiceDelta) -> Iterator[dict[str, Any]]:
        texts: tuple[tuple[Kind, str], ...] = (("reasoning", delta.reasoning), ("text", delta.text))
        for kind, text in texts:
            if text:
                if self._open != kind:
                    yield from self._next_part(kind, None)
                yield self.grow_part(kind, text)
        for call in delta.tool_calls:
            if call.id:
                yield from self._next_part("call", call)
            if call.arguments:
                yield self.grow_part("call", call.arguments)

    def _next_part(
        self, kind: Kind, call: inference_pb.ToolCallDelta | None
    ) -> Iterator[dict[str, Any]]:
        yield from self._close()
        self._open = kind
        yield from self.begin_part(kind, call)

    def _close(self) -> Iterator[dict[str, Any]]:
        if self._open is not None:
            yield from self.end_part(self._open)
            self._open = None
