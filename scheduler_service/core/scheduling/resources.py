"""What a worker group has a limited amount of, and sequences hold while they are in its batch.

Admission asks each resource, in order, whether sequences fit; all of them are acquired together.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

from scheduler_service.core.kv_cache.alloc_status import AllocStatus
from scheduler_service.core.kv_cache.manager import KVCacheManager
from scheduler_service.core.kv_cache.prefix_hit import JointStart, PrefixHit
from scheduler_service.core.scheduling.batch import Batch
from scheduler_service.core.sequence import Sequence


@dataclass(frozen=True, slots=True)
class Entrants:
    """Sequences of one group that enter the batch together, or not at all."""

    sequences: list[Sequence]
    """All of them; those that are not computed fork from the first later."""
    start: tuple[Sequence, PrefixHit] | list[JointStart[Sequence]]
    """The one that is computed, with its cached tokens, or several that share some."""


class Resource(Protocol):
    """A limited amount of something."""

    def fits(self, entrants: Entrants) -> AllocStatus:
        """Whether there is enough for these sequences: now, later or never."""
        ...

    def acquire(self, entrants: Entrants, batch: Batch) -> None:
        """Give them what they need; adds to the batch what its plan must do for that."""
        ...

    def release(self, seq: Sequence) -> None:
        """Take back what a sequence holds, if anything."""
        ...


class Places:
    """Places in the batch: one for each sequence."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._holders: set[Sequence] = set()

    @property
    def num_used(self) -> int:
        """Places of all sequences."""
        return len(self._holders)

    def holds(self, seq: Sequence) -> bool:
        """Whether a sequence has one."""
        return seq in self._holders

    def has_room(self, num_sequences: int) -> bool:
        """Whether there are this many more."""
        return self.num_used + num_sequences <= self._limit

    def fits(self, entrants: Entrants) -> AllocStatus:
        """Places come free as sequences end."""
        return AllocStatus.OK if self.has_room(len(entrants.sequences)) else AllocStatus.LATER

    def acquire(self, entrants: Entrants, batch: Batch) -> None:
        """One for each."""
        del batch
        self._holders.update(entrants.sequences)

    def release(self, seq: Sequence) -> None:
        """The sequence's place, unless it has given it up."""
        self._holders.discard(seq)


class Memory:
    """The KV cache, of which a sequence has as much as its known tokens take."""

    def __init__(self, cache: KVCacheManager) -> None:
        self._cache, self._admission = cache, cache.admission

    def fits(self, entrants: Entrants) -> AllocStatus:
        """Never, if a sequence is longer than the whole cache."""
        if isinstance(entrants.start, list):
            return self._admission.can_admit_jointly(entrants.start, len(entrants.sequences))
        seq, hit = entrants.start
        return self._admission.can_admit(
            seq.growth.length, hit, num_forks=len(entrants.sequences) - 1
        )

    def acquire(self, entrants: Entrants, batch: Batch) -> None:
        """Memory for all known tokens; what is on the host is swapped in."""
        if isinstance(entrants.start, list):
            moves = self._admission.admit_jointly(entrants.start)
        else:
            moves = self._admission.admit(*entrants.start, num_forks=len(entrants.sequences) - 1)
        batch.swap_in += moves.swap_in
        batch.copy += moves.copy

    def release(self, seq: Sequence) -> None:
        """What it computed can be found until the memory is used again."""
        if self._cache.tables.holds(seq):
            self._cache.free(seq)


def fit_all(resources: Iterable[Resource], entrants: Entrants) -> AllocStatus:
    """The first verdict other than OK, if any."""
    verdicts = (resource.fits(entrants) for resource in resources)
    return next((v for v in verdicts if v is not AllocStatus.OK), AllocStatus.OK)


def acquire_all(resources: Iterable[Resource], entrants: Entrants, batch: Batch) -> None:
    """Acquire every resource, all of which fit."""
    for resource in resources:
        resource.acquire(entrants, batch)
