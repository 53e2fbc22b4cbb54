"""The ranks of a group as threads of this process, joined by gloo over loopback as processes are.

Each rank has a thread, its share of the weights, its own caches and its own state of the sequences,
and all get the same plans. Tokens have the texts of `tests/support/vocabularies.py`. What ranks do
as processes of their own is tested end to end.
"""

from collections.abc import Callable, Mapping
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

from scheduler_service.core.config import KeptBlocks, SchedulerConfig, WorkerGroupCapacity
from scheduler_service.core.step_plan import StepResult
from tests.support.in_process import (
    MODEL,
    InProcessEngine,
    InProcessWorker,
    groups_of_core,
    launch,
)
from tests.support.runners import AllDrafts, HostEvent, LateEvent
from tests.support.vocabularies import grammars
from tools.launch import free_port
from worker_service.adapters.peft_format import ModelAdapter
from worker_service.address import TcpAddress
from worker_service.config import AdapterConfig, CacheConfig, ModelConfig, RunnerConfig
from worker_service.distributed.communicator import Rendezvous
from worker_service.distributed.layout import Layout
from worker_service.engine.executor import ModelFacts
from worker_service.loader import LoadedModel, load_model
from worker_service.models.interface import Model
from worker_service.runner.device.cuda_graphs import GraphRecorder, Replay
from worker_service.runner.device.in_flight_step import DeviceEvent
from worker_service.runner.device.state import DeviceState
from worker_service.runner.model_runner import ModelRunner
from worker_service.runner.torch_executor import Profiler, TorchExecutor

Result = TypeVar("Result")
NO_SPECULATION = RunnerConfig()
NO_ADAPTERS = AdapterConfig()
NO_OPTIONS: Mapping[str, Any] = {}
Wrap = Callable[[Model, Layout], Model]


class Executor(TorchExecutor):
    """Knows tokens' texts without a tokenizer."""

    def load(self) -> ModelFacts:
        """As with the tokenizer of these texts."""
        facts = super().load()
        self._grammars = grammars(facts.vocab_size)
        return replace(facts, structured_output=True)


class AheadExecutor(Executor):
    """Launches steps ahead and replays them, as on a GPU. The sampling rank's device is as early as
    can be, the others' as late."""

    num_recorded = 0
    """Steps recorded so far."""

    @property
    def state(self) -> DeviceState:
        """What the device keeps of this epoch."""
        assert self._state is not None
        return self._state

    @property
    def _has_device_steps(self) -> bool:
        return True

    def _make_recorder(self) -> GraphRecorder:
        return self

    def record(self, work: Callable[[], None]) -> Replay:
        """Do the work once; replays do it again."""
        self.num_recorded += 1
        work()
        return work

    def _make_event(self) -> DeviceEvent:
        return HostEvent() if self.loaded.communicator.layout.samples else LateEvent()


class RankThread:
    """One rank; its executor is used on its thread only, but for `interrupt`."""

    def __init__(
        self,
        model: Path,
        layout: Layout,
        block_size: int,
        port: int,
        wrap: Wrap,
        runner: RunnerConfig,
        executor: type[Executor],
        options: Mapping[str, Any],
        adapters: AdapterConfig,
    ) -> None:
        self.layout = layout
        config = ModelConfig(
            model=str(model), device="cpu", dtype="float32", layout=layout, threads=1, **options
        )
        cache = CacheConfig(block_size=block_size)

        def load() -> LoadedModel:
            loaded = load_model(config, cache)
            return replace(loaded, model=wrap(loaded.model, layout))

        self.executor = executor(
            cache,
            Profiler(Path(".")),
            load,
            Rendezvous(TcpAddress("127.0.0.1", port), layout),
            runner,
            AllDrafts(),
            adapters,
        )
        self.runner: ModelRunner | None = None
        self.thread = ThreadPoolExecutor(1)

    def run(self, work: Callable[[], Result]) -> "Future[Result]":
        """Run `work` on the rank's thread, after everything queued before."""
        return self.thread.submit(work)

    def join(self, num_gpu_blocks: int, num_cpu_blocks: int, epoch: int) -> None:
        """On its thread: meet the others over empty caches."""
        self.runner = self.executor.make_runner(num_gpu_blocks, num_cpu_blocks, epoch)

    def execute(self, plan: bytes) -> StepResult:
        """On its thread: a plan's result, both as they travel."""
        return self.launch(plan)()

    def launch(self, plan: bytes) -> Callable[[], StepResult]:
        """On its thread: launch a plan; what is returned may be called elsewhere for its result."""
        assert self.runner is not None
        return launch(self.runner, plan)


class RankThreads:
    """All ranks of a group."""

    def __init__(
        self,
        model: Path,
        *,
        tensor_parallel_size: int = 1,
        pipeline_parallel_size: int = 1,
        block_size: int = 4,
        wrap: Wrap = lambda model, layout: model,
        runner: RunnerConfig = NO_SPECULATION,
        executor: type[Executor] = Executor,
        options: Mapping[str, Any] = NO_OPTIONS,
        adapters: AdapterConfig = NO_ADAPTERS,
    ) -> None:
        """wrap: what a rank is to have in place of its model; options: of `ModelConfig`."""
        port = free_port()
        self.ranks = [
            RankThread(
                model,
                Layout(
                    tensor_parallel_size=tensor_parallel_size,
                    pipeline_parallel_size=pipeline_parallel_size,
                    rank=rank,
                ),
                block_size,
                port,
                wrap,
                runner,
                executor,
                options,
                adapters,
            )
            for rank in range(tensor_parallel_size * pipeline_parallel_size)
        ]
        self.facts = [rank.run(rank.executor.load).result() for rank in self.ranks]
        self.epoch = 0
        self.block_size = block_size
        self.max_loras = adapters.max_loras if adapters.enable_lora else 0

    def join(self, num_gpu_blocks: int, num_cpu_blocks: int = 0) -> None:
        """Begin a new epoch."""
        self.epoch += 1
        sizes = num_gpu_blocks, num_cpu_blocks, self.epoch
        joining = [rank.run(lambda r=rank: r.join(*sizes)) for rank in self.ranks]
        for future in joining:
            future.result()

    def add_adapter(self, adapter: ModelAdapter) -> None:
        """Let all ranks hold an adapter, as from another worker."""
        for rank in self.ranks:
            assert rank.executor.adapters.add(bytearray(adapter.content)) == adapter.info

    def send(self, plan: bytes) -> "list[Future[StepResult]]":
        """Each rank's result to come, by rank."""
        return [rank.run(lambda r=rank: r.execute(plan)) for rank in self.ranks]

    def launch(self, plan: bytes) -> "list[Future[Callable[[], StepResult]]]":
        """Each rank's step to come, by rank, to be called for its result."""
        return [rank.run(lambda r=rank: r.launch(plan)) for rank in self.ranks]

    def close(self) -> None:
        """Part the ranks, and end their threads."""
        for rank in self.ranks:
            rank.executor.interrupt(0)
            if rank.runner is not None:
                rank.run(rank.runner.reset)
        for rank in self.ranks:
            rank.thread.shutdown()


class ParallelWorker(InProcessWorker):
    """A group of ranks as a worker; each epoch is another."""

    def __init__(self, group: RankThreads, num_gpu_blocks: int, num_cpu_blocks: int) -> None:
        self._group = group
        self._num_blocks = num_gpu_blocks, num_cpu_blocks
        self.adapters = None
        self.num_kept = 0
        """Drafts that were right."""
        self._kept = KeptBlocks()
        group.join(num_gpu_blocks, num_cpu_blocks)

    def capacity(self, group_id: str) -> WorkerGroupCapacity:
        """The registration that a core receives."""
        facts = self._group.facts[0]
        num_gpu_blocks, num_cpu_blocks = self._num_blocks
        return WorkerGroupCapacity(
            worker_group_id=group_id,
            model=MODEL,
            num_gpu_blocks=num_gpu_blocks,
            num_cpu_blocks=num_cpu_blocks,
            cache_groups=groups_of_core(facts.cache_groups),
            max_model_len=facts.max_model_len,
            vocab_size=facts.vocab_size,
            num_speculative_tokens=facts.num_speculative_tokens,
            max_loras=self._group.max_loras,
        )

    def lose_core(self) -> None:
        """Begin another epoch, in which nothing is left of the one before."""
        self._group.join(*self._num_blocks)

    def send(self, plan: bytes) -> Callable[[], StepResult]:
        """Hand a plan to all ranks; what is returned waits for the sampling rank's result."""
        steps = self._group.launch(plan)
        sampler = self._group.ranks[0].layout.sampler

        def result() -> StepResult:
            # An error of one rank would leave the others waiting for it.
            done, _ = wait(steps, return_when=FIRST_EXCEPTION)
            results = [step.result()() for step in steps if step in done]
            sampled = results.pop(sampler)
            assert all(result.token_ids == [] for result in results)
            self.num_kept += sum(count - 1 for count in sampled.num_sampled or ())
            return sampled

        return result


class ParallelEngine(InProcessEngine):
    """A group of ranks served to this process alone."""

    def __init__(
        self,
        model: Path,
        *,
        tensor_parallel_size: int = 1,
        pipeline_parallel_size: int = 1,
        num_gpu_blocks: int = 512,
        num_cpu_blocks: int = 0,
        config: SchedulerConfig | None = None,
        runner: RunnerConfig = NO_SPECULATION,
        executor: type[Executor] = Executor,
        adapters: AdapterConfig = NO_ADAPTERS,
    ) -> None:
        self.group = RankThreads(
            model,
            tensor_parallel_size=tensor_parallel_size,
            pipeline_parallel_size=pipeline_parallel_size,
            runner=runner,
            executor=executor,
            adapters=adapters,
        )
        self.reset(
            num_gpu_blocks=num_gpu_blocks,
            num_cpu_blocks=num_cpu_blocks,
            config=config or SchedulerConfig(),
        )

    def make_worker(self, num_gpu_blocks: int, num_cpu_blocks: int) -> ParallelWorker:
        """All ranks meet over empty caches."""
        return ParallelWorker(self.group, num_gpu_blocks, num_cpu_blocks)
