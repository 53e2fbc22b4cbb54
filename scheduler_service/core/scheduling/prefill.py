"""Admission to the batch, and prefill.

Waiting groups are admitted to the batch, their prompts are computed in chunks, and the choices of a
request fork from its prompt.
"""

from collections.abc import Iterable, Iterator

from scheduler_service.core.kv_cache.alloc_status import AllocStatus
from scheduler_service.core.request_queue import WaitingQueue
from scheduler_service.core.scheduling.batch import Batch, make_fork, make_new_sequence
from scheduler_service.core.scheduling.beams import BeamScheduler
from scheduler_service.core.scheduling.preemption import is_fetch_cheaper
from scheduler_service.core.scheduling.worker_group_state import WorkerGroupState
from scheduler_service.core.sequence import Sequence, SequenceGroup


class PrefillScheduler:
    """Admits waiting groups, and plans the rows of sequences until they decode."""

    def __init__(self, state: WorkerGroupState) -> None:
        self._config = state.config
        self._has_turn = state.has_turn
        self._cache = state.cache
        self._running = state.running
        self._pipeline = state.pipeline
        self._beams = BeamScheduler(state)

    # Prefill.

    def continue_prompts(self, batch: Batch) -> None:
        """Add the next chunks of prompts that are partly computed, or were partly found on the
        host; those of groups that preempt others come first."""
        prefilling = self._running.prefilling
        self.add_rows(sorted(prefilling, key=lambda seq: not seq.seq_group.is_preempting), batch)

    def add_rows(self, sequences: Iterable[Sequence], batch: Batch) -> None:
        """Add the next chunks of sequences, in order."""
        for seq in sequences:
            if not self._fits(seq.length, seq.num_computed, batch):
                return
            if not seq.seq_group.is_lockstep or self._beams.may_prefill(seq):
                self.add_row(seq, batch)

    def _fits(self, length: int, num_computed: int, batch: Batch) -> bool:
        """Whether the step has capacity for the next chunk of a sequence."""
        num_needed = 1 if self._config.enable_chunked_prefill else length - num_computed
        return batch.max_chunk(num_computed) >= num_needed

    def add_row(self, seq: Sequence, batch: Batch) -> None:
        """Add a row for a sequence's next tokens; after the last of them it decodes."""
        if self._running.is_unknown(seq):
            self._running.mark_introduced(seq)
            batch.add_new(make_new_sequence(seq, self._cache.table(seq)))
        num_tokens = min(batch.max_chunk(seq.num_computed), seq.length - seq.num_computed)
        is_last = seq.advance_prefill(num_tokens)
        batch.add_prefill(seq, num_tokens, is_last)
        if is_last:
            self._running.prefilling.remove(seq)
            if seq.seq_group.beams is not None:
                seq.seq_group.beams.num_prefilling -= 1
                self._begin_decoding(seq, 0)
                return
            self._begin_decoding(seq, self._cache.round_up(seq.length))
            for fork in seq.release_forks():
                self._fork(seq, fork, batch)

    def _begin_decoding(self, seq: Sequence, reserved_length: int) -> None:
        seq.start_decode(reserved_length)
        self._running.begin_decoding(seq)

    def _fork(self, parent: Sequence, fork: Sequence, batch: Batch) -> None:
        """Make a choice sample from its parent's last logits and share its memory."""
        self._cache.fork(parent, fork)
        fork.fork_from(parent, self._pipeline.next_step_id)
        # The first to write after the shared tokens must copy.
        parent.reserve(fork.length)
        self._begin_decoding(fork, fork.length)
        batch.add_new(make_fork(fork, parent, [], self._cache.table(fork)))
        batch.add_prefill(fork, 0, True)

    # Admission.

    def admit(self, waiting: WaitingQueue, batch: Batch) -> None:
        """Admit groups from a queue in order, while there are places, memory and tokens."""
        while batch.budget > 0 and (seq_group := waiting.head()) is not None:
            if not self._has_turn(seq_group):
                waiting.skip(seq_group)
                continue
            verdict = self._admit_seq_group(seq_group, batch)
            if verdict is AllocStatus.NEVER:
                batch.outgrown.append(seq_group)
            if verdict is not AllocStatus.OK:
                break
            waiting.discard(seq_group)
        waiting.end_round()

    def _admit_seq_group(self, seq_group: SequenceGroup, batch: Batch) -> AllocStatus:
        """Admit the group's sequences; LATER if some keep waiting."""
        if seq_group.beams is not None:
            verdict = self._beams.admit(seq_group, batch)
            if verdict is AllocStatus.OK:
                self.add_rows(seq_group.beams.held, batch)
            return verdict
        for seq, forks in _starts(seq_group):
            if batch.budget == 0:
                return AllocStatus.LATER
            verdict = self._admit_sequence(seq, forks, batch)
            if verdict is not AllocStatus.OK:
                return verdict
        return AllocStatus.OK

    def _admit_sequence(self, seq: Sequence, forks: list[Sequence], batch: Batch) -> AllocStatus:
        """Admit a sequence and those that will fork from it."""
        if any(other.num_in_flight for other in (seq, *forks)):
            return AllocStatus.LATER  # its tokens are sent again, so all must be known
        if self._running.num_places + 1 + len(forks) > self._config.max_num_seqs:
            return AllocStatus.LATER
        hit = self._cache.match_prefix(seq, on_host=self._may_fetch(batch))
        if not seq.seq_group.is_preempting and self._cache.is_to_come(seq, hit):
            return AllocStatus.LATER
        if not self._fits(seq.length, hit.num_tokens, batch):
            return AllocStatus.LATER
        verdict = self._cache.can_admit(seq.length, hit)
        if verdict is AllocStatus.OK:
            seq.start_prefill(self._pipeline.next_step_id, hit.num_tokens)
            arrives = hit.num_moves > 0
            self._running.enter(seq, forks, batch.now_us, arrives=arrives)
            batch.swap_in += self._cache.admit(seq, hit)
            if not arrives:
                self.add_row(seq, batch)
        return verdict

    def _may_fetch(self, batch: Batch) -> bool:
        """Whether to swap in what the host has of a prompt. Not in a step with preemptions: what
        one of the step's copies reads may be free already, and must not be the target of a swap-in,
        which the worker does first."""
        if batch.has_preempted:
            return False
        return is_fetch_cheaper(self._pipeline.rates, self._cache.tokens_per_move)


def _starts(seq_group: SequenceGroup) -> Iterator[tuple[Sequence, list[Sequence]]]:
    """The group's waiting sequences to prefill, each with the sequences that fork from it.

    Sequences without output share the first one's prefill; those with output differ from each
    other, and each is computed separately.
    """
    waiting = seq_group.waiting()
    fresh = [seq for seq in waiting if not seq.output_token_ids]
    if fresh:
        yield fresh[0], fresh[1:]
    for seq in waiting:
        if seq.output_token_ids:
            yield seq, []
