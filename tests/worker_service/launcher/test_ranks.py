"""Which rank a process is, and where each rank listens."""

import pytest

from worker_service.distributed.layout import Layout
from worker_service.errors import InvalidOption
from worker_service.launcher.flags import (
    LauncherName,
    RankAssignment,
    RankFlags,
    RanksToLaunch,
    assign_rank,
)
from worker_service.launcher.launcher import LocalHost, address_of

TORCHRUN = {
    "RANK": "3",
    "WORLD_SIZE": "4",
    "LOCAL_RANK": "1",
    "MASTER_ADDR": "host-a",
    "MASTER_PORT": "29500",
}


def flags(**settings: object) -> RankFlags:
    defaults: dict[str, object] = {
        "tensor_parallel_size": 2,
        "pipeline_parallel_size": 2,
        "rank": None,
        "local_rank": 0,
        "distributed_init": None,
        "group_id": None,
    }
    return RankFlags(**(defaults | settings))  # type: ignore[arg-type]


def test_one_rank_is_itself_whatever_the_environment_says() -> None:
    alone = flags(tensor_parallel_size=1, pipeline_parallel_size=1)
    for variables in ({}, TORCHRUN):
        assignment = assign_rank(alone, variables)
        assert isinstance(assignment, RankAssignment)
        assert assignment.group.layout == Layout()
        assert assignment.group.store_address is None


def test_without_a_rank_all_are_started() -> None:
    all_of_them = RanksToLaunch(ranks=range(4))
    assert assign_rank(flags(), {}) == all_of_them
    assert assign_rank(flags(), {"RANK": "3"}) == all_of_them, "not all of torchrun's variables"


def test_a_node_starts_its_part() -> None:
    given = flags(num_nodes=2, node_rank=1, distributed_init="host-a:29500")
    assignment = assign_rank(given, TORCHRUN)
    assert isinstance(assignment, RanksToLaunch)
    assert assignment.ranks == range(2, 4)
    assert assignment.distributed_init == "host-a:29500"
    assert assignment.group_id == "nodes-host-a:29500", "the same on all nodes"
    named = flags(num_nodes=4, node_rank=0, distributed_init="host-a:29500", group_id="big")
    assert assign_rank(named, {}) == RanksToLaunch(
        ranks=range(1), distributed_init="host-a:29500", group_id="big"
    )


def test_ray_starts_even_one() -> None:
    for sizes, ranks in (((2, 2), range(4)), ((1, 1), range(1))):
        given = flags(
            tensor_parallel_size=sizes[0],
            pipeline_parallel_size=sizes[1],
            launcher=LauncherName.ray,
        )
        assert assign_rank(given, TORCHRUN) == RanksToLaunch(ranks=ranks, launcher=LauncherName.ray)


def test_flags_place_a_rank() -> None:
    given = flags(rank=2, distributed_init="host-a:29500", group_id="big", local_rank=1)
    assignment = assign_rank(given, TORCHRUN)
    assert isinstance(assignment, RankAssignment)
    assert assignment.group.layout.rank == 2
    assert str(assignment.group.store_address) == "host-a:29500"
    assert (assignment.group_id, assignment.local_rank, assignment.address_offset) == ("big", 1, 0)


def test_torchrun_places_a_rank() -> None:
    assignment = assign_rank(flags(), TORCHRUN)
    assert isinstance(assignment, RankAssignment)
    assert assignment.group.layout.rank == 3
    assert str(assignment.group.store_address) == "host-a:29500"
    assert assignment.group_id == "torchrun-host-a:29500"
    assert (assignment.local_rank, assignment.address_offset) == (1, 1)


@pytest.mark.parametrize(
    ("settings", "variables", "problem"),
    [
        ({"rank": 1}, {}, "group_id: expected the same name on every rank"),
        ({"rank": 1, "group_id": "g"}, {}, "distributed_init: expected HOST:PORT of rank 0"),
        ({"rank": 4, "group_id": "g"}, {}, "rank: expected 0 to 3 with 2 x 2 ranks, got 4"),
        (
            {"rank": 1, "group_id": "g", "distributed_init": "unix:/a"},
            {},
            "distributed_init: expected HOST:PORT, got 'unix:/a'",
        ),
        ({"tensor_parallel_size": 3}, TORCHRUN, "make 6 ranks, but the environment's WORLD_SIZE"),
        ({}, TORCHRUN | {"RANK": "x"}, "RANK: expected a number in the environment, got 'x'"),
        ({"tensor_parallel_size": 0}, {}, "tensor_parallel_size: expected 1 to 4096, got 0"),
        ({"num_nodes": 3}, {}, "num_nodes: expected a divisor of 4, the ranks that --tensor-par"),
        ({"num_nodes": 0}, {}, "num_nodes: expected a divisor of 4"),
        ({"num_nodes": 2}, {}, "node_rank: expected 0 to 1, got none"),
        ({"num_nodes": 2, "node_rank": 2}, {}, "node_rank: expected 0 to 1, got 2"),
        ({"num_nodes": 2, "node_rank": 0}, {}, "distributed_init: expected HOST:PORT of node 0"),
        ({"launcher": LauncherName.ray, "num_nodes": 2}, {}, "num_nodes: expected none with"),
        (
            {"launcher": LauncherName.ray, "distributed_init": "host-a:29500"},
            {},
            "distributed_init: expected none with --launcher ray",
        ),
    ],
)
def test_what_contradicts_itself_is_told(
    settings: dict[str, object], variables: dict[str, str], problem: str
) -> None:
    with pytest.raises(InvalidOption, match=problem):
        assign_rank(flags(**settings), variables)


def test_ranks_listen_one_after_the_other() -> None:
    assert address_of("0.0.0.0:7620", 3, "listen") == "0.0.0.0:7623"
    assert address_of("[::1]:7620", 1, "listen") == "[::1]:7621"
    assert address_of("unix:/run/w.sock", 0, "listen") == "unix:/run/w.sock"
    assert address_of("unix:/run/w.sock", 2, "listen") == "unix:/run/w.sock.2"
    assert address_of("127.0.0.1:0", 2, "listen") == "127.0.0.1:0", "each takes a free one"


def test_ranks_without_room_for_their_ports_are_not_started() -> None:
    with pytest.raises(InvalidOption, match="listen: expected room for 3 more ports"):
        LocalHost(
            arguments=(),
            ranks=range(4, 8),
            group_id="g",
            listen="127.0.0.1:65533",
            advertise=None,
            distributed_init="host-a:29500",
        )
