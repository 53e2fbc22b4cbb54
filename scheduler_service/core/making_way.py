"""Room in a batch for a request that goes ahead of others, at their expense."""

from collections.abc import Iterable
from itertools import chain

from scheduler_service.core.config import SchedulerConfig
from scheduler_service.core.kv_cache.block_manager import AllocStatus, BlockManager
from scheduler_service.core.kv_cache.prefix_cache import NoPrefixCache, PrefixCache
from scheduler_service.core.policies import Policy
from scheduler_service.core.scheduling.running_set import RunningSet
from scheduler_service.core.sequence import SequenceGroup


class MakingWay:
    """Finds who must leave the batch. The policy says who may have to.

    Groups of beams stay: their sequences come and go in every step, so that what they would free
    cannot be told.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        policy: Policy,
        blocks: BlockManager,
        prefixes: PrefixCache | NoPrefixCache,
        running: RunningSet,
    ) -> None:
        self._max_num_seqs = config.max_num_seqs
        self._policy = policy
        self._blocks = blocks
        self._prefixes = prefixes
        self._running = running
        self._in_vain: tuple[SequenceGroup, int] | None = None
        """Who asked last when nobody yielded, and the batch's changes until then: it asks in every
        step, and while the same are in the batch the answer is the same."""

    def find(
        self, group: SequenceGroup, groups: Iterable[SequenceGroup]
    ) -> list[SequenceGroup] | None:
        """Who must leave the batch for a waiting group to be admitted, the fewest, the first to
        leave first. None if it goes ahead of none of the `groups` that are here, running or not,
        or finds no room even so."""
        question = (group, self._running.num_changes)
        if question == self._in_vain:
            return None
        yielding = self._policy.yielding(group, groups)
        first = next(yielding, None)
        if first is None:
            self._in_vain = question
            return None
        found = self._prefixes.find(group.longest)
        victims: list[SequenceGroup] = []
        num_places = num_blocks = 0
        for other in chain([first], yielding):
            if self._has_room(group, found, num_places, num_blocks):
                return victims
            if other.num_running and not other.is_lockstep:
                victims.append(other)
                num_places += other.num_running
                num_blocks += self._num_blocks_of(other)
        return victims if self._has_room(group, found, num_places, num_blocks) else None

    def _has_room(
        self, group: SequenceGroup, found: list[int], num_places: int, num_blocks: int
    ) -> bool:
        """Whether the group could be admitted if so many places and blocks more were free."""
        num_taken = self._running.num_places - num_places + len(group.waiting())
        verdict = self._blocks.can_allocate(group.max_known_tokens, found, -num_blocks)
        return num_taken <= self._max_num_seqs and verdict is AllocStatus.OK

    def _num_blocks_of(self, group: SequenceGroup) -> int:
        """Blocks that come free when the group leaves."""
        seq_ids = [seq.seq_id for seq in group.running() if self._blocks.holds(seq.seq_id)]
        return self._blocks.num_own_blocks(seq_ids)
