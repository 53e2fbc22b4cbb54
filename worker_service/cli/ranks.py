"""Which rank a process is: told by flags, by torchrun, or none, where it is to start them."""

from collections.abc import Mapping
from dataclasses import dataclass

from worker_service.command_line.rank_flags import LauncherName, RankFlags
from worker_service.config import GroupConfig
from worker_service.errors import InvalidOption
from worker_service.parallel.torchrun import Torchrun, read_torchrun


@dataclass(frozen=True, kw_only=True, slots=True)
class Place:
    """A process that is one rank, mostly the only one."""

    group: GroupConfig
    group_id: str | None
    local_rank: int = 0

    address_offset: int = 0
    """How many addresses after the one told this rank listens, since others were told the same."""

    metrics_offset: int = 0
    """The same for where it tells metrics."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StartRanks:
    """A process that is no rank, but starts some."""

    ranks: range
    """All of the group, or one machine's."""

    launcher: LauncherName = LauncherName.local
    distributed_init: str | None = None
    """Where rank 0 keeps the store, where others start it."""

    group_id: str | None = None

    first_local_rank: int = 0
    """Which of the machine's GPUs the first of them takes, the others those after it."""


def find_place(flags: RankFlags, variables: Mapping[str, str]) -> Place | StartRanks:
    """What this process is to be, by its flags and environment. Raises InvalidOption."""
    world_size = flags.layout_of(0).world_size
    if flags.rank is not None and world_size > 1:
        return _told_by_flags(flags, flags.rank)
    if flags.rank is None and flags.launcher is LauncherName.ray:
        return _on_all_nodes(flags, world_size)
    if flags.num_nodes != 1:
        return _on_one_node(flags, world_size)
    if world_size == 1:
        layout = flags.layout_of(flags.rank or 0)
        return Place(
            group=GroupConfig(layout=layout), group_id=flags.group_id, local_rank=flags.local_rank
        )
    torchrun = read_torchrun(variables)
    if torchrun is not None:
        return _told_by_torchrun(flags, torchrun)
    return StartRanks(
        ranks=range(world_size), group_id=flags.group_id, first_local_rank=flags.local_rank
    )


def _on_all_nodes(flags: RankFlags, world_size: int) -> StartRanks:
    """Ray chooses the nodes and the ports."""
    if flags.num_nodes != 1:
        raise InvalidOption("num_nodes: expected none with --launcher ray, which chooses the nodes")
    if flags.distributed_init is not None:
        raise InvalidOption("distributed_init: expected none with --launcher ray, which chooses it")
    return StartRanks(ranks=range(world_size), launcher=LauncherName.ray, group_id=flags.group_id)


def _on_one_node(flags: RankFlags, world_size: int) -> StartRanks:
    """As many ranks as any other node has, in the order of the nodes."""
    num_nodes, node = flags.num_nodes, flags.node_rank
    if num_nodes < 1 or world_size % num_nodes:
        raise InvalidOption(
            f"num_nodes: expected a divisor of {world_size}, the ranks that {flags.sizes} make,"
            f" got {num_nodes}"
        )
    if node is None or not 0 <= node < num_nodes:
        got = "none" if node is None else node
        raise InvalidOption(f"node_rank: expected 0 to {num_nodes - 1}, got {got}")
    if flags.distributed_init is None:
        raise InvalidOption("distributed_init: expected HOST:PORT of node 0, the same on all nodes")
    size = world_size // num_nodes
    return StartRanks(
        ranks=range(node * size, (node + 1) * size),
        distributed_init=flags.distributed_init,
        group_id=flags.group_id or f"nodes-{flags.distributed_init}",
        first_local_rank=flags.local_rank,
    )


def _told_by_flags(flags: RankFlags, rank: int) -> Place:
    if flags.group_id is None:
        raise InvalidOption("group_id: expected the same name on every rank of the group")
    return Place(
        group=GroupConfig(layout=flags.layout_of(rank), distributed_init=flags.distributed_init),
        group_id=flags.group_id,
        local_rank=flags.local_rank,
        metrics_offset=_place_on_node(flags, rank),
    )


def _place_on_node(flags: RankFlags, rank: int) -> int:
    """A rank's place among those that its machine was told to start. Ray's ranks, whose machines
    are told nothing, count from the group's first."""
    world_size = flags.layout_of(rank).world_size
    return rank % max(1, world_size // max(1, flags.num_nodes))


def _told_by_torchrun(flags: RankFlags, torchrun: Torchrun) -> Place:
    layout = flags.layout_of(0)
    if torchrun.world_size != layout.world_size:
        raise InvalidOption(
            f"tensor_parallel_size: {flags.sizes} make {layout.world_size} ranks, but the"
            f" environment's WORLD_SIZE is {torchrun.world_size}"
        )
    return Place(
        group=GroupConfig(
            layout=flags.layout_of(torchrun.rank),
            distributed_init=flags.distributed_init or torchrun.master,
        ),
        group_id=flags.group_id or torchrun.group_id,
        local_rank=torchrun.local_rank,
        address_offset=torchrun.local_rank,
        metrics_offset=torchrun.local_rank,
    )
