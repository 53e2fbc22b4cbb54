"""What the cache groups of a worker group have in memory and have found, for status pages."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class CacheGroupUsage:
    """One cache group. Counts of tokens are since the worker group joined."""

    lifetime: str
    """With the span, as in `window 512`."""
    block_tokens: int
    """0 in a group of states."""
    num_state_blocks: int
    """Blocks of one state; 0 elsewhere."""
    num_used_blocks: int
    """Device blocks that sequences have; the first growing group's include leased ones."""
    num_cached: int
    """Entries of the prefix cache on the device, whether or not sequences use them: blocks, or
    saved states."""
    num_host_cached: int
    num_queried_tokens: int
    """Tokens of sequences that were looked up when these were admitted."""
    num_found_tokens: int
    """The first of these tokens that this group had, on device or host; only what all groups have
    is used."""
