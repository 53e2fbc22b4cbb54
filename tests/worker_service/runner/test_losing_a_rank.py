"""What a rank does when another is gone, or does not come."""

import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import pytest
import torch

from scheduler_service.core.step_plan import StepResult
from tests.support.checkpoints import checkpoint
from tests.support.rank_threads import RankThreads
from tests.support.worker_driver import PlanBuilder, Row
from tools.launch import free_port
from worker_service.address import TcpAddress
from worker_service.distributed.communicator import (
    Communicator,
    EpochRendezvous,
    Rendezvous,
    survive_lost_peers,
)
from worker_service.distributed.layout import Layout
from worker_service.errors import GroupBroken

NUM_BLOCKS = 64
SOON_S = 60
"""Far less than gloo's own patience."""
SHORT = timedelta(seconds=1)


@pytest.fixture
def two() -> Iterator[RankThreads]:
    """Two ranks that have met."""
    ranks = RankThreads(checkpoint("llama"), tensor_parallel_size=2)
    ranks.join(NUM_BLOCKS)
    yield ranks
    ranks.close()


def a_plan(epoch: int, seq_id: int = 1) -> bytes:
    """One prompt, computed and sampled from."""
    builder = PlanBuilder(epoch=epoch)
    builder.add(seq_id, [1, 2, 3, 4, 5])
    return builder.plan([Row(seq_id, 5)]).SerializeToString()


def sampled(results: "list[Future[StepResult]]") -> list[list[int]]:
    """The tokens in each rank's result."""
    return [list(result.result(SOON_S).token_ids) for result in results]


def test_a_rank_that_parts_ends_the_step_of_one_that_waits_for_it(two: RankThreads) -> None:
    first, second = two.ranks
    waiting = first.run(lambda: first.execute(a_plan(1)))
    assert second.runner is not None
    second.run(second.runner.reset)
    with pytest.raises(GroupBroken, match="lost another rank"):
        waiting.result(SOON_S)


def test_no_thread_waits_for_a_rank_that_has_left() -> None:
    """The process would abort at its end if one did. The sampling rank still has what it sent."""
    ranks = RankThreads(checkpoint("llama"), pipeline_parallel_size=2)
    first, _ = ranks.ranks
    for rank in ranks.ranks:
        rank.run(lambda: None).result(SOON_S)
    before = set(threading.enumerate())
    ranks.join(NUM_BLOCKS)
    sampled(ranks.send(a_plan(1)))
    first.run(lambda: first.execute(a_plan(1, seq_id=2))).result(SOON_S)
    for leaving in [rank.run(rank.runner.reset) for rank in ranks.ranks if rank.runner is not None]:
        leaving.result(SOON_S)
    for thread in set(threading.enumerate()) - before:  # that of a cache's population ends soon
        thread.join(SOON_S)
        assert not thread.is_alive(), thread.name
    ranks.close()


def test_a_rank_that_waits_can_be_told_to_give_up(two: RankThreads) -> None:
    first, _ = two.ranks
    waiting = first.run(lambda: first.execute(a_plan(1)))
    first.executor.interrupt(1)
    with pytest.raises(GroupBroken, match="collectives were interrupted"):
        waiting.result(SOON_S)


def test_a_rank_that_waits_for_others_to_come_can_be_told_to_give_up(two: RankThreads) -> None:
    first, second = two.ranks
    joining = first.run(lambda: first.join(NUM_BLOCKS, 0, epoch=2))
    meeting = first.run(lambda: None)
    while not meeting.done():
        first.executor.interrupt(1)
    with pytest.raises(GroupBroken, match="not all ranks of the group have joined"):
        joining.result(SOON_S)
    assert second.runner is not None


class _NobodyComes:
    """A store in which this rank finds itself alone, and may look but once."""

    def __init__(self) -> None:
        self._answers = iter([False])

    def set(self, name: str, value: str) -> None:
        pass

    def check(self, names: list[str]) -> bool:
        return next(self._answers)


def test_a_rank_that_is_told_to_give_up_while_it_looks_for_the_store_does_not_wait() -> None:
    layout = Layout(tensor_parallel_size=2)
    communicator = Communicator(layout)

    class Slow(Rendezvous):
        def meet(self, epoch: int, cancelled: threading.Event) -> EpochRendezvous:
            communicator.interrupt(1)
            return EpochRendezvous(_NobodyComes(), layout, "127.0.0.1", cancelled)

    with pytest.raises(GroupBroken, match="not all ranks of the group have joined"):
        communicator.join(Slow(TcpAddress("127.0.0.1", 1), layout), 1, torch.device("cpu"))


def process_groups(lost: bool) -> "list[Future[Any]]":
    """What two ranks that have met get as a process group, if the second is not lost before."""
    address = TcpAddress("127.0.0.1", free_port())

    def join(rank: int) -> Any:
        meeting = rendezvous[rank].meet(1, threading.Event())
        meeting.wait_for_all()
        return None if lost and rank else meeting.process_group("everyone", range(2))

    rendezvous = [
        Rendezvous(address, Layout(tensor_parallel_size=2, rank=rank)) for rank in range(2)
    ]
    rendezvous[0].open()
    with ThreadPoolExecutor(2) as ranks:
        return [ranks.submit(join, rank) for rank in range(2)]


def test_a_rank_that_is_lost_before_it_connects_ends_the_wait_of_the_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("worker_service.distributed.communicator._CONNECT_TIMEOUT", SHORT)
    waiting, _ = process_groups(lost=True)
    with pytest.raises(GroupBroken, match="cannot create process group 'everyone'"):
        waiting.result(SOON_S)


def test_ranks_that_were_parted_meet_again_and_give_the_same_tokens(two: RankThreads) -> None:
    before = sampled(two.send(a_plan(1)))
    first, _ = two.ranks
    waiting = first.run(lambda: first.execute(a_plan(1, seq_id=2)))
    first.executor.interrupt(1)
    with pytest.raises(GroupBroken):
        waiting.result(SOON_S)
    two.join(NUM_BLOCKS)
    assert sampled(two.send(a_plan(2))) == before


def test_a_rank_whose_group_has_parted_executes_nothing(two: RankThreads) -> None:
    first, _ = two.ranks
    assert first.runner is not None
    runner = first.runner
    first.run(runner.reset).result(SOON_S)
    with pytest.raises(GroupBroken, match="has not joined"):
        first.run(lambda: first.execute(a_plan(1))).result(SOON_S)


def test_a_rank_on_a_gpu_outlives_another_unless_the_user_has_it_otherwise() -> None:
    name = "TORCH_NCCL_ASYNC_ERROR_HANDLING"  # by default torch ends the process
    for before, after in (({}, "0"), ({name: "3"}, "3")):
        environment: dict[str, str] = dict(before)
        survive_lost_peers(environment)
        assert environment == {name: after}
