"""What the cache groups of a worker group have in memory and have found, for status pages."""

from dataclasses import dataclass

from scheduler_service.core.kv_cache.manager import KVCacheManager


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


def usage_of(cache: KVCacheManager) -> list[CacheGroupUsage]:
    """What each cache group has and has found."""
    tables, on_host = cache.tables, cache.host.pool.cached.num_entries
    cached, num_used = tables.pool.cached.num_entries, _num_used(cache)
    return [
        CacheGroupUsage(
            lifetime=f"{group.lifetime} {group.span}" if group.span else group.lifetime.value,
            block_tokens=group.block_tokens,
            num_state_blocks=group.num_blocks,
            num_used_blocks=num_used[number],
            num_cached=cached[number],
            num_host_cached=on_host[number],
            num_queried_tokens=cache.admission.num_queried,
            num_found_tokens=cache.admission.num_found[number],
        )
        for number, group in enumerate(tables.groups)
    ]


def _num_used(cache: KVCacheManager) -> list[int]:
    """Device blocks in use by cache group. All that are not in the tables of other groups are
    counted as the first growing group's, whose tables are too long to be searched."""
    groups, held, device = cache.tables.groups, cache.tables.held.values(), cache.tables.pool
    growing = next((number for number, group in enumerate(groups) if group.is_growing), None)
    used = [
        0 if n == growing else len(set().union(*(h.tables[n].blocks for h in held)))
        for n in range(len(groups))
    ]
    if growing is not None:
        used[growing] = device.num_blocks - device.num_free_blocks - sum(used)
    return used
