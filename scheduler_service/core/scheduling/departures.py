"""Groups on their way from a worker group to others of its model: it drains, or has become too
small for them.

A group leaves the batch at once, so that no step is planned for it any more, and is gone when the
results of the steps under way are in: their tokens count, and nothing comes in later that could be
taken for the result of a row that it gets elsewhere.
"""

from collections.abc import Iterator

from scheduler_service.core.kv_cache.prefix_cache import PrefixCache
from scheduler_service.core.scheduling.pipeline import Pipeline
from scheduler_service.core.scheduling.preemption import SwapManager
from scheduler_service.core.scheduling.worker_group_state import RunningSet
from scheduler_service.core.sequence import SequenceGroup, SequenceStatus
from scheduler_service.core.stats.request_timing import RequestEvent


class MigratingGroups:
    """Groups without a place, or blocks, in their worker group, which they are to leave."""

    def __init__(
        self,
        prefixes: PrefixCache,
        running: RunningSet,
        swapping: SwapManager,
        pipeline: Pipeline,
    ) -> None:
        self._prefixes = prefixes
        self._running = running
        self._swapping = swapping
        self._pipeline = pipeline
        self._seq_groups: dict[SequenceGroup, None] = {}

    def __contains__(self, seq_group: SequenceGroup) -> bool:
        return seq_group in self._seq_groups

    def __iter__(self) -> Iterator[SequenceGroup]:
        return iter(self._seq_groups)

    def begin(self, seq_group: SequenceGroup, now_us: int) -> None:
        """Let a group leave that is in no queue. It has begun here or elsewhere."""
        self._leave_kv_behind(seq_group, now_us)
        seq_group.clock.recover(now_us)
        seq_group.note(RequestEvent.MOVED, now_us)
        self._seq_groups[seq_group] = None

    def discard(self, seq_group: SequenceGroup) -> None:
        """The group has ended, if it was one of these."""
        self._seq_groups.pop(seq_group, None)

    def take_gone(self) -> list[SequenceGroup]:
        """Groups without rows in flight, which are to be placed elsewhere."""
        if not self._seq_groups:
            return []
        in_flight = {seq.seq_group for seq in self._pipeline.open_rows()}
        gone = [seq_group for seq_group in self._seq_groups if seq_group not in in_flight]
        for seq_group in gone:
            del self._seq_groups[seq_group]
        return gone

    def _leave_kv_behind(self, seq_group: SequenceGroup, now_us: int) -> None:
        """Free a group's blocks on device and host: it is computed again where it goes.

        Whoever wants its KV to go along begins here: the blocks would be freed only when they have
        been copied, and the group would come into its new batch as from the host, with all but the
        last tokens computed (`SwapManager.swap_in`).
        """
        for seq in seq_group.running():
            self._prefixes.note_departure(seq)
            if seq.status is SequenceStatus.RUNNING:  # else it left with the one it forks from
                self._running.vacate(seq, now_us)
        for seq in seq_group.swapped():
            self._swapping.end(seq)
            seq.preempt()
        self._running.drop_ended()  # before it runs again, elsewhere
