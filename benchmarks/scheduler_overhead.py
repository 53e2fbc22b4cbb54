"""CPU time of the scheduler core per step of steady decoding, without a worker.

A worker that takes no time answers each plan with a fixed token. Columns: planning
(`schedule`), the plan as bytes, the result from bytes, taking it in (`update`), the outbox as
bytes, and their sum. Growth must be linear in running sequences and flat in their lengths.

    python -m benchmarks.scheduler_overhead
"""

import argparse
import gc
from collections.abc import Callable
from dataclasses import dataclass, field
from statistics import median
from time import thread_time_ns
from typing import TypeVar

from pagewire.v1.plan_pb2 import StepResult as StepResultMessage
from pagewire.v1.sampling_pb2 import SamplerParams
from scheduler_service import wire
from scheduler_service.core import (
    GroupCapacity,
    Request,
    SchedulerConfig,
    SchedulerCore,
    StepPlan,
    StepResult,
)

BLOCK_SIZE = 16
MAX_TOKENS = 100_000
T = TypeVar("T")


@dataclass
class Stopwatch:
    """Times of one kind of work, in microseconds."""

    times: dict[str, list[float]] = field(default_factory=dict)

    def measure(self, name: str, work: Callable[[], T]) -> T:
        """Do the work and note its time."""
        start = thread_time_ns()
        result = work()
        self.times.setdefault(name, []).append((thread_time_ns() - start) / 1000)
        return result


class Bench:
    """A core with so many running sequences, all decoding."""

    def __init__(self, num_seqs: int, prompt_tokens: int, num_frontends: int) -> None:
        blocks_each = -(-(prompt_tokens + 4096) // BLOCK_SIZE)
        config = SchedulerConfig(
            max_num_seqs=num_seqs,
            max_num_batched_tokens=num_seqs + 16_384,
            max_queue_tokens=2**40,
        )
        self.core = SchedulerCore(config)
        capacity = GroupCapacity(
            group_id="g",
            model="m",
            num_gpu_blocks=num_seqs * blocks_each,
            num_cpu_blocks=0,
            block_size=BLOCK_SIZE,
            max_model_len=prompt_tokens + MAX_TOKENS,
            vocab_size=32_000,
        )
        self.core.add_group(capacity, 0.0)
        self.now = 0.0
        for i in range(num_seqs):
            request = Request(
                frontend_id=f"f{i % num_frontends}",
                handle=i + 1,
                request_id=f"r{i}",
                model="m",
                # Lengths differ, so that blocks fill up in different steps.
                prompt_token_ids=[7] * (prompt_tokens + i % BLOCK_SIZE),
                max_tokens=MAX_TOKENS,
                sampling=SamplerParams(),
                stop_token_ids=frozenset({2, 3}),
            )
            self.core.submit(request, self.now)
        while self.core.snapshot().num_waiting:
            self.step(Stopwatch())
        for _ in range(3):
            self.step(Stopwatch())

    def step(self, watch: Stopwatch) -> int:
        """One step; the plan's size in bytes."""
        self.now += 0.01
        plan = watch.measure("schedule", lambda: self.core.schedule("g", self.now))
        assert plan is not None
        plan_bytes = watch.measure(
            "encode plan", lambda: wire.encode_plan(plan, 1).SerializeToString()
        )
        answer = self._answer(plan)
        result = watch.measure("decode result", lambda: self._decode(answer))
        watch.measure("update", lambda: self.core.update("g", result, self.now))
        watch.measure("encode news", self._encode_news)
        return len(plan_bytes)

    def _answer(self, plan: StepPlan) -> bytes:
        sample = plan.sample or [True] * len(plan.seq_ids)
        message = StepResultMessage(epoch=1, step_id=plan.step_id)
        message.token_ids = (11).to_bytes(4, "little") * sum(sample)
        return message.SerializeToString()

    def _decode(self, answer: bytes) -> StepResult:
        return wire.decode_result(StepResultMessage.FromString(answer))

    def _encode_news(self) -> None:
        for outbox in self.core.take_outboxes().values():
            wire.encode_outbox(outbox).SerializeToString()


COLUMNS = ["schedule", "encode plan", "decode result", "update", "encode news"]


def run(num_seqs: int, prompt_tokens: int, num_steps: int, num_frontends: int) -> None:
    """Print one line of the table: medians over the steps, in microseconds."""
    bench = Bench(num_seqs, prompt_tokens, num_frontends)
    watch = Stopwatch()
    gc.collect()
    sizes = [bench.step(watch) for _ in range(num_steps)]
    medians = [median(watch.times[name]) for name in COLUMNS]
    sums = [sum(parts) for parts in zip(*(watch.times[name] for name in COLUMNS), strict=True)]
    cells = [f"{value:13.1f}" for value in [*medians, median(sums), median(sums) / num_seqs]]
    bytes_per_seq = sum(sizes) / num_steps / num_seqs
    print(f"{num_seqs:8} {prompt_tokens:8} {' '.join(cells)} {bytes_per_seq:13.1f}")


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--running", type=int, nargs="+", default=[16, 256, 1024, 4096])
    parser.add_argument("--prompt-tokens", type=int, nargs="+", default=[64, 4096])
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--frontends", type=int, default=2)
    args = parser.parse_args()
    names = [*COLUMNS, "sum", "sum/sequence", "plan bytes/seq"]
    print("medians per step in microseconds")
    print(f"{'running':>8} {'prompt':>8} {' '.join(f'{name:>13}' for name in names)}")
    for prompt_tokens in args.prompt_tokens:
        for num_seqs in args.running:
            run(num_seqs, prompt_tokens, args.steps, args.frontends)


if __name__ == "__main__":
    main()
