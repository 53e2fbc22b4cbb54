"""Many requests on one stream: their answers apart, their errors their own."""

import asyncio
from typing import Any

import grpc
import pytest

from pagewire.v1 import inference_service_pb2 as pb
from scheduler_service.frontend.auth import Principal
from scheduler_service.frontend.multiplexer import MAX_ERRORS, RequestMultiplexer
from tests.scheduler_service.frontend.conftest import Served
from tests.support.fake_core import FakeCore, model_info
from tests.support.frontends import (
    bad_field,
    client_of,
    error_info,
    error_of,
    generate_request,
    read_until_error,
    running_frontend,
    text_of,
)
from tests.support.tokenizers import letters


async def send(call: Any, request_id: str | None, **fields: Any) -> None:
    prompt = fields.pop("prompt", [5])
    own = {} if request_id is None else {"request_id": request_id}
    request = generate_request(prompt, **own, **fields)
    await call.write(pb.GenerateManyRequest(request=request))


async def read_events(call: Any) -> tuple[dict[str, list[pb.GenerateResponse]], dict[str, Any]]:
    """Responses and errors by request id, to the stream's end."""
    responses: dict[str, list[pb.GenerateResponse]] = {}
    errors: dict[str, pb.RequestError] = {}
    while (message := await call.read()) is not grpc.aio.EOF:
        if message.WhichOneof("event") == "response":
            responses.setdefault(message.response.request_id, []).append(message.response)
        else:
            errors[message.error.request_id] = message.error
    return responses, errors


async def test_answers_are_told_apart_and_half_closing_lets_them_finish(served: Served) -> None:
    call = served.client.GenerateMany()
    for name in ("one", "two", "six"):
        await send(call, name)
    await call.done_writing()
    requests = [await served.core.next_request() for _ in range(3)]
    for request in reversed(requests):
        await request.complete(letters(request.submit.request_id))
    responses, errors = await read_events(call)
    assert {name: text_of(answer) for name, answer in responses.items()} == {
        "one": "one",
        "two": "two",
        "six": "six",
    }
    assert all(answer[0].HasField("started") for answer in responses.values())
    assert all(answer[-1].HasField("usage") for answer in responses.values())
    assert errors == {}
    assert await call.code() is grpc.StatusCode.OK


async def test_an_error_that_names_half_a_character_does_not_touch_the_others() -> None:
    async with (
        FakeCore(models=[model_info(structured_output=True)]) as core,
        running_frontend(core.address) as frontend,
        client_of(frontend) as client,
    ):
        call = client.GenerateMany()
        await send(call, "bad", json_schema='{"\\ud800": 1}')
        await send(call, "good")
        await call.done_writing()
        await (await core.next_request()).complete(letters("ok"))
        responses, errors = await read_events(call)
    assert text_of(responses["good"]) == "ok"
    assert bad_field(errors["bad"].status) == "sampling_params.json_schema"


async def test_one_requests_error_does_not_touch_the_others(served: Served) -> None:
    call = served.client.GenerateMany()
    await send(call, "good")
    await send(call, "bad", temperature=-1)
    await send(call, "long", prompt=[5] * 300)
    await send(call, None)
    await send(call, "good")
    await call.done_writing()
    await (await served.core.next_request()).complete(letters("fine"))
    responses: list[pb.GenerateResponse] = []
    errors: list[pb.RequestError] = []
    while (message := await call.read()) is not grpc.aio.EOF:
        if message.HasField("response"):
            responses.append(message.response)
        else:
            errors.append(message.error)
    assert text_of(responses) == "fine"
    told = {(error.request_id, error.code, error_info(error.status).reason) for error in errors}
    assert told == {
        ("bad", grpc.StatusCode.INVALID_ARGUMENT.value[0], "INVALID_FIELD"),
        ("long", grpc.StatusCode.FAILED_PRECONDITION.value[0], "PROMPT_TOO_LONG"),
        ("", grpc.StatusCode.INVALID_ARGUMENT.value[0], "INVALID_FIELD"),
        ("good", grpc.StatusCode.ALREADY_EXISTS.value[0], "DUPLICATE_REQUEST"),
    }
    fields = {bad_field(error.status) for error in errors if error.code == 3}
    assert fields == {"sampling_params.temperature", "request_id"}
    assert all(error.message for error in errors)


async def test_an_abort_ends_one_request_of_the_stream(served: Served) -> None:
    call = served.client.GenerateMany()
    await send(call, "stays")
    await send(call, "goes")
    requests = {}
    for _ in range(2):
        request = await served.core.next_request()
        requests[request.submit.request_id] = request
    await served.client.Abort(pb.AbortRequest(request_id="goes"))
    await requests["goes"].cancelled()
    await requests["stays"].complete(letters("on"))
    await call.done_writing()
    responses, errors = await read_events(call)
    assert text_of(responses["stays"]) == "on"
    assert errors["goes"].code == grpc.StatusCode.CANCELLED.value[0]


async def test_a_client_that_goes_takes_all_its_requests_with_it(served: Served) -> None:
    call = served.client.GenerateMany()
    await send(call, "a")
    await send(call, "b")
    requests = [await served.core.next_request() for _ in range(2)]
    call.cancel()
    for request in requests:
        await request.cancelled()
    assert len(served.frontend.requests) == 0


async def test_the_limit_of_open_requests_refuses_single_requests() -> None:
    async with (
        FakeCore() as core,
        running_frontend(core.address, max_concurrent_requests=1) as frontend,
        client_of(frontend) as client,
    ):
        call = client.GenerateMany()
        await send(call, "in")
        request = await core.next_request()
        await send(call, "out")
        error = (await call.read()).error
        assert (error.request_id, error_info(error.status).reason) == ("out", "QUEUE_FULL")
        await call.done_writing()
        await request.complete(letters("ok"))
        responses, _ = await read_events(call)
        assert text_of(responses["in"]) == "ok"


@pytest.mark.parametrize("half_closed", [True, False])
async def test_a_shutdown_lets_the_streams_requests_finish(half_closed: bool) -> None:
    async with (
        FakeCore() as core,
        running_frontend(core.address, grace_period_s=20) as frontend,
        client_of(frontend) as client,
    ):
        call = client.GenerateMany()
        await send(call, "r")
        request = await core.next_request()
        if half_closed:
            await call.done_writing()
        stopping = asyncio.create_task(frontend.stop())
        await frontend.requests.capacity.is_draining.wait()
        await request.complete(letters("ok"))
        answer: list[pb.GenerateResponse] = []
        while not answer or not answer[-1].HasField("usage"):
            answer.append((await call.read()).response)
        assert text_of(answer) == "ok"
        if half_closed:
            assert await call.read() is grpc.aio.EOF
        else:
            assert (await error_of(call)).code() is grpc.StatusCode.UNAVAILABLE
        await stopping


async def test_a_shutdown_ends_each_request_that_has_not_finished_in_time_with_an_error() -> None:
    async with (
        FakeCore() as core,
        running_frontend(core.address) as frontend,
        client_of(frontend) as client,
    ):
        call = client.GenerateMany()
        await send(call, "r")
        request = await core.next_request()
        await request.accept()
        await request.send_tokens(letters("a"))
        while not text_of([(await call.read()).response]):
            pass
        await frontend.stop()
        responses, error = await read_until_error(call)
        (failed,) = [response.error for response in responses]
        assert (failed.request_id, failed.code) == ("r", grpc.StatusCode.UNAVAILABLE.value[0])
        assert error_info(failed.status).reason == "SHUTTING_DOWN"
        assert error.code() is grpc.StatusCode.UNAVAILABLE


async def test_no_more_is_read_from_a_client_that_leaves_refusals_unread(served: Served) -> None:
    num_read = num_written = most_unwritten = 0

    async def read() -> pb.GenerateManyRequest | None:
        nonlocal num_read, most_unwritten
        most_unwritten = max(most_unwritten, num_read - num_written)
        num_read += 1
        return pb.GenerateManyRequest() if num_read <= 3 * MAX_ERRORS else None

    async def write(response: pb.GenerateManyResponse) -> None:
        nonlocal num_written
        assert bad_field(response.error.status) == "request_id"
        num_written += 1

    await RequestMultiplexer(served.frontend.requests, None, Principal).run(read, write)
    assert num_written == 3 * MAX_ERRORS
    assert most_unwritten < MAX_ERRORS
