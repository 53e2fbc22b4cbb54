"""No tenant and no call takes all of a frontend's places."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.rpc import error_details_pb2

from pagewire.v1 import inference_service_pb2 as pb
from scheduler_service.frontend.auth import hash_of
from scheduler_service.frontend.config import FrontendConfig
from tests.support.fake_core import FakeCore
from tests.support.frontends import (
    client_of,
    detail,
    error_info,
    error_of,
    generate_request,
    running_frontend,
)


def as_caller(tenant: str) -> Sequence[tuple[str, str]]:
    return (("authorization", f"Bearer key-of-{tenant}"),)


@pytest.fixture
def keys(tmp_path: Path) -> Path:
    path = tmp_path / "keys.toml"
    entries = (f'[[key]]\nsha256 = "{hash_of(f"key-of-{t}")}"\ntenant = "{t}"\n' for t in "ab")
    path.write_text("".join(entries))
    return path


async def test_a_tenant_with_its_share_is_refused_with_a_delay_and_others_are_not(
    keys: Path,
) -> None:
    async with (
        FakeCore() as core,
        running_frontend(core.address, api_keys=keys, max_concurrent_requests=4) as frontend,
        client_of(frontend) as client,
    ):

        def generate(tenant: str) -> Any:
            return client.Generate(generate_request([5]), metadata=as_caller(tenant))

        first = generate("a")
        first_request = await core.next_request()
        second = generate("a")
        await core.next_request()
        error = await error_of(generate("a"))
        assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert detail(error, error_details_pb2.RetryInfo).retry_delay.seconds == 1
        assert error_info(error).metadata["max_tenant_requests"] == "2"
        other = generate("b")
        await core.next_request()
        first.cancel()
        await first_request.cancelled()
        third = generate("a")
        await core.next_request()
        for call in (second, third, other):
            call.cancel()


async def test_one_stream_of_many_requests_has_a_share_of_its_own() -> None:
    async with (
        FakeCore() as core,
        running_frontend(core.address, max_tenant_requests=2) as frontend,
        client_of(frontend) as client,
    ):
        call = client.GenerateMany()
        for request_id in ("r0", "r1", "r2"):
            request = generate_request([5], request_id=request_id)
            await call.write(pb.GenerateManyRequest(request=request))
        error = (await call.read()).error
        assert (error.request_id, error_info(error.status).reason) == ("r2", "QUEUE_FULL")
        other = client.Generate(generate_request([5]))
        for _ in range(3):
            await core.next_request()
        other.cancel()
        call.cancel()


@pytest.mark.parametrize(
    ("settings", "share"),
    [
        ({}, 2048),
        ({"max_concurrent_requests": 1}, 1),
        ({"max_tenant_requests": 7}, 7),
        ({"max_tenant_requests": 7, "max_concurrent_requests": 5}, 5),
    ],
)
def test_the_share_is_half_unless_it_is_given(settings: dict[str, int], share: int) -> None:
    assert FrontendConfig(**settings).tenant_share == share  # type: ignore[arg-type]
