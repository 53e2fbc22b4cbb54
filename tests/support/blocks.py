"""KV caches with blocks of four tokens, and sequences whose tokens are known."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from scheduler_service.core.config import CacheGroup, SchedulerConfig
from scheduler_service.core.context import ContextPart
from scheduler_service.core.kv_cache.block_pool import CachedBlocks
from scheduler_service.core.kv_cache.manager import KVCacheManager
from scheduler_service.core.kv_cache.prefix_hit import GroupHit, PrefixHit
from scheduler_service.core.kv_cache.prefix_keys import CacheableSequence, PrefixKeys
from tests.support.core_driver import make_capacity

BLOCK_SIZE = 4


def make_manager(
    num_gpu_blocks: int = 4,
    num_cpu_blocks: int = 0,
    *groups: CacheGroup,
    max_chunk_tokens: int = 0,
    **config: float,
) -> KVCacheManager:
    """The cache of one group that keeps all tokens, or of these."""
    capacity = make_capacity(
        num_gpu_blocks=num_gpu_blocks,
        num_cpu_blocks=num_cpu_blocks,
        cache_groups=groups or (CacheGroup(block_tokens=BLOCK_SIZE),),
        max_chunk_tokens=max_chunk_tokens,
    )
    values = {"watermark": 0.0} | config
    return KVCacheManager(SchedulerConfig(**values), capacity)  # type: ignore[arg-type]


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

    @property
    def growth(self) -> "KnownSequence":
        return self

    num_known = length
    max_reusable_tokens = length
    num_prompt_tokens = length
    num_confirmed = length

    def known_tokens(self, start: int, end: int) -> list[int]:
        return self.tokens[start:end]


def sequence(seq_id: int, num_tokens: int = 0, keys: Sequence[bytes] = ()) -> KnownSequence:
    """A sequence that is compared by its id alone; `keys`: of its units of four tokens."""
    prefix_keys = PrefixKeys()
    prefix_keys[BLOCK_SIZE, 0] = list(keys)
    return KnownSequence(seq_id, [0] * num_tokens, prefix_keys)


def hit(found: Sequence[int] = (), stored: Sequence[int] = ()) -> PrefixHit:
    """Blocks that are found on the device, and then on the host."""
    blocks = [*found, *(~block for block in stored)]
    return PrefixHit(len(blocks) * BLOCK_SIZE, [GroupHit(0, blocks)])


def allocate(
    manager: KVCacheManager, seq_id: int, num_tokens: int, found: Sequence[int] = ()
) -> list[int]:
    """A sequence's new table."""
    manager.admission.admit(sequence(seq_id, num_tokens), hit(found))
    return device_blocks(manager, sequence(seq_id))


def device_blocks(manager: KVCacheManager, seq: CacheableSequence) -> list[int]:
    """A sequence's blocks on the device, in order."""
    return [*manager.tables.held[seq.seq_id].blocks()]


def host_blocks(manager: KVCacheManager, seq: CacheableSequence) -> list[int]:
    """A swapped-out sequence's blocks on the host, in order."""
    return [*manager.swap.held[seq.seq_id].blocks()]


def num_free_blocks(manager: KVCacheManager) -> tuple[int, int]:
    """Blocks on device and host that no sequence uses."""
    return manager.tables.pool.num_free_blocks, manager.host.pool.num_free_blocks


def set_keys(manager: KVCacheManager, seq_id: int, keys: Sequence[bytes]) -> None:
    """Let a sequence's first blocks be found by these keys."""
    manager.prefixes.offer(sequence(seq_id, keys=keys), len(keys) * BLOCK_SIZE)


def find(cached: CachedBlocks, keys: Sequence[bytes]) -> list[int]:
    """The blocks with these keys, up to the first that is not found."""
    blocks = map(cached.find, keys)
    return [block for block in iter(lambda: next(blocks, None), None) if block is not None]
