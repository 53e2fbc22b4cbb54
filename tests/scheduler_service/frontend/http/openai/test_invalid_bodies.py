"""However much is wrong with a body, little is said of it, and little held."""

from typing import Any

import pytest
from pydantic import TypeAdapter, ValidationError

from scheduler_service.frontend.http.openai.protocol import ChatRequest, CompletionRequest
from scheduler_service.frontend.http.openai.sampling import MAX_ENTRIES
from scheduler_service.frontend.http.tokenize import DetokenizeBody, TokenizeChat, TokenizeText
from tests.support.http_frontends import HttpServed

MANY = 5 * MAX_ENTRIES
NO_FIELDS = dict.fromkeys(map(str, range(MANY)), 1)
USER = {"role": "user", "content": "hello"}
NANS = [[float("nan")] * MANY]
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"a": NANS}}}
TOKENIZE = TokenizeText | TokenizeChat

CASES: list[tuple[Any, dict[str, Any]]] = [
    (CompletionRequest, {"prompt": "a"} | NO_FIELDS),
    (CompletionRequest, {"prompt": [None] * MANY}),
    (CompletionRequest, {"prompt": ["a", *[1] * MANY]}),
    (CompletionRequest, {"prompt": [[]] * MANY}),
    (CompletionRequest, {"prompt": [[None] * MANY]}),
    (CompletionRequest, {"prompt": "a", "logit_bias": NO_FIELDS | {"1": "x"}}),
    (CompletionRequest, {"prompt": "a", "logit_bias": dict.fromkeys(NO_FIELDS, "x")}),
    (CompletionRequest, {"prompt": "a", "metadata": NO_FIELDS}),
    (CompletionRequest, {"prompt": "a", "stop": [1] * MANY}),
    (CompletionRequest, {"prompt": "a", "stop_token_ids": ["a"] * MANY}),
    (CompletionRequest, {"prompt": "a", "bad_words": [1] * MANY}),
    (CompletionRequest, {"prompt": "a", "guided_choice": [1] * MANY}),
    (CompletionRequest, {"prompt": "a", "structured_outputs": {"choice": [1] * MANY}}),
    (CompletionRequest, {"prompt": "a", "response_format": {"type": "text"} | NO_FIELDS}),
    (ChatRequest, {"messages": [{}] * MANY}),
    (ChatRequest, {"messages": [USER | NO_FIELDS]}),
    (ChatRequest, {"messages": [{"role": "user", "content": [{}] * MANY}]}),
    (ChatRequest, {"messages": [{"role": "assistant", "tool_calls": [{}] * MANY}]}),
    (ChatRequest, {"messages": [USER], "tools": [{}] * MANY}),
    (ChatRequest, {"messages": [USER], "documents": [1] * MANY}),
    (ChatRequest, {"messages": [USER], "documents": [{"a": NANS}]}),
    (ChatRequest, {"messages": [USER], "chat_template_kwargs": {"a": NANS}}),
    (ChatRequest, {"messages": [USER | {"annotations": NANS}]}),
    (ChatRequest, {"messages": [USER], "tools": [TOOL]}),
    (ChatRequest, {"messages": [USER], "modalities": ["audio"] * MANY}),
    (TOKENIZE, {"prompt": 1} | NO_FIELDS),
    (TOKENIZE, {"messages": [{}] * MANY}),
    (DetokenizeBody, {"tokens": ["a"] * MANY}),
]


@pytest.mark.parametrize(("kind", "body"), CASES, ids=map(str, range(len(CASES))))
def test_a_body_with_many_mistakes_gets_few_complaints(kind: Any, body: dict[str, Any]) -> None:
    with pytest.raises(ValidationError) as refusal:
        TypeAdapter(kind).validate_python(body)
    assert refusal.value.error_count() <= 20


def test_each_unknown_field_of_a_few_is_told_of() -> None:
    body = {"prompt": "a"} | dict.fromkeys("xyz", 1)
    with pytest.raises(ValidationError) as refusal:
        CompletionRequest.model_validate(body)
    assert {error["loc"] for error in refusal.value.errors()} == {("x",), ("y",), ("z",)}


CHAT = {"messages": [USER]}
COMPLETE = {"prompt": "a"}


@pytest.mark.parametrize(
    ("path", "body", "message"),
    [
        ("/v1/completions", {}, "prompt: required"),
        ("/tokenize", {}, "prompt: required"),
        ("/detokenize", {}, "tokens: required"),
        ("/v1/completions", COMPLETE | {"top_p": 1.5}, "top_p: expected at most 1, got 1.5"),
        ("/v1/completions", COMPLETE | {"n": "2"}, 'n: expected an integer, got "2"'),
        (
            "/v1/completions",
            COMPLETE | {"foo": 1},
            "foo: unknown field: leave it out (/openapi.json lists the fields)",
        ),
        ("/v1/completions", COMPLETE | {"suffix": "a"}, "suffix: not supported: leave it out"),
        ("/v1/completions", COMPLETE | {"store": True}, "store: expected false, got true"),
        (
            "/v1/completions",
            COMPLETE | {"stop": ["a"] * 17},
            "stop: expected at most 16 items, got a list of 17 entries",
        ),
        ("/v1/chat/completions", CHAT | {"functions": []}, "functions: not supported: use tools"),
        (
            "/v1/chat/completions",
            {"messages": []},
            "messages: expected at least 1 item, got a list of 0 entries",
        ),
        (
            "/v1/chat/completions",
            {"messages": [{"role": "user"}]},
            "messages[0].content: required in a message of role 'user'",
        ),
        (
            "/v1/chat/completions",
            CHAT | {"response_format": {"type": "xml"}},
            "response_format: expected one of 'text', 'json_object', 'json_schema' as type, "
            "got 'xml'",
        ),
        (
            "/v1/chat/completions",
            CHAT | {"user": 5, "model": "m"},
            "user: expected a string, got 5",
        ),
    ],
)
async def test_a_message_names_the_field_what_is_allowed_and_what_was_received(
    served: HttpServed, path: str, body: dict[str, Any], message: str
) -> None:
    refused = await served.client.post(path, json=body)
    assert refused.status_code == 400
    assert refused.json()["error"]["message"] == message
