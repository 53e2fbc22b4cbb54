"""Block managers with blocks of four tokens, whose keys are the tokens themselves."""

from collections.abc import Sequence

from scheduler_service.core.kv_cache.block_manager import BlockManager

BLOCK_SIZE = 4


def keys_of(tokens: Sequence[int]) -> list[bytes]:
    """Keys of the blocks that these tokens fill: the tokens themselves."""
    ends = range(BLOCK_SIZE, len(tokens) + 1, BLOCK_SIZE)
    return [bytes(tokens[:end]) for end in ends]


def make_manager(num_gpu_blocks: int, num_cpu_blocks: int = 0) -> BlockManager:
    return BlockManager(
        num_gpu_blocks=num_gpu_blocks, num_cpu_blocks=num_cpu_blocks, block_size=4, watermark=0.0
    )
