"""How requests end early, and how the service does: cancel, abort, deadline, limits, signals."""

import asyncio
import os
import signal

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from pagewire.v1 import inference_service_pb2 as pb
from scheduler_service.frontend.auth import Principal
from scheduler_service.frontend.config import FrontendConfig
from scheduler_service.frontend.server import SERVICE_NAME, serve
from tests.scheduler_service.frontend.conftest import Served
from tests.support.fake_core import TIMEOUT_S, FakeCore
from tests.support.frontends import (
    client_of,
    error_info,
    error_of,
    eventually,
    generate_request,
    model_ready,
    read_all,
    running_frontend,
    text_of,
)
from tests.support.tokenizers import byte_level

LETTER = byte_level().token_to_id("a")


async def test_a_client_that_cancels_frees_its_request_at_once(served: Served) -> None:
    call = served.client.Generate(generate_request("hello"))
    request = await served.core.next_request()
    await request.accept()
    await call.read()
    call.cancel()
    await request.cancelled()
    assert len(served.frontend.requests) == 0


async def test_a_request_cancelled_before_it_was_sent_never_reaches_the_core(
    served: Served,
) -> None:
    attachment = await served.core.attachment()
    await attachment.announce_models([])
    await model_ready(served.frontend, ready=False)
    call = served.client.Generate(generate_request("gone"))
    await eventually(lambda: len(served.frontend.requests) > 0)
    call.cancel()
    await eventually(lambda: len(served.frontend.requests) == 0)
    await attachment.announce_models(served.core.models)
    call = served.client.Generate(generate_request("there"))
    request = await served.core.next_request()
    assert byte_level().decode(request.prompt) == "there"
    assert not attachment.cancels
    call.cancel()


async def test_a_client_may_cancel_a_request_and_send_its_id_again_at_once(
    served: Served,
) -> None:
    for _ in range(50):
        cancelled = served.client.Generate(generate_request("first", request_id="same"))
        await (await served.core.next_request()).accept()
        await cancelled.read()
        cancelled.cancel()
        again = served.client.Generate(generate_request("second", request_id="same"))
        request = await served.core.next_request()
        assert byte_level().decode(request.prompt) == "second"
        await request.accept()
        await again.read()
        again.cancel()
        await eventually(lambda: len(served.frontend.requests) == 0)


async def test_a_cancellation_that_is_seen_after_the_next_call_still_comes_first(
    served: Served,
) -> None:
    requests, tenant = served.frontend.requests, Principal()
    first = requests.open(generate_request("a", request_id="same"), None, _ignore, tenant)
    again = asyncio.create_task(
        requests.open_soon(generate_request("b", request_id="same"), None, _ignore, tenant)
    )
    await asyncio.sleep(0)
    requests.close(first)
    requests.close(await again)
    assert first.error is None


def _ignore(_: object) -> None:
    pass


async def test_an_abort_ends_the_stream_and_the_request(served: Served) -> None:
    call = served.client.Generate(generate_request("hello", request_id="r"))
    request = await served.core.next_request()
    await served.client.Abort(pb.AbortRequest(request_id="r"))
    error = await error_of(call)
    assert error.code() is grpc.StatusCode.CANCELLED
    assert error_info(error).reason == "ABORTED_BY_CLIENT"
    await request.cancelled()


async def test_an_abort_of_an_unknown_request_is_not_found(served: Served) -> None:
    error = await error_of(served.client.Abort(pb.AbortRequest(request_id="nobody")))
    assert error.code() is grpc.StatusCode.NOT_FOUND
    assert error_info(error).reason == "UNKNOWN_REQUEST"


async def test_an_abort_reaches_a_request_of_another_frontend(served: Served) -> None:
    served.core.elsewhere.add("theirs")
    await served.client.Abort(pb.AbortRequest(request_id="theirs"))
    assert not served.core.elsewhere


async def test_a_deadline_ends_a_request_whose_core_is_away() -> None:
    async with (
        running_frontend("127.0.0.1:1") as frontend,
        client_of(frontend) as client,
    ):
        error = await error_of(client.Generate(generate_request("hello"), timeout=0.3))
        assert error.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        await eventually(lambda: len(frontend.requests) == 0)


async def test_the_default_timeout_ends_a_request_that_brings_no_deadline() -> None:
    async with (
        FakeCore() as core,
        running_frontend(core.address, default_timeout_s=0.3) as frontend,
        client_of(frontend) as client,
    ):
        while not core.requests:  # on a busy machine one may end on its way
            error = await error_of(client.Generate(generate_request("hello")))
            assert error.code() is grpc.StatusCode.DEADLINE_EXCEEDED
            assert error_info(error).reason == "DEADLINE_EXCEEDED"
        request = await core.next_request()
        assert 0 < request.submit.timeout_us <= 300_000
        await request.cancelled()


async def test_a_shutdown_lets_open_requests_finish_and_takes_no_new_ones() -> None:
    async with (
        FakeCore() as core,
        running_frontend(core.address, grace_period_s=TIMEOUT_S) as frontend,
        client_of(frontend) as client,
    ):
        call = client.Generate(generate_request("hello"))
        request = await core.next_request()
        stopping = asyncio.create_task(frontend.stop())
        await frontend.requests.capacity.is_draining.wait()
        error = await error_of(client.Generate(generate_request("hello")))
        assert error.code() is grpc.StatusCode.UNAVAILABLE
        assert error_info(error).reason == "SHUTTING_DOWN"
        await request.complete([LETTER])
        assert text_of(await read_all(call)) == "a"
        await stopping


async def test_a_shutdown_ends_what_has_not_finished_in_time_with_an_error() -> None:
    async with (
        FakeCore() as core,
        running_frontend(core.address, grace_period_s=0.1) as frontend,
        client_of(frontend) as client,
    ):
        call = client.Generate(generate_request("hello"))
        many = client.GenerateMany()
        await core.next_request()
        stopping = asyncio.create_task(frontend.stop())
        for stream in (call, many):
            error = await error_of(stream)
            assert error.code() is grpc.StatusCode.UNAVAILABLE
            assert error_info(error).reason == "SHUTTING_DOWN"
        await stopping


async def test_health_follows_the_core_and_its_models() -> None:
    async def health(address: str) -> set[int]:
        async with grpc.aio.insecure_channel(address) as channel:
            stub = health_pb2_grpc.HealthStub(channel)
            answers = [
                await stub.Check(health_pb2.HealthCheckRequest(service=name))
                for name in ("", SERVICE_NAME)
            ]
        return {answer.status for answer in answers}

    async def until(address: str, status: int) -> None:
        async with asyncio.timeout(TIMEOUT_S):
            while await health(address) != {status}:  # noqa: ASYNC110 - it is another's event
                await asyncio.sleep(0.02)

    serving = health_pb2.HealthCheckResponse.SERVING
    not_serving = health_pb2.HealthCheckResponse.NOT_SERVING
    async with FakeCore(models=[]) as core, running_frontend(core.address) as frontend:
        address = frontend.runner.address
        attachment = await core.attachment()
        assert await health(address) == {not_serving}
        await attachment.announce_models([*FakeCore().models])
        await until(address, serving)
        await attachment.announce_models([])
        await until(address, not_serving)
        await attachment.announce_models([*FakeCore().models])
        await until(address, serving)
        await core.stop()
        await until(address, not_serving)


async def test_a_signal_ends_the_service_in_order() -> None:
    async with FakeCore() as core:
        serving = asyncio.create_task(
            serve(FrontendConfig(core=core.address, listen="127.0.0.1:0", grace_period_s=5))
        )
        await core.attachment()
        os.kill(os.getpid(), signal.SIGTERM)
        await asyncio.wait_for(serving, TIMEOUT_S)
        await core.until(lambda: not core.attachments[0].is_open)


@pytest.mark.parametrize(
    "settings",
    [
        {"core": "nowhere"},
        {"listen": "127.0.0.1"},
        {"max_concurrent_requests": 0},
        {"max_tenant_requests": 0},
        {"default_timeout_s": 0.0},
        {"default_timeout_s": float("nan")},
        {"grace_period_s": -1.0},
    ],
)
def test_a_configuration_that_makes_no_sense_is_refused_by_name(
    settings: dict[str, object],
) -> None:
    (name,) = settings
    with pytest.raises(ValueError, match=name.removesuffix("_s")):
        FrontendConfig(**settings)  # type: ignore[arg-type]
