"""The scheduler core: decides which sequences run on which worker group in each step.

It owns all requests from submission to their end, the queues that they wait in, and the KV cache
of every worker group. It is a pure state machine that never waits or reads a clock: the same calls
produce the same plans, so that any run can be replayed. It imports no protobuf; log probabilities
and vectors pass through it in the bytes of the wire. Its driver runs this loop:

    core = SchedulerCore(SchedulerConfig())
    core.add_worker_group(capacity, now)        # a worker group is ready
    core.submit(request, now)                   # raises an error of scheduler_service.errors
    while (plan := core.schedule(group_id, now)) is not None:
        send(plan)                              # plans of a group are executed in order ...
    core.update(group_id, result, now)          # ... and answered in order
    for frontend_id, outputs in core.pop_outboxes().items():
        send(outputs)

Call `schedule` until it returns None, then take the outputs: for every group after a worker group
joined, left or began to drain; for a result's own group after `update`; and after any call for the
groups that `pop_woken` returns, because requests are routed by whichever group plans.

The modules, from the outside in:

    core.py            SchedulerCore: the public interface; requests and worker groups
    endings.py         how requests end
    inspection.py      the state in detail, for status pages
    admission/         which requests are accepted, and whether they can meet their deadlines
    routing/           which worker group serves a waiting request
    scheduling/        Scheduler, one per worker group: schedule() and update(); the strategies of
                       sampling, beam search and pooling, and the resources of a batch
    policies/          the order in which requests are served
    kv_cache/          KVCacheManager: memory on device and host, and the prefix cache
    sequence.py        the state of one request and its sequences, and its strategy
    progress.py        how long a sequence is, and how far it is computed
    fitting.py         how far a request can get in a worker group, and whether it fits
    placement.py       where a request is served or waits, and the workers that died with it
    request_queue.py   the queues of waiting requests
    beam_search.py     which beams of a beam search continue, and when it ends
    tenants.py         what each tenant uses and may use
    scheduler_stats.py counters, histograms and snapshots
    throughput.py      what steps cost, and how fast queues are served
    request_timing.py  a request's time by activity, and its events
    context.py         what KV depends on besides tokens: salts, adapters, media
    config.py          what an operator configures, and the capacity of a worker group

    request.py         what frontends submit, and the outputs sent to them
    step_plan.py       the plans sent to workers, and the results that they return

Promises to workers, beyond those of plan.proto:

- An id is in `forget_seq_ids` only if an earlier plan introduced the sequence, and once.
- Memory may be given to another sequence in the plan after the one in which its last owner was
  scheduled: plans are executed in order, so a row whose result is discarded (its sequence ended
  while the step was in flight) writes before the new owner does.
- A new sequence's `num_computed_tokens` were computed by earlier plans, for other sequences or
  for itself before a preemption, and the results have arrived; nothing writes to their memory. Or
  it was swapped out, and they are all but its last token. An earlier plan may have swapped them in.
  At least its last token is left to compute.
- What a plan swaps in is not used by it: neither read nor written by its rows, nor copied. Host
  memory that it reads is not written before the next plan.
- No plan computes more tokens of a sequence than its request or the model allows, whatever is still
  in flight.
- A sequence comes back to a worker only when all its sampled tokens are known, with all of them.
- A sequence that is pooled has no row after the one that brings its vector, or those of its last
  tokens; the next plan forgets it.
- A sequence that reports candidates has at most one row in flight. It gets its next row with the
  token that was chosen, or as a fork that brings it, or as a new sequence.

Promises to frontends: an accepted request ends exactly once, and unless it is cancelled its end is
reported once; its tokens are reported once, in order, and none after the end of their choice. If
each token has a vector, some may be reported once more after a loss, with the same numbers.
"""

from scheduler_service.core.beam_search import BeamParams as BeamParams
from scheduler_service.core.beam_search import EarlyStopping as EarlyStopping
from scheduler_service.core.config import PolicyName as PolicyName
from scheduler_service.core.config import SchedulerConfig as SchedulerConfig
from scheduler_service.core.config import TenantConfig as TenantConfig
from scheduler_service.core.config import WorkerGroupCapacity as WorkerGroupCapacity
from scheduler_service.core.context import ContextKind as ContextKind
from scheduler_service.core.context import ContextPart as ContextPart
from scheduler_service.core.core import SchedulerCore as SchedulerCore
from scheduler_service.core.inspection import Inspection as Inspection
from scheduler_service.core.inspection import InspectionDetail as InspectionDetail
from scheduler_service.core.request import ChoiceFinished as ChoiceFinished
from scheduler_service.core.request import EngineOutputs as EngineOutputs
from scheduler_service.core.request import GeneratedTokens as GeneratedTokens
from scheduler_service.core.request import Request as Request
from scheduler_service.core.request import RequestFinished as RequestFinished
from scheduler_service.core.request import RequestTimings as RequestTimings
from scheduler_service.core.scheduler_stats import CoreSnapshot as CoreSnapshot
from scheduler_service.core.scheduler_stats import WorkerGroupSnapshot as WorkerGroupSnapshot
from scheduler_service.core.scheduling.pipeline import ResultMismatch as ResultMismatch
from scheduler_service.core.step_plan import NewSequence as NewSequence
from scheduler_service.core.step_plan import RowCandidates as RowCandidates
from scheduler_service.core.step_plan import RowError as RowError
from scheduler_service.core.step_plan import RowLogprobs as RowLogprobs
from scheduler_service.core.step_plan import RowPromptLogprobs as RowPromptLogprobs
from scheduler_service.core.step_plan import StepPlan as StepPlan
from scheduler_service.core.step_plan import StepResult as StepResult
