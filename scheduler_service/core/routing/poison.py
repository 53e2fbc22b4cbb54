"""Poison requests: a request that kills its worker must not kill all others in turn.

Every request that a worker was computing when it died counts the loss, and fails at the last one
that the configuration allows. Before that last one it is a suspect until it has passed the point
at which its worker died: a suspect is computed alone, so that it can neither take others with it
nor be blamed for them. Where a suspect was computed, other requests that have one loss left are
not blamed.
"""

from collections.abc import Iterable

from scheduler_service.core.config import SchedulerConfig
from scheduler_service.core.sequence import SequenceGroup
from scheduler_service.errors import GenerationFailed


def blamed(computed: Iterable[SequenceGroup], config: SchedulerConfig) -> list[SequenceGroup]:
    """The requests in a lost worker's batch that may have caused the loss. If a suspect was in
    the batch, exonerate other last-chance requests that have already passed the step at which
    their last worker died."""
    computed = list(computed)
    if not any(seq_group.is_suspect for seq_group in computed):
        return computed
    return [
        seq_group
        for seq_group in computed
        if seq_group.is_suspect or not _is_last_chance(seq_group, config)
    ]


def count_loss(seq_group: SequenceGroup, config: SchedulerConfig) -> GenerationFailed | None:
    """Count a worker's death for which a group is blamed; returns the error of a group that has
    reached `max_worker_losses`."""
    seq_group.num_worker_losses += 1
    if seq_group.num_worker_losses >= config.max_worker_losses:
        return GenerationFailed(
            f"the request was on {seq_group.num_worker_losses} workers when they were lost",
            reason="WORKERS_LOST",
            details={"num_worker_losses": seq_group.num_worker_losses},
        )
    seq_group.frontend.outbox.worker_losses.append(seq_group.request.handle)
    mark_suspect(seq_group, config)
    return None


def mark_suspect(seq_group: SequenceGroup, config: SchedulerConfig) -> None:
    """Make a group that the next worker's death would fail a suspect, until it has passed the
    steps that were in flight at the last one."""
    if _is_last_chance(seq_group, config) and seq_group.num_unfinished:
        seq_group.suspect_length = seq_group.max_known_tokens + config.max_steps_ahead


def _is_last_chance(seq_group: SequenceGroup, config: SchedulerConfig) -> bool:
    """Whether the next worker's death would fail a group."""
    return 0 < seq_group.num_worker_losses == config.max_worker_losses - 1
