"""Who leaves the batch when memory runs out, and how.

A whole group leaves, the last in order: its sequences share blocks, and some of them alone would
hold memory without coming to an end. Only where the group that needs a block is itself the last,
one of its sequences makes room for its siblings: the last of them, which is computed again when
they have freed something.

A group leaves by *swap*, its blocks to host memory and back, or by *recompute*: its blocks are
freed, and its tokens computed again later. `auto` does what costs less by the measured rates:

    swap         block moves, out and back x us_per_moved_block
    recompute    tokens to compute x us_per_prefill_token

Each block is moved once each way, and not to the host if it is there already. With the prefix
cache, sequences find what others have or have computed before them: then the tokens of each block
count once, and only if nobody else has it. (More may be found, unless it is evicted meanwhile.)

As long as nothing of the kind has been measured, a single sequence is recomputed, which takes one
pass over its tokens, and several are swapped: what they share is moved once, but each of them may
have to be computed on its own.
"""

import logging

from scheduler_service.core.config import PreemptionMode, SchedulerConfig
from scheduler_service.core.kv_cache.block_manager import AllocStatus, BlockManager
from scheduler_service.core.kv_cache.prefix_cache import NoPrefixCache, PrefixCache
from scheduler_service.core.moving_costs import is_swap_cheaper
from scheduler_service.core.scheduling.batch import Batch
from scheduler_service.core.scheduling.running_set import RunningSet
from scheduler_service.core.sequence import Sequence, SequenceGroup
from scheduler_service.core.stats.scheduler_stats import Totals
from scheduler_service.core.stats.throughput import StepRates
from scheduler_service.core.swapping import Swapping
from scheduler_service.core.timeline import RequestEvent
from scheduler_service.core.waiting_queue import WaitingQueue

logger = logging.getLogger(__name__)


class Preemption:
    """Makes room for running sequences, at the expense of the last of them."""

    def __init__(
        self,
        config: SchedulerConfig,
        blocks: BlockManager,
        prefixes: PrefixCache | NoPrefixCache,
        waiting: WaitingQueue,
        swapping: Swapping,
        running: RunningSet,
        rates: StepRates,
        totals: Totals,
    ) -> None:
        self._config = config
        self._blocks = blocks
        self._prefixes = prefixes
        self._waiting = waiting
        self._swapping = swapping
        self._running = running
        self._rates = rates
        self._totals = totals

    def make_room(self, group: SequenceGroup, batch: Batch) -> bool:
        """Take the blocks of the last group, or of the last sequence if that is of this group,
        which needs one; False if the group cannot go on even alone.

        Takes only sequences that have no row in the batch yet, as long as decodes get their rows
        in order; a group in lockstep must ask before any of its sequences has a row.
        """
        running, last = self._running, self._running.last()
        is_own = last.group is group
        if is_own and group.is_lockstep and self._is_alone(group):
            return False
        batch.has_preempted = True
        self._totals.num_preemptions += 1
        if is_own and not group.is_lockstep and group.num_running > 1:
            self._recompute([running.pop_last()], batch)
            return True
        swaps = self._is_to_swap(last.group)
        self._take_out(running.pop_last_group(), swaps, batch)
        return True

    def make_way(self, victim: SequenceGroup, batch: Batch) -> None:
        """Take the places and blocks of a group for one that goes ahead of it. Before anything has
        a row."""
        batch.has_preempted = True
        self._totals.num_preemptions += 1
        swaps = self._is_to_swap(victim)
        self._take_out(self._running.pop_group(victim), swaps, batch)

    def _take_out(self, victims: list[Sequence], swaps: bool, batch: Batch) -> None:
        if swaps:
            self._swap_out(victims, batch)
        else:
            self._recompute(victims, batch)

    def _is_alone(self, group: SequenceGroup) -> bool:
        """Whether nothing but the group is in the batch."""
        return self._running.num_places == group.num_running

    def _is_to_swap(self, group: SequenceGroup) -> bool:
        """Whether the last group's blocks are to be moved to the host."""
        mode = self._config.preemption_mode
        if mode is PreemptionMode.RECOMPUTE:
            return False
        # A prompt that is partly computed has little to lose, no tokens of its own yet, and
        # choices that wait for its end: it begins again, finding what the prefix cache has.
        if any(seq.group is group for seq in self._running.prefilling):
            return False
        sequences = group.running()
        if any(seq.live_forks() for seq in sequences):
            return False  # a search that has not begun
        seq_ids = [seq.seq_id for seq in sequences]
        if self._blocks.can_swap_out(seq_ids) is not AllocStatus.OK:
            return False
        if mode is PreemptionMode.SWAP:
            return True
        return is_swap_cheaper(
            self._rates,
            num_sequences=len(sequences),
            num_moves=self._blocks.num_moves(seq_ids),
            num_tokens=self._num_tokens_to_recompute(sequences),
        )

    def _num_tokens_to_recompute(self, sequences: list[Sequence]) -> int:
        if not self._config.enable_prefix_caching:
            return sum(seq.length for seq in sequences)
        seq_ids = [seq.seq_id for seq in sequences]
        return self._blocks.num_own_blocks(seq_ids) * self._blocks.block_size

    def _recompute(self, victims: list[Sequence], batch: Batch) -> None:
        """Free the blocks of sequences of one group; they wait to be computed again."""
        self._log("recompute", victims)
        victims[0].group.note(RequestEvent.PREEMPTED, batch.now_us)
        for seq in victims:
            self._prefixes.note_decodes(seq)
            self._running.vacate(seq, batch.now_us)
        self._waiting.add(victims[0].group)

    def _swap_out(self, victims: list[Sequence], batch: Batch) -> None:
        """Move the blocks of a whole group to the host, from where it will come back."""
        self._log("swap", victims)
        victims[0].group.note(RequestEvent.SWAPPED_OUT, batch.now_us)
        for seq in victims:
            self._prefixes.note_decodes(seq)
        self._swapping.swap_out(victims, batch)

    def _log(self, means: str, victims: list[Sequence]) -> None:
        logger.warning(
            "preempted by=%s request_id=%s seq_ids=%s num_tokens=%d",
            means,
            victims[0].group.request.request_id,
            ",".join(str(seq.seq_id) for seq in victims),
            max(seq.length for seq in victims),
        )
