"""The scheduler core: which sequences run where, step by step.

A still core with busy edges: nothing here waits, reads a clock or knows the wire. The same calls
give the same plans, so that any run can be replayed. What drives it does this:

    core = SchedulerCore(SchedulerConfig())
    core.add_group(capacity, now)               # a worker group is ready
    core.submit(request, now)                   # raises an error of scheduler_service.errors
    while (plan := core.schedule(group_id, now)) is not None:
        send(plan)                              # plans of a group are executed in order ...
    core.update(group_id, result, now)          # ... and answered in order
    for frontend_id, outbox in core.take_outboxes().items():
        send(outbox)

After a group has come, gone or begun to drain every group may have something to do, after a result
its own group, and after any call those that `take_stirred` names, since requests are placed by
whichever group plans: call `schedule` for each until it returns None. Then take the outboxes.

How it is made, from the outside in:

    core.py           SchedulerCore: requests from submission to end; groups come and go
    registry.py       live requests by id and by frontends' handles
    submission.py     what may refuse a request, in order; admission.py and takeover.py say why
    deadlines.py      whether a request can still meet its deadline; drain.py knows how queues move
    deadline_watch.py when to look at which
    losses.py         whom to blame for a worker's death
    tenants.py        what tenants have under way, and what they may have
    fleet.py          all worker groups, and the models that they serve
    models.py         per model: its worker groups, and what waits for them
    lanes.py          who waits for a worker group; policies/ says who is next
    placing.py        who goes to a worker group now; placement.py says to which
    room.py           what a worker group has room for, which these ask
    wait.py           what a request remembers of their answers
    scheduler.py      Scheduler, one per worker group: schedule() and update()
    waiting_queue.py  who waits, by rank; heap.py keeps the order
    admitting.py      from there into the batch
    prefilling.py     from a prompt to its first tokens
    decoding.py       one token more for what decodes
    running_set.py    who is in the batch, in that order
    preemption.py     who leaves it for want of memory, and how
    making_way.py     who leaves it for a request that goes ahead
    leaving.py        who leaves the worker group, since it drains or is too small
    swapping.py       who is in host memory, and comes back
    moving_costs.py   whether it is worth it
    block_manager.py  who has which blocks; block_pool.py counts references
    host_blocks.py    the same of host memory; what the device has no room to remember
    prefix_cache.py   what sequences begin alike; cached_blocks.py knows which blocks hold it
    batch.py          a plan in the making
    pipeline.py       plans without results yet
    lead.py           how many of them there may be
    introducing.py    what a worker is told of a sequence
    receiving.py      what follows from their results; delivery.py takes them to outboxes
    ending.py         how sequences end
    beam_search.py    beam search: who goes on, who has ended, when it is over
    beam_group.py     which sequences hold which beams; beam_scheduling.py has them in the batch,
                      beam_delivery.py tells what was found
    rates.py          what steps cost, from the results
    step_times.py     when a step is overdue
    sequence.py       one choice; one request's choices
    frontends.py      who gets which news
    request_clock.py  where a request's time goes
    timeline.py       what happened to it, and when
    inspection.py     a close look at both: request_snapshot.py, block_map.py
    latency_histogram.py   how long tokens took, for all requests
    plan.py, request.py, outbox.py, config.py, snapshot.py   what goes in and out

Promises to workers, beyond those of plan.proto:

- An id is in `forget_seq_ids` only if an earlier plan made the sequence known, and once.
- A block may be given to another sequence in the plan after the one in which its last owner was
  scheduled: plans are executed in order, so a row that is run in vain (its sequence ended while
  the step was in flight) writes before the new owner does.
- A new sequence's `num_computed_tokens` are in full blocks that earlier plans computed, for other
  sequences or for itself before a preemption, and whose results are in; nobody writes to them. Or
  it was swapped out, and they are all but its last token. An earlier plan may have swapped the
  blocks in. At least its last token is left to compute.
- What a plan swaps in is not used by it: neither read nor written by its rows, nor copied. A host
  block that it reads is not written before the next plan.
- No plan asks a sequence for more tokens than its request or the model allows, whatever is still
  in flight.
- A sequence comes back to a worker only when all its sampled tokens are known, with all of them.
- A sequence that reports candidates has at most one row in flight. It gets its next row with the
  token that was chosen, or as a fork that brings it, or as a new sequence.

Promises to frontends: an accepted request ends exactly once, and if it is not cancelled its end is
told once; its tokens are told once, in order, and none after the end of their choice.
"""

from scheduler_service.core.beam_search import BeamParams, EarlyStopping
from scheduler_service.core.config import GroupCapacity, PolicyName, SchedulerConfig, TenantConfig
from scheduler_service.core.core import SchedulerCore
from scheduler_service.core.engine_outputs import (
    ChoiceFinished,
    Outbox,
    RequestFinished,
    RequestTimings,
)
from scheduler_service.core.request import GeneratedTokens, Request
from scheduler_service.core.scheduling.pipeline import ResultMismatch
from scheduler_service.core.stats.inspection import Inspection, InspectionDetail
from scheduler_service.core.stats.scheduler_stats import CoreSnapshot, GroupSnapshot
from scheduler_service.core.step_plan import (
    NewSequence,
    RowCandidates,
    RowError,
    RowLogprobs,
    RowPromptLogprobs,
    StepPlan,
    StepResult,
)

__all__ = [
    "BeamParams",
    "ChoiceFinished",
    "CoreSnapshot",
    "EarlyStopping",
    "GeneratedTokens",
    "GroupCapacity",
    "GroupSnapshot",
    "Inspection",
    "InspectionDetail",
    "NewSequence",
    "Outbox",
    "PolicyName",
    "Request",
    "RequestFinished",
    "RequestTimings",
    "ResultMismatch",
    "RowCandidates",
    "RowError",
    "RowLogprobs",
    "RowPromptLogprobs",
    "SchedulerConfig",
    "SchedulerCore",
    "StepPlan",
    "StepResult",
    "TenantConfig",
]
