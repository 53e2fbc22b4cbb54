"""One token more for everything that decodes, and the blocks for it."""

from functools import partial

from scheduler_service.core.kv_cache.block_manager import BlockManager
from scheduler_service.core.kv_cache.prefix_cache import PrefixCache
from scheduler_service.core.scheduling.batch import Batch
from scheduler_service.core.scheduling.beams import BeamScheduler
from scheduler_service.core.scheduling.preemption import Preemption
from scheduler_service.core.scheduling.worker_group_state import RunningSet
from scheduler_service.core.sequence import Sequence, SequenceStatus, extend_all


class DecodeScheduler:
    """Gives decoding sequences their rows; where memory is short, others leave the batch."""

    def __init__(
        self,
        blocks: BlockManager,
        prefixes: PrefixCache,
        running: RunningSet,
        preemption: Preemption,
        beams: BeamScheduler,
    ) -> None:
        self._blocks = blocks
        self._prefixes = prefixes
        self._running = running
        self._preemption = preemption
        self._beams = beams

    def add_rows(self, batch: Batch) -> None:
        """A row for each.

        Preemption takes sequences off the ends of the lists, that is, only those that the loop
        has not come to yet, or the one it is at.
        """
        reserve = partial(self._reserve, batch=batch)
        extend_all(self._running.decoding, reserve, batch.seq_ids, batch.rows)
        batch.budget -= len(batch.rows)

    def _reserve(self, seq: Sequence, batch: Batch) -> bool:
        """Make the sequence's last token writable; False if it gets no row in this step, or has
        got it already, with the other beams of its group."""
        if seq.seq_group.beams is not None:
            if not self._beams.plan(seq.seq_group, batch):
                batch.outgrown.append(seq.seq_group)
            return False
        if seq.length >= seq.seq_group.num_prompt_tokens + seq.max_output_tokens:
            return False  # its last token is in flight
        if not self._blocks.fits(seq.length):
            if seq.num_in_flight == 0:
                batch.outgrown.append(seq.seq_group)
            return False  # what is in flight may end it yet
        if self._blocks.num_free_blocks == 0 and not self._make_room(seq, batch):
            return False
        update = self._blocks.append(seq.seq_id, seq.length)
        if update is not None:
            batch.update_block(seq.seq_id, update)
        self._prefixes.note_decodes(seq)
        seq.reserve(self._blocks.round_up(seq.length))
        return True

    def _make_room(self, seq: Sequence, batch: Batch) -> bool:
        """Preempt others until the sequence has its block; False if it gets none."""
        while not self._blocks.can_append(seq.seq_id, seq.length):
            if not self._preemption.make_room(seq.seq_group, batch):
                batch.outgrown.append(seq.seq_group)
                return False
            if seq.status is not SequenceStatus.RUNNING:
                return False
        return True
