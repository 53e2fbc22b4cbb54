"""Engines with drafts, whose outputs are compared with those without."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

from scheduler_service.core.config import SchedulerConfig
from tests.support.in_process import InProcessEngine, InProcessWorker, Output, SpeculatingWorker
from tests.support.runners import RUNNERS, AllDrafts, recorded_on_gpu
from worker_service.config import CacheConfig, ModelConfig, RunnerConfig
from worker_service.kv_cache.cache_engine import CacheEngine
from worker_service.loader import load_model
from worker_service.models.decoder.draft_head import DraftHead
from worker_service.models.interface import Model
from worker_service.runner.drafting.drafter import Drafter
from worker_service.runner.torch_executor import Profiler, TorchExecutor

NUM_DRAFTS = 3
PROMPTS = [[5 + (7 * index + at) % 200 for at in range(6 + 9 * index)] for index in range(4)]
SAMPLING: list[dict[str, Any]] = [
    {},
    {"temperature": 0.8, "top_p": 0.9, "seed": 11},
    {"temperature": 1.0, "seed": 3, "top_k": 20, "min_tokens": 9},
]


class SpeculatingEngine(InProcessEngine, ABC):
    """Computes all drafts of a drafter over the worker's cache, and counts them in `lengths`."""

    num_drafts = NUM_DRAFTS

    def __init__(
        self,
        model: Path,
        *,
        config: SchedulerConfig | None = None,
        runner: str = "host",
        **options: Any,
    ):
        """runner: one of `RUNNERS`, or `gpu` for what a worker has there."""
        self.path = model
        self.kind = (RUNNERS | {"gpu": recorded_on_gpu})[runner]
        self.lengths = AllDrafts()
        config = config or SchedulerConfig(max_speculative_seqs=8)
        super().__init__(model, config=config, **options)

    def load_draft(self) -> Model | DraftHead | None:
        """The draft model or head of a new worker, if it has one."""
        return None

    @abstractmethod
    def make_drafter(self, cache: CacheEngine) -> Drafter:
        """The drafter of a new worker."""

    def make_worker(self, num_gpu_blocks: int, num_cpu_blocks: int) -> InProcessWorker:
        """A worker with drafts."""
        model, self.draft = self.loaded.model, self.load_draft()
        if self.draft is not None and not model.kv_cache_spec.num_drafts:
            model.kv_cache_spec = model.kv_cache_spec.with_drafts(self.draft.kv_cache_spec)
        return SpeculatingWorker(
            model,
            make_drafter=self.make_drafter,
            draft_lengths=self.lengths,
            num_drafts=self.num_drafts,
            kind=self.kind,
            num_gpu_blocks=num_gpu_blocks,
            num_cpu_blocks=num_cpu_blocks,
            block_size=self.block_size,
            device=self.device,
        )

    def assert_outputs_are_those_without_drafts(
        self, prompts: Sequence[Sequence[int]], max_tokens: int, **sampling: Any
    ) -> list[Output]:
        """Generate with and without drafts. Returns the outputs."""
        plain = _without_drafts(
            self.path, tuple(map(tuple, prompts)), max_tokens, frozenset(sampling.items())
        )
        drafting = self.generate(prompts, max_tokens, **sampling)
        assert [answer.token_ids for answer in drafting] == [answer.token_ids for answer in plain]
        assert [answer.logprobs for answer in drafting] == [answer.logprobs for answer in plain]
        return drafting


@cache
def _without_drafts(
    path: Path,
    prompts: tuple[tuple[int, ...], ...],
    max_tokens: int,
    sampling: frozenset[tuple[str, Any]],
) -> list[Output]:
    """Outputs that tests with several runners and drafters compare with."""
    return InProcessEngine(path).generate(prompts, max_tokens, **dict(sampling))


def loaded_executor(model: Path, **speculation: Any) -> TorchExecutor:
    """An executor with 1 MiB of KV cache and of swap space; speculation: see `RunnerConfig`."""
    cache = CacheConfig(block_size=16, kv_cache_memory=2**20, swap_space=2**20)
    config = ModelConfig(model=str(model), device="cpu", dtype="float32")
    executor = TorchExecutor(
        cache,
        Profiler(Path(".")),
        lambda: load_model(config, cache),
        None,
        RunnerConfig(**speculation),
    )
    executor.load()
    return executor
