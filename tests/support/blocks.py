"""Block managers with blocks of four tokens, whose keys are the tokens themselves."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from scheduler_service.core.config import CacheGroup
from scheduler_service.core.context import ContextPart
from scheduler_service.core.kv_cache.block_manager import BlockManager
from scheduler_service.core.kv_cache.block_pool import CachedBlocks
from scheduler_service.core.kv_cache.prefix_hit import GroupHit, PrefixHit
from scheduler_service.core.kv_cache.prefix_keys import PrefixKeys

BLOCK_SIZE = 4


def keys_of(tokens: Sequence[int]) -> list[bytes]:
    """Keys of the blocks that these tokens fill: the tokens themselves."""
    ends = range(BLOCK_SIZE, len(tokens) + 1, BLOCK_SIZE)
    return [bytes(tokens[:end]) for end in ends]


def make_manager(
    num_gpu_blocks: int, num_cpu_blocks: int = 0, watermark: float = 0.0
) -> BlockManager:
    """A manager of one group that keeps all tokens."""
    return BlockManager(
        num_gpu_blocks=num_gpu_blocks,
        num_cpu_blocks=num_cpu_blocks,
        groups=[CacheGroup(block_tokens=BLOCK_SIZE)],
        watermark=watermark,
        key_tokens=BLOCK_SIZE,
    )


def hit(found: Sequence[int] = (), stored: Sequence[int] = ()) -> PrefixHit:
    """Blocks that are found on the device, and then on the host."""
    blocks = [*found, *(~block for block in stored)]
    return PrefixHit(len(blocks) * BLOCK_SIZE, [GroupHit(0, blocks)])


def allocate(
    manager: BlockManager, seq_id: int, num_tokens: int, found: Sequence[int] = ()
) -> list[int]:
    """A sequence's new table."""
    manager.allocate(seq_id, num_tokens, hit(found))
    return table_of(manager, seq_id)


def table_of(manager: BlockManager, seq_id: int) -> list[int]:
    [table] = manager.tables(seq_id)
    return list(table.blocks)


def find(cached: CachedBlocks, keys: Sequence[bytes]) -> list[int]:
    """The blocks with these keys, up to the first that is not found."""
    blocks = map(cached.find, keys)
    return [block for block in iter(lambda: next(blocks, None), None) if block is not None]


@dataclass(eq=False)
class KnownSequence:
    """A sequence whose tokens are all known."""

    seq_id: int
    tokens: list[int]
    prefix_keys: PrefixKeys = field(default_factory=PrefixKeys)
    context: tuple[ContextPart, ...] = ()
    is_prefilling: bool = False
    next_position: int = 0

    @property
    def length(self) -> int:
        return len(self.tokens)

    num_known = length
    max_reusable_tokens = length
    num_prompt_tokens = length

    def known_tokens(self, start: int, end: int) -> list[int]:
        return self.tokens[start:end]
