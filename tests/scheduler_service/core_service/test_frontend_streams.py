"""One stream per frontend, one message per step, and nothing left behind."""

import asyncio
from typing import Any, cast

import grpc
import pytest

from pagewire.columns import pack
from pagewire.v1 import scheduler_service_pb2 as pb
from pagewire.v1.scheduler_service_pb2_grpc import SchedulerServiceStub
from scheduler_service.columns import from_column
from scheduler_service.core.config import SchedulerConfig
from scheduler_service.core.core import SchedulerCore
from scheduler_service.core.request import EngineOutputs, Request, RequestFinished, RequestTimings
from scheduler_service.core.scheduling.pooling import MAX_PART_BYTES
from scheduler_service.core_service.driver import CoreDriver
from scheduler_service.core_service.frontend_streams import FrontendStream, merge, split
from scheduler_service.core_service.service import CoreService
from scheduler_service.errors import GenerationFailed, Unavailable
from tests.scheduler_service.core_service.conftest import Fleet
from tests.support.attached_frontend import AttachedFrontend, submission
from tests.support.fake_worker import FakeWorker, counted
from tests.support.waiting import until


class SlowReader:
    """A call's context whose peer takes the next message only when a test lets it."""

    def __init__(self) -> None:
        self.messages: list[pb.SchedulerMessage] = []
        self.may_take = asyncio.Semaphore(0)

    async def write(self, response: pb.AttachResponse) -> None:
        self.messages.append(response.message)
        await self.may_take.acquire()


async def test_news_for_a_slow_reader_are_merged_in_order() -> None:
    attachment = FrontendStream("slow", CoreDriver(SchedulerCore(SchedulerConfig())))
    reader = SlowReader()
    writing = asyncio.create_task(attachment.write_all(cast(Any, reader)))
    attachment.deliver(EngineOutputs(token_handles=[1], token_ids=[10]))
    await until(lambda: reader.messages, "the first message was begun")
    for token in range(11, 16):
        attachment.deliver(EngineOutputs(token_handles=[1, 2], token_ids=[token, token + 100]))
    reader.may_take.release()
    await until(lambda: len(reader.messages) == 2, "the second message was begun")
    merged = reader.messages[1]
    assert from_column(merged.token_handles, "") == [1, 2] * 5
    assert from_column(merged.token_ids, "")[::2] == list(range(11, 16))
    writing.cancel()


def finished(handle: int) -> RequestFinished:
    return RequestFinished(handle=handle, cached_tokens=0, timings=RequestTimings())


def test_vectors_travel_in_parts_after_all_tokens_and_before_the_ends_of_their_requests() -> None:
    vector = bytes(MAX_PART_BYTES // 2)
    lost = GenerationFailed("lost", reason="WORKERS_LOST")
    pending = EngineOutputs(
        accepted=[1],
        token_handles=[9],
        token_ids=[7],
        vectors=[(handle, 0, vector) for handle in (1, 2, 3, 3, 3)],
        requests_finished=[finished(3), finished(9), finished(1)],
        requests_failed=[(8, lost), (3, lost)],
    )
    parts = []
    while pending:
        part, pending = split(pending)
        if not parts:
            merge(pending, EngineOutputs(token_handles=[10], token_ids=[6]))
        parts.append(part)
    assert [[handle for handle, *_ in part.vectors] for part in parts] == [[1, 2], [3, 3], [3]]
    assert [part.accepted for part in parts] == [[1], [], []]
    assert [part.token_handles for part in parts] == [[9], [10], []]
    ends = [[end.handle for end in part.requests_finished] for part in parts]
    assert ends == [[9, 1], [], [3]]
    assert [[handle for handle, _ in part.requests_failed] for part in parts] == [[8], [], [3]]


async def test_tokens_overtake_vectors_and_those_of_a_cancelled_request_are_dropped() -> None:
    stream = FrontendStream("slow", CoreDriver(SchedulerCore(SchedulerConfig())))
    reader = SlowReader()
    writing = asyncio.create_task(stream.write_all(cast(Any, reader)))
    vector = bytes(MAX_PART_BYTES)
    stream.deliver(EngineOutputs(vectors=[(1, 0, vector), (2, 0, vector), (3, 0, vector)]))
    await until(lambda: reader.messages, "the first message was begun")
    stream.deliver(EngineOutputs(token_handles=[9], token_ids=[10]))
    stream.apply(pb.FrontendMessage(cancels=pack([2])))
    for _ in range(2):
        reader.may_take.release()
    await until(lambda: len(reader.messages) == 2, "the second message was begun")
    assert [[vector.handle for vector in m.vectors] for m in reader.messages] == [[1], [3]]
    assert from_column(reader.messages[1].token_handles, "") == [9]
    writing.cancel()


async def test_what_is_pending_is_sent_before_the_stream_is_closed() -> None:
    attachment = FrontendStream("slow", CoreDriver(SchedulerCore(SchedulerConfig())))
    reader = SlowReader()
    writing = asyncio.create_task(attachment.write_all(cast(Any, reader)))
    attachment.deliver(EngineOutputs(accepted=[1]))
    attachment.close(Unavailable("going"))
    reader.may_take.release()
    done, _ = await asyncio.wait([writing], timeout=60)
    assert isinstance(next(iter(done)).exception(), Unavailable)
    assert [from_column(message.accepted, "") for message in reader.messages] == [[1]]


async def test_a_second_stream_of_a_frontend_replaces_the_first(
    service: CoreService, fleet: Fleet
) -> None:
    worker = await fleet.start(FakeWorker())
    worker.hold_results()
    async with AttachedFrontend(service.address, "same") as first:
        await first.submit(1, [1, 2], max_tokens=50)
        await until(lambda: first.accepted, "the first stream's request was accepted")
        async with AttachedFrontend(service.address, "same") as second:
            await until(lambda: first.end, "the first stream ended")
            assert first.end is not None
            assert first.end.code() == grpc.StatusCode.UNAVAILABLE
            await second.submit(1, [1, 2], max_tokens=5, generated={0: [3]})
            worker.may_answer.set()
            await second.wait_finished(1)
            assert second.tokens[1] == counted(3, 4)
            assert len(service.frontends) == 1
    assert first.finished == {}


async def test_a_request_id_may_be_reused_in_the_message_that_cancels_it(
    service: CoreService, fleet: Fleet
) -> None:
    worker = await fleet.start(FakeWorker())
    worker.hold_results()
    async with AttachedFrontend(service.address) as frontend:
        await frontend.submit(1, [10], max_tokens=30)
        await until(lambda: 1 in frontend.accepted, "the request was accepted")
        again = submission("frontend-1", 2, [500], max_tokens=30)
        again.request_id = submission("frontend-1", 1, [10]).request_id
        await frontend.send(pb.FrontendMessage(submits=[again], cancels=pack([1])))
        worker.may_answer.set()
        await frontend.wait_finished(2)
        assert frontend.tokens[2] == counted(500, 30)
    assert 1 not in frontend.finished


class BuggyCore(SchedulerCore):
    """Breaks on one request."""

    def submit(self, request: Request, now: float) -> None:
        if request.request_id == "one-1":
            raise RuntimeError("secret")
        super().submit(request, now)


async def test_a_bug_that_one_request_shows_fails_that_request_alone() -> None:
    driver = CoreDriver(BuggyCore(SchedulerConfig()))
    attachment, reader = FrontendStream("one", driver), SlowReader()
    driver.add_frontend("one", attachment)
    attachment.apply(
        pb.FrontendMessage(submits=[submission("one", 1, [7]), submission("one", 2, [8])])
    )
    writing = asyncio.create_task(attachment.write_all(cast(Any, reader)))
    reader.may_take.release()
    reader.may_take.release()
    await until(lambda: any(message.accepted for message in reader.messages), "one was accepted")
    (failed,) = [failed for message in reader.messages for failed in message.requests_failed]
    assert (failed.handle, failed.reason, failed.message) == (1, "INTERNAL", "internal error")
    assert from_column(b"".join(message.accepted for message in reader.messages), "") == [2]
    writing.cancel()
    driver.close()


async def test_a_stream_without_a_name_is_refused(core: SchedulerServiceStub) -> None:
    call = core.Attach()
    await call.write(pb.AttachRequest(message=pb.FrontendMessage()))
    assert await code_of(call) == grpc.StatusCode.INVALID_ARGUMENT


async def test_a_malformed_column_ends_that_stream_alone(
    service: CoreService, fleet: Fleet
) -> None:
    await fleet.start(FakeWorker())
    async with (
        AttachedFrontend(service.address, "good") as good,
        AttachedFrontend(service.address, "bad") as bad,
    ):
        await bad.send(pb.FrontendMessage(cancels=b"\1\2\3"))
        await until(lambda: bad.end, "the bad stream ended")
        assert bad.end is not None
        assert bad.end.code() == grpc.StatusCode.INVALID_ARGUMENT
        assert "cancels" in (bad.end.details() or "")
        await good.submit(1, [1])
        await good.wait_finished(1)


async def code_of(call: Any) -> grpc.StatusCode:
    try:
        await call.read()
    except grpc.aio.AioRpcError as error:
        return error.code()
    raise AssertionError("the call did not fail")


async def test_half_closing_ends_the_frontends_requests(service: CoreService, fleet: Fleet) -> None:
    worker = await fleet.start(FakeWorker())
    async with AttachedFrontend(service.address) as frontend:
        await frontend.submit(1, [1], max_tokens=400)
        await frontend.wait_tokens(1, 2)
        await frontend.half_close()
        await until(lambda: len(service.frontends) == 0, "the frontend has left")
    groups = service.driver.core.snapshot().worker_groups
    assert groups[0].num_free_gpu_blocks == worker.num_gpu_blocks


async def test_a_request_can_be_aborted_from_elsewhere(
    service: CoreService, fleet: Fleet, core: SchedulerServiceStub
) -> None:
    await fleet.start(FakeWorker())
    async with AttachedFrontend(service.address) as frontend:
        await frontend.submit(1, [10], max_tokens=400)
        await frontend.wait_tokens(1, 3)
        live = submission("frontend-1", 1, [10]).request_id
        await core.Abort(pb.SchedulerServiceAbortRequest(request_id=live))
        failed = await frontend.wait_failed(1)
        assert failed.code == grpc.StatusCode.CANCELLED.value[0]
        for unknown in (live, "nobody"):
            with pytest.raises(grpc.aio.AioRpcError) as error:
                await core.Abort(pb.SchedulerServiceAbortRequest(request_id=unknown))
            assert error.value.code() is grpc.StatusCode.NOT_FOUND


class Writer:
    """A call's context whose peer has written these messages and then half-closed."""

    def __init__(self, *messages: pb.FrontendMessage) -> None:
        self.messages = list(messages)

    async def read(self) -> object:
        if not self.messages:
            return grpc.aio.EOF
        return pb.AttachRequest(message=self.messages.pop(0))


async def test_a_stream_that_was_replaced_submits_nothing_more() -> None:
    driver = CoreDriver(SchedulerCore(SchedulerConfig()))
    message = pb.FrontendMessage(submits=[submission("again", 1, [10])])
    replaced, current = FrontendStream("again", driver), FrontendStream("again", driver)
    replaced.close(Unavailable("attached again"))
    await replaced.read_all(cast(Any, Writer(message)))
    assert driver.core.snapshot().num_waiting == 0
    await current.read_all(cast(Any, Writer(message)))
    assert driver.core.snapshot().num_waiting == 1
    driver.close()
