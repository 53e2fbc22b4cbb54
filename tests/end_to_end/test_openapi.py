"""The OpenAPI document is correct: requests generated from it are answered as it says."""

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from jsonschema import Draft202012Validator
from schemathesis import GenerationMode
from schemathesis.checks import not_a_server_error, positive_data_acceptance

from scheduler_service.frontend.http.errors import ERROR_RESPONSES
from tests.support.cluster import Cluster

OPERATIONS = (
    ("/health", "GET"),
    ("/version", "GET"),
    ("/tokenizer_info", "GET"),
    ("/v1/models", "GET"),
    ("/v1/models/{name}", "GET"),
    ("/tokenize", "POST"),
    ("/detokenize", "POST"),
    ("/v1/completions", "POST"),
    ("/v1/chat/completions", "POST"),
    ("/v1/responses", "POST"),
    ("/v1/messages", "POST"),
    ("/v1/messages/count_tokens", "POST"),
    ("/v1/embeddings", "POST"),
    ("/v2/embed", "POST"),
    ("/pooling", "POST"),
    ("/classify", "POST"),
    ("/score", "POST"),
    ("/v1/score", "POST"),
    ("/rerank", "POST"),
    ("/v1/rerank", "POST"),
    ("/v2/rerank", "POST"),
    ("/v1/load_lora_adapter", "POST"),
    ("/v1/unload_lora_adapter", "POST"),
)
ALIASES = ("/v1/score", "/v1/rerank", "/v2/rerank")
"""Other paths of the same operations."""
NUM_QUICK, NUM_LONG = 8, 50
NOT_JSON = ("/metrics",)
"""Prometheus's text, which its own tests read."""


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A deadline ends what a made-up request would have go on for long."""
    folder = tmp_path_factory.mktemp("openapi")
    flags = ["--http", "127.0.0.1:0", "--default-timeout", "1"]
    with Cluster(folder, frontend_flags=flags, worker_flags=["--dtype", "float32"]) as cluster:
        cluster.start()
        yield cluster.http_url()


@pytest.fixture(scope="module")
def api(url: str) -> Any:
    """The document, and requests made up from it."""
    return schemathesis.openapi.from_url(f"{url}/openapi.json")


def test_every_endpoint_of_the_document_is_tried(api: Any) -> None:
    told = {
        (path, method.upper())
        for path, methods in api.raw_schema["paths"].items()
        for method in methods
        if path not in NOT_JSON
    }
    assert told == set(OPERATIONS)


def test_no_answer_is_told_that_never_comes(api: Any) -> None:
    """Malformed requests are answered with 400, not with FastAPI's 422."""
    codes = {
        code
        for methods in api.raw_schema["paths"].values()
        for operation in methods.values()
        for code in operation["responses"]
    }
    assert codes == {"200", *map(str, ERROR_RESPONSES)}
    assert "HTTPValidationError" not in api.raw_schema["components"]["schemas"]


@pytest.mark.parametrize(
    ("path", "wish", "schema"),
    [
        ("/v1/completions", {"prompt": "One day", "logprobs": 2, "echo": True}, "Completion"),
        (
            "/v1/chat/completions",
            {
                "messages": [{"role": "user", "content": "What is 27 + 45?"}],
                "logprobs": True,
                "top_logprobs": 2,
            },
            "ChatCompletionChunk",
        ),
    ],
)
def test_chunks_of_streams_are_as_the_document_says(
    api: Any, url: str, path: str, wish: dict[str, Any], schema: str
) -> None:
    """And have no field that it does not name."""
    every = {"stream": True, "max_tokens": 4, "prompt_logprobs": 1, "return_token_ids": True}
    options = {"include_usage": True, "continuous_usage_stats": True}
    answer = httpx.post(f"{url}{path}", json=wish | every | {"stream_options": options}, timeout=60)
    *lines, done = [line for line in answer.text.split("\n\n") if line]
    assert done == "data: [DONE]"
    schemas = api.raw_schema["components"]["schemas"]
    closed = {
        name: each | {"additionalProperties": False} if "properties" in each else each
        for name, each in schemas.items()
    }
    told = {"$ref": f"#/components/schemas/{schema}", "components": {"schemas": closed}}
    validator = Draft202012Validator(told)
    chunks = [json.loads(line.removeprefix("data: ")) for line in lines]
    for chunk in chunks:
        validator.validate(chunk)
    choices = [choice for chunk in chunks for choice in chunk["choices"]]
    num_tokens = sum(len(choice.get("token_ids") or ()) for choice in choices)
    assert num_tokens == chunks[-1]["usage"]["completion_tokens"] > 0


CASES = [
    *((path, method, GenerationMode.POSITIVE) for path, method in OPERATIONS),
    *((path, method, GenerationMode.NEGATIVE) for path, method in OPERATIONS if method == "POST"),
]


@pytest.mark.parametrize(
    ("path", "method", "mode"), [case for case in CASES if case[0] not in ALIASES]
)
def test_answers_are_as_the_document_says(api: Any, path: str, method: str, mode: Any) -> None:
    _check_answers(api, path, method, mode, NUM_QUICK)


@pytest.mark.long
@pytest.mark.parametrize(("path", "method", "mode"), CASES)
def test_many_more_answers_are_as_the_document_says(
    api: Any, path: str, method: str, mode: Any
) -> None:
    _check_answers(api, path, method, mode, NUM_LONG)


def _check_answers(api: Any, path: str, method: str, mode: Any, num_examples: int) -> None:
    """Codes, kinds of content and bodies. 504 is the deadline's; what the document allows may be
    refused all the same, as it knows no model's vocabulary, length or roles."""

    @given(api[path][method].as_strategy(generation_mode=mode))
    @settings(
        max_examples=num_examples,
        derandomize=True,
        database=None,
        phases=[Phase.explicit, Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    def check(case: Any) -> None:
        response = case.call(timeout=60)
        refusals = (403,) if "lora" in path else ()  # this frontend changes no adapters
        assert response.status_code in (200, 400, 404, 405, 504, *refusals), response.text
        case.validate_response(
            response, excluded_checks=[not_a_server_error, positive_data_acceptance]
        )

    check()
