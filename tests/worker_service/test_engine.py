"""What the engine remembers for the core that comes after this one."""

from pathlib import Path

from tests.support.counting_model import loaded_counting_model
from worker_service.config import CacheConfig
from worker_service.engine import Engine
from worker_service.executor import BlockCounts
from worker_service.model_executor import ModelExecutor
from worker_service.profiler import Profiler


class CountingExecutor(ModelExecutor):
    """Counts how often memory is measured."""

    num_profiles = 0

    def profile_blocks(self, *, max_num_seqs: int, max_num_batched_tokens: int) -> BlockCounts:
        self.num_profiles += 1
        return super().profile_blocks(
            max_num_seqs=max_num_seqs, max_num_batched_tokens=max_num_batched_tokens
        )


async def test_memory_is_measured_once_for_each_size_of_batch() -> None:
    executor = CountingExecutor(
        CacheConfig(block_size=4),
        Profiler(Path()),
        lambda: loaded_counting_model(None, block_size=4),
    )
    engine = Engine(executor)
    await engine.load()
    try:
        counts = [(await engine.profile_blocks(n, 64)).num_gpu_blocks for n in (3, 3, 4, 3)]
    finally:
        engine.stop()
    assert counts == [192, 192, 256, 192]
    assert executor.num_profiles == 2
