"""What the prefix cache has of a sequence."""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class GroupHit:
    """The blocks of one cache group that rows after the found tokens read."""

    first: int = 0
    """Index of the first of them in the sequence's table."""
    blocks: Sequence[int] = ()
    """Device blocks; ~b for block b on the host."""
    ends_inside: bool = False
    """Whether the found tokens end inside the last block, which must be copied."""

    @property
    def shared(self) -> Sequence[int]:
        """The device blocks that can be used as they are."""
        full = self.blocks[:-1] if self.ends_inside else self.blocks
        return [block for block in full if block >= 0]


@dataclass(frozen=True, slots=True)
class PrefixHit:
    """The first tokens of a waiting sequence that the cache has, until something is allocated."""

    num_tokens: int
    """On device and host together."""
    groups: Sequence[GroupHit]

    @property
    def host_blocks(self) -> list[int]:
        """The blocks that must be moved to the device."""
        return [~block for group in self.groups for block in group.blocks if block < 0]

    @property
    def shared(self) -> list[int]:
        """The device blocks that can be used as they are."""
        return [block for group in self.groups for block in group.shared]

    @property
    def copied(self) -> list[int]:
        """The device blocks of which a part was found."""
        lasts = [group.blocks[-1] for group in self.groups if group.ends_inside]
        return [block for block in lasts if block >= 0]

    @property
    def num_moves(self) -> int:
        """Number of moves from the host that it takes to use them all."""
        return len(self.host_blocks)


def no_hit(num_groups: int) -> PrefixHit:
    """Nothing is found."""
    return PrefixHit(0, [GroupHit()] * num_groups)
