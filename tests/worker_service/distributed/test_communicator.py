"""What ranks exchange within a stage."""

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from typing import Any

import pytest
import torch

from tests.support.gloo_ranks import (
    GlooMeeting,
    GlooRendezvous,
    RankProcess,
    SymmetricRendezvous,
)
from tests.support.runners import EagerRecorder
from tools.launch import free_port
from worker_service.address import TcpAddress
from worker_service.distributed.communicator import (
    ESTIMATED_DEVICE_BYTES,
    SYMMETRIC_BYTES,
    Communicator,
    EpochRendezvous,
    ProcessGroups,
    Rendezvous,
    Transfer,
    connect,
    require_symmetric_memory,
)
from worker_service.distributed.layout import Layout
from worker_service.errors import GroupBroken, InvalidOption
from worker_service.runner.device.cuda_graphs import CudaGraphRecorder, Replay

CPU = torch.device("cpu")


def test_columns_are_gathered_on_the_rank_that_samples_alone() -> None:
    address = TcpAddress("127.0.0.1", free_port())
    parts = torch.arange(12.0).view(3, 2, 2)
    total = 5  # the last rank's last column is padding
    layouts = [Layout(tensor_parallel_size=3, rank=rank) for rank in range(3)]
    meetings = [Rendezvous(address, layout) for layout in layouts]
    meetings[0].open()

    def gathered(rank: int) -> torch.Tensor:
        communicator = Communicator(layouts[rank])
        communicator.join(meetings[rank], 1, CPU)
        try:
            return communicator.gather_columns(parts[rank], total)
        finally:
            communicator.sum(parts[rank])  # no rank leaves before all have gathered
            communicator.leave()

    with ThreadPoolExecutor(3) as threads:
        found = [*threads.map(gathered, range(3))]
    assert [layout.samples for layout in layouts] == [True, False, False]
    assert torch.equal(found[0], torch.cat([*parts], dim=1)[:, :total])
    assert found[0].is_contiguous()
    for other in found[1:]:
        assert torch.equal(other, torch.zeros(2, total))
        assert other.untyped_storage().nbytes() == other.itemsize, "zeros take no memory"


def test_a_rank_alone_repeats_its_own_columns() -> None:
    part = torch.ones(2, 3)
    assert torch.equal(Communicator(Layout()).gather_columns(part, 3), part)
    alone = Communicator(Layout(tensor_parallel_size=2)).gather_columns(part, 5)
    assert torch.equal(alone, part.repeat(1, 2)[:, :5])


@pytest.mark.parametrize("name", ["cpu", "cuda"])
def test_partial_sums_are_added_in_the_order_of_ranks(name: str) -> None:
    """In any other order, 1 would vanish."""
    parts = torch.tensor([1e8, -1e8, 1.0]).view(3, 1, 1).repeat(1, 5, 7)
    layouts = [Layout(tensor_parallel_size=3, rank=rank) for rank in range(3)]
    address = TcpAddress("127.0.0.1", free_port())
    meetings = [GlooRendezvous(address, layout) for layout in layouts]
    meetings[0].open()

    def total(rank: int) -> torch.Tensor:
        communicator = Communicator(layouts[rank], sums_in_order=True)
        communicator.join(meetings[rank], 1, torch.device(name))
        try:
            return communicator.sum(parts[rank])
        finally:
            communicator.sum(parts[rank])  # no rank leaves before all have their sums
            communicator.leave()

    with ThreadPoolExecutor(3) as threads:
        assert all(summed.equal(torch.ones(5, 7)) for summed in threads.map(total, range(3)))


def test_memory_of_nccl_is_estimated_then_measured_and_counted_only_until_it_is_taken() -> None:
    layouts = [Layout(tensor_parallel_size=2, rank=rank) for rank in range(2)]
    address, gpu = TcpAddress("127.0.0.1", free_port()), torch.device("cuda")
    meetings = [GlooRendezvous(address, layout) for layout in layouts]
    meetings[0].open()

    def lives(rank: int) -> list[int]:
        def connected(groups: ProcessGroups, device: torch.device) -> int:
            assert groups.sum(torch.ones(2, 2)).tolist() == [[2.0, 2.0]] * 2
            return 300 << 20

        communicator = Communicator(layouts[rank], connect=connected)
        seen = [communicator.bytes_to_allocate(gpu)]
        communicator.join(meetings[rank], 1, gpu)
        seen.append(communicator.bytes_to_allocate(gpu))
        communicator.leave()
        return [*seen, communicator.bytes_to_allocate(gpu), communicator.bytes_to_allocate(CPU)]

    with ThreadPoolExecutor(2) as threads:
        for seen in threads.map(lives, range(2)):
            assert seen == [ESTIMATED_DEVICE_BYTES, 0, 300 << 20, 0]
    assert Communicator(Layout()).bytes_to_allocate(gpu) == 0


class InterruptedMeeting(GlooMeeting):
    """Another thread ends the epoch while the groups are made."""

    def __init__(self, interrupt: Callable[[], None], *given: Any) -> None:
        super().__init__(*given)
        self._interrupt = interrupt

    def process_group(self, name: str, ranks: Sequence[int]) -> Any:
        self._interrupt()
        return super().process_group(name, ranks)


class InterruptedRendezvous(GlooRendezvous):
    """Where they meet."""

    def __init__(self, address: TcpAddress, communicator: Communicator) -> None:
        super().__init__(address, communicator.layout)
        self._communicator = communicator

    def meet(self, epoch: int, cancelled: threading.Event) -> EpochRendezvous:
        return InterruptedMeeting(
            partial(self._communicator.interrupt, epoch),
            self._store(f"epoch-{epoch}"),
            self._layout,
            "127.0.0.1",
            cancelled,
        )


def test_an_epoch_that_ends_while_its_groups_are_made_sends_nothing() -> None:
    """The kernels of a GPU would wait for other ranks for ever."""

    def connected(groups: ProcessGroups, device: torch.device) -> int:
        raise AssertionError("the epoch has ended")

    communicator = Communicator(Layout(), connect=connected)
    rendezvous = InterruptedRendezvous(TcpAddress("127.0.0.1", free_port()), communicator)
    rendezvous.open()
    with pytest.raises(GroupBroken, match="epoch has ended"):
        communicator.join(rendezvous, 1, torch.device("cuda"))
    communicator.leave()


@pytest.mark.parametrize(
    ("options", "passes"),
    [
        ({"symmetric": True}, True),
        ({"symmetric": False}, False),
        ({"symmetric": True, "sums_in_order": True}, False),
    ],
)
def test_small_sums_pass_through_symmetric_memory_and_large_ones_do_not(
    options: dict[str, bool], passes: bool
) -> None:
    layouts = [Layout(tensor_parallel_size=2, rank=rank) for rank in range(2)]
    address, gpu = TcpAddress("127.0.0.1", free_port()), torch.device("cuda")
    meetings = [SymmetricRendezvous(address, layout) for layout in layouts]
    meetings[0].open()
    large = SYMMETRIC_BYTES // 4 + 1

    def sums(rank: int) -> list[torch.Tensor]:
        communicator = Communicator(layouts[rank], connect=lambda *_: 0, **options)
        communicator.join(meetings[rank], 1, gpu)
        try:
            largest = communicator.sum(torch.full((large,), 1.0 + rank))
            first = communicator.sum(torch.full((3, 5), 10.0 + rank))
            second = communicator.sum(torch.full((2, 2), 20.0 + rank, dtype=torch.bfloat16))
            communicator.sum(torch.zeros(large))  # no rank leaves before all have their sums
        finally:
            communicator.leave()
        assert [tensor.shape for tensor in (first, second)] == [(3, 5), (2, 2)]
        assert second.dtype == torch.bfloat16
        return [largest.unique(), first.unique(), second.unique()]

    with ThreadPoolExecutor(2) as threads:
        for found in threads.map(sums, range(2)):
            assert [number.item() for number in found] == [3.0, 21.0, 41.0]
    for meeting in meetings:
        held = meeting.meeting.buffer[:8].view(torch.bfloat16)
        assert (held == 41.0).all() == passes


SOON_S = 60
"""Far below gloo's own timeout, and enough to start processes."""


@pytest.mark.parametrize("victim", [0, 2])
@pytest.mark.parametrize("is_inside", [True, False])
def test_a_killed_rank_ends_the_sums_of_the_others_who_go_on_with_another(
    is_inside: bool, victim: int
) -> None:
    """is_inside: whether it is in the sum that the others wait for; victim: rank 0 is the one that
    hosts the store."""
    layouts, port = [Layout(tensor_parallel_size=3, rank=rank) for rank in range(3)], free_port()
    ranks = [RankProcess(layout, port) for layout in layouts]
    first, last = (rank for i, rank in enumerate(ranks) if i != victim)

    def together(action: str, numbers: Iterable[float]) -> list[Any]:
        for rank, number in zip(ranks, numbers, strict=True):
            rank.begin(action, number)
        return [rank.result(SOON_S) for rank in ranks]

    try:
        assert together("join", [1, 1, 1]) == [None] * 3
        assert together("sum", [1, 2, 4]) == [(7.0, 7.0)] * 3
        first.begin("sum", 1)
        if is_inside:
            ranks[victim].begin("sum", 1)
        assert not any(rank.is_done() for rank in ranks)
        ranks[victim].kill()
        last.begin("sum", 1)
        for rank in (first, last):
            assert isinstance(rank.result(SOON_S), RuntimeError | GroupBroken)
        ranks[victim] = RankProcess(layouts[victim], port)
        assert together("join", [2, 2, 2]) == [None] * 3
        assert together("sum", [1, 3, 5]) == [(9.0, 9.0)] * 3
    finally:
        for rank in ranks:
            rank.kill()


def test_symmetric_memory_requires_a_gpu_and_a_torch_that_can_abort_it() -> None:
    with pytest.raises(InvalidOption, match=r"expected torch 2\.13 or newer, got 2\.11\.0\+cu130"):
        require_symmetric_memory(torch.device("cuda"), "2.11.0+cu130")
    with pytest.raises(InvalidOption, match="expected a GPU, got cpu"):
        require_symmetric_memory(CPU, "2.13.0")
    require_symmetric_memory(torch.device("cuda:1"), "2.14.1")


@pytest.mark.gpu
def test_connecting_to_others_takes_a_plausible_amount_of_memory() -> None:
    device = torch.device("cuda")
    with rank_alone(device) as groups:
        assert 0 <= connect(groups, device) < ESTIMATED_DEVICE_BYTES


DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
"""A GPU has a group of one rank here, which NCCL serves as it does larger ones."""


@contextmanager
def rank_alone(device: torch.device, *, sums_in_order: bool = False) -> Iterator[ProcessGroups]:
    """The process groups of one rank that has met itself."""
    rendezvous = Rendezvous(TcpAddress("127.0.0.1", free_port()), Layout())
    rendezvous.open()
    meeting = rendezvous.meet(1, threading.Event())
    meeting.wait_for_all()
    groups = ProcessGroups(Layout(), meeting, device, sums_in_order=sums_in_order)
    try:
        yield groups
    finally:
        groups.close()


def recorded_step(groups: ProcessGroups, device: torch.device) -> tuple[Replay, torch.Tensor]:
    """What ranks exchange in a step, recorded; and its input, to which it is added."""
    numbers = torch.ones(4, 2, device=device)

    def exchange() -> None:
        gathered = groups.gather_columns(groups.sum(numbers.clone()))
        assert gathered is not None
        groups.share_in_stage(gathered)
        numbers.add_(gathered)

    recorder = CudaGraphRecorder(device) if device.type == "cuda" else EagerRecorder()
    replay = recorder.record(exchange)
    numbers.fill_(1)
    return replay, numbers


@pytest.mark.parametrize("sums_in_order", [False, True])
@pytest.mark.parametrize("name", DEVICES)
def test_what_ranks_exchange_can_be_recorded(name: str, sums_in_order: bool) -> None:
    device = torch.device(name)
    with rank_alone(device, sums_in_order=sums_in_order) as groups:
        replay, numbers = recorded_step(groups, device)
        for _ in range(3):
            replay()
        assert numbers.tolist() == [[8.0, 8.0]] * 4
        groups.check()
        del replay  # NCCL frees a communicator only when no graph refers to it


@pytest.mark.parametrize("name", DEVICES)
def test_an_interruption_does_not_wait_for_recordings(name: str) -> None:
    device = torch.device(name)
    with rank_alone(device) as groups:
        replay, _ = recorded_step(groups, device)
        groups.interrupt()
        with pytest.raises(GroupBroken, match="interrupted"):
            groups.check()
        del replay


class EndsAfterTimeout:
    """A collective that ends between the expiry of a wait and the look at whether it has ended."""

    def __init__(self, error: RuntimeError | None = None) -> None:
        self._error = error
        self._is_completed = False

    def is_completed(self) -> bool:
        return self._is_completed

    def wait(self, timeout: timedelta | None = None) -> bool:
        if not self._is_completed:
            self._is_completed = True
            raise RuntimeError("Operation timed out!")
        if self._error is not None:
            raise self._error
        return True


def test_a_collective_that_ends_as_a_wait_for_it_expires_has_its_own_outcome() -> None:
    tensor = torch.ones(2)
    broken = threading.Event()
    assert Transfer(EndsAfterTimeout(), tensor, broken).wait() is tensor
    failed = Transfer(EndsAfterTimeout(RuntimeError("connection reset")), tensor, broken)
    with pytest.raises(GroupBroken, match="lost another rank: connection reset"):
        failed.wait()


def test_closing_is_no_interruption() -> None:
    """What a device has computed before is valid."""
    with rank_alone(CPU) as groups:
        pass
    groups.check()
