"""The core's records of what is in blocks that no sequence may use, kept for the next core.

The worker does not read a record. It knows when one ends: a plan removes the record of a block
before any plan writes to the block, so what is in flight when a core dies changes no recorded
block.

The last tokens of sequences are in no record yet when a core dies. So the sequences that the
stream has then are kept, too, until the next stream's first plan.
"""

import logging
from collections.abc import Iterator, Sequence

from worker_service.errors import InvalidPlan
from worker_service.plan import CachedEntry, KeptSequence, StepPlan

logger = logging.getLogger(__name__)


class CachedBlocks:
    """The records of one worker's caches. Used on the model thread.

    Memory: an entry of at most one record for each block.
    """

    def __init__(self, num_device_blocks: int = 0, num_host_blocks: int = 0) -> None:
        self.sizes = (num_device_blocks, num_host_blocks)
        self.key_seed: int | None = None
        """Of the recorded keys; None before the first core has sent one."""
        self._entries: dict[int, CachedEntry] = {}
        """By first block, ~b for host block b; the first recorded first."""
        self.sequences: Sequence[KeptSequence] = ()
        """Those of the last stream, once it has ended without a failure."""
        self._failed_step_id = 0
        """The last step with a failed row whose sequence the core has not withdrawn."""

    def __len__(self) -> int:
        return len(self._entries)

    def entries(self) -> Iterator[CachedEntry]:
        """All entries, the first recorded first."""
        return iter(self._entries.values())

    def clear(self) -> None:
        """Remove everything, because a step has failed: nobody knows what it has written."""
        self._entries.clear()
        self.sequences = ()
        self._failed_step_id = 0

    def add_failure(self, step_id: int) -> None:
        """Record that a row has failed: what its sequence computed may be recorded. Called before
        the core has the result, on any thread."""
        self._failed_step_id = step_id

    def settle(self) -> None:
        """Remove everything if there are failures that the last core had no time to withdraw;
        called once its stream is closed."""
        if self._failed_step_id:
            logger.warning("cached blocks are dropped reason=a row failed as the core died")
            self.clear()

    def begin(self, plan: StepPlan) -> None:
        """Remove the records that a plan ends; called before it is executed. Raises InvalidPlan
        for blocks that the caches do not have, and for records before the first seed."""
        self.sequences = ()
        if plan.withdrawn_step_id >= self._failed_step_id:
            self._failed_step_id = 0
        if plan.key_seed is not None:
            self._entries.clear()
            self.key_seed = plan.key_seed
        for block in plan.uncached_blocks.tolist():
            self._entries.pop(block, None)
        if plan.cached_blocks and self.key_seed is None:
            raise InvalidPlan("cached_blocks", "expected a key_seed in this plan or an earlier one")
        num_device, num_host = self.sizes
        for entry in plan.cached_blocks:
            for block in entry.blocks:
                if not -num_host <= block < num_device:
                    expected = f"expected {-num_host} to {num_device - 1}, got {block}"
                    raise InvalidPlan("cached_blocks.blocks", expected)

    def finish(self, plan: StepPlan) -> None:
        """Add a plan's records; called once all of its work is queued on the device."""
        for entry in plan.cached_blocks:
            self._entries.pop(entry.blocks[0], None)
            self._entries[entry.blocks[0]] = entry
