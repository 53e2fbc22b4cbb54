"""The link to the core: what it carries, and what happens when the core goes and comes back."""

import asyncio
from typing import Any, cast

import grpc
import pytest

from pagewire.columns import pack
from pagewire.v1 import scheduler_service_pb2 as scheduler_pb
from scheduler_service.frontend import core_client
from scheduler_service.frontend.core_client import MAX_HANDLE, CoreClient, CoreConnection
from scheduler_service.frontend.input.processor import resolve_request
from scheduler_service.frontend.models.frontend_model import build_model
from scheduler_service.frontend.requests.request_stream import RequestStream
from service_common.cluster import NO_CLUSTER, Cluster
from tests.scheduler_service.frontend.conftest import Served
from tests.support.fake_core import FakeCore, FakeRequest, model_info
from tests.support.frontends import (
    bad_field,
    client_of,
    error_of,
    eventually,
    generate_request,
    model_ready,
    read_all,
    running_frontend,
    text_of,
    tokens_of,
)
from tests.support.tokenizers import byte_level, letters, model_files


async def started(served: Served, **fields: object) -> tuple[object, FakeRequest]:
    call = served.client.Generate(generate_request("hello", **fields))
    request = await served.core.next_request()
    await request.accept()
    await call.read()
    return call, request


async def test_a_broken_stream_is_replaced_and_open_requests_go_on_where_they_were(
    served: Served,
) -> None:
    call, request = await started(served, n=2, seed=5, cache_salt="s")
    await request.send_tokens(letters("abc"), 0)
    await request.send_tokens(letters("x"), 1)
    await request.finish_choice(1)
    while text_of(received := [await call.read()], 1) == "":
        pass
    request.attachment.break_off()
    again = await served.core.next_request()
    assert again.attachment is not request.attachment
    assert (again.submit.request_id, again.submit.generation.sampling.seed) == (
        request.submit.request_id,
        5,
    )
    assert again.submit.context == request.submit.context
    assert len(again.submit.context) == 1
    assert again.generated(0) == letters("abc")
    assert again.generated(1) == letters("x")
    assert [entry.finished for entry in again.submit.generation.generated] == [False, True]
    await again.accept()
    await again.send_tokens(letters("de"), 0)
    await again.finish_choice(0)
    await again.finish()
    rest = await read_all(call)
    assert text_of([*received, *rest], 0)[-2:] == "de"
    assert not any(response.HasField("started") for response in rest)
    assert rest[-1].usage.completion_tokens == 6
    timings = rest[-1].timings
    assert timings.recovery_us > 0
    assert timings.unaccounted_us > 0
    parts = [value for field, value in timings.ListFields()]
    assert 2 * timings.total_us == sum(parts)


@pytest.mark.parametrize("is_good", [True, False])
async def test_what_has_ended_is_not_submitted_to_the_next_core_for_a_slow_reader(
    served: Served, is_good: bool
) -> None:
    """It would be computed again, and nobody would stop it."""
    model = build_model(model_info(), model_files(byte_level()))
    ended = RequestStream("slow", None, lambda: None, "")
    ended.begin(resolve_request(generate_request([5]), "slow", model))
    served.frontend.core_client.submit(ended)
    request = await served.core.next_request()
    await request.accept()
    await request.send_tokens(letters("ab"))
    if is_good:
        await request.finish_choice()
        await request.finish()
    else:
        await request.fail(grpc.StatusCode.INTERNAL, "GENERATION_FAILED")
    await eventually(lambda: ended.submission.has_ended)
    request.attachment.break_off()
    await served.core.attachment(1)
    call = served.client.Generate(generate_request([5], request_id="other"))
    again = await served.core.next_request()
    assert again.submit.request_id == "other"
    await again.complete(letters("c"))
    await read_all(call)
    last = ended.take()
    assert last is not None
    assert tokens_of([last]) == letters("ab")
    assert last.HasField("usage") is is_good
    assert last.timings.unaccounted_us == last.timings.recovery_us == 0
    served.frontend.core_client.close(ended)


async def test_a_core_on_its_way_out_does_not_fail_the_request_that_the_next_can_do(
    served: Served,
) -> None:
    call = served.client.Generate(generate_request("hello"))
    request = await served.core.next_request()
    await request.fail(grpc.StatusCode.UNAVAILABLE, "SHUTTING_DOWN")
    request.attachment.break_off()
    again = await served.core.next_request()
    await again.complete(letters("ok"))
    assert text_of(await read_all(call)) == "ok"


async def test_a_core_that_does_not_know_the_model_yet_gets_the_request_when_it_does(
    served: Served,
) -> None:
    call, request = await started(served)
    await request.send_tokens(letters("ab"))
    assert text_of([await call.read()]) == "ab"
    served.core.models = [model_info("other")]
    request.attachment.break_off()
    again = await served.core.next_request()
    await again.fail(grpc.StatusCode.NOT_FOUND, "UNKNOWN_MODEL")
    await again.attachment.announce_models([model_info("other"), model_info("tiny")])
    last = await served.core.next_request()
    assert last.generated() == letters("ab")
    await last.accept()
    await last.finish_choice()
    await last.finish()
    assert (await read_all(call))[-1].usage.completion_tokens == 2


async def test_a_model_that_comes_with_the_refusal_for_its_absence_is_not_waited_for(
    served: Served,
) -> None:
    """A core merges what it has not sent yet into one message."""
    call, request = await started(served)
    request.attachment.break_off()
    again = await served.core.next_request()
    unknown = scheduler_pb.RequestFailed(
        handle=again.handle, code=grpc.StatusCode.NOT_FOUND.value[0], reason="UNKNOWN_MODEL"
    )
    await again.attachment.send(
        requests_failed=[unknown], models=scheduler_pb.ServedModels(models=[model_info()])
    )
    last = await served.core.next_request()
    assert last.attachment is again.attachment
    await last.complete(letters("ok"))
    assert text_of(await read_all(call)) == "ok"


@pytest.mark.parametrize(
    ("sampling", "field", "name"),
    [
        ({"n": 128}, "num_choices", "sampling_params.n"),
        ({"best_of": 128}, "num_choices", "sampling_params.best_of"),
        (
            {"beam_search": {"width": 9}},
            "beam_search.width",
            "sampling_params.beam_search.width",
        ),
        ({}, "max_tokens", "sampling_params.max_tokens"),
        ({}, "resume", "resume"),
    ],
)
async def test_a_field_that_the_core_refuses_is_named_as_the_client_knows_it(
    served: Served, sampling: dict[str, Any], field: str, name: str
) -> None:
    call = served.client.Generate(generate_request("hello", **sampling))
    request = await served.core.next_request()
    detail = scheduler_pb.ErrorDetail(key="field", value=field)
    code = grpc.StatusCode.INVALID_ARGUMENT
    await request.fail(code, "INVALID_FIELD", f"{field}: must be less", details=[detail])
    error = await error_of(call)
    assert bad_field(error) == name
    assert error.details() == f"{name}: must be less"


async def test_the_prompts_log_probabilities_are_not_told_twice(served: Served) -> None:
    call = served.client.Generate(generate_request([5, 6, 7], prompt_logprobs=0))

    def update(handle: int, start: int, ids: list[int]) -> scheduler_pb.PromptLogprobsUpdate:
        return scheduler_pb.PromptLogprobsUpdate(
            handle=handle,
            start=start,
            width=1,
            token_ids=pack(ids),
            logprobs=b"\0" * 4 * len(ids),
            ranks=pack([1] * len(ids)),
        )

    request = await served.core.next_request()
    await request.accept()
    await request.attachment.send(prompt_logprobs=[update(request.handle, 1, [6])])
    await call.read()
    request.attachment.break_off()
    again = await served.core.next_request()
    await again.attachment.send(prompt_logprobs=[update(again.handle, 1, [6, 7])])
    await again.complete(letters("a"))
    responses = await read_all(call)
    (prompt,) = [r.prompt_logprobs for r in responses if r.prompt_logprobs]
    assert [entry.token.token_id for entry in prompt] == [5, 6, 7]


async def test_requests_wait_for_a_core_that_is_still_to_come() -> None:
    core = FakeCore()
    await core.start("127.0.0.1:0")
    await core.stop()
    async with running_frontend(core.address) as frontend, client_of(frontend) as client:
        call = client.Generate(generate_request("hello"))
        await eventually(lambda: len(frontend.requests) > 0)
        late = FakeCore()
        await late.start(core.address)
        try:
            await (await late.next_request()).complete(letters("hi"))
            assert text_of(await read_all(call)) == "hi"
        finally:
            await late.stop()


async def test_requests_wait_for_a_model_that_is_still_to_come(served: Served) -> None:
    attachment = await served.core.attachment()
    await attachment.announce_models([])
    await model_ready(served.frontend, ready=False)
    call = served.client.Generate(generate_request("hello"))
    await eventually(lambda: len(served.frontend.requests) > 0)
    assert not attachment.requests
    await attachment.announce_models(served.core.models)
    await (await served.core.next_request()).complete(letters("hi"))
    assert text_of(await read_all(call)) == "hi"


async def test_a_burst_of_requests_travels_in_one_message(served: Served) -> None:
    attachment = await served.core.attachment()
    await attachment.announce_models([])
    await model_ready(served.frontend, ready=False)
    calls = [served.client.Generate(generate_request([5, 6])) for _ in range(50)]
    await eventually(lambda: len(served.frontend.requests) == 50)
    await attachment.announce_models(served.core.models)
    requests = [await served.core.next_request() for _ in calls]
    assert len([message for message in attachment.messages if message.submits]) == 1
    for request in requests:
        await request.complete(letters("a"))
    for call in calls:
        assert tokens_of(await read_all(call)) == letters("a")


async def test_resubmissions_are_spread_over_messages_of_bounded_size(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(core_client, "MAX_SUBMIT_BYTES", 2000)
    calls = [served.client.Generate(generate_request([5] * 200)) for _ in range(10)]
    requests = [await served.core.next_request() for _ in calls]
    requests[0].attachment.break_off()
    again = [await served.core.next_request() for _ in calls]
    assert {request.handle for request in again} == {request.handle for request in requests}
    assert max(len(message.submits) for message in again[0].attachment.messages) == 3
    for call in calls:
        call.cancel()


async def test_a_deadline_travels_as_the_time_that_is_left(served: Served) -> None:
    call = served.client.Generate(generate_request("hello"), timeout=30)
    request = await served.core.next_request()
    assert 0 < request.submit.timeout_us <= 31_000_000
    call.cancel()
    await request.cancelled()
    call = served.client.Generate(generate_request("hello"))
    assert not (await served.core.next_request()).submit.HasField("timeout_us")
    call.cancel()


async def test_a_message_that_is_nonsense_costs_the_stream_and_not_the_frontend(
    served: Served,
) -> None:
    call, request = await started(served)
    await request.attachment.send(accepted=b"abc")
    again = await served.core.next_request()
    await again.complete(letters("ok"))
    assert text_of(await read_all(call)) == "ok"


async def test_news_of_requests_that_are_gone_are_passed_over(served: Served) -> None:
    call, request = await started(served)
    attachment = request.attachment
    await attachment.send(
        accepted=pack([999]),
        token_handles=pack([999, request.handle]),
        token_ids=pack(letters("xa")),
        logprobs=[scheduler_pb.ChoiceLogprobs(handle=999)],
        prompt_logprobs=[scheduler_pb.PromptLogprobsUpdate(handle=999)],
        choices_finished=[scheduler_pb.ChoiceFinished(handle=999)],
        requests_finished=[scheduler_pb.RequestFinished(handle=999)],
        requests_failed=[scheduler_pb.RequestFailed(handle=999)],
    )
    await request.finish_choice()
    await request.finish()
    assert text_of(await read_all(call)) == "a"


async def test_an_unforeseen_failure_ends_its_own_request_only(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    call, request = await started(served)
    other_call, other = await started(served)
    (stream,) = [
        opened.stream
        for opened in served.frontend.requests._open.values()
        if opened.stream.submission.handle == request.handle
    ]

    def fail() -> None:
        raise ZeroDivisionError("a bug")

    monkeypatch.setattr(stream, "advance", fail)
    await request.send_tokens(letters("a"))
    error = await error_of(call)
    assert (error.code(), error.details()) == (grpc.StatusCode.INTERNAL, "internal error")
    await request.cancelled()
    await other.send_tokens(letters("b"))
    await other.finish_choice()
    await other.finish()
    assert text_of(await read_all(other_call)) == "b"


@pytest.mark.parametrize("output", ["prompt_logprobs", "requests_finished"])
async def test_outputs_that_are_malformed_end_their_own_request_only(
    served: Served, output: str
) -> None:
    call, request = await started(served, prompt_logprobs=1)
    other_call, other = await started(served)
    kind = {"prompt_logprobs": scheduler_pb.PromptLogprobsUpdate}.get(
        output, scheduler_pb.RequestFinished
    )
    message: Any = kind(handle=request.handle)
    if isinstance(message, scheduler_pb.PromptLogprobsUpdate):
        message.token_ids = b"abc"
    await request.attachment.send(**{output: [message]})
    error = await error_of(call)
    assert error.code() == grpc.StatusCode.INTERNAL
    await other.complete(letters("b"))
    assert text_of(await read_all(other_call)) == "b"
    assert request.attachment is other.attachment
    assert request.attachment.is_open


async def test_handles_start_again_at_one_and_skip_those_in_use() -> None:
    core = CoreConnection(Cluster(NO_CLUSTER), "unix:/nowhere")
    try:
        link = CoreClient(core, "f", lambda models: None)
        model = build_model(model_info(), model_files(byte_level()))

        def submit(num_choices: int) -> int:
            stream = RequestStream("r", None, lambda: None, "")
            stream.begin(resolve_request(generate_request([5], n=num_choices), "r", model))
            link.submit(stream)
            return stream.submission.handle

        assert [submit(3), submit(1)] == [1, 4]
        link._next_handle = MAX_HANDLE - 1
        assert submit(2) == 5
    finally:
        await core.close()


class RenewedCluster(Cluster):
    """A member whose certificates are replaced on demand."""

    certificates: Any = None

    def channel_credentials(self) -> Any:
        return self.certificates

    def channel(self, address: str, options: Any) -> grpc.aio.Channel:
        return grpc.aio.insecure_channel(address, options=options)


class HoldingCore(FakeCore):
    """Answers for its status on demand."""

    def __init__(self) -> None:
        super().__init__()
        self.asked, self.answers = asyncio.Event(), asyncio.Event()

    async def GetStatus(
        self, request: Any, context: Any
    ) -> scheduler_pb.SchedulerServiceGetStatusResponse:
        self.asked.set()
        await self.answers.wait()
        return await super().GetStatus(request, context)


async def test_a_call_continues_while_certificates_are_renewed() -> None:
    cluster = RenewedCluster(NO_CLUSTER)
    request = scheduler_pb.SchedulerServiceGetStatusRequest()
    async with HoldingCore() as core:
        connection = CoreConnection(cluster, core.address)
        try:
            call = connection.stub.GetStatus(request)
            await core.asked.wait()
            cluster.certificates = object()
            former = connection.stub
            await connection.renew()
            assert connection.stub is not former
            core.answers.set()
            assert await call == await connection.stub.GetStatus(request)
            core.asked.clear()
            core.answers.clear()
            left = connection.stub.GetStatus(request)
            await core.asked.wait()
            cluster.certificates = object()
            await connection.renew()
        finally:
            await connection.close()
        assert left.cancelled()


class BreakingCore:
    """A connection, its stub and its calls: a stream that breaks on demand."""

    address = "unix:/nowhere"

    def __init__(self) -> None:
        self.breaks = asyncio.Event()

    async def renew(self) -> None:
        pass

    @property
    def stub(self) -> "BreakingCore":
        return self

    def Attach(self) -> "BreakingCore":
        return self

    async def read(self) -> Any:
        await self.breaks.wait()
        raise grpc.aio.AioRpcError(
            grpc.StatusCode.UNAVAILABLE, grpc.aio.Metadata(), grpc.aio.Metadata()
        )

    async def write(self, _: Any) -> None:
        pass

    def cancel(self) -> None:
        pass


async def test_a_link_that_is_cancelled_while_its_stream_breaks_ends() -> None:
    core = BreakingCore()
    running = asyncio.create_task(CoreClient(cast(Any, core), "f", lambda: None).run())
    for _ in range(5):
        await asyncio.sleep(0)
    core.breaks.set()
    # Now the reading fails; in the turns after that the writing is brought to its end.
    await asyncio.sleep(0)
    running.cancel()
    done, _ = await asyncio.wait([running], timeout=60)
    assert done
    assert running.cancelled()
