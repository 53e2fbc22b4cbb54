"""Flags of ranks, and which rank this process is, if it is one and does not launch them."""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

from service_common.config_flags import ConfigFlags
from worker_service.config import GroupConfig
from worker_service.distributed.layout import Layout
from worker_service.errors import InvalidOption


class LauncherName(StrEnum):
    """The launcher of the ranks."""

    local = "local"
    """The command itself, as children."""

    ray = "ray"
    """A Ray cluster, on its nodes."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RankFlags:
    """The number of ranks, and which of them this process runs."""

    group_id: str | None = None
    """Worker group."""
    tensor_parallel_size: int = 1
    """Number of ranks that share each layer of the model."""
    pipeline_parallel_size: int = 1
    """Number of stages that the layers are divided into."""
    rank: int | None = None
    """Run as this rank, and start no others."""
    local_rank: int = 0
    """Index of the GPU that a rank uses, or of the first of those started here."""
    distributed_init: str | None = None
    """Address at which the other ranks find rank 0; with --rank."""
    launcher: LauncherName = LauncherName.local
    """The launcher of the ranks: this command on its machine, or a Ray cluster."""
    num_nodes: int = 1
    """Machines with equal parts of the ranks, each started with --node-rank."""
    node_rank: int | None = None
    """Index of this machine among them; starts its part of the ranks."""

    def require_one_rank(self, option: str) -> None:
        """Raises InvalidOption where `option` is given for several ranks."""
        if self.layout_of(0).world_size > 1:
            raise InvalidOption(f"{option}: expected one rank, got {self.sizes}")

    def layout_of(self, rank: int) -> Layout:
        """A rank's place. Raises InvalidOption."""
        return Layout(
            tensor_parallel_size=self.tensor_parallel_size,
            pipeline_parallel_size=self.pipeline_parallel_size,
            rank=rank,
        )

    @property
    def sizes(self) -> str:
        """The parallel sizes, for error messages."""
        return (
            f"tensor_parallel_size {self.tensor_parallel_size} and"
            f" pipeline_parallel_size {self.pipeline_parallel_size}"
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class RankAssignment:
    """A process that is one rank, usually the only one."""

    group: GroupConfig
    group_id: str | None
    local_rank: int = 0

    address_offset: int = 0
    """Offset of this rank's address from the configured one, which several ranks share."""

    metrics_offset: int = 0
    """The same for the address that serves metrics."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RanksToLaunch:
    """A process that launches ranks and is none itself."""

    ranks: range
    """All of the group, or one machine's."""

    launcher: LauncherName = LauncherName.local
    distributed_init: str | None = None
    """Address of the store of rank 0, if other machines start it."""

    group_id: str | None = None

    first_local_rank: int = 0
    """Index of the GPU that the first of them uses; the others use the following ones."""


def assign_rank(flags: RankFlags, variables: Mapping[str, str]) -> RankAssignment | RanksToLaunch:
    """The role of this process, by its flags and environment. Raises InvalidOption."""
    world_size = flags.layout_of(0).world_size
    if flags.rank is not None and world_size > 1:
        return _from_flags(flags, flags.rank)
    if flags.rank is None and flags.launcher is LauncherName.ray:
        return _on_all_nodes(flags, world_size)
    if flags.num_nodes != 1:
        return _on_one_node(flags, world_size)
    if world_size == 1:
        layout = flags.layout_of(flags.rank or 0)
        return RankAssignment(
            group=GroupConfig(layout=layout), group_id=flags.group_id, local_rank=flags.local_rank
        )
    if all(name in variables for name in _TORCHRUN_VARIABLES):
        return _from_torchrun(flags, variables)
    return RanksToLaunch(
        ranks=range(world_size), group_id=flags.group_id, first_local_rank=flags.local_rank
    )


def _on_all_nodes(flags: RankFlags, world_size: int) -> RanksToLaunch:
    """Ray chooses the nodes and the ports."""
    if flags.num_nodes != 1:
        raise InvalidOption("num_nodes: expected none with --launcher ray, which chooses the nodes")
    if flags.distributed_init is not None:
        raise InvalidOption("distributed_init: expected none with --launcher ray, which chooses it")
    return RanksToLaunch(
        ranks=range(world_size), launcher=LauncherName.ray, group_id=flags.group_id
    )


def _on_one_node(flags: RankFlags, world_size: int) -> RanksToLaunch:
    """This node's share of the ranks; all nodes have equally many, in the order of the nodes."""
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
    return RanksToLaunch(
        ranks=range(node * size, (node + 1) * size),
        distributed_init=flags.distributed_init,
        group_id=flags.group_id or f"nodes-{flags.distributed_init}",
        first_local_rank=flags.local_rank,
    )


def _from_flags(flags: RankFlags, rank: int) -> RankAssignment:
    if flags.group_id is None:
        raise InvalidOption("group_id: expected the same name on every rank of the group")
    return RankAssignment(
        group=GroupConfig(layout=flags.layout_of(rank), distributed_init=flags.distributed_init),
        group_id=flags.group_id,
        local_rank=flags.local_rank,
        metrics_offset=_index_on_node(flags, rank),
    )


def _index_on_node(flags: RankFlags, rank: int) -> int:
    """A rank's index among the ranks that its machine starts. Ray's ranks, whose machines
    get no flags, count from the group's first."""
    world_size = flags.layout_of(rank).world_size
    return rank % max(1, world_size // max(1, flags.num_nodes))


_TORCHRUN_VARIABLES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def _from_torchrun(flags: RankFlags, variables: Mapping[str, str]) -> RankAssignment:
    expected = flags.layout_of(0).world_size
    rank, world_size, local_rank = (
        _number(variables, name) for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK")
    )
    if world_size != expected:
        raise InvalidOption(
            f"tensor_parallel_size: {flags.sizes} make {expected} ranks, but the"
            f" environment's WORLD_SIZE is {world_size}"
        )
    master = f"{variables['MASTER_ADDR']}:{variables['MASTER_PORT']}"
    return RankAssignment(
        group=GroupConfig(
            layout=flags.layout_of(rank), distributed_init=flags.distributed_init or master
        ),
        group_id=flags.group_id or f"torchrun-{master}",
        local_rank=local_rank,
        address_offset=local_rank,
        metrics_offset=local_rank,
    )


def _number(variables: Mapping[str, str], name: str) -> int:
    text = variables.get(name, "0")
    if not text.isdecimal():
        raise InvalidOption(f"{name}: expected a number in the environment, got {text!r}")
    return int(text)


@dataclass(frozen=True, kw_only=True, slots=True)
class RayFlags:
    """Ranks on a Ray cluster."""

    ray_address: str | None = None
    """The Ray cluster."""
    ray_cpus_per_rank: int = 1
    """CPUs that Ray keeps for a rank."""
    ray_timeout: float = 300.0
    """How long to wait for nodes that have room for the group."""


RANKS = ConfigFlags(
    RankFlags,
    settings={
        "group_id": {"show_default": "drawn at random"},
        "rank": {"show_default": "start all ranks on this machine, unless torchrun has"},
        "distributed_init": {"metavar": "HOST:PORT"},
    },
)
RAY = ConfigFlags(
    RayFlags,
    settings={
        "ray_address": {
            "envvar": ["PAGEWIRE_RAY_ADDRESS", "RAY_ADDRESS"],
            "metavar": "HOST:PORT",
            "show_default": "the one this machine belongs to",
        },
        "ray_timeout": {"metavar": "SECONDS"},
    },
)
