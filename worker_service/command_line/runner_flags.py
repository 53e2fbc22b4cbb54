"""How a GPU's steps are computed."""

from dataclasses import dataclass
from typing import Annotated

from typer import Option

from worker_service.command_line.options import env
from worker_service.config import RunnerConfig


@dataclass(frozen=True, kw_only=True, slots=True)
class RunnerFlags:
    """How a GPU's steps are computed."""

    cuda_graphs: Annotated[
        bool,
        Option(
            "--cuda-graphs/--no-cuda-graphs",
            envvar=env("CUDA_GRAPHS"),
            help="On a GPU, record decode steps at start and replay them.",
        ),
    ] = True
    max_graph_batch_size: Annotated[
        int,
        Option(envvar=env("MAX_GRAPH_BATCH_SIZE"), help="Largest batch of decodes recorded."),
    ] = 512
    compile: Annotated[
        bool,
        Option(
            "--compile",
            envvar=env("COMPILE"),
            help="On a GPU, put layers through torch.compile.",
        ),
    ] = False

    def config(self) -> RunnerConfig:
        """The same as settings. Raises InvalidOption."""
        return RunnerConfig(
            cuda_graphs=self.cuda_graphs,
            max_graph_batch_size=self.max_graph_batch_size,
            compile=self.compile,
        )
