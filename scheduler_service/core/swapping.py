"""Groups whose blocks are in host memory: how they get there, and how they come back.

A swapped-out group is forgotten by the worker. It comes back as a whole, in two plans: the first
swaps its blocks in, which the worker does beside the forward pass; the next one introduces its
sequences again, with all but their last tokens computed, and has rows of them.
"""

from scheduler_service.core.heap import RemovableHeap
from scheduler_service.core.introducing import introduce
from scheduler_service.core.kv_cache.block_manager import AllocStatus, BlockManager
from scheduler_service.core.kv_cache.prefix_cache import NoPrefixCache, PrefixCache
from scheduler_service.core.scheduling.batch import Batch
from scheduler_service.core.scheduling.pipeline import Pipeline
from scheduler_service.core.scheduling.running_set import RunningSet
from scheduler_service.core.sequence import Sequence, SequenceGroup
from scheduler_service.core.step_plan import NewSequence
from scheduler_service.core.timeline import RequestEvent


class Swapping:
    """The swapped-out groups of one worker group, in the policy's order.

    They come before all that wait: as long as there are any, nothing else is admitted. They cannot
    wait for ever: what they need, they have had before, and whatever runs comes to an end.
    """

    def __init__(
        self,
        max_num_seqs: int,
        blocks: BlockManager,
        prefixes: PrefixCache | NoPrefixCache,
        running: RunningSet,
        pipeline: Pipeline,
    ) -> None:
        self._max_num_seqs = max_num_seqs
        self._blocks = blocks
        self._prefixes = prefixes
        self._running = running
        self._pipeline = pipeline
        self._groups: RemovableHeap[SequenceGroup] = RemovableHeap()
        self._landed: list[tuple[Sequence, NewSequence]] = []

    def __len__(self) -> int:
        return len(self._groups)

    def swap_out(self, sequences: list[Sequence], batch: Batch) -> None:
        """Move the blocks of all running sequences of a group, which are out of their lists."""
        batch.swap_out += self._running.swap_out(sequences, batch.now_us)
        group = sequences[0].group
        if group not in self._groups:
            self._groups.push(group.rank, group)

    def swap_in(self, batch: Batch) -> None:
        """Begin to bring groups back, first in order first, as far as places and blocks go."""
        while (top := self._groups.peek()) is not None:
            group = top[1]
            sequences = group.swapped()
            if not self._can_come_back(sequences):
                return
            self._groups.remove(group)
            group.note(RequestEvent.SWAPPED_IN, batch.now_us)
            batch.swap_in += self._blocks.swap_in([seq.seq_id for seq in sequences])
            for seq in sequences:
                seq.num_computed = seq.length - 1
                seq.is_prefilled = True
            self._running.come_back(sequences, batch.now_us)

    def _can_come_back(self, sequences: list[Sequence]) -> bool:
        if any(seq.num_in_flight for seq in sequences):
            return False  # the worker must be told all their tokens
        if self._running.num_places + len(sequences) > self._max_num_seqs:
            return False
        return self._blocks.can_swap_in([seq.seq_id for seq in sequences]) is AllocStatus.OK

    def land(self) -> None:
        """What the last plan swapped in, for a group that comes back or one that has found its
        prompt on the host, is on the device from now on."""
        for seq in self._running.land():
            seq.first_step_id = self._pipeline.next_step_id
            self._prefixes.note_arrival(seq)
            if seq.is_prefilled:
                table = self._blocks.table(seq.seq_id)  # before the step changes it
                self._landed.append((seq, introduce(seq, table)))

    def introduce_landed(self, batch: Batch) -> None:
        """Have the worker told of those that decode again and got rows; the others had to leave
        once more, or have outgrown the cache."""
        for seq, new_sequence in self._landed:
            if seq.num_in_flight:
                batch.add_new(new_sequence)
                self._running.introduce(seq)
        self._landed = []

    def end(self, seq: Sequence) -> None:
        """A swapped-out sequence is about to end: free its blocks."""
        self._blocks.free_swapped(seq.seq_id)
        if len(seq.group.swapped()) == 1:
            self._groups.remove(seq.group)

    def check(self, group: SequenceGroup) -> None:
        """Assert that a group is here if any of its sequences is swapped out."""
        assert (group in self._groups) == bool(group.swapped())
        assert not self._landed
