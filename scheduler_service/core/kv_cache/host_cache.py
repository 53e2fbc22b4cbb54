"""The prefix cache's second tier: host memory of one worker group.

It holds cached blocks that were evicted from the device, or will be soon. A block with
contents that is given to another sequence must first be copied to the host, and the forward pass of
that plan waits for the copy. So every plan also copies some of the blocks that later plans will
evict: nothing writes to those in this step, so the worker can copy them while it computes, and
evicting them later copies nothing.
"""

import math
from collections import Counter
from collections.abc import Sequence

from scheduler_service.core.kv_cache.block_pool import BlockPool, Contents

PLANS_AHEAD = 2
"""Blocks that are kept ready, by the largest number that a recent plan allocated; and the most
blocks that a plan copies ahead, by the number that it allocates."""

SPARE_COPIES = 8
"""Blocks that a plan may copy ahead in addition."""

DECAY = 0.99
"""Weight of the largest number of blocks after one more plan: half of it is left after 69 plans."""


class HostCache:
    """Cached blocks over one pool of host blocks, which swapped-out sequences share.

    A block with a key has the same contents as a device block that has or had this key; if they do
    not fill it, no sequence uses it. Blocks that are in no table are cached: they are kept until
    swapped-out sequences or newer cached blocks need the memory, and the least recently used is
    evicted first.

    Blocks that the plan under construction reads or writes are pinned until `end_plan`. Its
    swap-outs run before its swap-ins, so a block that it reads must not be a target; and no block
    may be a target twice.

    Invariant: a block's reference count is the number of tables that contain it, plus one for each
    time the plan under construction reads or writes it, and for each lease.
    """

    def __init__(self, num_blocks: int) -> None:
        self.pool = BlockPool(num_blocks)
        self._pinned: list[int] = []
        """References that end with the plan; a sequence's blocks are in reverse order."""
        self._kept: dict[int, int] = {}
        """Cached device blocks that this plan copies to the host, by host block: evicted ones in
        the order of eviction, then those that will be evicted next."""

    def pin(self, blocks: Sequence[int]) -> None:
        """Keep blocks that the plan under construction reads or writes, until it is complete: a
        reference of each ends then."""
        self._pinned += reversed(blocks)

    def keep(self, device_blocks: Sequence[int], contents: Contents) -> None:
        """Copy an entry of the device that is about to be overwritten, in this plan or a later one,
        if it has no copy here and host blocks can be found."""
        found = self.pool.cached.find(contents.key, contents.group)
        if found is not None:
            self.pool.cached.touch(found)
            return
        blocks = self._room_for(len(device_blocks))
        if blocks:
            self.pool.cached.add(blocks[0], contents, blocks)
            self._pinned += blocks
            self._kept |= zip(blocks, device_blocks, strict=True)

    def _room_for(self, num_blocks: int) -> list[int]:
        """Blocks for an entry; none if too few are free. For a single one, the copy of the first
        block that was evicted for this plan and is not used is given up; it is the last block of
        its sequence, which could not be found without those before it."""
        if self.pool.num_free_blocks >= num_blocks:
            return self.pool.allocate(num_blocks)
        for block in self._kept if num_blocks == 1 else ():
            is_single = len(self.pool.cached.entry(block)) == 1
            if is_single and self.pool.num_references(block) == 1:
                del self._kept[block]
                self._pinned.remove(block)
                self.pool.cached.discard(block)
                return [block]
        return []

    def fetch(self, blocks: Sequence[int]) -> None:
        """Pin cached blocks that the plan under construction reads."""
        self.pool.share(blocks)
        self.pin(blocks)

    def end_plan(self) -> list[int]:
        """Unpin the plan's blocks: the next plan may write to them. Returns the pairs (device
        block, host block) that the plan must swap out in addition, to keep cached blocks."""
        self.pool.release(self._pinned[::-1])
        self._pinned = []
        kept, self._kept = self._kept, {}
        return [block for host, device in kept.items() for block in (device, host)]

    def check(self, references: Counter[int]) -> None:
        """Assert the invariant, between plans; `references`: of tables and leases, by block."""
        # Blocks that were allocated between plans, for copies of another group's, were evicted; the
        # plan that begins the fetch into them keeps what they held.
        assert sorted(self._pinned) == sorted(self._kept)
        self.pool.check(dict(references + Counter(self._pinned)))


class CopyAhead:
    """Keeps blocks ready to be allocated without a copy: empty ones, and those least recently used.

    The blocks stay cached on the device until they are evicted. At most a quarter of the free host
    blocks hold such copies, so that the host does not evict them before the device does. A host
    with room for few of them has none: it keeps what was evicted last.
    """

    def __init__(self, device: BlockPool, host: HostCache) -> None:
        self._device = device
        self._host = host
        self._num_allocated = 0
        """Blocks that the pool had allocated when the last plan was complete."""
        self._demand = 0.0
        """The largest number of blocks that a recent plan allocated."""

    def end_plan(self, *, has_rows: bool) -> None:
        """Take in what the plan under construction has allocated, and copy blocks ahead in it if
        it has rows: the forward pass hides the copies, and no plan is made for them alone."""
        num_allocated = self._device.num_allocated - self._num_allocated
        self._num_allocated = self._device.num_allocated
        self._demand = max(float(num_allocated), DECAY * self._demand)
        if not has_rows:
            return
        room = self._host.pool.num_free_blocks // 4
        if room < SPARE_COPIES:
            return
        num_wanted = min(math.ceil(PLANS_AHEAD * self._demand), room)
        num_missing = num_wanted - self._device.num_ready_blocks
        most = PLANS_AHEAD * num_allocated + SPARE_COPIES
        for blocks, contents in self._device.cached.save(min(num_missing, most)):
            self._host.keep(blocks, contents)
