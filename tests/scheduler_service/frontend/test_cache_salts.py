"""Requests share cached prefixes only with those of the same salt, however they arrive."""

import asyncio
from contextlib import AsyncExitStack
from typing import Any

from pagewire.v1 import context_pb2
from scheduler_service.core.context import tenant_context
from scheduler_service.core_service.config import CoreServiceConfig
from scheduler_service.core_service.service import make_core_service
from tests.support.fake_worker import FakeWorker
from tests.support.frontends import (
    client_of,
    generate_request,
    read_all,
    running_frontend,
)
from tests.support.http_frontends import HttpServed, http_client, http_served

PROMPT = [1, 2, 3, 4, 5, 6, 7, 8, 9]
SALT = "3mVvLpv8gWnkQ1p0Yb6c"
TURN = {"messages": [{"role": "user", "content": "hello"}]}
BODIES: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "hello"},
    "/v1/chat/completions": TURN,
    "/v1/responses": {"input": "hello"},
    "/v1/messages": TURN | {"max_tokens": 4},
}


async def context_of(
    served: HttpServed, path: str, salt: str | None
) -> list[context_pb2.ContextPart]:
    """What the core gets of a request over HTTP; over gRPC if there is no path."""
    if path:
        body = BODIES[path] | {"cache_salt": salt}
        answer = asyncio.ensure_future(served.client.post(path, json=body))
    else:
        async with client_of(served.frontend) as client:
            call = client.Generate(generate_request("hello", cache_salt=salt))
            request = await served.core.next_request()
            call.cancel()
            return list(request.submit.context)
    request = await served.core.next_request()
    await request.complete([5])
    assert (await answer).status_code == 200
    return list(request.submit.context)


async def test_a_salt_has_one_digest_over_http_and_grpc_and_without_one_there_is_no_context() -> (
    None
):
    async with http_served() as served:
        contexts = [await context_of(served, path, SALT) for path in ("", *BODIES)]
        [[other]] = [await context_of(served, "", SALT + "x")]
        without = [await context_of(served, path, None) for path in ("", *BODIES)]
    assert without == [[]] * 5
    [part] = contexts[0]
    assert contexts == [[part]] * 5
    assert (part.kind, part.start, part.length) == (context_pb2.CONTEXT_KIND_SALT, 0, 0)
    assert len(part.digest) == len(other.digest) == 32
    assert part.digest != other.digest
    assert SALT.encode() not in part.digest


async def test_a_salt_with_a_tenants_name_is_not_the_tenants() -> None:
    async with http_served() as served:
        [part] = await context_of(served, "", "production")
    assert part.digest != tenant_context("production")[0].digest


async def test_requests_find_what_was_computed_with_their_salt_and_nothing_else() -> None:
    salts = [None, "a", "b", None, "a", "b"]
    async with AsyncExitStack() as stack:
        core = await stack.enter_async_context(
            make_core_service(CoreServiceConfig(listen="127.0.0.1:0"))
        )
        worker = FakeWorker()
        await worker.start(core.address)
        frontend = await stack.enter_async_context(
            running_frontend(core.address, http="127.0.0.1:0")
        )
        client = await stack.enter_async_context(client_of(frontend))
        found = []
        for salt in salts:
            call = client.Generate(generate_request(PROMPT, max_tokens=2, cache_salt=salt))
            found.append((await read_all(call))[-1].usage.cached_tokens)
        http = await stack.enter_async_context(http_client(frontend))
        for salt in (*salts[:3], "c"):
            body = {"prompt": PROMPT, "max_tokens": 2, "cache_salt": salt}
            usage = (await http.post("/v1/completions", json=body)).json()["usage"]
            found.append((usage["prompt_tokens_details"] or {}).get("cached_tokens", 0))
        await worker.kill()
    assert found == [0, 0, 0, 8, 8, 8, 8, 8, 8, 0]
    assert worker.broken_promises == []
