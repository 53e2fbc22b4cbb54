"""The OpenAPI document tells the truth: requests made up from it are answered as it says."""

from collections.abc import Iterator
from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from schemathesis import GenerationMode
from schemathesis.checks import not_a_server_error, positive_data_acceptance

from tests.support.cluster import Cluster

OPERATIONS = (
    ("/health", "GET"),
    ("/version", "GET"),
    ("/v1/models", "GET"),
    ("/v1/models/{name}", "GET"),
    ("/tokenize", "POST"),
    ("/detokenize", "POST"),
    ("/v1/completions", "POST"),
    ("/v1/chat/completions", "POST"),
)
NUM_EXAMPLES = 20


@pytest.fixture(scope="module")
def api(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """A deadline ends what a made-up request would have go on for long."""
    folder = tmp_path_factory.mktemp("openapi")
    flags = ["--http", "127.0.0.1:0", "--default-timeout", "1"]
    with Cluster(folder, frontend_flags=flags, worker_flags=["--dtype", "float32"]) as cluster:
        cluster.start()
        yield schemathesis.openapi.from_url(f"{cluster.http_url()}/openapi.json")


CASES = [
    *((path, method, GenerationMode.POSITIVE) for path, method in OPERATIONS),
    *((path, method, GenerationMode.NEGATIVE) for path, method in OPERATIONS if method == "POST"),
]


@pytest.mark.parametrize(("path", "method", "mode"), CASES)
def test_answers_are_as_the_document_says(api: Any, path: str, method: str, mode: Any) -> None:
    """Codes, kinds of content and bodies. 504 is the deadline's; what the document allows may be
    refused all the same, as it knows no model's vocabulary, length or roles."""

    @given(api[path][method].as_strategy(generation_mode=mode))
    @settings(
        max_examples=NUM_EXAMPLES,
        deadline=None,
        derandomize=True,
        database=None,
        phases=[Phase.explicit, Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    def check(case: Any) -> None:
        response = case.call(timeout=60)
        assert response.status_code in (200, 400, 404, 405, 504), response.text
        case.validate_response(
            response, excluded_checks=[not_a_server_error, positive_data_acceptance]
        )

    check()
