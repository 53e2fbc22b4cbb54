"""Groups of several ranks: whole or not at all, the same plans to each, one that samples."""

import time

import pytest

from pagewire.v1 import scheduler_service_pb2 as pb
from scheduler_service.core_service.service import CoreService
from scheduler_service.core_service.workers.worker import Worker
from tests.scheduler_service.core_service.conftest import Fleet
from tests.support.attached_frontend import AttachedFrontend
from tests.support.fake_worker import FakeWorker, counted
from tests.support.waiting import until

GROUP = "group"


def rank(number: int, *, world_size: int = 2, **settings: object) -> FakeWorker:
    settings = {"worker_id": f"rank-{number}", "group_id": GROUP} | settings
    return FakeWorker(rank=number, world_size=world_size, **settings)  # type: ignore[arg-type]


def is_ready(service: CoreService) -> bool:
    return [group.group_id for group in service.registry if group.is_ready] == [GROUP]


async def test_a_group_is_ready_once_all_ranks_are_there(
    service: CoreService, fleet: Fleet
) -> None:
    ranks = [await fleet.start(rank(number, world_size=3)) for number in (2, 0)]
    (group,) = service.registry
    assert not group.is_full
    assert [worker.num_profiles for worker in ranks] == [0, 0]
    ranks.append(await fleet.start(rank(1, world_size=3), last_epoch=4))
    await until(lambda: is_ready(service), "the group is ready")
    assert [worker.epochs for worker in ranks] == [[5], [5], [5]]


async def test_all_ranks_get_the_least_of_their_blocks_and_the_same_plans(
    service: CoreService, fleet: Fleet
) -> None:
    first = await fleet.start(rank(0, num_gpu_blocks=100))
    second = await fleet.start(rank(1, num_gpu_blocks=70))
    async with AttachedFrontend(service.address) as frontend:
        for handle in range(1, 6):
            await frontend.submit(handle, range(handle), max_tokens=20)
        await frontend.wait_finished(*range(1, 6))
        for handle in range(1, 6):
            assert frontend.tokens[handle] == counted(handle - 1, 20)
    await until(lambda: len(first.plans) == len(second.plans), "both have all plans")
    assert first.plans == second.plans
    assert [worker.runner.num_gpu_blocks for worker in (first, second)] == [70, 70]


@pytest.mark.parametrize("lost", [0, 1])
async def test_the_loss_of_a_rank_is_the_groups_and_its_return_begins_afresh(
    service: CoreService, fleet: Fleet, lost: int
) -> None:
    ranks = [await fleet.start(rank(number)) for number in (0, 1)]
    async with AttachedFrontend(service.address) as frontend:
        await frontend.submit(1, [1, 2, 3], max_tokens=200)
        await frontend.wait_tokens(1, 10)
        ranks[0].hold_results()
        await ranks[lost].kill()
        await until(lambda: not is_ready(service), "the group is not ready any more")
        ranks[0].may_answer.set()
        await fleet.start(rank(lost, worker_id="again"))
        await frontend.wait_finished(1)
        assert frontend.tokens[1] == counted(3, 200)
    stayed = ranks[1 - lost]
    assert stayed.epochs == [1, 2]
    assert stayed.directives == ["serve"], "it was never away"


async def test_a_rank_out_of_step_ends_the_streams_of_all(
    service: CoreService, fleet: Fleet, caplog: pytest.LogCaptureFixture
) -> None:
    ranks = [await fleet.start(rank(number)) for number in (0, 1)]
    async with AttachedFrontend(service.address) as frontend:
        await frontend.submit(1, [1, 2, 3], max_tokens=200)
        await frontend.wait_tokens(1, 10)
        ranks[1].answer_next_as_step = 999
        await frontend.wait_finished(1)
        assert frontend.tokens[1] == counted(3, 200)
    assert [worker.epochs for worker in ranks] == [[1, 2], [1, 2]]
    assert "rank 1: expected the result of epoch 1" in caplog.text


async def test_a_second_rank_that_tells_tokens_is_not_trusted(
    service: CoreService, fleet: Fleet, caplog: pytest.LogCaptureFixture
) -> None:
    ranks = [await fleet.start(rank(number)) for number in (0, 1)]
    ranks[1].tells_tokens = True
    async with AttachedFrontend(service.address) as frontend:
        await frontend.submit(1, [1, 2, 3], max_tokens=30)
        await until(lambda: "rank 1 samples, as rank 0 is to do" in caplog.text, "it is noticed")
        ranks[1].tells_tokens = False
        await frontend.wait_finished(1)
        assert frontend.tokens[1] == counted(3, 30)


async def test_the_rank_that_samples_need_not_be_the_first(
    service: CoreService, fleet: Fleet
) -> None:
    await fleet.start(rank(0, samples=False))
    await fleet.start(rank(1, samples=True))
    async with AttachedFrontend(service.address) as frontend:
        await frontend.submit(1, [1, 2, 3], max_tokens=30)
        await frontend.wait_finished(1)
        assert frontend.tokens[1] == counted(3, 30)


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"fingerprint": "f2"}, "a model with fingerprint f1; this rank has f2"),
        ({"dtype": "bfloat16"}, "a model with dtype float32; this rank has bfloat16"),
        ({"max_model_len": 99}, "a model with max_model_len 512; this rank has 99"),
        ({"world_size": 3}, "rank 1 of 3: group 'group' has ranks of 2"),
        ({"world_size": 1}, "rank 1: expected less than world_size, 1"),
    ],
)
async def test_a_rank_that_does_not_fit_is_sent_away(
    service: CoreService, fleet: Fleet, settings: dict[str, object], reason: str
) -> None:
    await fleet.start(rank(0))
    wrong = await fleet.start(rank(1, **settings))
    assert wrong.directives == ["stop"]
    assert reason in (wrong.stop_reason or "")
    await fleet.start(rank(1, worker_id="right"))
    await until(lambda: is_ready(service), "the group is ready with the right one")


@pytest.mark.parametrize("samples", [False, True])
async def test_a_group_in_which_not_just_one_rank_samples_is_sent_away(
    service: CoreService, fleet: Fleet, samples: bool
) -> None:
    ranks = [await fleet.start(rank(number, samples=samples)) for number in (0, 1)]
    await until(lambda: all(worker.stop_reason for worker in ranks), "both were notified")
    assert "expected one rank that samples" in (ranks[0].stop_reason or "")


async def test_a_group_is_drained_as_one(service: CoreService, fleet: Fleet) -> None:
    ranks = [await fleet.start(rank(number)) for number in (0, 1)]
    async with AttachedFrontend(service.address) as frontend:
        await frontend.submit(1, [1, 2, 3], max_tokens=60)
        await frontend.wait_tokens(1, 5)
        service.registry.drain(GROUP)
        await frontend.wait_finished(1)
        assert frontend.tokens[1] == counted(3, 60)
    await until(lambda: all(worker.stop_reason for worker in ranks), "both are asked to stop")
    await until(lambda: not list(service.registry), "the group is gone")
    assert [worker.directives for worker in ranks] == [["serve", "drain", "stop"]] * 2
    assert [worker.stop_reason for worker in ranks] == ["drained", "drained"]


async def test_a_rank_that_leaves_later_than_others_is_told_once_to_stop() -> None:
    worker = Worker(pb.WorkerRegistration(), lease_s=1.0, clock=time.monotonic)
    worker.dismiss("drained")
    worker.dismiss("drained")
    assert worker.directives.qsize() == 1
    assert worker.dismissed.is_set()


async def test_a_group_that_waits_for_ranks_is_drained_at_once(
    service: CoreService, fleet: Fleet
) -> None:
    first = await fleet.start(rank(0))
    service.registry.drain(GROUP)
    await until(lambda: first.stop_reason == "drained", "it is asked to stop")
    assert first.directives == ["serve", "drain", "stop"]


async def test_a_draining_group_that_loses_a_rank_is_drained(
    service: CoreService, fleet: Fleet
) -> None:
    first, second = [await fleet.start(rank(number)) for number in (0, 1)]
    async with AttachedFrontend(service.address) as frontend:
        await frontend.submit(1, [1, 2, 3], max_tokens=60)
        await frontend.wait_tokens(1, 5)
        first.hold_results()
        service.registry.drain(GROUP)
        await second.kill()
        await until(lambda: first.stop_reason == "drained", "the other is asked to stop")
        await fleet.start(FakeWorker("elsewhere"))
        await frontend.wait_finished(1)
        assert frontend.tokens[1] == counted(3, 60)


async def test_a_process_that_replaces_a_draining_one_serves(
    service: CoreService, fleet: Fleet
) -> None:
    """As when a supervisor starts the next one before the last has ended."""
    leaving = await fleet.start(FakeWorker("old", group_id="g"))
    async with AttachedFrontend(service.address) as frontend:
        await frontend.submit(1, [1, 2, 3], max_tokens=60)
        await frontend.wait_tokens(1, 5)
        leaving.hold_results()
        service.registry.drain("g")
        next_one = await fleet.start(FakeWorker("new", group_id="g"))
        await frontend.wait_finished(1)
        assert frontend.tokens[1] == counted(3, 60)
        assert (leaving.stop_reason or "").startswith("replaced in its group")
        assert next_one.directives == ["serve"]
        [group] = service.registry
        assert group.is_ready
