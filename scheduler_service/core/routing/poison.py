"""Poison requests: a request that kills its worker must not kill all others in turn.

Every request that a worker was computing at its death counts the loss, and fails at the last one
that the configuration allows. Before that it is a suspect for as long as it may do what it did: it
is computed alone, so that it can neither hide behind others nor be taken for them. Where a suspect
was computed, others that are as near to their ends are not to blame.
"""

from collections.abc import Iterable

from scheduler_service.core.config import SchedulerConfig
from scheduler_service.core.sequence import SequenceGroup
from scheduler_service.errors import GenerationFailed


class PoisonTracker:
    """Counts requests' lost workers."""

    def __init__(self, config: SchedulerConfig) -> None:
        self._max_worker_losses = config.max_worker_losses
        self._num_steps_in_flight = config.max_steps_ahead

    def blamed(self, computed: Iterable[SequenceGroup]) -> list[SequenceGroup]:
        """The requests in a lost worker's batch that may have caused the loss. If a suspect was in
        the batch, exonerate other last-chance requests that have already passed the step at which
        their last worker died."""
        computed = list(computed)
        if not any(seq_group.is_suspect for seq_group in computed):
            return computed
        return [
            seq_group
            for seq_group in computed
            if seq_group.is_suspect or not self._is_last_time(seq_group)
        ]

    def count(self, seq_group: SequenceGroup) -> GenerationFailed | None:
        """Note that a worker died for which a group is blamed; its error if that was once too
        often."""
        seq_group.num_worker_losses += 1
        if seq_group.num_worker_losses >= self._max_worker_losses:
            return GenerationFailed(
                f"the request was on {seq_group.num_worker_losses} workers when they were lost",
                reason="WORKERS_LOST",
                details={"num_worker_losses": seq_group.num_worker_losses},
            )
        seq_group.frontend.outbox.worker_losses.append(seq_group.request.handle)
        self.suspect(seq_group)
        return None

    def suspect(self, seq_group: SequenceGroup) -> None:
        """Keep a group that the next worker's death would fail from others of its kind, until it
        is past the steps that were in flight."""
        if self._is_last_time(seq_group) and seq_group.num_unfinished:
            seq_group.suspect_length = seq_group.max_known_tokens + self._num_steps_in_flight

    def _is_last_time(self, seq_group: SequenceGroup) -> bool:
        """Whether the next worker's death would fail a group."""
        return 0 < seq_group.num_worker_losses == self._max_worker_losses - 1
