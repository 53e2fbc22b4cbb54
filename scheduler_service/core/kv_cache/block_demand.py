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
        self.per_fork = sum(group.num_blocks for group in groups)
        """Blocks of the states of a sequence that forks from another one."""
        self.per_token = sum(group.has_tokens for group in groups)
        """Most blocks that a sequence needs to write its next token to memory of its own."""
        self.per_row = self.per_token + self.per_fork
        """The same, with those of a copy of its states."""

    def of(self, num_tokens: int, num_source_tokens: int = 0, num_forks: int = 0) -> int:
        """Most blocks that a sequence of `num_tokens` tokens, with a source, has at a time, and its
        forks at first."""
        sizes = num_tokens, self._max_chunk, num_source_tokens
        return sum(group.max_blocks(*sizes) for group in self._groups) + num_forks * self.per_fork

    def of_all(self, num_tokens: int, num_source_tokens: int, count: int) -> int:
        """Blocks of `count` sequences with `num_tokens` tokens in all, and to grow."""
        mean, mean_source = (-(-n // max(1, count)) for n in (num_tokens, num_source_tokens))
        numbers = (
            min(
                group.max_blocks(num_tokens, 0, num_source_tokens),
                count * group.max_blocks(mean, self._max_chunk, mean_source),
            )
            for group in self._groups
            if not group.is_state
        )
        return sum(numbers) + count * (self.per_token + self.per_fork)

    def after(
        self,
        num_tokens: int,
        hit: PrefixHit,
        is_shared: Callable[[int], bool],
        *,
        branches: Sequence[int] = (),
        num_forks: int = 0,
    ) -> list[int]:
        """By group: most blocks that a sequence of `num_tokens` tokens has at a time, and its forks
        at first, without those of a hit that `is_shared`. `branches`: positions at which others go
        on from it, which keep what is read there."""
        numbers = []
        for group, found in zip(self._groups, hit.groups, strict=True):
            if group.is_state:
                numbers.append(group.num_blocks * (1 + num_forks))
                continue
            shared = [block >= 0 and is_shared(block) for block in found.full]
            end = group.max_blocks(num_tokens, 0, hit.num_source_tokens)
            if not group.span:
                numbers.append(end - sum(shared))
                continue
            first = found.first + (shared.index(False) if False in shared else len(shared))
            number = min(group.max_blocks(num_tokens, self._max_chunk), end - first)
            numbers.append(min(number + _num_read_at(group, branches), end - first))
        return numbers

    def hit_of(self, num_tokens: int, num_source_tokens: int) -> PrefixHit:
        """A hit of `num_tokens` tokens, which fill blocks in every group; its blocks stand for
        others. States are not among them."""
        groups = []
        for group in self._groups:
            if group.is_state:
                groups.append(GroupHit())
                continue
            first = group.first_needed(num_tokens) // group.block_tokens
            end = group.max_blocks(num_tokens, 0, num_source_tokens)
            groups.append(GroupHit(first, [0] * (end - first)))
        return PrefixHit(num_tokens, groups, num_source_tokens)


def _num_read_at(group: CacheGroup, positions: Sequence[int]) -> int:
    """Number of blocks that rows at any of these positions read of the tokens before it."""
    tokens = group.block_tokens
    ranges = (range(group.first_needed(at) // tokens, at // tokens) for at in positions)
    return len({index for indices in ranges for index in indices})
