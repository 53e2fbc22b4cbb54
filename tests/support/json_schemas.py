"""Whether a constraint allows a text, by the compiler and limits that workers have."""

import json
from typing import Any

from llguidance import LLMatcher

from scheduler_service.frontend.structured_output.problems import byte_tokenizer
from service_common import lark

TOKENIZER = byte_tokenizer()


def allows(grammar: str, text: str) -> bool:
    """Whether a grammar in Lark allows a text. Raises ValueError if it does not compile."""
    matcher = LLMatcher(TOKENIZER, grammar, log_level=0, limits=lark.LIMITS)
    if matcher.is_error():
        raise ValueError(matcher.get_error())
    tokens = list(text.encode())
    return bool(matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting())


def accepts(schema: dict[str, Any] | str, value: Any) -> bool:
    """Whether a JSON schema, or its text, allows a value, with properties in its order."""
    schema = json.loads(schema) if isinstance(schema, str) else schema
    return allows(lark.schema_to_lark(schema), json.dumps(value))
