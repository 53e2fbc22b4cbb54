"""Admission to the batch, and prefill: waiting groups are admitted, and their prompts are computed
in chunks."""

from collections.abc import Iterable
from dataclasses import dataclass

from scheduler_service.core.kv_cache.alloc_status import AllocStatus
from scheduler_service.core.request_queue import WaitingQueue
from scheduler_service.core.scheduling.batch import Batch, make_new_sequence
from scheduler_service.core.scheduling.placed_groups import PlacedGroups
from scheduler_service.core.scheduling.running_set import RunningSet
from scheduler_service.core.scheduling.strategies import StrategySchedulers
from scheduler_service.core.sequence import Sequence


@dataclass(slots=True, eq=False)
class PrefillScheduler:
    """Admits waiting groups, and plans the rows of sequences until their prompts are computed."""

    placed: PlacedGroups
    running: RunningSet
    strategies: StrategySchedulers

    def continue_prompts(self, batch: Batch) -> None:
        """Add the next chunks of prompts that are partly computed, or were partly found on the
        host; those of groups that preempt others come first."""
        prefilling = self.running.prefilling
        order = sorted(prefilling, key=lambda seq: not seq.seq_group.placement.is_preempting)
        self.add_rows(order, batch)

    def add_rows(self, sequences: Iterable[Sequence], batch: Batch) -> None:
        """Add the next chunks of sequences that have none in the batch, in order."""
        for seq in sequences:
            if seq in batch.prefilled:
                continue
            if not batch.fits(seq, seq.prefill.num_computed):
                return
            if max_tokens := self.strategies.of(seq.seq_group).max_row_tokens(seq, batch):
                self._add_row(seq, batch, max_tokens)  # others may have memory if it has none

    def _add_row(self, seq: Sequence, batch: Batch, max_tokens: int) -> None:
        """Add a row for a sequence's next tokens, unless memory for them is short; its strategy
        decides what follows the last."""
        cache = self.running.cache
        start = seq.prefill.num_computed
        end = start + min(batch.max_chunk(start), max_tokens)
        num_tokens = cache.tables.chunk_end(seq, start, end) - start
        updates = cache.extend_prompt(seq, start, start + num_tokens)
        if updates is None:
            return
        if self.running.is_unintroduced(seq):
            self.running.mark_introduced(seq)
            batch.add_new(make_new_sequence(seq, cache.tables.of(seq)))
        else:
            batch.update_tables(seq.seq_id, updates)
        is_last = seq.prefill.advance(num_tokens, seq.growth.length)
        batch.add_prefill(seq, num_tokens, is_last)
        if is_last:
            self.running.prefilling.remove(seq)
            cache.tables.end_prompt(seq)
            self.strategies.of(seq.seq_group).end_prefill(seq, batch)

    def admit(self, waiting: WaitingQueue, batch: Batch) -> None:
        """Admit groups from a queue in order, while there are places, memory and tokens."""
        while batch.budget > 0 and (seq_group := waiting.head()) is not None:
            if not self.placed.has_turn(seq_group):
                waiting.skip(seq_group)
                continue
            verdict = self.strategies.of(seq_group).admit(seq_group, batch, self.add_rows)
            if verdict is AllocStatus.NEVER:
                batch.exceeding.append(seq_group)
            if verdict is not AllocStatus.OK:
                break
            waiting.discard(seq_group)
        waiting.end_round()
