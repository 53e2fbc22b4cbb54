"""What the prefix cache has of a sequence."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from scheduler_service.core.kv_cache.prefix_keys import CacheableSequence

S = TypeVar("S", bound=CacheableSequence)


@dataclass(frozen=True, slots=True)
class GroupHit:
    """The blocks of one cache group that rows after the found tokens read."""

    first: int = 0
    """Index of the first of them in the sequence's table."""
    blocks: Sequence[int] = ()
    """Device blocks; ~b for block b on the host."""
    num_copied: int = 0
    """The last blocks that must be copied, because the sequence will write to them: the one in
    which the found tokens end, or a state."""

    @property
    def full(self) -> Sequence[int]:
        """The blocks that can be used as they are."""
        return self.blocks[: len(self.blocks) - self.num_copied]

    @property
    def shared(self) -> Sequence[int]:
        """Those of them on the device."""
        return [block for block in self.full if block >= 0]

    @property
    def copied(self) -> Sequence[int]:
        """The device blocks that must be copied."""
        return [block for block in self.blocks[len(self.full) :] if block >= 0]


@dataclass(frozen=True, slots=True)
class PrefixHit:
    """The first tokens of a waiting sequence that the cache has, until something is allocated."""

    num_tokens: int
    """On device and host together."""
    groups: Sequence[GroupHit]
    num_source_tokens: int = 0
    """Tokens of the source that it attends to, found or not."""

    @property
    def host_blocks(self) -> list[int]:
        """The blocks that must be moved to the device."""
        return [~block for group in self.groups for block in group.blocks if block < 0]

    @property
    def shared(self) -> list[int]:
        """The device blocks that can be used as they are."""
        return [block for group in self.groups for block in group.shared]

    @property
    def num_moves(self) -> int:
        """Number of moves from the host that it takes to use them all."""
        return len(self.host_blocks)


def no_hit(num_groups: int, num_source_tokens: int) -> PrefixHit:
    """Nothing is found."""
    return PrefixHit(0, [GroupHit()] * num_groups, num_source_tokens)


@dataclass(frozen=True, slots=True)
class JointStart(Generic[S]):
    """Where the first tokens of one of several sequences come from that are admitted together."""

    seq: S
    hit: PrefixHit
    source: S | None
    """The sequence before it that shares more of its tokens with it than are found, if any."""
    num_tokens: int
    """Tokens that are found or shared, and need not be computed for it."""
