"""Tokens wait for others to go with them, where all that wait for them are patient."""

import asyncio
from typing import Any, cast

from pagewire.v1 import scheduler_service_pb2 as pb
from scheduler_service.columns import from_column
from scheduler_service.core.config import SchedulerConfig
from scheduler_service.core.core import SchedulerCore
from scheduler_service.core.request import (
    ChoiceFinished,
    EngineOutputs,
    RequestFinished,
    RequestTimings,
)
from scheduler_service.core_service.driver import CoreDriver
from scheduler_service.core_service.frontend_streams import (
    ACCEPTANCE_HOLD_S,
    FrontendStream,
    HoldTimes,
)
from scheduler_service.core_service.service import CoreService
from scheduler_service.errors import QueueFull
from tests.scheduler_service.core_service.conftest import Fleet
from tests.support.attached_frontend import AttachedFrontend, submission
from tests.support.fake_worker import FakeWorker, counted
from tests.support.waiting import until

LONG_MS = 60_000
TOKENS = EngineOutputs(token_handles=[1], token_ids=[10])


def finished(handle: int) -> EngineOutputs:
    request = RequestFinished(handle=handle, cached_tokens=0, timings=RequestTimings())
    return EngineOutputs(requests_finished=[request])


def test_tokens_wait_as_long_as_the_least_patient_request_allows() -> None:
    holds = HoldTimes()
    holds.begin(1, 0.5)
    assert holds.delay_s(TOKENS) == 0.5
    holds.begin(2, 0.1)
    assert holds.delay_s(TOKENS) == 0.1
    holds.begin(3, 0.0)
    assert holds.delay_s(TOKENS) == 0
    holds.end(3)
    holds.end(3)
    assert holds.delay_s(TOKENS) == 0.1


def test_all_other_news_are_told_at_once() -> None:
    holds = HoldTimes()
    holds.begin(1, 0.5)
    assert holds.delay_s(EngineOutputs(accepted=[1])) == 0
    ended = ChoiceFinished(handle=1, reason="stop")
    assert (
        holds.delay_s(EngineOutputs(token_handles=[1], token_ids=[2], choices_finished=[ended]))
        == 0
    )


def test_the_acceptance_of_a_text_may_wait_for_its_vector() -> None:
    holds = HoldTimes()
    holds.begin(1, 0.5)
    assert holds.delay_s(EngineOutputs(accepted=[2])) == ACCEPTANCE_HOLD_S
    assert holds.delay_s(EngineOutputs(accepted=[2, 1])) == 0
    tokens = EngineOutputs(accepted=[2], token_handles=[1], token_ids=[7])
    assert holds.delay_s(tokens) == ACCEPTANCE_HOLD_S
    holds.begin(3, 0.0)
    assert holds.delay_s(tokens) == 0
    assert holds.delay_s(EngineOutputs(accepted=[2], vectors=[(2, 0, b"")])) == 0


def test_requests_whose_end_is_told_do_not_count_any_more() -> None:
    holds = HoldTimes()
    for handle, hold_s in enumerate((0.0, 0.2, 0.0, 0.5), start=1):
        holds.begin(handle, hold_s)
    holds.delay_s(finished(1))
    holds.delay_s(EngineOutputs(requests_failed=[(3, QueueFull("full"))]))
    assert holds.delay_s(TOKENS) == 0.2
    holds.delay_s(finished(2))
    assert holds.delay_s(TOKENS) == 0.5
    holds.delay_s(finished(4))
    assert len(holds) == 0
    assert holds.delay_s(TOKENS) == 0


async def test_a_patient_request_gets_its_tokens_with_its_end(
    service: CoreService, fleet: Fleet
) -> None:
    await fleet.start(FakeWorker())
    async with AttachedFrontend(service.address) as frontend:
        before = frontend.num_messages
        await frontend.submit(1, [1, 2], max_tokens=20, max_hold_ms=LONG_MS)
        await frontend.wait_finished(1)
        assert frontend.tokens[1] == counted(2, 20)
        assert frontend.num_messages <= before + 3, "accepted, all tokens, the end"


class Reader:
    """A call's context that keeps what it is sent."""

    def __init__(self) -> None:
        self.token_ids: list[int] = []

    async def write(self, response: pb.AttachResponse) -> None:
        self.token_ids += from_column(response.message.token_ids, "")


async def test_tokens_do_not_wait_as_long_as_an_acceptance_that_waits_already() -> None:
    driver = CoreDriver(SchedulerCore(SchedulerConfig()))
    attachment, reader = FrontendStream("one", driver), Reader()
    attachment.apply(pb.FrontendMessage(submits=[submission("one", 1, [7], max_hold_ms=LONG_MS)]))
    writing = asyncio.create_task(attachment.write_all(cast(Any, reader)))
    attachment.deliver(EngineOutputs(token_handles=[1], token_ids=[3]))
    attachment.deliver(EngineOutputs(accepted=[2]))
    await until(lambda: reader.token_ids == [3], "the token was sent with the acceptance")
    writing.cancel()
    driver.close()


async def test_tokens_that_wait_are_told_in_time() -> None:
    driver = CoreDriver(SchedulerCore(SchedulerConfig()))
    attachment, reader = FrontendStream("one", driver), Reader()
    attachment.apply(pb.FrontendMessage(submits=[submission("one", 1, [7], max_hold_ms=1)]))
    writing = asyncio.create_task(attachment.write_all(cast(Any, reader)))
    for token in range(3):
        attachment.deliver(EngineOutputs(token_handles=[1], token_ids=[token]))
        assert reader.token_ids == list(range(token))
        await until(lambda: len(reader.token_ids) > token, "the token was sent")  # noqa: B023
    writing.cancel()
    driver.close()
