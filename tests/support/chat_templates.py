"""Chats by a chat template, from the body of an HTTP request."""

from typing import Any

from scheduler_service.frontend.http.openai.protocol import ChatPrompt
from scheduler_service.frontend.http.openai.serving_chat import chat_of
from scheduler_service.frontend.input.chat import chat_text, check_chat
from scheduler_service.frontend.models.frontend_model import FrontendModel, build_model
from tests.support.fake_core import model_info
from tests.support.tokenizers import byte_level, model_files


def model_with(template: str) -> FrontendModel:
    """A model with this chat template."""
    files = model_files(byte_level()) | {"chat_template.jinja": template.encode()}
    return build_model(model_info(), files)


def prompt_of(model: FrontendModel, messages: list[dict[str, Any]], **fields: Any) -> str:
    """The prompt of a chat completion, as text. Raises InvalidArgument."""
    chat = chat_of(ChatPrompt.model_validate({"messages": messages, **fields}))
    check_chat(chat)
    return chat_text(chat, model)
