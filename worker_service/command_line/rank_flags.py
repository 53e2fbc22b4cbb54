"""What the command line says of ranks."""

from dataclasses import dataclass
from enum import StrEnum
from typing import Annotated

from typer import Option

from worker_service.command_line.options import env
from worker_service.distributed.layout import Layout
from worker_service.errors import InvalidOption


class LauncherName(StrEnum):
    """Who starts the ranks."""

    local = "local"
    """The command itself, as children."""

    ray = "ray"
    """A Ray cluster, on its nodes."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RankFlags:
    """What the command line says of ranks."""

    group_id: Annotated[
        str | None,
        Option(envvar=env("GROUP_ID"), help="Worker group.", show_default="drawn at random"),
    ] = None
    tensor_parallel_size: Annotated[
        int,
        Option(
            envvar=env("TENSOR_PARALLEL_SIZE"), help="Ranks that share each layer of the model."
        ),
    ] = 1
    pipeline_parallel_size: Annotated[
        int,
        Option(
            envvar=env("PIPELINE_PARALLEL_SIZE"), help="Stages that the layers are spread over."
        ),
    ] = 1
    rank: Annotated[
        int | None,
        Option(
            envvar=env("RANK"),
            help="Be this one of the ranks, and start none.",
            show_default="start all ranks on this machine, unless torchrun has",
        ),
    ] = None
    local_rank: Annotated[
        int,
        Option(
            envvar=env("LOCAL_RANK"),
            help="Which of the machine's GPUs a rank takes, or the first of those started.",
        ),
    ] = 0
    distributed_init: Annotated[
        str | None,
        Option(
            envvar=env("DISTRIBUTED_INIT"),
            metavar="HOST:PORT",
            help="Where rank 0 is to be found by the others; with --rank.",
        ),
    ] = None
    launcher: Annotated[
        LauncherName,
        Option(
            envvar=env("LAUNCHER"),
            help="Who starts the ranks: this command on its machine, or a Ray cluster.",
        ),
    ] = LauncherName.local
    num_nodes: Annotated[
        int,
        Option(
            envvar=env("NUM_NODES"),
            help="Machines with equal parts of the ranks, each started with --node-rank.",
        ),
    ] = 1
    node_rank: Annotated[
        int | None,
        Option(envvar=env("NODE_RANK"), help="Start this machine's part of the ranks."),
    ] = None

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
