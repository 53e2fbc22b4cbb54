"""A key's tenant has that tenant's limits, and receives a retry delay."""

from collections.abc import Sequence
from pathlib import Path

import grpc
from google.rpc import error_details_pb2

from scheduler_service.core.config import SchedulerConfig, TenantConfig
from scheduler_service.core_service.config import CoreServiceConfig
from scheduler_service.core_service.service import make_core_service
from scheduler_service.frontend.auth import hash_of
from tests.security.test_links import running_worker
from tests.support.frontends import (
    client_of,
    detail,
    error_info,
    error_of,
    generate_request,
    model_ready,
    running_frontend,
)


def as_caller(tenant: str) -> Sequence[tuple[str, str]]:
    return (("authorization", f"Bearer key-of-{tenant}"),)


async def test_a_tenant_beyond_its_limit_is_refused_with_a_delay_and_others_are_not(
    tmp_path: Path,
) -> None:
    keys = tmp_path / "keys.toml"
    entries = (f'[[key]]\nsha256 = "{hash_of(f"key-of-{t}")}"\ntenant = "{t}"\n' for t in "ab")
    keys.write_text("".join(entries))
    limits = {"a": TenantConfig(max_requests=1)}
    config = CoreServiceConfig(listen="127.0.0.1:0", scheduler=SchedulerConfig(tenants=limits))
    endless = generate_request([5, 6], max_tokens=30_000, ignore_eos=True)
    async with (
        make_core_service(config) as core,
        running_worker(core.address),
        running_frontend(core.address, api_keys=keys) as frontend,
        client_of(frontend) as client,
    ):
        await model_ready(frontend)
        first = client.Generate(endless, metadata=as_caller("a"))
        await first.read()
        error = await error_of(client.Generate(endless, metadata=as_caller("a")))
        assert error.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
        assert error_info(error).reason == "TENANT_LIMIT"
        delay = detail(error, error_details_pb2.RetryInfo).retry_delay
        assert delay.ToMicroseconds() > 0
        other = client.Generate(endless, metadata=as_caller("b"))
        assert (await other.read()).HasField("started")
        first.cancel()
        other.cancel()
