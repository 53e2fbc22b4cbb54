"""Recordings of cores whose workers take exactly the time that a cost model says."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

from scheduler_service.core import Request, SchedulerConfig, SchedulerCore, WorkerGroupCapacity
from scheduler_service.core.request import Generation
from scheduler_service.replay.exact_replay import ExactReplay
from scheduler_service.replay.recorder import RecordingCore
from scheduler_service.replay.recording import Entry, decode_sampling
from tests.support.core_driver import GENERATION_FIELDS, make_capacity
from tests.support.recorded import Recording
from tools.what_if.cost_model import CostModel
from tools.what_if.simulation import simulate
from tools.what_if.trace import ChoiceHistory, RequestHistory, Trace, TraceReader

COSTS = CostModel(base=0.010, per_row=0.001, per_token=0.0001, per_block=0.0)

GPU_COSTS = CostModel(base=0.008, per_row=0.00003, per_token=0.00006, per_block=0.0)
"""Similar to those of an 8B model on one large GPU."""

GPU_GROUP = make_capacity(num_gpu_blocks=8192, block_size=16, max_model_len=4096, vocab_size=32_000)
GPU_CONFIG = SchedulerConfig(
    max_num_seqs=32,
    max_num_batched_tokens=256,
    max_queue_requests=1_000_000,
    max_queue_tokens=2**30,
    enable_prefix_caching=False,
)


def entry(do: str, **arguments: Any) -> Entry:
    """An input that nobody wrote down."""
    return Entry(line=0, do=do, arguments=arguments)


def join(capacity: WorkerGroupCapacity | None = None, now: float = 0.0) -> Entry:
    """A worker group joins."""
    return entry("add_worker_group", capacity=capacity or make_capacity(), now=now)


def script(
    number: int,
    *,
    at: float = 0.0,
    prompt: int = 4,
    num_tokens: int = 4,
    max_tokens: int | None = None,
    tokens: Sequence[int] | None = None,
    **fields: Any,
) -> RequestHistory:
    """A request with one choice, of `num_tokens` tokens."""
    work = {name: fields.pop(name) for name in GENERATION_FIELDS & fields.keys()}
    request = Request(
        frontend_id="f0",
        handle=number + 1,
        request_id=f"r{number}",
        model="m",
        # Unlike all others from the first token on.
        prompt_token_ids=[(number + i) % 31 for i in range(prompt)],
        work=Generation(
            max_tokens=max_tokens or num_tokens,
            sampling=None,
        ),
    )
    return RequestHistory(
        number=number,
        request=replace(request, work=replace(request.work, **work), **fields),
        submitted=at,
        choices=[ChoiceHistory(tokens=list(tokens or [5] * num_tokens))],
    )


def make_trace(*scripts: RequestHistory, interventions: Sequence[Entry] = ()) -> Trace:
    """Requests for one worker group that is there from the start."""
    return Trace(histories=list(scripts), interventions=[join(), *interventions], steps={})


def record(trace: Trace, config: SchedulerConfig, costs: CostModel = COSTS) -> Recording:
    """The recording of a trace that is put to a core in virtual time."""
    recording = Recording(decode_sampling)
    simulate(trace, RecordingCore(config, recording), {"g0": costs})
    return recording


def read_trace(recording: Recording) -> Trace:
    """What a recording says of its users and workers."""
    reader = TraceReader()
    summary = ExactReplay(recording.header()).run(recording.entries(), reader.observe)
    assert summary.is_exact
    return reader.trace()


def serve(
    core: SchedulerCore,
    scripts: Iterable[RequestHistory],
    *,
    group: WorkerGroupCapacity = GPU_GROUP,
    until: float = math.inf,
) -> list[RequestHistory]:
    """The requests that a worker group with `GPU_COSTS` serves until it leaves."""
    leaves = entry("remove_worker_group", worker_group_id=group.worker_group_id, now=until)
    interventions = [join(group)] + ([leaves] if until < math.inf else [])
    trace = replace(make_trace(*scripts), interventions=interventions)
    return simulate(trace, core, {group.worker_group_id: GPU_COSTS})
