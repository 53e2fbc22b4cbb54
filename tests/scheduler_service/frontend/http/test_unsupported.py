"""What vLLM's server answers and ours does not is refused by its name."""

import pytest

from scheduler_service.frontend.http.unsupported import UNSUPPORTED
from tests.support.http_frontends import HttpServed


@pytest.mark.parametrize("method", ["GET", "POST"])
async def test_every_such_endpoint_is_refused_by_its_name(served: HttpServed, method: str) -> None:
    for path in UNSUPPORTED:
        refused = await served.client.request(method, path)
        error = refused.json()["error"]
        assert refused.status_code == 501, path
        assert (error["type"], error["code"]) == ("not_implemented_error", "not_implemented")
        assert error["message"] == f"{path} is not supported: {UNSUPPORTED[path]}"
        assert refused.headers["x-should-retry"] == "false"
