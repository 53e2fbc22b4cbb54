"""A simulated runner and a plan builder that fit together."""

from collections.abc import Sequence
from typing import Any

from pagewire.v1 import plan_pb2
from tests.support.worker_driver import PlanBuilder, Row
from worker_service.config import SimulationConfig
from worker_service.plan import StepResult
from worker_service.service import wire
from worker_service.simulated.executor import SimulatedRunner

BLOCK_SIZE = 4
NUM_BLOCKS = 32


class Bench:
    """A runner that is given plans as they come off the wire."""

    def __init__(self, **config: Any) -> None:
        self.config = SimulationConfig(**({"vocab_size": 997, "max_model_len": 64} | config))
        self.runner = SimulatedRunner(
            self.config,
            groups=self.config.groups(BLOCK_SIZE),
            num_gpu_blocks=NUM_BLOCKS,
            num_cpu_blocks=8,
        )
        self.plans = PlanBuilder(block_size=BLOCK_SIZE)

    def execute(self, plan: plan_pb2.StepPlan) -> StepResult:
        return self.runner.execute(wire.decode_plan(plan, 0))

    def step(self, *rows: Row, **fields: Any) -> StepResult:
        return self.execute(self.plans.plan(rows, **fields))

    def tokens(self, *rows: Row, **fields: Any) -> list[int]:
        tokens: list[int] = self.step(*rows, **fields).token_ids.tolist()
        return tokens

    def decode(self, seq_id: int, num_steps: int) -> list[int]:
        return [self.tokens(Row(seq_id))[0] for _ in range(num_steps)]


def undisturbed(prompt: Sequence[int], num_tokens: int, **fields: Any) -> list[int]:
    """The output of a sequence that runs alone, its prompt in one piece."""
    bench = Bench()
    bench.plans.add(1, prompt, **fields)
    return bench.tokens(Row(1, len(prompt))) + bench.decode(1, num_tokens - 1)
