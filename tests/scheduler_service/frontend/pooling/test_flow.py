"""The texts of a call at the core: how many, what becomes of them after a loss, and their end."""

import asyncio
import gc
import time
from typing import Any

import grpc
import pytest
from prometheus_client import generate_latest

from pagewire.v1 import inference_service_pb2 as pb
from pagewire.v1 import pooling_pb2
from scheduler_service.errors import QueueFull
from scheduler_service.frontend.auth import Principal
from scheduler_service.frontend.pooling.call import PoolingCall
from scheduler_service.frontend.pooling.service import MAX_OPEN_INPUTS
from tests.support.fake_core import FakeCore, FakeRequest
from tests.support.frontends import error_info, error_of, eventually, read_until_error
from tests.support.pooling import (
    answer,
    answering,
    errors_of,
    responses_of,
    serving,
    texts,
    vector_of,
    vectors_of,
)
from tests.support.scrapes import Scrape

MANY = [
    pb.EmbedRequest(inputs=texts(*([number] for number in range(start, start + 200))))
    for start in (1, 201)
] * 3
"""1,200 texts of one token in six messages."""

FULL = {"code": grpc.StatusCode.RESOURCE_EXHAUSTED, "reason": "QUEUE_FULL"}
EMBED = "/pagewire.v1.InferenceService/Embed"
ALL = pb.EmbedOptions(type=pooling_pb2.POOLING_TYPE_ALL)


async def started(client: Any, *messages: Any, method: str = "Embed") -> Any:
    """A call with these messages and no others."""
    call = getattr(client, method)()
    for message in messages:
        await call.write(message)
    await call.done_writing()
    return call


async def next_requests(core: FakeCore, count: int) -> list[FakeRequest]:
    return [await core.next_request() for _ in range(count)]


def check_many(responses: list[Any]) -> None:
    expected = {i: vector_of([1 + i % 400]) for i in range(1200)}
    assert vectors_of(responses) == expected


async def test_a_call_of_many_texts_keeps_a_few_hundred_at_the_core_in_few_messages() -> None:
    async with serving() as (core, _, client):
        call = await started(client, *MANY)
        first = await next_requests(core, MAX_OPEN_INPUTS)
        (attachment,) = core.attachments
        assert len([m for m in attachment.messages if m.submits]) < 50
        assert len(core.requests) == MAX_OPEN_INPUTS
        most = 0
        num_answered = 0

        async def answer_one(request: FakeRequest) -> None:
            nonlocal most, num_answered
            most = max(most, len(core.requests) - num_answered)
            num_answered += 1
            await answer(request)

        for request in first:
            await answer_one(request)
        async with answering(core, answer_one):
            check_many(await _rest(call))
        assert most == MAX_OPEN_INPUTS


async def test_results_that_nobody_reads_stop_the_call_until_they_are_read() -> None:
    messages = iter([*MANY, None])

    async def read() -> pb.EmbedRequest | None:
        return next(messages)

    async with serving() as (core, frontend, _), answering(core):
        pooling = frontend.http_services.pooling
        async with pooling.open(read, Principal(), deadline=None) as call:
            await eventually(lambda: call.num_answered == MAX_OPEN_INPUTS)
            assert call.num_inputs == len(core.requests) == MAX_OPEN_INPUTS
            num_results = 0
            while (results := await call.next()) is not None:
                num_results += len(results)
    assert num_results == 1200


async def test_texts_continue_on_a_new_core_which_must_not_refuse_them() -> None:
    async with serving() as (core, _, client):
        call = await started(client, pb.EmbedRequest(inputs=texts([5], [6], [7])))
        first, second, third = await next_requests(core, 3)
        await first.pool(1, 2, 3)
        await second.accept()
        await call.read()
        (await core.attachment()).break_off()
        again = {r.handle: r for r in await next_requests(core, 2)}
        assert again[second.handle].submit.was_accepted
        assert not again[third.handle].submit.was_accepted
        assert again[second.handle].submit.request_id == second.submit.request_id
        for request in again.values():
            await answer(request)
        responses = await _rest(call)
    assert vectors_of(responses) == {1: vector_of([6]), 2: vector_of([7])}


async def _rest(call: Any) -> list[Any]:
    responses = []
    while (response := await call.read()) is not grpc.aio.EOF:
        responses.append(response)
    return responses


async def test_vectors_of_tokens_are_passed_on_as_they_come_and_once() -> None:
    async with serving() as (core, _, client):
        call = await started(client, pb.EmbedRequest(inputs=texts([5, 6, 7]), embed=ALL))
        request = await core.next_request()
        await request.accept()
        await request.send_vectors(*range(6))
        first = await call.read()
        await request.send_vectors(*range(3, 9), first_token=1)  # a worker was lost
        await request.finish()
        entries = [e for r in [first, *await _rest(call)] for e in r.embeddings]
    assert [(e.first_token, len(e.values) // 12, e.num_tokens) for e in entries] == [
        (0, 2, 3),
        (2, 1, 3),
    ]
    assert vectors_of([first, pb.EmbedResponse(embeddings=entries[1:])]) == {0: list(range(9))}


@pytest.mark.parametrize(
    ("numbers", "embed"),
    [((1, 2), None), ((1, 2, float("nan")), None), ((1, 2, 3), ALL), ((1, 2), ALL)],
)
async def test_a_worker_that_sends_other_numbers_fails_the_text_alone(
    numbers: tuple[float, ...], embed: Any
) -> None:
    async with serving() as (core, _, client):
        call = await started(client, pb.EmbedRequest(inputs=texts([5, 6], [7]), embed=embed))
        bad, good = await next_requests(core, 2)
        await bad.pool(*numbers)
        await good.pool(1, 2, 3)
        responses = await _rest(call)
    assert {i: error.code for i, error in errors_of(responses).items()} == {0: 13}
    assert vectors_of(responses)[1] == [1, 2, 3]


async def test_texts_that_the_core_has_no_room_for_wait_until_others_have_ended() -> None:
    async with serving() as (core, _, client):
        refused: set[int] = set()
        num_live = 0

        async def answer_ten(request: FakeRequest) -> None:
            nonlocal num_live
            if num_live == 10 and request.submit.prompt_token_ids not in refused:
                refused.add(request.submit.prompt_token_ids)
                num_live = 0
                await request.fail(**FULL)
                return
            num_live += 1
            await answer(request)

        async with answering(core, answer_ten):
            check_many(await responses_of(client.Embed(), *MANY))
        assert len(refused) > 10


async def test_texts_that_wait_for_room_are_sent_again_when_the_others_have_failed() -> None:
    async with serving() as (core, _, client):
        call = await started(client, pb.EmbedRequest(inputs=texts([5], [6], [7])))
        failing, *waiting = await next_requests(core, 3)
        await failing.accept()
        for request in waiting:
            await request.fail(**FULL)
        await failing.fail(grpc.StatusCode.INTERNAL, "NOT_FINITE")
        for request in await next_requests(core, 2):
            await answer(request)
        responses = await _rest(call)
    assert {i: error.code for i, error in errors_of(responses).items()} == {0: 13}
    assert vectors_of(responses).keys() == {1, 2}


async def test_texts_that_are_sent_again_continue_on_a_new_core_or_are_cancelled() -> None:
    async with serving() as (core, _, client):
        call = await started(client, pb.EmbedRequest(inputs=texts([5], [6])))
        first, second = await next_requests(core, 2)
        await first.accept()
        await second.fail(**FULL)
        await answer(first)
        await (await core.next_request()).accept()
        (await core.attachment()).break_off()
        again = await core.next_request()
        assert again.submit.prompt_token_ids == second.submit.prompt_token_ids
        assert again.submit.was_accepted
        call.cancel()
        await again.cancelled()


async def test_a_call_of_which_nothing_was_accepted_is_refused_as_a_whole() -> None:
    async with serving() as (core, _, client):
        call = await started(client, pb.EmbedRequest(inputs=texts([5], [6])))
        for request in await next_requests(core, 2):
            await request.fail(**FULL, retry_delay_us=5_000_000)
        error = await error_of(call)
    assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert error_info(error).reason == "QUEUE_FULL"


async def test_the_end_of_a_call_cancels_its_texts_and_frees_its_place() -> None:
    async with serving() as (core, frontend, client):
        call = await started(client, pb.EmbedRequest(inputs=texts([5], [6], [7])))
        requests = await next_requests(core, 3)
        await requests[0].accept()
        assert len(frontend.requests) == 1
        call.cancel()
        for request in requests:
            await request.cancelled()
        await eventually(lambda: not len(frontend.requests))


@pytest.mark.parametrize(
    ("settings", "is_late", "code"),
    [
        ({"default_timeout_s": 0.2}, True, grpc.StatusCode.DEADLINE_EXCEEDED),
        ({}, False, grpc.StatusCode.UNAVAILABLE),
    ],
)
@pytest.mark.parametrize("num_models", [0, 1])
async def test_deadlines_and_a_shutdown_end_a_call_wherever_it_waits(
    settings: dict[str, Any], is_late: bool, code: grpc.StatusCode, num_models: int
) -> None:
    async with serving(**settings) as (core, frontend, client):
        if not num_models:
            await (await core.attachment()).announce_models([])
            await eventually(lambda: not frontend.models.is_serving)
        call = await started(client, pb.EmbedRequest(inputs=texts([5])))
        if num_models and not is_late:
            assert not (await core.next_request()).submit.HasField("timeout_us")
        await eventually(lambda: len(frontend.requests) == 1 or is_late)
        stopping = None if is_late else asyncio.create_task(frontend.stop())
        _, error = await read_until_error(call)
        assert error.code() is code
        if stopping is not None:
            await stopping


async def test_the_core_is_told_how_long_a_text_may_take() -> None:
    async with serving(default_timeout_s=60) as (core, _, client):
        await started(client, pb.EmbedRequest(inputs=texts([5])))
        assert 0 < (await core.next_request()).submit.timeout_us <= 60_000_000


async def test_calls_share_the_requests_that_a_frontend_may_have() -> None:
    async with serving(max_concurrent_requests=8) as (core, frontend, client):
        alone = await started(client, MANY[0])
        held = await next_requests(core, 4)  # half of 8 for one call
        other = await started(client, MANY[0])
        held += await next_requests(core, 4)
        assert len(frontend.requests) == 2
        async with answering(core):
            for request in held:
                await answer(request)
            for call in (alone, other):
                assert len(vectors_of(await _rest(call))) == 200


async def test_nothing_is_kept_of_a_refused_call_until_its_deadline() -> None:
    async def read() -> pb.EmbedRequest | None:
        raise AssertionError("it was refused")

    async with serving(max_concurrent_requests=1) as (_, frontend, client):
        held = client.Embed()
        await eventually(lambda: len(frontend.requests) == 1)
        deadline, refused = time.monotonic() + 3600, Principal()
        with pytest.raises(QueueFull):
            async with frontend.http_services.pooling.open(read, refused, deadline=deadline):
                pass
        gc.collect()
        calls = [known for known in gc.get_objects() if type(known) is PoolingCall]
        assert len(calls) >= 1
        assert not any(call.tenant is refused for call in calls)
        held.cancel()


async def test_calls_and_their_texts_are_counted() -> None:
    async with serving() as (core, frontend, client), answering(core):
        await responses_of(client.Embed(), pb.EmbedRequest(inputs=texts([5, 6], "", [7])))
        found = Scrape(generate_latest(frontend.http_services.registry).decode())
    of_model = {"model_name": "embedder", "call": "embed"}
    assert found.sum("pagewire_pooled_inputs_total", **of_model, outcome="ok") == 2
    assert found.sum("pagewire_pooled_inputs_total", **of_model, outcome="error") == 1
    assert found.sum("pagewire_pooling_call_seconds_count", **of_model) == 1
    assert found.sum("pagewire_requests_total", outcome="ok") == 1
    assert found.sum("pagewire_tenant_tokens_total", kind="prompt") == 3
    assert found.sum("vllm:prompt_tokens_total", model_name="embedder") == 3


@pytest.mark.parametrize("num_good", [0, 1])
async def test_a_message_that_is_no_message_is_the_clients_error(num_good: int) -> None:
    async with (
        serving() as (core, frontend, _),
        answering(core),
        grpc.aio.insecure_channel(frontend.runner.address) as channel,
    ):
        call = channel.stream_stream(EMBED, None, pb.EmbedResponse.FromString)()
        for _ in range(num_good):
            await call.write(pb.EmbedRequest(inputs=texts([5])).SerializeToString())
        await call.write(b"\xff")
        _, error = await read_until_error(call)
    assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert "expected messages of the method's type" in str(error.details())
