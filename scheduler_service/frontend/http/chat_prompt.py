"""A conversation as OpenAI words it to ours."""

import json
from typing import Any

from pagewire.v1 import inference_service_pb2 as inference_pb
from scheduler_service.frontend.http.openai.protocol import ChatMessageBody, ChatPrompt, ToolBody

PART_SEPARATOR = "\n"
"""Between the parts of one turn's content, as templates take it as one text."""


def chat_of(body: ChatPrompt, *, with_tools: bool = True) -> inference_pb.Chat:
    """The conversation; tools are left out where the model is not to know them."""
    chat = inference_pb.Chat(messages=[_message(message) for message in body.messages])
    if body.add_generation_prompt is not None:
        chat.add_generation_prompt = body.add_generation_prompt
    if body.continue_final_message is not None:
        chat.continue_final_message = body.continue_final_message
    if with_tools:
        chat.tools.extend(_tool(tool) for tool in body.tools or ())
    variables: dict[str, Any] = dict(body.chat_template_kwargs or {})
    if body.documents is not None:
        variables["documents"] = body.documents
    if body.reasoning_effort is not None:
        variables["reasoning_effort"] = body.reasoning_effort
    if variables:
        chat.template_arguments_json = json.dumps(variables)
    return chat


def _message(body: ChatMessageBody) -> inference_pb.ChatMessage:
    role = "system" if body.role == "developer" else body.role
    message = inference_pb.ChatMessage(role=role, content=_text(body))
    for name in ("name", "tool_call_id"):
        value = getattr(body, name)
        if value is not None:
            setattr(message, name, value)
    thoughts = body.reasoning if body.reasoning_content is None else body.reasoning_content
    if thoughts is not None:
        message.reasoning_content = thoughts
    for call in body.tool_calls or ():
        function = call.function
        message.tool_calls.add(id=call.id, name=function.name, arguments_json=function.arguments)
    return message


def _text(body: ChatMessageBody) -> str:
    if isinstance(body.content, list):
        return PART_SEPARATOR.join(part.text for part in body.content)
    return body.content or ""


def _tool(body: ToolBody) -> inference_pb.Tool:
    tool = inference_pb.Tool(name=body.function.name)
    if body.function.description is not None:
        tool.description = body.function.description
    if body.function.parameters is not None:
        tool.parameters_json = json.dumps(body.function.parameters)
    return tool
