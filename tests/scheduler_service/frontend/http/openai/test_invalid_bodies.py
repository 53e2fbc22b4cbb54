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
        (
            "/v1/completions",
            COMPLETE | {"extra_body": {}},
            "extra_body: not supported: its entries are fields of the body itself",
        ),
        (
            "/v1/responses",
            {"input": "a", "max_tokens": 5},
            "max_tokens: unknown field: did you mean max_output_tokens? (/openapi.json lists the "
            "fields)",
        ),
        (
            "/v1/chat/completions",
            CHAT | {"prompt": "a"},
            "prompt: unknown field: did you mean messages? (/openapi.json lists the fields)",
        ),
        (
            "/v1/messages",
            {"messages": [USER], "max_tokens": 5, "stop": "a"},
            "stop: unknown field: did you mean stop_sequences? (/openapi.json lists the fields)",
        ),
        (
            "/tokenize",
            COMPLETE | CHAT,
            "messages: it cannot be combined with the other fields of this request",
        ),
        (
            "/v1/chat/completions",
            CHAT | {"reasoning_effort": "huge"},
            "reasoning_effort: expected 'none', 'minimal', 'low', 'medium', 'high', 'xhigh' or "
            "'max', got \"huge\"",
        ),
        ("/v1/completions", COMPLETE | {"suffix": "a"}, "suffix: not supported: leave it out"),
        ("/v1/completions", COMPLETE | {"store": True}, "store: expected false, got true"),
        (
            "/v1/completions",
            COMPLETE | {"stop": ["a"] * 17},
            "stop: expected at most 16 items, got a list of 17 entries",
        ),
        (
            "/v1/chat/completions",
            CHAT | {"functions": [{}]},
            "functions: not supported: use tools",
        ),
        (
            "/v1/chat/completions",
            CHAT | {"max_token": 5},
            "max_token: unknown field: did you mean max_tokens? (/openapi.json lists the fields)",
        ),
        (
            "/v1/completions",
            COMPLETE | {"topp": 0.5},
            "topp: unknown field: did you mean top_p? (/openapi.json lists the fields)",
        ),
        (
            "/v1/chat/completions",
            {"messages": [USER | {"contents": "a"}]},
            "messages[0].contents: unknown field: did you mean content? (/openapi.json lists the "
            "fields)",
        ),
        (
            "/v1/messages",
            {"messages": [USER], "max_tokens": 5, "stop_sequence": ["a"]},
            "stop_sequence: unknown field: did you mean stop_sequences? (/openapi.json lists the "
            "fields)",
        ),
        (
            "/v1/responses",
            {"input": "a", "max_output_token": 5},
            "max_output_token: unknown field: did you mean max_output_tokens? (/openapi.json lists "
            "the fields)",
        ),
        (
            "/v1/completions",
            COMPLETE | {"n": 3, "best_of": 2},
            "best_of: expected at least n (3), got 2",
        ),
        (
            "/v1/completions",
            COMPLETE | {"min_tokens": 9, "max_tokens": 8},
            "min_tokens: expected at most max_tokens (8), got 9",
        ),
        (
            "/v1/completions",
            COMPLETE | {"use_beam_search": True, "temperature": 0.5},
            "temperature: expected to be absent, 0 or 1 with beam_search, got 0.5",
        ),
        (
            "/v1/completions",
            COMPLETE | {"logit_bias": {"4000": 1}},
            "logit_bias[0].token_id: expected a token id below the vocabulary size 405, got 4000",
        ),
        *(
            (
                "/v1/completions",
                {"prompt": prompt},
                "prompt: expected a text, token ids, a list of texts, or a list of lists of token "
                "ids, got a list of 2 entries",
            )
            for prompt in (["a", [1]], ["a", 1], [[1], "a"], [1, True])
        ),
        ("/v1/completions", {"prompt": [1, -1]}, "prompt[1]: expected at least 0, got -1"),
        (
            "/v1/chat/completions",
            CHAT | {"max_tokens": 0},
            "max_tokens: expected at least 1, or -1 (as many as fit), got 0",
        ),
        *(
            (
                "/v1/chat/completions",
                {"messages": [{"role": "user", "content": [{"type": kind, kind: {}}]}]},
                f"messages[0].content[0].type: expected 'text', got \"{kind}\": the models served "
                "here read text only",
            )
            for kind in ("image_url", "input_audio", "video_url", "file")
        ),
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
            CHAT | {"response_format": "json"},
            'response_format: expected an object, got "json"',
        ),
        (
            "/v1/chat/completions",
            CHAT | {"model": 5},
            "model: expected a string, got 5",
        ),
        *(
            (
                "/v1/chat/completions",
                CHAT | {"response_format": {"type": "json_schema", "json_schema": {name: {}}}},
                f"response_format.json_schema.{name}: unknown field: did you mean schema? "
                "(/openapi.json lists the fields)",
            )
            for name in ("schma", "schemas", "shema")
        ),
        (
            "/v1/completions",
            {"promt": "a"},
            "promt: unknown field: did you mean prompt? (/openapi.json lists the fields)",
        ),
        (
            "/v1/chat/completions",
            {"messages": [{"role": "user", "content": [{"type": "text", "texts": "a"}]}]},
            "messages[0].content[0].texts: unknown field: did you mean text? (/openapi.json lists "
            "the fields)",
        ),
        (
            "/v1/completions",
            {"p" * 300_000: "a"},
            "prompt: required",
        ),
        ("/v1/completions", COMPLETE | {"echo": 1.5}, "echo: expected a boolean, got 1.5"),
        ("/v1/chat/completions", CHAT | {"echo": True}, "echo: expected false, got true"),
        (
            "/v1/chat/completions",
            CHAT | {"modalities": ["text", "audio"]},
            'modalities: expected ["text"], got a list of 2 entries',
        ),
        *(
            (path, body | {"cache_salt": salt}, f"cache_salt: expected {problem}")
            for path, body in (
                ("/v1/completions", COMPLETE),
                ("/v1/chat/completions", CHAT),
                ("/v1/responses", {"input": "a"}),
            )
            for salt, problem in (
                ("", 'at least 1 character, got ""'),
                ("s" * 1025, 'at most 1024 characters, got "' + 39 * "s" + "…"),
                (7, "a string, got 7"),
            )
        ),
        (
            "/v1/responses",
            {"input": "a", "background": True},
            "background: expected false, got true",
        ),
    ],
)
async def test_a_message_names_the_field_what_is_allowed_and_what_was_received(
    served: HttpServed, path: str, body: dict[str, Any], message: str
) -> None:
    refused = await served.client.post(path, json=body)
    assert refused.status_code == 400
    assert refused.json()["error"]["message"] == message


async def test_a_model_that_is_not_served_has_the_same_error_wherever_it_is_named(
    served: HttpServed,
) -> None:
    listed = await served.client.get("/v1/models/nope")
    requested = await served.client.post("/v1/completions", json=COMPLETE | {"model": "nope"})
    assert listed.status_code == requested.status_code == 404
    assert listed.json() == requested.json()
    assert listed.json()["error"]["message"] == "unknown model 'nope'; available models: tiny"


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
