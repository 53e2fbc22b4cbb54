"""From the waiting queue into the batch."""

from collections.abc import Iterator

from scheduler_service.core.config import SchedulerConfig
from scheduler_service.core.kv_cache.block_manager import AllocStatus, BlockManager
from scheduler_service.core.kv_cache.prefix_cache import NoPrefixCache, PrefixCache
from scheduler_service.core.moving_costs import is_fetch_cheaper
from scheduler_service.core.prefilling import Prefilling
from scheduler_service.core.scheduling.batch import Batch
from scheduler_service.core.scheduling.beams import BeamScheduling
from scheduler_service.core.scheduling.pipeline import Pipeline
from scheduler_service.core.scheduling.running_set import RunningSet
from scheduler_service.core.sequence import Sequence, SequenceGroup
from scheduler_service.core.stats.throughput import StepRates
from scheduler_service.core.waiting_queue import WaitingQueue


class Admitting:
    """Admits waiting groups in order, as far as places, blocks and tokens go."""

    def __init__(
        self,
        config: SchedulerConfig,
        blocks: BlockManager,
        prefixes: PrefixCache | NoPrefixCache,
        running: RunningSet,
        pipeline: Pipeline,
        prefilling: Prefilling,
        beams: BeamScheduling,
        rates: StepRates,
    ) -> None:
        self._config = config
        self._blocks = blocks
        self._prefixes = prefixes
        self._running = running
        self._pipeline = pipeline
        self._prefilling = prefilling
        self._beams = beams
        self._rates = rates

    def admit(self, waiting: WaitingQueue, batch: Batch) -> None:
        """Fill the batch from a queue."""
        while batch.budget > 0 and (group := waiting.head()) is not None:
            verdict = self._admit_group(group, batch)
            if verdict is AllocStatus.NEVER:
                batch.outgrown.append(group)
            if verdict is not AllocStatus.OK:
                return
            waiting.discard(group)

    def _admit_group(self, group: SequenceGroup, batch: Batch) -> AllocStatus:
        """Admit the group's sequences; LATER if some go on waiting."""
        if group.beams is not None:
            verdict = self._beams.admit(group, batch)
            if verdict is AllocStatus.OK:
                self._prefilling.add_rows(group.beams.held, batch)
            return verdict
        for seq, forks in _starts(group):
            if batch.budget == 0:
                return AllocStatus.LATER
            verdict = self._admit_sequence(seq, forks, batch)
            if verdict is not AllocStatus.OK:
                return verdict
        return AllocStatus.OK

    def _admit_sequence(self, seq: Sequence, forks: list[Sequence], batch: Batch) -> AllocStatus:
        """Admit a sequence and those that will fork from it."""
        if any(other.num_in_flight for other in (seq, *forks)):
            return AllocStatus.LATER  # its tokens must be known to be sent again
        if self._running.num_places + 1 + len(forks) > self._config.max_num_seqs:
            return AllocStatus.LATER
        found = self._prefixes.find(seq)
        stored = self._find_on_host(seq, len(found), batch)
        num_found = (len(found) + len(stored)) * self._blocks.block_size
        if not seq.group.is_ahead and self._prefixes.is_to_come(seq, len(found) + len(stored)):
            return AllocStatus.LATER
        if not self._config.enable_chunked_prefill and seq.length - num_found > batch.budget:
            return AllocStatus.LATER
        verdict = self._blocks.can_allocate(seq.length, found)
        if verdict is AllocStatus.OK:
            self._start(seq, len(found), num_found)
            self._running.enter(seq, forks, batch.now_us, arrives=bool(stored))
            self._prefixes.note_admission(seq)
            batch.swap_in += self._blocks.fetch(seq.seq_id, seq.length, found, stored)
            if not stored:
                self._prefilling.add_row(seq, batch)
        return verdict

    def _find_on_host(self, seq: Sequence, num_found: int, batch: Batch) -> list[int]:
        """Host blocks worth bringing back.

        None in a step with preemptions: a block that one of its copies reads may have come free
        since, and must not be the target of a swap-in, which would come first.
        """
        if batch.has_preempted or not is_fetch_cheaper(self._rates, self._blocks.block_size):
            return []
        return self._prefixes.find_on_host(seq, num_found)

    def _start(self, seq: Sequence, num_found_blocks: int, num_found_tokens: int) -> None:
        """Count what was found as computed."""
        seq.first_step_id = self._pipeline.next_step_id
        seq.num_computed = num_found_tokens
        seq.num_offered_blocks = num_found_blocks
        group = seq.group
        if not group.has_begun:
            group.num_cached_tokens = min(num_found_tokens, group.num_prompt_tokens)


def _starts(group: SequenceGroup) -> Iterator[tuple[Sequence, list[Sequence]]]:
    """The group's waiting sequences to prefill, each with those that fork from it.

    Those without output share the first one's prefill; those with some differ from each other
    and are computed each on their own.
    """
    waiting = group.waiting()
    fresh = [seq for seq in waiting if not seq.output_token_ids]
    if fresh:
        yield fresh[0], fresh[1:]
    for seq in waiting:
        if seq.output_token_ids:
            yield seq, []
