"""What a worker group has capacity for: all that the router asks of it."""

from collections.abc import Mapping
from dataclasses import dataclass

from scheduler_service.core.config import SchedulerConfig, WorkerGroupCapacity
from scheduler_service.core.kv_cache.block_manager import BlockManager
from scheduler_service.core.kv_cache.prefix_cache import PrefixCache
from scheduler_service.core.request_queue import WaitingQueue
from scheduler_service.core.scheduling.preemption import (
    SwapManager,
    VictimSelector,
    is_fetch_cheaper,
)
from scheduler_service.core.scheduling.worker_group_state import RunningSet
from scheduler_service.core.sequence import SequenceGroup, SequenceStatus
from scheduler_service.core.stats.throughput import StepRates

RUNNING = SequenceStatus.RUNNING


@dataclass(frozen=True, kw_only=True, slots=True)
class CapacityEstimate:
    """What a group would find in a worker group."""

    num_tokens_to_compute: int
    """Those that neither device nor host has."""
    num_blocks_to_fetch: int
    """Blocks that the host has; none if they are sooner computed again."""
    shortage: float
    """The share of the sequences there that must end before it finds places and blocks beside
    those that wait; 0 if none."""


class CapacityProbe:
    """Questions about one worker group; none changes anything."""

    def __init__(
        self,
        config: SchedulerConfig,
        capacity: WorkerGroupCapacity,
        blocks: BlockManager,
        prefixes: PrefixCache,
        running: RunningSet,
        swapping: SwapManager,
        rates: StepRates,
        victims: VictimSelector,
        *,
        waiting: WaitingQueue,
        ahead: WaitingQueue,
        seq_groups: Mapping[SequenceGroup, None],
    ) -> None:
        """`seq_groups`: all that are placed there."""
        self._config = config
        self._capacity = capacity
        self._blocks = blocks
        self._prefixes = prefixes
        self._running = running
        self._swapping = swapping
        self._rates = rates
        self._victims = victims
        self._waiting = waiting
        self._ahead = ahead
        self._seq_groups = seq_groups

    @property
    def max_step_tokens(self) -> int:
        """Tokens of the largest step."""
        return self._config.max_num_batched_tokens

    @property
    def num_sequences(self) -> int:
        """Sequences here, in the batch or waiting for it."""
        num_waiting = self._waiting.num_sequences + self._ahead.num_sequences
        return self._running.num_places + num_waiting

    @property
    def caches_prefixes(self) -> bool:
        """Whether what one sequence has computed serves others."""
        return self._config.enable_prefix_caching

    def num_tokens_to_compute(self, seq_group: SequenceGroup) -> int:
        """Tokens of a group that has not run that are in no block here, on device or host."""
        longest = seq_group.longest
        num_found = len(self._prefixes.find(longest))
        num_found += len(self._prefixes.find_on_host(longest, num_found))
        return longest.num_known - num_found * self._blocks.block_size

    @property
    def has_room(self) -> bool:
        """Whether any group at all may find room here now."""
        if self.num_sequences >= self._config.max_num_seqs:  # the usual case under load, first
            return False
        if self._ahead or self._swapping:
            return False
        # Beyond that it would only wait here, and could not go elsewhere.
        return self.num_tokens_to_prefill < self._config.max_num_batched_tokens

    def estimate(self, seq_group: SequenceGroup) -> CapacityEstimate:
        """What a group would find here that fits."""
        longest = seq_group.longest
        found = self._prefixes.find(longest)
        num_blocks = self._blocks.num_blocks_for(longest.num_known)
        num_promised = self._blocks.num_blocks_for(self._waiting.num_tokens) + len(self._waiting)
        blocks_short = self._blocks.num_blocks_short(num_blocks - len(found), found, num_promised)
        num_sequences = self.num_sequences
        places_short = num_sequences + len(seq_group.waiting()) - self._config.max_num_seqs
        num_used = self._capacity.num_gpu_blocks - self._blocks.num_free_blocks
        is_fetched = is_fetch_cheaper(self._rates, self._blocks.block_size)
        stored = self._prefixes.find_on_host(longest, len(found)) if is_fetched else ()
        num_found = (len(found) + len(stored)) * self._blocks.block_size
        return CapacityEstimate(
            num_tokens_to_compute=longest.num_known - num_found,
            num_blocks_to_fetch=len(stored),
            shortage=max(0, places_short / max(1, num_sequences), blocks_short / max(1, num_used)),
        )

    def has_room_for(self, seq_group: SequenceGroup) -> bool:
        """Whether a group that fits would find room here now, if need be by preemption."""
        has_room = self.has_room and self.estimate(seq_group).shortage == 0
        return has_room or self.can_take_ahead(seq_group)

    def can_take_ahead(self, seq_group: SequenceGroup) -> bool:
        """Whether the group would find room here now by preempting others, whether they run or
        wait."""
        if self._ahead or not seq_group.fits(self._capacity):
            return False
        return self._victims.find(seq_group, self._seq_groups) is not None

    @property
    def has_suspect(self) -> bool:
        """Whether a suspect is here. Linear in the groups here."""
        return any(seq_group.is_suspect for seq_group in self._seq_groups)

    @property
    def num_tokens_to_prefill(self) -> int:
        """Tokens of prompts that are not computed yet."""
        prefilling = [seq for seq in self._running.prefilling if seq.status is RUNNING]
        num_begun = sum(seq.length - seq.num_computed for seq in prefilling)
        return num_begun + self._waiting.num_tokens
