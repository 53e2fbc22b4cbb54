"""From a prompt to its first tokens: chunks of prefills, and the choices that fork from them."""

from collections.abc import Iterable

from scheduler_service.core.config import SchedulerConfig
from scheduler_service.core.introducing import introduce
from scheduler_service.core.kv_cache.block_manager import BlockManager
from scheduler_service.core.scheduling.batch import Batch
from scheduler_service.core.scheduling.beams import BeamScheduling
from scheduler_service.core.scheduling.pipeline import Pipeline
from scheduler_service.core.scheduling.running_set import RunningSet
from scheduler_service.core.sequence import Sequence
from scheduler_service.core.step_plan import NewSequence


def note_reserved(seq: Sequence, num_tokens: int) -> None:
    """Let a sequence decode up to so many tokens, or its end, without a question for blocks."""
    max_length = seq.group.num_prompt_tokens + seq.max_output_tokens
    seq.reserved_length = min(num_tokens, max_length - 1)


class Prefilling:
    """Gives sequences that have tokens to compute their rows, until they decode."""

    def __init__(
        self,
        config: SchedulerConfig,
        blocks: BlockManager,
        running: RunningSet,
        pipeline: Pipeline,
        beams: BeamScheduling,
    ) -> None:
        self._config = config
        self._blocks = blocks
        self._running = running
        self._pipeline = pipeline
        self._beams = beams

    def go_on(self, batch: Batch) -> None:
        """The next chunks of prompts that are partly computed, or were partly found on the host;
        those that go ahead first."""
        prefilling = self._running.prefilling
        self.add_rows(sorted(prefilling, key=lambda seq: not seq.group.is_ahead), batch)

    def add_rows(self, sequences: Iterable[Sequence], batch: Batch) -> None:
        """The next chunks of these, in order."""
        in_pieces = self._config.enable_chunked_prefill
        for seq in sequences:
            if batch.budget < (1 if in_pieces else seq.length - seq.num_computed):
                return
            if not seq.group.is_lockstep or self._beams.may_prefill(seq):
                self.add_row(seq, batch)

    def add_row(self, seq: Sequence, batch: Batch) -> None:
        """A row for the sequence's next tokens; with the last of them it begins to decode."""
        if self._running.introduce(seq):
            batch.add_new(introduce(seq, self._blocks.table(seq.seq_id)))
        num_tokens = min(batch.budget, seq.length - seq.num_computed)
        seq.num_computed += num_tokens
        is_last = seq.num_computed == seq.length
        batch.add_prefill(seq, num_tokens, is_last)
        if is_last:
            self._running.prefilling.remove(seq)
            if seq.group.beams is not None:
                seq.group.beams.num_prefilling -= 1
                self._begin_decoding(seq, 0)
                return
            self._begin_decoding(seq, self._blocks.round_up(seq.length))
            for fork in seq.live_forks():
                self._fork(seq, fork, batch)
            seq.forks = []

    def _begin_decoding(self, seq: Sequence, reserved_length: int) -> None:
        note_reserved(seq, reserved_length)
        seq.length += 1
        self._running.begin_decoding(seq)

    def _fork(self, parent: Sequence, fork: Sequence, batch: Batch) -> None:
        """Let a choice sample from its parent's last logits, and share the blocks so far."""
        block_ids = self._blocks.fork(parent.seq_id, fork.seq_id)
        fork.follow(parent, self._pipeline.next_step_id)
        # Whoever writes to the shared last block first must ask.
        note_reserved(parent, fork.length)
        self._begin_decoding(fork, fork.length)
        batch.add_new(
            NewSequence(
                seq_id=fork.seq_id,
                choice_index=fork.choice_index,
                token_ids=[],
                num_prompt_tokens=0,
                num_computed_tokens=0,
                block_ids=block_ids,
                sampling=fork.group.request.sampling,
                parent_seq_id=parent.seq_id,
            )
        )
        batch.add_prefill(fork, 0, True)
