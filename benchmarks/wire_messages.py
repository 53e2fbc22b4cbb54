"""Plans and results as messages: how large they are, and what either end takes for them."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import fmean, median
from time import thread_time_ns

import numpy as np

from benchmarks.steady_core import TOKEN_ID, Queue, SteadyCore
from pagewire.v1 import plan_pb2
from pagewire.v1 import worker_service_pb2 as worker_pb
from scheduler_service import wire as core_wire
from scheduler_service.core import StepPlan
from worker_service.plan import StepResult, StepTimings
from worker_service.service import wire as worker_wire

TIMINGS = StepTimings(
    received_us=3_600_000_000,
    started_us=3_600_000_100,
    finished_us=3_600_005_100,
    cache_ops_us=10,
    forward_us=4_500,
    sample_us=400,
)
"""Of a worker that has been up for an hour, and a step of 5 ms."""

_BATCH = 10
"""Calls between two readings of the clock, which itself takes as long as the smallest of them."""

Row = dict[str, object]


@dataclass(frozen=True, kw_only=True, slots=True)
class Message:
    """A plan and what answers it: bytes, and CPU microseconds of making and reading them."""

    plan_bytes: int
    result_bytes: int
    encode_plan_us: float
    decode_plan_us: float
    encode_result_us: float
    decode_result_us: float

    @classmethod
    def of(cls, plan: StepPlan) -> "Message":
        """With each end's own conversions: the core's of plans to bytes, and so on."""
        request = _encode_plan(plan)
        result = _result(plan)
        answer = _encode_result(result)
        return cls(
            plan_bytes=len(request),
            result_bytes=len(answer),
            encode_plan_us=_cpu_us(lambda: _encode_plan(plan)),
            decode_plan_us=_cpu_us(lambda: _decode_plan(request)),
            encode_result_us=_cpu_us(lambda: _encode_result(result)),
            decode_result_us=_cpu_us(lambda: _decode_result(answer)),
        )


def steady_row(num_seqs: int, num_steps: int) -> Row:
    """Sequences that all decode, over `num_steps` steps. Bytes are means, since steps in which
    blocks fill up are larger than others; times are medians."""
    plans: list[StepPlan] = []
    core = SteadyCore(Queue(num_seqs=num_seqs, prompt_tokens=64), on_plan=plans.append)
    plans.clear()
    for _ in range(num_steps):
        core.round()
    return _row("steady decoding", num_seqs, [Message.of(plan) for plan in plans])


def new_row(prompt_tokens: int, num_repeats: int) -> Row:
    """One sequence that begins, its whole prompt in the plan."""
    plans: list[StepPlan] = []
    SteadyCore(Queue(num_seqs=1, prompt_tokens=prompt_tokens), on_plan=plans.append)
    first = plans[0]
    assert len(first.new_sequences) == 1
    messages = [Message.of(first) for _ in range(num_repeats)]
    return _row(f"a new prompt of {prompt_tokens:,} tokens", 1, messages)


def _row(case: str, num_seqs: int, messages: Sequence[Message]) -> Row:
    plan_bytes = fmean(message.plan_bytes for message in messages)
    row: Row = {
        "case": case,
        "sequences": num_seqs,
        "plan_bytes": round(plan_bytes, 1),
        "plan_bytes_per_sequence": round(plan_bytes / num_seqs, 2),
        "result_bytes": round(fmean(message.result_bytes for message in messages), 1),
    }
    for name in ("encode_plan_us", "decode_plan_us", "encode_result_us", "decode_result_us"):
        row[name] = round(median(getattr(message, name) for message in messages), 2)
    return row


def _encode_plan(plan: StepPlan) -> bytes:
    request = worker_pb.ExecuteStepsRequest(plan=core_wire.encode_plan(plan, 1))
    return request.SerializeToString()


def _decode_plan(data: bytes) -> object:
    return worker_wire.decode_plan(worker_pb.ExecuteStepsRequest.FromString(data).plan, 0)


def _result(plan: StepPlan) -> StepResult:
    """A token for each row that samples."""
    num_sampled = len(plan.seq_ids) if plan.sample is None else sum(plan.sample)
    token_ids = np.full(num_sampled, TOKEN_ID, np.int32)
    return StepResult(epoch=1, step_id=plan.step_id, token_ids=token_ids, timings=TIMINGS)


def _encode_result(result: StepResult) -> bytes:
    message: plan_pb2.StepResult = worker_wire.encode_result(result)
    return worker_pb.ExecuteStepsResponse(result=message).SerializeToString()


def _decode_result(data: bytes) -> object:
    return core_wire.decode_result(worker_pb.ExecuteStepsResponse.FromString(data).result)


def _cpu_us(call: Callable[[], object]) -> float:
    began = thread_time_ns()
    for _ in range(_BATCH):
        call()
    return (thread_time_ns() - began) / 1000 / _BATCH
