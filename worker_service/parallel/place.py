"""Which rank a process is: told by flags, by torchrun, or none, where it is to start them all."""

from collections.abc import Mapping
from dataclasses import dataclass

from worker_service.config import GroupConfig
from worker_service.errors import InvalidOption
from worker_service.parallel.layout import Layout
from worker_service.parallel.torchrun import Torchrun, read_torchrun


@dataclass(frozen=True, kw_only=True, slots=True)
class RankFlags:
    """What the command line says of ranks."""

    tensor_parallel_size: int
    pipeline_parallel_size: int
    rank: int | None
    local_rank: int
    distributed_init: str | None
    group_id: str | None

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
        """For people."""
        return (
            f"tensor_parallel_size {self.tensor_parallel_size} and"
            f" pipeline_parallel_size {self.pipeline_parallel_size}"
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Place:
    """A process that is one rank, mostly the only one."""

    group: GroupConfig
    group_id: str | None
    local_rank: int = 0

    address_offset: int = 0
    """How many addresses after the one told this rank listens, since others were told the same."""


@dataclass(frozen=True, slots=True)
class StartAll:
    """A process that is no rank, but starts them."""

    world_size: int


def find_place(flags: RankFlags, variables: Mapping[str, str]) -> Place | StartAll:
    """What this process is to be, by its flags and environment. Raises InvalidOption."""
    world_size = flags.layout_of(0).world_size
    if world_size == 1:
        layout = flags.layout_of(flags.rank or 0)
        return Place(
            group=GroupConfig(layout=layout), group_id=flags.group_id, local_rank=flags.local_rank
        )
    if flags.rank is not None:
        return _told_by_flags(flags, flags.rank)
    torchrun = read_torchrun(variables)
    return StartAll(world_size) if torchrun is None else _told_by_torchrun(flags, torchrun)


def _told_by_flags(flags: RankFlags, rank: int) -> Place:
    if flags.group_id is None:
        raise InvalidOption("group_id: expected the same name on every rank of the group")
    return Place(
        group=GroupConfig(layout=flags.layout_of(rank), distributed_init=flags.distributed_init),
        group_id=flags.group_id,
        local_rank=flags.local_rank,
    )


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
    )
