"""`/v1/chat/completions`: requests, and messages with reasoning and tool calls."""

import json
from collections.abc import Iterable
from typing import Any

from fastapi import APIRouter

from pagewire.v1 import inference_service_pb2 as inference_pb
from pagewire.v1 import sampling_pb2
from scheduler_service.errors import InvalidArgument
from scheduler_service.frontend.http.errors import ERROR_RESPONSES
from scheduler_service.frontend.http.openai import protocol, serving
from scheduler_service.frontend.http.openai.sampling import constraint_field, sampling_params
from scheduler_service.frontend.metrics import FINISH_LABELS

THINKING_SWITCHES = ("enable_thinking", "thinking")
"""Variables by which chat templates switch thinking off or on, such as Qwen's and DeepSeek's."""


def _parts(delta: inference_pb.ChoiceDelta) -> list[protocol.Delta]:
    """The parts of a message's new output, each for a chunk of its own: some clients read only one
    of the fields of a chunk."""
    parts: list[protocol.Delta] = []
    if reasoning := delta.reasoning:
        parts.append({"reasoning_content": reasoning, "reasoning": reasoning})
    if text := delta.text:
        parts.append({"content": text})
    for call in delta.tool_calls:
        part: protocol.ToolCallDelta = {
            "index": call.index,
            "function": {"arguments": call.arguments},
        }
        if call.id:
            part |= {"id": call.id, "type": "function"}
            part["function"]["name"] = call.name
        parts.append({"tool_calls": [part]})
    return parts


def _append(message: Any, delta: protocol.Delta) -> None:
    """Append a part of a message to the whole one."""
    for part in delta.get("tool_calls", ()):
        calls = message.setdefault("tool_calls", [])
        if "id" in part:
            function = {"name": part["function"]["name"], "arguments": ""}
            calls.append({"id": part["id"], "type": part["type"], "function": function})
        calls[part["index"]]["function"]["arguments"] += part["function"]["arguments"]
    for name in ("content", "reasoning_content", "reasoning"):
        if name in delta:
            message[name] = (message.get(name) or "") + delta[name]
    if "tool_calls" in message:
        message["content"] = message["content"] or None


class ChatResponseBuilder(serving.ChoicesBuilder):
    """Answers to a conversation."""

    objects = ("chat.completion.chunk", "chat.completion")

    def __init__(self, request: protocol.ChatRequest, request_id: str) -> None:
        super().__init__(serving.Envelope(request, f"chatcmpl-{request_id}"))
        self._request = request
        self._calling: set[int] = set()
        """Choices that have called a function."""

    def append(self, choice: Any, piece: Any) -> Any:
        """Append the part of the message, and the fields of its tokens."""
        if choice is None:
            message = {"role": "assistant", "content": "", "refusal": None}
            empty = {"logprobs": None, "finish_reason": None, "stop_reason": None}
            choice = {"index": piece["index"], "message": message, **empty}
            choice |= self._of_tokens((), ())
        _append(choice["message"], piece["delta"])
        for name in piece.keys() - {"index", "delta"}:
            choice[name] = serving.joined(choice[name], piece[name])
        return choice

    def pieces(
        self, index: int, response: inference_pb.GenerateResponse
    ) -> Iterable[protocol.ChunkChoice]:
        """The roles first, then the new part of each choice."""
        if response.prompt_logprobs:
            self.prompt_fields["prompt_logprobs"] = serving.prompt_logprobs(
                response.prompt_logprobs
            )
        if response.HasField("started"):
            if self._request.return_token_ids:
                self.prompt_fields["prompt_token_ids"] = list(response.started.prompt_token_ids)
            for number in range(self._request.n or 1):
                yield _piece(number, {"role": "assistant", "content": ""}, {})
        for delta in response.choices:
            if delta.tool_calls:
                self._calling.add(delta.index)
            fields = self._fields(delta)
            parts = _parts(delta) or ([{}] if fields else [])
            for part in parts[:-1]:
                yield _piece(delta.index, part, {})
            for part in parts[-1:]:  # the last one has the tokens and the end
                yield _piece(delta.index, part, fields)

    def _fields(self, delta: inference_pb.ChoiceDelta) -> protocol.ChoiceFields:
        """The fields of a choice besides its message, as far as there is anything new."""
        fields: protocol.ChoiceFields = {}
        if delta.token_ids:
            fields = self._of_tokens(delta.logprobs, delta.token_ids)
        if delta.finish_reason:
            fields["finish_reason"] = self._finish_reason(delta)
            fields["stop_reason"] = serving.stop_reason(delta)
        return fields

    def _of_tokens(
        self, logprobs: Iterable[inference_pb.TokenLogprobs], token_ids: Iterable[int]
    ) -> protocol.ChoiceFields:
        """The requested fields of output tokens besides their text."""
        fields: protocol.ChoiceFields = {}
        if self._request.logprobs:
            as_ids = bool(self._request.return_tokens_as_token_ids)
            fields["logprobs"] = serving.chat_logprobs(logprobs, as_ids=as_ids)
        if self._request.return_token_ids:
            fields["token_ids"] = list(token_ids)
        return fields

    def _finish_reason(self, delta: inference_pb.ChoiceDelta) -> protocol.FinishReason | None:
        reason: protocol.FinishReason | None = FINISH_LABELS.get(delta.finish_reason)
        is_named = isinstance(self._request.tool_choice, protocol.NamedToolChoice)
        if reason == "stop" and delta.index in self._calling and not is_named:
            return "tool_calls"
        return reason


def _piece(
    index: int, delta: protocol.Delta, fields: protocol.ChoiceFields
) -> protocol.ChunkChoice:
    return {"index": index, "delta": delta, "logprobs": None, "finish_reason": None, **fields}


def chat_of(body: protocol.ChatPrompt, *, with_tools: bool = True) -> inference_pb.Chat:
    """The conversation, with or without its tools. Raises InvalidArgument."""
    for index, message in enumerate(body.messages):
        if message.content is None and message.role != "assistant":
            raise InvalidArgument(
                f"chat.messages[{index}].content", f"required in a message of role {message.role!r}"
            )
    variables: dict[str, Any] = dict(body.chat_template_kwargs or {})
    if body.reasoning_effort == "none":
        variables = dict.fromkeys(THINKING_SWITCHES, False) | variables
    if body.documents is not None:
        variables["documents"] = body.documents
    if body.reasoning_effort is not None:
        variables["reasoning_effort"] = body.reasoning_effort
    return inference_pb.Chat(
        messages=map(_message, body.messages),
        tools=map(_tool, body.tools or ()) if with_tools else (),
        add_generation_prompt=body.add_generation_prompt,
        continue_final_message=body.continue_final_message,
        template_arguments_json=json.dumps(variables) if variables else None,
    )


def _message(body: protocol.ChatMessageBody) -> inference_pb.ChatMessage:
    return inference_pb.ChatMessage(
        role="system" if body.role == "developer" else body.role,
        content=body.content if isinstance(body.content, str) else "",
        content_parts=[
            inference_pb.ContentPart(text=part.text)
            for part in (body.content if isinstance(body.content, list) else ())
        ],
        name=body.name,
        tool_calls=[
            inference_pb.ToolCall(
                id=call.id, name=call.function.name, arguments_json=call.function.arguments
            )
            for call in body.tool_calls or ()
        ],
        tool_call_id=body.tool_call_id,
        reasoning_content=(
            body.reasoning if body.reasoning_content is None else body.reasoning_content
        ),
    )


def _tool(body: protocol.ToolBody) -> inference_pb.Tool:
    parameters = body.function.parameters
    return inference_pb.Tool(
        name=body.function.name,
        description=body.function.description,
        parameters_json=None if parameters is None else json.dumps(parameters),
        strict=body.function.strict,
    )


router = APIRouter(tags=["OpenAI"])


@serving.generation_endpoint(
    router,
    "/v1/chat/completions",
    protocol.ChatRequest,
    summary="Answer a conversation",
    answer=ERROR_RESPONSES
    | serving.streamed_or_whole(protocol.ChatCompletion, protocol.ChatCompletionChunk),
)
def answer_chat(body: protocol.ChatRequest, call: serving.Call) -> serving.Generation:
    """A conversation, by the model's chat template."""
    builder = ChatResponseBuilder(body, call.request_id)
    return serving.Generation([generate_request(body)], builder, constraint_field(body))


def generate_request(body: protocol.ChatRequest) -> inference_pb.GenerateRequest:
    """The request that a gRPC client would send. Raises InvalidArgument."""
    request = serving.make_request(body, chat_params(body))
    chat, choice = request.chat, body.tool_choice
    chat.CopyFrom(chat_of(body, with_tools=choice != "none"))
    if isinstance(choice, protocol.NamedToolChoice):
        chat.tool_choice.name = choice.function.name
    elif choice == "required":
        chat.tool_choice.required = True
    for name in ("include_reasoning", "parallel_tool_calls"):
        if (value := getattr(body, name)) is not None:
            setattr(chat, name, value)
    return request


def chat_params(body: protocol.ChatRequest) -> sampling_pb2.SamplingParams:
    """The sampling parameters. Raises InvalidArgument."""
    params = sampling_params(body)
    max_tokens = body.max_completion_tokens or body.max_tokens
    if max_tokens == 0:
        raise InvalidArgument("max_tokens", "expected at least 1, or -1 (as many as fit), got 0")
    if max_tokens is not None and max_tokens > 0:
        params.max_tokens = max_tokens
    if body.logprobs:
        params.logprobs = body.top_logprobs or 0
    elif body.top_logprobs:
        raise InvalidArgument("top_logprobs", "requires logprobs")
    return params
