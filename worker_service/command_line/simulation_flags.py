"""A worker without a model."""

from dataclasses import dataclass
from typing import Annotated

from typer import Option

from worker_service.command_line.options import env
from worker_service.simulation.config import DEFAULT_MAX_MODEL_LEN, SimulationConfig
from worker_service.simulation.cost import CostModel


@dataclass(frozen=True, kw_only=True, slots=True)
class SimulationFlags:
    """A worker without a model."""

    simulate: Annotated[
        bool,
        Option(
            "--simulate",
            envvar=env("SIMULATE"),
            help="Serve no model: check every plan and make tokens up. Of the flags above, those "
            "of the model's files, device, numbers and memory have no effect then.",
        ),
    ] = False
    simulate_gpu_blocks: Annotated[
        int, Option(envvar=env("SIMULATE_GPU_BLOCKS"), help="Simulated KV blocks on the device.")
    ] = 4096
    simulate_cpu_blocks: Annotated[
        int, Option(envvar=env("SIMULATE_CPU_BLOCKS"), help="Simulated KV blocks on the host.")
    ] = 4096
    simulate_vocab_size: Annotated[
        int, Option(envvar=env("SIMULATE_VOCAB_SIZE"), help="Simulated tokens are below this.")
    ] = 32000
    simulate_eos_token_id: Annotated[
        int, Option(envvar=env("SIMULATE_EOS_TOKEN_ID"), help="Simulated end of a sequence.")
    ] = 2
    simulate_step_us: Annotated[
        float, Option(envvar=env("SIMULATE_STEP_US"), help="Microseconds a simulated step takes,")
    ] = 0.0
    simulate_token_us: Annotated[
        float,
        Option(envvar=env("SIMULATE_TOKEN_US"), help="more per token of a row beyond its first,"),
    ] = 0.0
    simulate_sequence_us: Annotated[
        float, Option(envvar=env("SIMULATE_SEQUENCE_US"), help="more per row,")
    ] = 0.0
    simulate_block_us: Annotated[
        float, Option(envvar=env("SIMULATE_BLOCK_US"), help="and more per swapped block.")
    ] = 0.0

    def config(self, max_model_len: int | None) -> SimulationConfig:
        """What the worker is to pretend to be. Raises InvalidOption."""
        return SimulationConfig(
            vocab_size=self.simulate_vocab_size,
            eos_token_id=self.simulate_eos_token_id,
            num_gpu_blocks=self.simulate_gpu_blocks,
            num_cpu_blocks=self.simulate_cpu_blocks,
            cost=CostModel(
                step_us=self.simulate_step_us,
                token_us=self.simulate_token_us,
                sequence_us=self.simulate_sequence_us,
                block_us=self.simulate_block_us,
            ),
            max_model_len=DEFAULT_MAX_MODEL_LEN if max_model_len is None else max_model_len,
        )
