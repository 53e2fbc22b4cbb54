"""Records of the prefix cache at the workers, from which a later core continues.

A plan carries the changes since the one before it: which blocks are found by which keys, and which
are found no more. A block is found once the result of the plan that computed it is in, and it is
written to again only by the plan that ends its record or a later one. So whatever plans a worker
has executed when the core dies, its records are right, and plans in flight write to none of the
recorded blocks.
"""

import logging
from collections.abc import Iterator, Mapping, Sequence

from scheduler_service.core.config import RECORD_WIDTH, CacheGroup, KeptBlocks
from scheduler_service.core.kv_cache.block_pool import KEY_BYTES, BlockPool, Contents, Tail
from scheduler_service.core.step_plan import CachedBlocks, StepPlan

logger = logging.getLogger(__name__)


class CacheRecords:
    """Adopts the records of one worker group, and keeps them up to date in its plans."""

    def __init__(
        self,
        kept: KeptBlocks | None,
        groups: Sequence[CacheGroup],
        device: BlockPool,
        host: BlockPool,
        *,
        unit: int,
        key_seed: int | None,
    ) -> None:
        """`kept`: None if the workers record nothing; `unit`: tokens of a unit of keys; `key_seed`:
        of all keys here, None if there are none. Nothing is adopted if the workers' keys have
        another seed."""
        self._pools = (device, host)
        self._key_seed: int | None = key_seed or 0
        self._uncached: list[int] = []
        self._withdrawn_step_id = 0
        if kept is None:
            return
        if kept.blocks and key_seed is not None and kept.key_seed == key_seed:
            try:
                entries = dict(_decode(kept, groups, device.num_blocks, host.num_blocks, unit))
            except ValueError as error:
                logger.warning("cached blocks of an earlier core are not used reason=%s", error)
            else:
                self._adopt(entries, kept.stale)
        elif kept.blocks:
            logger.warning("cached blocks of an earlier core are not used reason=other key seed")
        for pool in self._pools:
            pool.cached.changed = {}

    def _adopt(self, entries: Mapping[tuple[int, ...], Contents], stale: Sequence[int]) -> None:
        """Find all entries; those that were recorded last are evicted first, because a prefix is
        recorded before what follows it."""
        ordered = list(entries.items())[::-1]
        on_device = [(blocks, held) for blocks, held in ordered if blocks[0] >= 0]
        on_host = [
            (tuple(~block for block in blocks), held) for blocks, held in ordered if blocks[0] < 0
        ]
        device, host = self._pools
        refused = device.adopt(on_device) + [~block for block in host.adopt(on_host)]
        self._uncached = [*stale, *refused]
        self._key_seed = None

    def reseed(self, seed: int) -> None:
        """Begin the records again, with keys of another seed."""
        self._key_seed = seed

    def add_withdrawal(self, step_id: int) -> None:
        """Record that what the failed rows of a step computed is found no more: their sequences are
        withdrawn."""
        self._withdrawn_step_id = step_id

    def add_to(self, plan: StepPlan) -> None:
        """Add the changes since the last plan, and in the first plan what begins the records."""
        device, host = self._pools
        if device.cached.changed is None or host.cached.changed is None:
            return  # they record nothing
        plan.withdrawn_step_id, self._withdrawn_step_id = self._withdrawn_step_id, 0
        plan.key_seed, self._key_seed = self._key_seed, None
        plan.uncached_blocks, self._uncached = self._uncached, []
        if not device.cached.changed and not host.cached.changed:
            return
        blocks: list[int] = []
        keys: list[bytes] = []
        for pool, is_host in ((device, False), (host, True)):
            for entry, contents in pool.cached.pop_changed():
                first = ~entry[0] if is_host else entry[0]
                if contents is None:
                    plan.uncached_blocks.append(first)
                    continue
                tail = contents.tail
                num_tail_tokens = 0 if tail is None else tail.num_tokens
                num_units, is_full = len(contents.units), int(contents.is_full)
                blocks += (first, contents.group, num_units, is_full, num_tail_tokens)
                for block in entry[1:]:
                    blocks += (~block if is_host else block, contents.group, 0, 0, 0)
                keys += contents.units
                if tail is not None:
                    keys.append(tail.parent)
        if blocks:
            plan.cached_blocks = CachedBlocks(blocks=blocks, keys=b"".join(keys))


def rows_by_entry(blocks: Sequence[int]) -> list[list[Sequence[int]]]:
    """The rows of `CachedBlocks.blocks`, those of an entry together. Raises ValueError if the first
    begins no entry."""
    entries: list[list[Sequence[int]]] = []
    for start in range(0, len(blocks), RECORD_WIDTH):
        row = blocks[start : start + RECORD_WIDTH]
        if row[2]:
            entries.append([])
        elif not entries:
            raise ValueError("the first block begins no entry")
        entries[-1].append(row)
    return entries


def _decode(
    kept: KeptBlocks,
    groups: Sequence[CacheGroup],
    num_device_blocks: int,
    num_host_blocks: int,
    unit: int,
) -> Iterator[tuple[tuple[int, ...], Contents]]:
    """The blocks and the contents of all entries. Raises ValueError for what cannot be in these
    caches."""
    entries = rows_by_entry(kept.blocks)
    rows = [row for entry in entries for row in entry]
    keys = [kept.keys[start : start + KEY_BYTES] for start in range(0, len(kept.keys), KEY_BYTES)]
    if sum(row[2] + (row[4] > 0) for row in rows) != len(keys):
        raise ValueError(f"{len(keys)} keys are not those of {len(entries)} entries")
    blocks = [row[0] for row in rows]
    if len(set(blocks)) < len(blocks):
        raise ValueError("a block is in two entries")
    if not -num_host_blocks <= min(blocks) <= max(blocks) < num_device_blocks:
        raise ValueError(f"expected blocks {-num_host_blocks} to {num_device_blocks - 1}")
    start = 0
    for of_entry in entries:
        _, number, num_units, is_full, num_tail_tokens = of_entry[0]
        entry = tuple(row[0] for row in of_entry)
        _check(number, len(entry), num_units, groups, unit)
        units = tuple(keys[start : start + num_units])
        start += num_units + (num_tail_tokens > 0)
        tail = Tail(keys[start - 1], num_tail_tokens) if num_tail_tokens else None
        yield entry, Contents(number, units, bool(is_full), tail)


def _check(
    number: int, num_blocks: int, num_units: int, groups: Sequence[CacheGroup], unit: int
) -> None:
    """Raises ValueError unless an entry of a group can have as many blocks and units."""
    if not 0 <= number < len(groups):
        raise ValueError(f"there is no cache group {number}")
    group = groups[number]
    max_units = group.block_tokens // unit if group.has_tokens else 1
    if num_blocks != (group.num_blocks if group.is_state else 1) or num_units > max_units:
        raise ValueError(f"cache group {number} has no {num_blocks} blocks with {num_units} units")
