"""A frontend, the real scheduler core, and a worker that counts."""

from contextlib import AsyncExitStack
from typing import Any

from pagewire.v1 import inference_service_pb2 as pb
from scheduler_service.core_service.config import CoreServiceConfig
from scheduler_service.core_service.service import CoreService, make_core_service
from tests.support.fake_worker import FakeWorker, counted
from tests.support.frontends import (
    client_of,
    eventually,
    generate_request,
    read_all,
    running_frontend,
    tokens_of,
)


def core_at(address: str = "127.0.0.1:0") -> CoreService:
    return make_core_service(CoreServiceConfig(listen=address))


async def test_choices_stream_to_their_end_and_the_account_adds_up() -> None:
    async with core_at() as core:
        worker = FakeWorker()
        await worker.start(core.address)
        async with running_frontend(core.address) as frontend, client_of(frontend) as client:
            responses = await read_all(
                client.Generate(generate_request([1, 2, 3], n=3, max_tokens=40))
            )
        await worker.kill()
    for choice in range(3):
        assert tokens_of(responses, choice) == counted(3, 40)
    assert responses[-1].usage == pb.Usage(prompt_tokens=3, completion_tokens=120)
    parts = [value for field, value in responses[-1].timings.ListFields()]
    assert 2 * responses[-1].timings.total_us == sum(parts)
    assert worker.broken_promises == []


async def test_a_core_that_is_replaced_in_mid_stream_changes_no_token() -> None:
    starts, num_tokens = range(0, 600, 100), 450
    first_worker, second_worker = FakeWorker(), FakeWorker()
    async with AsyncExitStack() as first, AsyncExitStack() as second:
        address = (await first.enter_async_context(core_at())).address
        await first_worker.start(address)
        frontend = await second.enter_async_context(running_frontend(address))
        client = await second.enter_async_context(client_of(frontend))
        calls = [
            client.Generate(generate_request([start], n=2, max_tokens=num_tokens))
            for start in starts
        ]
        answers = [await read_some(call) for call in calls]
        first_worker.hold_results()
        await first.aclose()
        await first_worker.kill()
        await second.enter_async_context(core_at(address))
        await second_worker.start(address)
        for answer, call in zip(answers, calls, strict=True):
            answer += await read_all(call)
        await second_worker.kill()
    for start, answer in zip(starts, answers, strict=True):
        for choice in range(2):
            assert tokens_of(answer, choice) == counted(start, num_tokens)
        assert answer[-1].usage.completion_tokens == 2 * num_tokens
        assert answer[-1].timings.recovery_us > 0
    assert first_worker.broken_promises == second_worker.broken_promises == []


async def read_some(call: Any) -> list[pb.GenerateResponse]:
    """Responses up to the first with tokens."""
    responses = [await call.read()]
    while not responses[-1].choices:
        responses.append(await call.read())
    return responses


async def test_a_client_that_goes_leaves_nothing_in_the_core() -> None:
    async with core_at() as core:
        worker = FakeWorker()
        await worker.start(core.address)
        async with running_frontend(core.address) as frontend, client_of(frontend) as client:
            call = client.Generate(generate_request([1], max_tokens=500))
            await read_some(call)
            worker.hold_results()
            call.cancel()
            await eventually(lambda: core.driver.core.snapshot().num_running == 0)
            worker.may_answer.set()
        await worker.kill()
