"""`python -m tests.support.poisoned_worker CORE LISTEN`: a worker that one request kills.

It serves the embedded model like any other, but dies by SIGKILL as soon as it is to compute a
sequence with the token `POISON` in it: at the same point wherever the request goes.
"""

import asyncio
import os
import signal
import sys
from pathlib import Path

from worker_service.config import CacheConfig, ModelConfig, NetworkConfig, WorkerConfig
from worker_service.engine.executor import Runner, Step
from worker_service.loader import load_model
from worker_service.plan import StepPlan
from worker_service.runner.torch_executor import Profiler, TorchExecutor
from worker_service.service.lifecycle import make_worker

POISON = 1000
"""A token that no other request has."""


class PoisonedRunner:
    """A runner that dies of the poison."""

    def __init__(self, runner: Runner) -> None:
        self._runner = runner
        self.block_memory = runner.block_memory

    def launch(self, plan: StepPlan) -> Step:
        """Compute the plan, unless it is the last."""
        if any(POISON in new.token_ids for new in plan.new_sequences):
            os.kill(os.getpid(), signal.SIGKILL)
        return self._runner.launch(plan)

    def reset(self) -> None:
        """Forget all sequences."""
        self._runner.reset()


class PoisonedExecutor(TorchExecutor):
    """Makes such runners."""

    def make_runner(self, num_gpu_blocks: int, num_cpu_blocks: int, epoch: int) -> Runner:
        """One around a healthy runner."""
        return PoisonedRunner(super().make_runner(num_gpu_blocks, num_cpu_blocks, epoch))


def main(core: str, listen: str) -> None:
    """Serve until killed or stopped."""
    model = ModelConfig(model="embedded", dtype="float32", device="cpu")
    cache = CacheConfig(kv_cache_memory=2**24)
    network = NetworkConfig(core=core, listen=listen)
    config = WorkerConfig(model=model, cache=cache, network=network)
    executor = PoisonedExecutor(cache, Profiler(Path()), lambda: load_model(model, cache))
    asyncio.run(_run(config, executor))


async def _run(config: WorkerConfig, executor: PoisonedExecutor) -> None:
    worker = make_worker(config, executor)
    worker.handle_signals()
    await worker.run()


if __name__ == "__main__":
    main(*sys.argv[1:])
