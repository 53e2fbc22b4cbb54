"""Requests from an attached frontend through the core to a worker and back."""

import logging

import pytest

from pagewire.v1 import inference_service_pb2 as inference_pb
from pagewire.v1 import pooling_pb2
from pagewire.v1 import scheduler_service_pb2 as pb
from scheduler_service.core_service.service import CoreService
from tests.scheduler_service.core_service.conftest import Fleet
from tests.support.attached_frontend import AttachedFrontend
from tests.support.fake_worker import FakeWorker, counted
from tests.support.waiting import until


async def test_tokens_of_many_requests_flow_to_their_end(
    service: CoreService, fleet: Fleet
) -> None:
    await fleet.start(FakeWorker())
    async with AttachedFrontend(service.address) as frontend:
        for handle in range(1, 21):
            await frontend.submit(handle, range(handle), max_tokens=handle)
        await frontend.wait_finished(*range(1, 21))
        for handle in range(1, 21):
            assert frontend.tokens[handle] == counted(handle - 1, handle)
            assert frontend.finish_reasons[handle] == inference_pb.FINISH_REASON_LENGTH
        assert sorted(frontend.accepted) == list(range(1, 21))


async def test_vectors_of_many_requests_come_before_their_ends(
    service: CoreService, fleet: Fleet
) -> None:
    worker = await fleet.start(FakeWorker(pools=True))
    params = pooling_pb2.PoolingParams(type=pooling_pb2.POOLING_TYPE_LAST, dimensions=3)
    async with AttachedFrontend(service.address) as frontend:
        for handle in range(1, 21):
            await frontend.submit(handle, range(handle + 1), pooling=params)
        await frontend.submit(30, range(6), max_tokens=4)
        await frontend.wait_finished(*range(1, 21), 30)
        assert {
            handle: len(vector) for handle, vector in frontend.vectors.items()
        } == dict.fromkeys(range(1, 21), 3)
        assert len(set(map(tuple, frontend.vectors.values()))) == 20
        assert frontend.tokens == {30: counted(5, 4)}
    pooled = [new for plan in worker.plans for new in plan.new_sequences if new.HasField("pooling")]
    assert [new.pooling for new in pooled] == [params] * 20


async def test_a_vector_of_a_model_that_only_generates_is_refused_by_kind(
    service: CoreService, fleet: Fleet
) -> None:
    await fleet.start(FakeWorker())
    params = pooling_pb2.PoolingParams(type=pooling_pb2.POOLING_TYPE_LAST)
    async with AttachedFrontend(service.address) as frontend:
        await frontend.submit(1, [1, 2], pooling=params)
        failed = await frontend.wait_failed(1)
    assert (failed.code, failed.reason) == (9, "WORK_KIND_UNSUPPORTED")
    assert failed.message == (
        "the workers of the model 'counter' do generation, not pooling: send the request to a"
        " model that does pooling"
    )


async def test_the_next_plan_leaves_before_the_result_is_back(
    service: CoreService, fleet: Fleet
) -> None:
    worker = await fleet.start(FakeWorker())
    worker.hold_results()
    async with AttachedFrontend(service.address) as frontend:
        await frontend.submit(1, [1, 2, 3], max_tokens=20)
        await until(lambda: len(worker.plans) == 2, "plan 2 came while result 1 is held")
        assert worker.num_results == 0
        worker.may_answer.set()
        await frontend.wait_finished(1)
        assert frontend.tokens[1] == counted(3, 20)


@pytest.mark.parametrize(("max_hold_ms", "travel_together"), [(1000, True), (0, False)])
async def test_plans_travel_together_where_nobody_waits_for_tokens(
    service: CoreService, fleet: Fleet, max_hold_ms: int, travel_together: bool
) -> None:
    worker = await fleet.start(FakeWorker())
    async with AttachedFrontend(service.address) as frontend:
        await frontend.submit(1, [1, 2, 3], max_tokens=200, max_hold_ms=max_hold_ms)
        await frontend.wait_finished(1)
        assert frontend.tokens[1] == counted(3, 200)
        if not travel_together:
            assert worker.num_plan_messages == len(worker.plans) == 200
            return
        # A fake answers each plan alone: what is planned at once refills the lead. A request that
        # comes and is not as patient ends that.
        assert worker.num_plan_messages < len(worker.plans)
        assert worker.plans[-1].max_results == 8
        num_plans, num_messages = len(worker.plans), worker.num_plan_messages
        await frontend.submit(2, [1, 2, 3], max_tokens=200)
        await frontend.wait_finished(2)
        assert worker.num_plan_messages - num_messages == len(worker.plans) - num_plans
        assert not worker.plans[-1].max_results


async def test_a_frontend_gets_at_most_one_message_a_step(
    service: CoreService, fleet: Fleet
) -> None:
    worker = await fleet.start(FakeWorker())
    async with AttachedFrontend(service.address) as frontend:
        for handle in range(1, 9):
            await frontend.submit(handle, [handle], max_tokens=100)
        await frontend.wait_finished(*range(1, 9))
        # Besides: the models, once before and once after the worker has joined, and up to eight
        # messages of acceptances.
        assert frontend.num_messages <= worker.num_results + 10


async def test_a_cancelled_request_frees_its_blocks_within_a_step(
    service: CoreService, fleet: Fleet
) -> None:
    worker = await fleet.start(FakeWorker())
    async with AttachedFrontend(service.address) as frontend:
        await frontend.submit(1, range(8), max_tokens=400)
        await frontend.wait_tokens(1, 5)
        worker.hold_results()
        num_plans = len(worker.plans)
        await frontend.cancel(1)
        await frontend.submit(2, range(8), max_tokens=2)
        await until(lambda: 2 in frontend.accepted, "the message after the cancellation was read")
        worker.may_answer.set()
        await frontend.wait_finished(2)
        await until(lambda: free_blocks(service) == worker.num_gpu_blocks, "all blocks are free")
        cancelled = worker.plans[num_plans + 2 :]
        assert all(len(plan.seq_ids) <= 4 for plan in cancelled), "at most one row, of request 2"


def free_blocks(service: CoreService) -> int:
    return service.driver.core.snapshot().worker_groups[0].num_free_gpu_blocks


async def test_a_request_waits_for_a_worker_and_fails_at_its_deadline(
    service: CoreService, fleet: Fleet
) -> None:
    async with AttachedFrontend(service.address) as frontend:
        await frontend.submit(1, [1, 2], timeout_s=0.05)
        failed = await frontend.wait_failed(1)
        assert (failed.code, failed.reason) == (4, "DEADLINE_EXCEEDED")
        await frontend.submit(2, [1, 2], max_tokens=3, timeout_s=60)
        await fleet.start(FakeWorker())
        await frontend.wait_finished(2)
        assert frontend.tokens[2] == counted(2, 3)


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"generation": pb.Generation(max_tokens=2)}, "num_choices"),
        ({"request_id": ""}, "request_id"),
        ({"prompt_token_ids": b"\1\2\3"}, "prompt_token_ids"),
    ],
)
async def test_a_malformed_request_fails_alone(
    service: CoreService, fleet: Fleet, change: dict[str, object], field: str
) -> None:
    await fleet.start(FakeWorker())
    async with AttachedFrontend(service.address) as frontend:
        fields = {
            "handle": 7,
            "request_id": "seven",
            "model": "counter",
            "prompt_token_ids": b"\1\0\0\0",
            "generation": pb.Generation(num_choices=1, max_tokens=2),
        }
        await frontend.send(pb.FrontendMessage(submits=[pb.Submit(**fields | change)]))
        failed = await frontend.wait_failed(7)
        assert failed.reason == "INVALID_FIELD"
        assert [detail.value for detail in failed.details if detail.key == "field"] == [field]
        await frontend.submit(8, [1])
        await frontend.wait_finished(8)


async def test_refused_requests_add_no_lines_to_the_log(
    service: CoreService, fleet: Fleet, caplog: pytest.LogCaptureFixture
) -> None:
    """Logging is synchronous, on the event loop of all requests; the metrics count refusals."""
    await fleet.start(FakeWorker(max_model_len=64))
    async with AttachedFrontend(service.address) as frontend:
        await frontend.submit(1, range(8))
        await frontend.wait_finished(1)
        caplog.clear()
        caplog.set_level(logging.INFO, logger="scheduler_service")
        for handle in range(2, 12):
            await frontend.submit(handle, range(65))
            assert (await frontend.wait_failed(handle)).reason == "PROMPT_TOO_LONG"
        assert len(caplog.records) < 10
