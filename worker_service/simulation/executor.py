"""The simulation, as the engine drives it."""

from collections.abc import Iterator

from worker_service.engine.executor import BlockCounts, ModelFacts
from worker_service.errors import OutOfOrder
from worker_service.simulated.executor import SimulatedRunner
from worker_service.simulation.config import SimulationConfig


class SimulatedExecutor:
    """Implements `worker_service.engine.executor.Executor`."""

    def __init__(self, config: SimulationConfig, block_size: int) -> None:
        self._config = config
        self._block_size = block_size

    def load(self) -> ModelFacts:
        """Facts of a model whose tokens depend on nothing but its vocabulary's size."""
        config = self._config
        return ModelFacts(
            architecture="Simulated",
            fingerprint=f"simulated-{config.vocab_size}-{config.eos_token_id}",
            max_model_len=config.max_model_len,
            vocab_size=config.vocab_size,
            eos_token_ids=(config.eos_token_id,),
            bos_token_id=None,
            dtype="none",
            block_size=self._block_size,
            block_bytes=0,
            num_parameters=0,
            batch_invariant=True,
            structured_output=False,  # its tokens have no text
            device="simulated",
            attention_backend="",
        )

    def profile_blocks(self, *, max_num_seqs: int, max_num_batched_tokens: int) -> BlockCounts:
        """As many as the settings say."""
        return BlockCounts(
            num_gpu_blocks=self._config.num_gpu_blocks, num_cpu_blocks=self._config.num_cpu_blocks
        )

    def make_runner(self, num_gpu_blocks: int, num_cpu_blocks: int, epoch: int) -> SimulatedRunner:
        """A runner over empty caches."""
        return SimulatedRunner(
            self._config,
            block_size=self._block_size,
            num_gpu_blocks=num_gpu_blocks,
            num_cpu_blocks=num_cpu_blocks,
        )

    def check_device(self) -> None:
        """There is none to be lost."""

    def interrupt(self) -> None:
        """There are no other ranks to wait for."""

    def assets(self) -> Iterator[tuple[str, bytes]]:
        """None: there is no tokenizer, prompts are token ids."""
        return iter(())

    def start_profile(self) -> None:
        """Refused: there is no device to trace."""
        raise OutOfOrder("a simulated worker has nothing to profile")

    def stop_profile(self) -> str:
        """Refused: no profile is ever running."""
        raise OutOfOrder("no profile is running")
