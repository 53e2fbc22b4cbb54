"""However much is wrong with a body, little is said of it, and little held."""

import logging
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


COMPLETE = {"prompt": "a"}


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({"p" * 300_000: "a"}, "prompt: required"),
        (
            COMPLETE | {"logit_bias": {"7": 1, "8": 300}},
            'logit_bias: expected at most 100, got 300 for token "8"',
        ),
        (COMPLETE | {"top_k": 1.5}, "top_k: expected an integer, got 1.5"),
        (
            COMPLETE | {"structured_outputs": {"json": {}, "whitespace_pattern": " "}},
            "structured_outputs.whitespace_pattern: not supported: white space in JSON is a space, "
            "or a line break and its indentation",
        ),
        (
            COMPLETE | {"structured_outputs": {"json": {}, "disable_any_whitespace": True}},
            "structured_outputs.disable_any_whitespace: not supported: white space in JSON is a "
            "space, or a line break and its indentation",
        ),
        (
            COMPLETE | {"cache_salt": "s" * 1025},
            'cache_salt: expected at most 1024 characters, got "' + 39 * "s" + "…",
        ),
        (
            {"prompt": ["a"] * 4097},
            "prompt: expected at most 4096 items, got a list of 4097 entries",
        ),
        (
            {"prompt": ["a"] * 200, "guided_regex": "b" * 100_000},
            "prompt: expected at most 167 prompts, where each has 1 choices and 100015"
            " bytes of parameters",
        ),
        (
            {"prompt": ["a"] * 200, "n": 100},
            "prompt: expected at most 163 prompts, where each has 100 choices and 10"
            " bytes of parameters",
        ),
    ],
)
async def test_of_a_long_body_little_is_shown(
    served: HttpServed, body: dict[str, Any], message: str
) -> None:
    refused = await served.client.post("/v1/completions", json=body)
    assert refused.status_code == 400
    assert refused.json()["error"]["message"] == message


@pytest.mark.parametrize(
    ("path", "body", "shown"),
    [
        (
            "/v1/completions",
            {"prompt": ["secret", 1]},
            "path=/v1/completions status=400 reason=invalid_field field=prompt",
        ),
        (
            "/v1/completions",
            COMPLETE | {"model": "no\npe"},
            "path=/v1/completions status=404 reason=model_not_found field=None",
        ),
        (
            "/v1/messages",
            {"messages": [USER]},
            "path=/v1/messages status=400 reason=invalid_field field=max_tokens",
        ),
        ("/v1/a%0Ab", {}, "path=/v1/a%0Ab status=404 reason=not_found_error field=None"),
    ],
)
async def test_a_refused_request_is_logged_once_by_the_id_that_the_client_sent(
    served: HttpServed, caplog: pytest.LogCaptureFixture, path: str, body: Any, shown: str
) -> None:
    caplog.set_level(logging.DEBUG, "scheduler_service.frontend.http")
    answer = await served.client.post(path, json=body, headers={"X-Request-Id": "mine-7"})
    assert answer.headers["x-request-id"] == "mine-7"
    lines = [record.getMessage() for record in caplog.records if "refused" in record.msg]
    (line,) = lines
    assert line.startswith("request refused request_id=mine-7 method=POST ")
    assert line.endswith(shown)
