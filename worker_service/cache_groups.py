"""Cache groups: layers whose KV, or state, is kept for the same time.

Nothing here imports torch.
"""

from dataclasses import dataclass
from enum import Enum


class CacheLifetime(Enum):
    """How long what a token adds to a cache is kept; `model.proto` defines each."""

    GROWING = "growing"
    WINDOW = "window"
    CHUNK = "chunk"
    STATE = "state"
    FIXED = "fixed"


@dataclass(frozen=True, kw_only=True, slots=True)
class CacheGroup:
    """One cache group, as `model.proto` describes it."""

    lifetime: CacheLifetime = CacheLifetime.GROWING
    block_tokens: int = 0
    """Tokens per block; 0 in a group of states."""

    span: int = 0
    """Tokens of a window or a chunk; 0 elsewhere."""

    num_blocks: int = 0
    """Blocks of a sequence in a group of states; 0 elsewhere."""

    @property
    def has_tokens(self) -> bool:
        """Whether its blocks hold tokens of the sequence, as opposed to a state or a source."""
        return self.lifetime not in (CacheLifetime.STATE, CacheLifetime.FIXED)

    @property
    def chunk(self) -> int:
        """Tokens of a chunk, which see no other chunk; 0: there are none."""
        return self.span if self.lifetime is CacheLifetime.CHUNK else 0

    def table_width(self, num_tokens: int) -> int:
        """Entries of the block table of a sequence of this length."""
        return -(-num_tokens // self.block_tokens) if self.has_tokens else self.num_blocks

    def first_visible(self, position: int) -> int:
        """The first position that the token at `position` sees. Blocks whose tokens all precede
        it, for the next token of a sequence to be computed, are released."""
        if self.lifetime is CacheLifetime.WINDOW:
            return max(0, position - self.span + 1)
        if self.lifetime is CacheLifetime.CHUNK:
            return position // self.span * self.span
        return 0
