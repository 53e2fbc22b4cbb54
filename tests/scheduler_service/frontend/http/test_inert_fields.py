"""Fields that have no effect: the table of them, and requests that have them."""

from collections.abc import Iterator
from typing import Any

import pytest
from pydantic import TypeAdapter

from scheduler_service.frontend.http import app  # imports all bodies
from scheduler_service.frontend.http.anthropic import MessagesRequest
from scheduler_service.frontend.http.inert_fields import FIXED, IGNORED, INSTEAD
from scheduler_service.frontend.http.openai.protocol import ChatRequest, CompletionRequest
from scheduler_service.frontend.http.openai.sampling import Strict
from scheduler_service.frontend.http.openai.serving_responses import ResponsesRequest

USER = {"role": "user", "content": "hello"}
BODIES: dict[type[Strict], dict[str, Any]] = {
    CompletionRequest: {"prompt": "hello"},
    ChatRequest: {"messages": [USER]},
    ResponsesRequest: {"input": "hello"},
    MessagesRequest: {"messages": [USER], "max_tokens": 5},
}


def bodies(kind: type[Strict] = Strict) -> Iterator[type[Strict]]:
    """The types of all bodies and of their parts."""
    assert app.SCHEMAS
    for derived in kind.__subclasses__():
        yield derived
        yield from bodies(derived)


def test_every_row_of_the_table_is_of_a_body_that_does_not_declare_its_fields() -> None:
    declared = {kind.__name__: set(kind.model_fields) for kind in bodies()}
    assert IGNORED.keys() <= declared.keys()
    for name, fields in IGNORED.items():
        assert not declared[name].intersection(fields), name


def test_fields_without_a_counterpart_are_declared_by_no_body() -> None:
    supported = {"guided_choice", "guided_grammar", "guided_json", "guided_regex"}
    supported |= {"model", "seed", "stop"}
    declared = {name for kind in bodies() for name in kind.model_fields}
    assert declared.intersection(INSTEAD) == supported | {"max_completion_tokens"}
    assert declared.intersection(FIXED) == {"echo", "top_logprobs", "truncation_side"}


@pytest.mark.parametrize("kind", BODIES)
def test_ignored_fields_have_no_effect_whatever_their_value(kind: type[Strict]) -> None:
    body = BODIES[kind]
    plain = kind.model_validate(body)
    ignored = [name for base in kind.__mro__ for name in IGNORED.get(base.__name__, ())]
    assert len(ignored) >= 3
    for value in ("a", 5, True, [1], {"a": "b"}, None):
        assert kind.model_validate(body | dict.fromkeys(ignored, value)) == plain


@pytest.mark.parametrize("kind", BODIES)
def test_fields_of_other_bodies_are_not_ignored(kind: type[Strict]) -> None:
    body = BODIES[kind]
    for name in ("encrypted_content", "is_error", "index"):
        with pytest.raises(ValueError, match=f"(?s){name}.*Extra inputs"):
            kind.model_validate(body | {name: 1})


@pytest.mark.parametrize("kind", BODIES)
def test_null_is_an_absent_field_in_parts_too(kind: type[Strict]) -> None:
    body = BODIES[kind]
    nulls = dict.fromkeys(("audio", "function_call", "citations", "name", "no_field"))
    with_nulls = body | ({"messages": [USER | nulls]} if "messages" in body else nulls)
    assert kind.model_validate(with_nulls) == kind.model_validate(body)


@pytest.mark.parametrize("name", IGNORED)
def test_the_openapi_document_lists_ignored_fields(name: str) -> None:
    for kind in (kind for kind in bodies() if kind.__name__ == name):
        schema = TypeAdapter(kind).json_schema()
        properties = schema.get("$defs", {}).get(name, schema)["properties"]
        for field in IGNORED[name]:
            assert properties[field] == {"description": "Ignored."}
