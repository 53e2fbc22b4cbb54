"""Scheduler cores in steady decoding, without workers, timed step by step."""

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import compress, pairwise
from time import perf_counter_ns, thread_time_ns

from pagewire.v1.plan_pb2 import StepResult as StepResultMessage
from pagewire.v1.sampling_pb2 import SamplerParams
from scheduler_service import wire
from scheduler_service.core import (
    Request,
    SchedulerConfig,
    SchedulerCore,
    StepPlan,
    WorkerGroupCapacity,
)
from scheduler_service.core.config import CacheGroup, CacheLifetime
from scheduler_service.core.request import Generation

NUM_FRONTENDS = 2
PREFILL_TOKENS = 16_384
"""Prompt tokens of one step, in addition to the decodes."""

GROWTH_TOKENS = 4096
"""Output tokens for which every sequence has room."""

TOKEN_ID = 11


@dataclass(frozen=True, kw_only=True, slots=True)
class Queue:
    """The running sequences, the same for both schedulers."""

    num_seqs: int
    prompt_tokens: int
    block_size: int = 16
    num_groups: int = 1
    """Worker groups, among which the sequences are distributed evenly."""
    num_drafts: int = 0
    """Drafts of each row, of which rows accept none to all in turn."""
    window: int = 0
    """Tokens of the windows of a second cache group; 0: there is none."""

    @property
    def cache_groups(self) -> tuple[CacheGroup, ...]:
        """One that keeps all tokens, and that of windows if there is any; their blocks have the
        same number of tokens."""
        growing = CacheGroup(block_tokens=self.block_size)
        if not self.window:
            return (growing,)
        return growing, replace(growing, lifetime=CacheLifetime.WINDOW, span=self.window)

    @property
    def num_blocks(self) -> int:
        """Blocks of one group: enough for all of its sequences."""
        blocks_each = -(-(self.prompt_tokens + GROWTH_TOKENS) // self.block_size) + 1
        return self.num_seqs // self.num_groups * blocks_each * len(self.cache_groups)

    def prompt(self, index: int) -> list[int]:
        """The prompt of one sequence. Prompts share nothing, and their lengths differ within each
        group, so that every step fills up some blocks."""
        extra = index // self.num_groups % self.block_size
        return [100 + index] + [7] * (self.prompt_tokens + extra - 1)


@dataclass(frozen=True, kw_only=True, slots=True)
class StepTimes:
    """CPU time of one step, in microseconds."""

    schedule: float
    encode_plan: float
    decode_result: float
    update: float
    encode_outputs: float
    plan_bytes: int

    @property
    def deciding(self) -> float:
        """Time of the pure core."""
        return self.schedule + self.update

    @property
    def serializing(self) -> float:
        """Time of converting messages to and from bytes."""
        return self.encode_plan + self.decode_result + self.encode_outputs

    @property
    def total(self) -> float:
        """Time of the whole step."""
        return self.deciding + self.serializing


@contextmanager
def pauses_ms() -> Iterator[list[float]]:
    """Milliseconds of garbage collections, one by one, while the context is open."""
    found: list[float] = []
    began = 0

    def observe(phase: str, _info: object) -> None:
        nonlocal began
        if phase == "start":
            began = perf_counter_ns()
        else:
            found.append((perf_counter_ns() - began) / 1e6)

    gc.callbacks.append(observe)
    try:
        yield found
    finally:
        gc.callbacks.remove(observe)


class SteadyCore:
    """A core with a queue of running sequences, all decoding."""

    def __init__(
        self,
        queue: Queue,
        make_core: Callable[[SchedulerConfig], SchedulerCore] = SchedulerCore,
        *,
        on_plan: Callable[[StepPlan], None] = lambda plan: None,
    ) -> None:
        """`on_plan`: called with every plan, including those of prefills; its time does not
        count."""
        rows = queue.num_seqs // queue.num_groups
        self._core = make_core(
            SchedulerConfig(
                max_num_seqs=rows,
                max_num_batched_tokens=rows * (1 + queue.num_drafts) + PREFILL_TOKENS,
                max_speculative_seqs=rows,
                max_queue_requests=queue.num_seqs,
                max_queue_tokens=2**30,
            )
        )
        self._group_ids = [f"g{index}" for index in range(queue.num_groups)]
        self._on_plan = on_plan
        self._now = 0.0
        for group_id in self._group_ids:
            self._core.add_worker_group(_capacity(group_id, queue), self._now)
        for index in range(queue.num_seqs):
            self._core.submit(_request(index, queue), self._now)
        while self._core.snapshot().num_waiting:
            self.round()
        for _ in range(3):
            self.round()
        assert {g.num_running_sequences for g in self._core.snapshot().worker_groups} == {rows}
        gc.collect()

    @property
    def core(self) -> SchedulerCore:
        """The core itself, for reading only."""
        return self._core

    def round(self) -> list[StepTimes]:
        """A step of each group."""
        return [self._step(group_id) for group_id in self._group_ids]

    def _step(self, group_id: str) -> StepTimes:
        self._now += 0.01
        times = [thread_time_ns()]
        plan = self._core.schedule(group_id, self._now)
        times.append(thread_time_ns())
        assert plan is not None
        plan_bytes = wire.encode_plan(plan, 1).SerializeToString()
        times.append(thread_time_ns())
        self._on_plan(plan)
        answer = _answer(plan)
        times.append(thread_time_ns())
        result = wire.decode_result(StepResultMessage.FromString(answer))
        times.append(thread_time_ns())
        self._core.update(group_id, result, self._now)
        times.append(thread_time_ns())
        for outbox in self._core.pop_outboxes().values():
            wire.encode_outbox(outbox).SerializeToString()
        times.append(thread_time_ns())
        spent = [(after - before) / 1000 for before, after in pairwise(times)]
        return StepTimes(
            schedule=spent[0],
            encode_plan=spent[1],
            decode_result=spent[3],
            update=spent[4],
            encode_outputs=spent[5],
            plan_bytes=len(plan_bytes),
        )


def _capacity(group_id: str, queue: Queue) -> WorkerGroupCapacity:
    return WorkerGroupCapacity(
        worker_group_id=group_id,
        model="m",
        num_gpu_blocks=queue.num_blocks,
        num_cpu_blocks=0,
        cache_groups=queue.cache_groups,
        max_model_len=queue.prompt_tokens + queue.block_size + GROWTH_TOKENS,
        vocab_size=32_000,
        num_speculative_tokens=queue.num_drafts,
    )


def _request(index: int, queue: Queue) -> Request:
    return Request(
        frontend_id=f"f{index % NUM_FRONTENDS}",
        handle=index + 1,
        request_id=f"r{index}",
        model="m",
        prompt_token_ids=queue.prompt(index),
        work=Generation(
            max_tokens=GROWTH_TOKENS,
            sampling=SamplerParams(top_p=1.0, repetition_penalty=1.0),
            stop_token_ids=frozenset({2, 3}),
        ),
    )


def _answer(plan: StepPlan) -> bytes:
    samples = plan.output or [1] * len(plan.seq_ids)
    num_tokens = sum(samples)
    message = StepResultMessage(epoch=1, step_id=plan.step_id)
    if plan.lookahead is not None:
        rows = enumerate(compress(plan.lookahead, samples), start=plan.step_id)
        message.num_sampled = bytes(1 + place % (1 + most) for place, most in rows)
        num_tokens = sum(message.num_sampled)
        message.num_drafts = bytes(compress(plan.lookahead, samples))
    message.token_ids = TOKEN_ID.to_bytes(4, "little") * num_tokens
    return message.SerializeToString()
