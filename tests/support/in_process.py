"""Scheduler core and model runner in one process, joined by their own wire modules.

What crosses between them is bytes, as over gRPC, and plans are pipelined as deep as configured;
only the network and the processes are missing. So a test can run many models in little time.
"""

from collections import deque
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any
from weakref import WeakValueDictionary

import numpy as np
import torch

from pagewire.v1 import plan_pb2, sampling_pb2, worker_service_pb2
from scheduler_service import wire as scheduler_wire
from scheduler_service.core.config import (
    CacheGroup,
    CacheLifetime,
    KeptBlocks,
    KeptSequence,
    SchedulerConfig,
    WorkerGroupCapacity,
)
from scheduler_service.core.core import SchedulerCore
from scheduler_service.core.request import Generation, Request
from scheduler_service.core.step_plan import FetchResult, StepResult
from scheduler_service.core_service.workers.kept_blocks import RankReport, common_blocks, entries_of
from tests.support.runners import (
    AllDrafts,
    MakeDrafter,
    MakeRunner,
    host,
    make_cache,
    recorded,
    recorded_on_gpu,
    speculating,
)
from worker_service.adapters.peft_format import ModelAdapter
from worker_service.adapters.store import AdapterStore
from worker_service.array_types import Int32Array
from worker_service.cache_groups import CacheGroup as WorkerCacheGroup
from worker_service.config import ModelConfig
from worker_service.engine.cached_blocks import CachedBlocks
from worker_service.loader import load_model
from worker_service.models.interface import Model
from worker_service.runner.drafting.drafter import Draft, SequenceDrafter
from worker_service.runner.model_runner import ModelRunner
from worker_service.service import wire as worker_wire

GROUP = "group"
MODEL = "model"
FRONTEND = "frontend"
CPU = torch.device("cpu")
MAX_ADAPTERS = 64
"""Adapters that a worker holds."""
PEERS: "WeakValueDictionary[str, InProcessWorker]" = WeakValueDictionary()
"""Workers by address."""
ADDRESSES = count()
FETCH_STEPS = (0, 1, 2)
"""Plans, by turns, whose results come before the end of a fetch."""
FAILS_EVERY = 4
"""Fetches of which one fails, with something else in its blocks."""
GREEDY = {"temperature": 0.0, "top_p": 1.0, "repetition_penalty": 1.0}


@dataclass
class Output:
    """One choice's tokens, and the log probability of each if it was asked for."""

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    cached_tokens: int = 0
    """Prompt tokens found in the prefix cache."""
    prompt_logprobs: bytes = b""
    """Log probabilities as they travel, of a first choice whose request asked for them."""


def groups_of_core(groups: Sequence[WorkerCacheGroup]) -> tuple[CacheGroup, ...]:
    """A worker's cache groups as the core receives them."""
    return tuple(
        CacheGroup(
            lifetime=CacheLifetime(group.lifetime.value),
            block_tokens=group.block_tokens,
            span=group.span,
            num_blocks=group.num_blocks,
        )
        for group in groups
    )


def blocks_of_state(model: Model, block_size: int) -> int:
    """Blocks of a sequence's state; 0 for a model without."""
    groups = model.kv_cache_spec.groups(block_size)
    return sum(group.num_blocks for group in groups if not group.has_tokens)


class InProcessWorker:
    """A model with KV caches of its own; executes plans as they come off the wire."""

    def __init__(
        self,
        model: Model,
        *,
        num_gpu_blocks: int,
        block_size: int,
        num_cpu_blocks: int = 0,
        device: torch.device = CPU,
        make_runner: MakeRunner | None = None,
        num_speculative_tokens: int = 0,
        num_draft_states: int = 0,
        max_loras: int = 0,
    ) -> None:
        """make_runner: None makes the one that a worker on this device has. max_loras: adapters of
        the requests that the worker has at a time; 0: it refuses adapters."""
        self._max_loras = max_loras
        self.adapters: AdapterStore[ModelAdapter] | None = None
        """Those that the worker holds."""
        self._num_speculative_tokens = num_speculative_tokens
        self._model = model
        self._cache = make_cache(
            model,
            block_size,
            num_gpu_blocks=num_gpu_blocks,
            num_cpu_blocks=num_cpu_blocks,
            num_draft_blocks=num_draft_states * blocks_of_state(model, block_size),
            device=device,
        )
        make_runner = make_runner or (host if device.type == "cpu" else recorded_on_gpu)
        if max_loras:
            self.adapters = AdapterStore(MAX_ADAPTERS)
            make_runner = partial(make_runner, adapters=self.adapters)
        self._runner = make_runner(model, self._cache, block_size)
        self._block_size = block_size
        self._number = next(ADDRESSES)
        self.address = f"worker {self._number}"
        PEERS[self.address] = self
        self._records = CachedBlocks(num_gpu_blocks, num_cpu_blocks)
        self._kept = KeptBlocks()
        """What an earlier core has left."""
        self._leases: dict[int, plan_pb2.BlockLease] = {}
        self._last_lease_id = 0
        self._fetches: list[tuple[int, plan_pb2.BlockFetch]] = []
        """With the plan whose result reports the end."""

    def capacity(self, group_id: str) -> WorkerGroupCapacity:
        """The registration that a core receives."""
        return WorkerGroupCapacity(
            worker_group_id=group_id,
            model=MODEL,
            num_gpu_blocks=len(self._cache.device_cache),
            num_cpu_blocks=len(self._cache.host_cache),
            cache_groups=groups_of_core(self._model.kv_cache_spec.groups(self._block_size)),
            max_model_len=self._model.max_model_len,
            vocab_size=self._model.vocab_size,
            num_speculative_tokens=self._num_speculative_tokens,
            max_loras=self._max_loras,
            kv_layout=(("layout", "in process"),),
            addresses=(self.address,),
            epoch=1,
            kept=self._kept,
        )

    def lose_core(self) -> None:
        """Forget the sequences of a core that has died, all results of which were asked for; the
        next one receives what is in the caches."""
        self._records.sequences = self._runner.kept_sequences()
        self._records.settle()
        self._runner.reset()
        self._leases, self._last_lease_id, self._fetches = {}, 0, []
        kept = [
            worker_service_pb2.KeptSequence.FromString(
                worker_wire.encode_kept_sequence(sequence).SerializeToString()
            )
            for sequence in self._records.sequences
        ]
        report = RankReport(
            key_seed=self._records.key_seed,
            entries=dict(
                entries_of(worker_wire.encode_cached_blocks(list(self._records.entries())))
            ),
            sequences={one.seq_id: scheduler_wire.decode_kept_sequence(one, "") for one in kept},
        )
        self._kept = common_blocks([report])

    @property
    def kept_sequences(self) -> list[KeptSequence]:
        """What the present core has received of sequences of the one before."""
        return self._kept.sequences

    def execute(self, plan: bytes) -> StepResult:
        """The result of a serialized plan, carried over the wire's bytes."""
        return self.send(plan)()

    def send(self, plan: bytes) -> Callable[[], StepResult]:
        """Launch a serialized plan; to be called, in order, for its result."""
        message = plan_pb2.StepPlan.FromString(plan)
        for lease_id in np.frombuffer(message.ended_lease_ids, "<i4").tolist():
            del self._leases[lease_id]
        for lease in message.leases:
            self._leases[lease.lease_id] = lease
            self._last_lease_id = lease.lease_id
        for fetch in message.fetches:
            delay = FETCH_STEPS[fetch.fetch_id % len(FETCH_STEPS)]
            self._fetches.append((message.step_id + delay, fetch))
        decoded = worker_wire.decode_plan(message, received_us=0)
        self._records.begin(decoded)
        result = launch(self._runner, plan)
        self._records.finish(decoded)
        return partial(self._with_fetches, message, result)

    def _with_fetches(
        self, plan: plan_pb2.StepPlan, make_result: Callable[[], StepResult]
    ) -> StepResult:
        """The result of a plan, with the ends of fetches; of one without rows, with all that do
        not wait for their leases."""
        result = make_result()
        if result.errors:
            self._records.add_failure(plan.step_id)
        due = (f for at, f in self._fetches if at <= plan.step_id or not plan.seq_ids)
        ended = [fetch for fetch in due if not self._awaits_lease(fetch)]
        self._fetches = [(at, fetch) for at, fetch in self._fetches if fetch not in ended]
        result.fetches = [self._fetch(fetch) for fetch in ended]
        return result

    def _awaits_lease(self, fetch: plan_pb2.BlockFetch) -> bool:
        """Whether the source has not begun the lease; some fetches do not wait for that."""
        source = PEERS.get(fetch.addresses[0])
        is_early = source is not None and source._last_lease_id < fetch.lease_id
        return is_early and (fetch.fetch_id + self._number) % FAILS_EVERY != 1

    def _fetch(self, fetch: plan_pb2.BlockFetch) -> FetchResult:
        source, pairs = PEERS.get(fetch.addresses[0]), np.frombuffer(fetch.blocks, "<i4")
        end = FetchResult(fetch_id=fetch.fetch_id)
        if source is None:
            return replace(end, failure="UNREACHABLE")
        lease = source._leases.get(fetch.lease_id)
        if lease is None or lease.token != fetch.token:
            return replace(end, failure="DENIED")
        leased = np.frombuffer(lease.block_ids, "<i4").tolist()
        pool, host_pool = source._cache.device_cache, source._cache.host_cache
        for block, target in pairs.reshape(-1, 2).tolist():
            assert block in leased
            found = host_pool[~block] if block < 0 else pool[block]
            self._cache.device_cache[target] = found
        if (fetch.fetch_id + self._number) % FAILS_EVERY == 0:
            self._cache.device_cache[pairs[1::2].tolist()] = 0xFF
            return replace(end, failure="DIGEST_MISMATCH")
        return replace(end, num_bytes=len(pairs) // 2 * pool[0].numel(), duration_us=100)


class AheadWorker(InProcessWorker):
    """A worker that launches ahead as one with a GPU does, on a CPU."""

    def __init__(self, model: Model, **options: Any) -> None:
        super().__init__(model, make_runner=recorded, **options)


class SpeculatingWorker(InProcessWorker):
    """A worker that drafts."""

    def __init__(
        self,
        model: Model,
        *,
        make_drafter: MakeDrafter,
        draft_lengths: AllDrafts | None = None,
        num_drafts: int = 4,
        kind: Callable[..., ModelRunner] = host,
        **options: Any,
    ) -> None:
        """kind: as `speculating` takes it."""
        lengths = draft_lengths or AllDrafts()
        make_runner = partial(speculating, make_drafter, lengths, kind=kind)
        options |= {"make_runner": make_runner, "num_speculative_tokens": num_drafts}
        options["num_draft_states"] = 2 * num_drafts + 1  # fewer than some steps would use
        super().__init__(model, **options)


class KnowingDrafter(SequenceDrafter):
    """Proposes what is known to follow, except for about every fourth token."""

    def __init__(self, outputs: Iterable[Sequence[int]]) -> None:
        """outputs: prompts with their outputs, as they will be."""
        self.num_drafts = 0
        self.learn_outputs(outputs)

    def learn_outputs(self, outputs: Iterable[Sequence[int]]) -> None:
        """Propose from these instead."""
        self._outputs = [np.array(output, np.int32) for output in outputs]

    def follow(self, tokens: Int32Array, num_drafts: int, salt: np.uint64) -> Draft:
        """The drafts; none for an output that is not known."""
        for output in self._outputs:
            if len(output) > len(tokens) and np.array_equal(output[: len(tokens)], tokens):
                drafts = output[len(tokens) :][:num_drafts].copy()
                places = len(tokens) + np.arange(len(drafts))
                drafts[(drafts + 7 * places) % 4 == 0] ^= 1
                self.num_drafts += len(drafts)
                return Draft(drafts)
        return Draft(tokens[:0])


def launch(runner: ModelRunner, plan: bytes) -> Callable[[], StepResult]:
    """Launch a serialized plan; to be called for its result, carried over the wire's bytes."""
    message = plan_pb2.StepPlan.FromString(plan)
    step = runner.launch(worker_wire.decode_plan(message, received_us=0))

    def result() -> StepResult:
        answer = worker_wire.encode_result(step.collect()).SerializeToString()
        return scheduler_wire.decode_result(plan_pb2.StepResult.FromString(answer))

    return result


def execute(runner: ModelRunner, plan: bytes) -> StepResult:
    """The result of a serialized plan."""
    return launch(runner, plan)()


class InProcessEngine:
    """A model served to this process alone."""

    def __init__(
        self,
        model: Path,
        *,
        num_gpu_blocks: int = 512,
        num_cpu_blocks: int = 0,
        block_size: int = 4,
        dtype: str = "float32",
        device: str = "cpu",
        config: SchedulerConfig | None = None,
        releases_windows: bool = False,
    ) -> None:
        self.device = torch.device(device)
        self.loaded = load_model(ModelConfig(model=str(model), device=device, dtype=dtype))
        model_spec = self.loaded.model.kv_cache_spec
        self.loaded.model.kv_cache_spec = replace(model_spec, releases_windows=releases_windows)
        self.block_size = block_size
        self.reset(
            num_gpu_blocks=num_gpu_blocks,
            num_cpu_blocks=num_cpu_blocks,
            config=config or SchedulerConfig(),
        )

    def reset(
        self, *, num_gpu_blocks: int, num_cpu_blocks: int = 0, config: SchedulerConfig
    ) -> None:
        """Begin again with the same weights, another cache and another scheduler."""
        self.worker = self.make_worker(num_gpu_blocks, num_cpu_blocks)
        self.core = SchedulerCore(config)
        self.core.add_worker_group(self.worker.capacity(GROUP), now=0.0)

    def make_worker(self, num_gpu_blocks: int, num_cpu_blocks: int) -> InProcessWorker:
        """What executes the plans, over empty caches."""
        return InProcessWorker(
            self.loaded.model,
            num_gpu_blocks=num_gpu_blocks,
            block_size=self.block_size,
            num_cpu_blocks=num_cpu_blocks,
            device=self.device,
        )

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        max_tokens: int,
        num_choices: int = 1,
        stop_token_ids: Collection[int] = (),
        **sampling: object,
    ) -> list[Output]:
        """Run all prompts together to `max_tokens` tokens each, whatever they generate but for stop
        tokens; the choices of the first prompt, then those of the second, and so on."""
        params = sampling_pb2.SamplerParams(**(GREEDY | sampling))  # type: ignore[arg-type]
        for number, prompt in enumerate(prompts):
            request = Request(
                frontend_id=FRONTEND,
                handle=number * num_choices + 1,
                request_id=str(number),
                model=MODEL,
                prompt_token_ids=list(prompt),
                work=Generation(
                    max_tokens=max_tokens,
                    num_choices=num_choices,
                    sampling=params,
                    stop_token_ids=frozenset(stop_token_ids),
                    wants_logprobs=params.HasField("logprobs"),
                    wants_prompt_logprobs=params.HasField("prompt_logprobs"),
                ),
            )
            self.core.submit(request, now=0.0)
        outputs = {handle: Output() for handle in range(1, 1 + len(prompts) * num_choices)}
        self._run(outputs)
        return list(outputs.values())

    def run(self, requests: Sequence[Request]) -> dict[int, Output]:
        """Run requests together; their choices by handle."""
        for request in requests:
            self.core.submit(request, now=0.0)
        outputs = {
            request.handle + index: Output()
            for request in requests
            for index in range(request.work.num_choices)
        }
        self._run(outputs)
        return outputs

    def _run(self, outputs: dict[int, Output]) -> None:
        """Plan as far ahead as the pipeline allows, execute in order, until nothing is left."""
        results: deque[Callable[[], StepResult]] = deque()
        while True:
            while (plan := self.core.schedule(GROUP, now=0.0)) is not None:
                message = scheduler_wire.encode_plan(plan, epoch=1)
                results.append(self.worker.send(message.SerializeToString()))
            if not results:
                return
            self.core.update(GROUP, results.popleft()(), now=0.0)
            self._deliver(outputs)

    def _deliver(self, outputs: dict[int, Output]) -> None:
        for outbox in self.core.pop_outboxes().values():
            for _, error in outbox.requests_failed:
                raise error
            for handle, token in zip(outbox.token_handles, outbox.token_ids, strict=True):
                outputs[handle].token_ids.append(token)
            for handle, entry in outbox.logprobs:
                value = float(np.frombuffer(entry.logprobs, "<f4")[0])
                outputs[handle].logprobs.append(value)
            for handle, update in outbox.prompt_logprobs:
                outputs[handle].prompt_logprobs += update.logprobs
            for finished in outbox.requests_finished:
                outputs[finished.handle].cached_tokens = finished.cached_tokens
