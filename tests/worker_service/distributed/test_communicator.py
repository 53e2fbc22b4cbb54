"""What ranks exchange within a stage."""

from concurrent.futures import ThreadPoolExecutor

import torch

from tests.support.rank_threads import free_port
from worker_service.address import TcpAddress
from worker_service.distributed.communicator import Communicator, Rendezvous
from worker_service.distributed.layout import Layout

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
