"""Poison requests: a request that kills its worker must not kill all others in turn.

Only deaths in steps that a request had to itself fail it; those in company raise suspicion. A
request that did not get past the point at which one worker died, and loses another one there, is a
suspect: until it has passed that point, it is computed in steps of its own, with no other step in
flight (`PlacedGroups.has_turn`). If the worker dies again, only a kill from outside can be
another cause. That rarely happens twice during the few steps that such a trial takes; a request
whose trial ended in a death is tried after all other suspects, when a burst of kills may be over;
and its count starts again when a worker dies that was not computing it, nor another request alone.
A request that has lost many workers in company fails only after about as many alone: it is then
more likely that workers die of something else.

A request that has lost more than a few workers must get further to have passed the point, twice as
far with each loss, so that one that kills workers at ever later points is tried alone, too.
"""

from scheduler_service.core.config import SchedulerConfig
from scheduler_service.core.sequence import SequenceGroup
from scheduler_service.errors import GenerationFailed

FIRST_DOUBLING, MAX_DOUBLINGS = 4, 20
"""Losses at which one token suffices to pass the point, and the further ones that count."""


def count_loss(
    seq_group: SequenceGroup, config: SchedulerConfig, *, is_alone: bool
) -> GenerationFailed | None:
    """Count the death of a worker that was computing a group. `is_alone`: and nothing else. Returns
    the error of a group of whose losses `max_worker_losses`, and half of all, were such deaths."""
    losses = seq_group.losses
    is_lone = is_alone and losses.num_repeated > 0
    losses.num_repeated += 1
    losses.num_workers += 1
    losses.num_lone += is_lone
    if losses.num_lone >= max(config.max_worker_losses, losses.num_workers // 2):
        return GenerationFailed(
            f"{losses.num_workers} workers were lost while they computed the request, "
            f"{losses.num_lone} of them in steps without any other request",
            reason="WORKERS_LOST",
            details={
                "num_worker_losses": losses.num_workers,
                "num_lone_worker_losses": losses.num_lone,
            },
        )
    outbox, handle = seq_group.frontend.outbox, seq_group.request.handle
    outbox.worker_losses.append(handle)
    if is_lone:
        outbox.lone_worker_losses.append(handle)
    num_doublings = losses.num_workers - FIRST_DOUBLING
    _suspect(seq_group, 1 << min(max(0, num_doublings), MAX_DOUBLINGS))
    return None


def resume_suspicion(
    seq_group: SequenceGroup, previous: SequenceGroup | None, config: SchedulerConfig
) -> None:
    """Make a group a suspect if its former attempt was one, or if a former core has seen a worker
    die in a step that it had to itself."""
    if previous is not None and previous.is_before_loss:
        seq_group.losses.num_repeated = previous.losses.num_repeated
    elif seq_group.losses.num_lone:
        seq_group.losses.num_repeated = 2
    if seq_group.losses.num_repeated:
        _suspect(seq_group, config.max_steps_ahead)


def _suspect(seq_group: SequenceGroup, num_further_tokens: int) -> None:
    for seq in seq_group.unfinished():
        seq.suspect(seq.num_known + num_further_tokens)
