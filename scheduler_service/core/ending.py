"""How sequences end in a worker group, and their groups with the last of them."""

from scheduler_service.core import delivery
from scheduler_service.core.kv_cache.prefix_cache import NoPrefixCache, PrefixCache
from scheduler_service.core.scheduling.migration import Leaving
from scheduler_service.core.scheduling.running_set import RunningSet
from scheduler_service.core.sequence import Sequence, SequenceGroup, SequenceStatus
from scheduler_service.core.swapping import Swapping
from scheduler_service.core.waiting_queue import WaitingQueue
from scheduler_service.errors import GenerationFailed


class Ending:
    """Takes what ends out of wherever it is; what it held is free at once."""

    def __init__(
        self,
        prefixes: PrefixCache | NoPrefixCache,
        running: RunningSet,
        swapping: Swapping,
        leaving: Leaving,
        *,
        waiting: WaitingQueue,
        ahead: WaitingQueue,
        groups: dict[SequenceGroup, None],
    ) -> None:
        """`groups`: all that are placed here."""
        self._prefixes = prefixes
        self._running = running
        self._swapping = swapping
        self._leaving = leaving
        self._waiting = waiting
        self._ahead = ahead
        self._groups = groups
        self._ended: list[SequenceGroup] = []

    def end_sequence(self, seq: Sequence, status: SequenceStatus, now_us: int) -> None:
        """End a sequence. Those that were to fork from it wait again."""
        group = seq.group
        if seq.status is SequenceStatus.RUNNING:
            self._prefixes.note_decodes(seq)  # what it has computed can be found
            self._running.vacate(seq, now_us)
        elif seq.status is SequenceStatus.SWAPPED:
            self._swapping.end(seq)
        group.end(seq, status)
        if not group.waiting():
            self.discard(group)
        elif group not in self._ahead and group not in self._leaving:
            self._waiting.add(group)
        if group.num_unfinished == 0:
            self._note_ended(group)

    def end_group(self, group: SequenceGroup, status: SequenceStatus, now_us: int) -> None:
        """End all that is left of a group."""
        for seq in list(group.unfinished()):
            self.end_sequence(seq, status, now_us)

    def fail_group(self, group: SequenceGroup, error: GenerationFailed, now_us: int) -> None:
        """End a group by an error of its own, unless it has ended."""
        if group.num_unfinished:
            group.error = error
            self.end_group(group, SequenceStatus.FINISHED_ERROR, now_us)

    def end_full(self, group: SequenceGroup) -> None:
        """End choices of a group that is in no queue yet which have all the tokens that they can
        have here."""
        for seq in list(group.unfinished()):
            if len(seq.output_token_ids) >= seq.max_output_tokens:
                delivery.finish_choice(seq, None)
                group.end(seq, SequenceStatus.FINISHED_LENGTH_CAPPED)
        if group.num_unfinished == 0:
            self._note_ended(group)

    def discard(self, group: SequenceGroup) -> None:
        """Take a group out of the queues."""
        self._waiting.discard(group)
        self._ahead.discard(group)
        self._leaving.discard(group)

    def take_ended(self) -> list[SequenceGroup]:
        """Groups whose sequences have all ended since the last call."""
        ended, self._ended = self._ended, []
        return ended

    def check(self) -> None:
        """Assert that nobody is left to be told of an end."""
        assert not self._ended

    def _note_ended(self, group: SequenceGroup) -> None:
        del self._groups[group]
        self._ended.append(group)
