"""How many blocks sequences need: arithmetic over the cache groups."""

from collections.abc import Callable, Sequence

from scheduler_service.core.config import CacheGroup
from scheduler_service.core.kv_cache.prefix_hit import GroupHit, PrefixHit


class BlockDemand:
    """Numbers of blocks of sequences whose prompts are computed in chunks."""

    def __init__(self, groups: Sequence[CacheGroup], max_chunk: int) -> None:
        """`max_chunk`: most tokens of a prompt in a step, 0: all."""
        self._groups = groups
        self._max_chunk = max_chunk

    def of(self, num_tokens: int) -> int:
        """Most blocks that a sequence of `num_tokens` tokens has at a time."""
        return sum(group.max_blocks(num_tokens, self._max_chunk) for group in self._groups)

    def of_all(self, num_tokens: int, count: int) -> int:
        """Blocks of `count` sequences with `num_tokens` tokens in all, and to grow."""
        mean = -(-num_tokens // max(1, count))
        numbers = (
            min(group.max_blocks(num_tokens, 0), count * group.max_blocks(mean, self._max_chunk))
            for group in self._groups
        )
        return sum(numbers) + count * len(self._groups)

    def after(
        self,
        num_tokens: int,
        hit: PrefixHit,
        is_shared: Callable[[int], bool],
        num_upfront: int = 0,
    ) -> list[int]:
        """By group: most blocks that a sequence of `num_tokens` tokens has at a time, without those
        of a hit that `is_shared`. `num_upfront`: tokens for which all are allocated at once."""
        numbers = []
        for group, found in zip(self._groups, hit.groups, strict=True):
            full = found.blocks[:-1] if found.ends_inside else found.blocks
            shared = [block >= 0 and is_shared(block) for block in full]
            end = -(-num_tokens // group.block_tokens)
            if not group.span:
                numbers.append(end - sum(shared))
                continue
            first = found.first + (shared.index(False) if False in shared else len(shared))
            number = min(group.max_blocks(num_tokens, self._max_chunk), end - first)
            numbers.append(max(number, -(-num_upfront // group.block_tokens) - first))
        return numbers

    def hit_of(self, num_tokens: int) -> PrefixHit:
        """A hit of `num_tokens` tokens, which fill blocks in every group; its blocks stand for
        others."""
        groups = []
        for group in self._groups:
            first = group.first_needed(num_tokens) // group.block_tokens
            groups.append(GroupHit(first, [0] * (num_tokens // group.block_tokens - first)))
        return PrefixHit(num_tokens, groups)
