"""One step from plan to result: cache operations, forward pass, sampling.

The runner belongs to the engine's model thread; nothing here is safe to call from another. What
differs between workers is supplied to it:

| | one CPU | one GPU | a rank of several |
| --- | --- | --- | --- |
| forward pass | `HostSteps` | `DeviceSteps` | `HostSteps`, in micro-batches |
| sampling | on the host | on the device | on the host of one rank |
| tokens | known at once | pending until the device is done | broadcast; pending elsewhere |

A rank on a GPU that shares layers, but is no stage of a pipeline, works as one GPU does; its device
receives the tokens. On a GPU, the host computes the few steps that `DeviceSteps` cannot launch.
"""

from typing import TYPE_CHECKING, Any

import torch

from worker_service.adapters.store import AdapterStore
from worker_service.distributed.communicator import Communicator
from worker_service.distributed.layout import Layout
from worker_service.engine.executor import FinishedStep, Step
from worker_service.kv_cache.block_memory import CacheMemory
from worker_service.kv_cache.cache_engine import CacheEngine
from worker_service.models.interface import Model
from worker_service.plan import KeptSequence, StepPlan, monotonic_us
from worker_service.runner.batch.pooling import Pooling
from worker_service.runner.batch.rank_outcomes import RankOutcomes
from worker_service.runner.batch.step_outcome import StepStart
from worker_service.runner.device.steps import DeviceSteps
from worker_service.runner.drafting.speculation import Speculation
from worker_service.runner.host.steps import HostSteps
from worker_service.runner.state.sequence_state import SequenceState
from worker_service.runner.state.sequence_table import SequenceTable

if TYPE_CHECKING:
    from worker_service.structured.grammars import Grammars


class ModelRunner:
    """A model, or a rank's share of one, its KV caches, and the sequences in them.

    `launch` and `reset` belong to the model thread; what `launch` returns may be collected by
    another.
    """

    def __init__(
        self,
        model: Model,
        cache: CacheEngine,
        block_size: int,
        grammars: "Grammars | None" = None,
        *,
        communicator: Communicator | None = None,
        device: DeviceSteps | None = None,
        speculation: Speculation | None = None,
        pooling: Pooling | None = None,
        adapters: AdapterStore[Any] | None = None,
    ) -> None:
        """grammars: for sequences with a constraint; None refuses those. communicator: of the ranks
        that share the model, which have joined for an epoch: then the runner is for that epoch.
        device: launches steps ahead; None computes each step when it is launched. speculation: None
        adds no drafts; the steps that the host computes for a device have none if a head or another
        rank makes them. pooling: None generates
        tokens. adapters: those that sequences may have; None: none."""
        self._model = model
        self._cache = cache
        self.block_memory = CacheMemory(cache) if len(cache.device_cache) else None
        self._groups = model.kv_cache_spec.groups(block_size)
        self._grammars = grammars
        self._ranks = RankOutcomes(communicator or Communicator(Layout()))
        self._pooling = None if pooling is None else pooling.facts
        self._adapters = adapters
        on_host = speculation
        if device is not None and speculation is not None and not speculation.is_on_host_alone:
            on_host = None
        self._host = HostSteps(model, cache, self._ranks, on_host, pooling)
        self._device = device
        self._speculation = speculation
        self._sequences = self._no_sequences()

    def kept_sequences(self) -> list[KeptSequence]:
        """What the caches hold of the sequences; see `Runner`."""
        return self._sequences.kept(waits_for_ranks=self._ranks.layout.world_size > 1)

    def reset(self) -> None:
        """Forget all sequences and leave the other ranks. Steps in flight may still be
        collected."""
        self._sequences = self._no_sequences()
        if self._speculation is not None:
            self._speculation.reset()
        if self._device is not None:
            self._device.forget_all()
            if self._ranks.layout.world_size > 1:
                self._device.finish()
        self._ranks.leave()

    def _no_sequences(self) -> SequenceState:
        if self._adapters is not None:
            self._adapters.release_all()
        table = SequenceTable(
            vocab_size=self._model.vocab_size,
            max_model_len=self._model.max_model_len,
            groups=self._groups,
            num_gpu_blocks=len(self._cache.device_cache),
            num_cpu_blocks=len(self._cache.host_cache),
            num_parts=self._ranks.layout.pipeline_parallel_size,
            pooling=self._pooling,
            adapters=self._adapters,
        )
        return SequenceState(table, self._grammars)

    @torch.inference_mode()
    def launch(self, plan: StepPlan) -> Step:
        """Begin what the plan says. With several ranks only the sampling rank's result has tokens.

        Raises InvalidPlan, as every rank does, after which the state of the sequences may be half
        the plan's: the caller resets the runner. Raises GroupBroken if another rank is lost.
        """
        is_shared = self._ranks.layout.world_size > 1
        if is_shared:
            self._ranks.check()
        if self._speculation is not None and self._speculation.has_states:
            self._sequences.pending.resolve_all()  # the plan may copy states, or forget them
        started_us = monotonic_us()
        self._cache.execute(plan)
        if (states := self._sequences.table.blocks.states) is not None:
            states.move(plan)
        cache_us, cache_done_us = self._cache.timer(), monotonic_us()
        rows = self._sequences.apply(plan)
        if self._speculation is not None:
            self._speculation.forget(rows.forgotten)
        start = StepStart(started_us, cache_done_us, monotonic_us(), cache_us)
        if self._device is not None:
            step = self._device.launch(plan, rows, self._sequences, start)
            if step is not None:
                return step
            waiting_since_us = monotonic_us()
            self._sequences.pending.resolve_all()
            start = start.later(monotonic_us() - waiting_since_us)
        outcome = self._host.compute(plan, rows.batch, self._sequences)
        if is_shared:
            self._ranks.check()
        if len(plan.seq_ids) == 0:
            self._cache.finish()  # no forward pass overlaps the operations
        timings = start.timings(plan, outcome.forward_us)
        if self._device is not None:
            self._sequences.pending.resolve_all()  # sampled by another rank, not on the device
            self._device.record_tokens(rows.batch)
        samples = self._ranks.layout.samples
        return FinishedStep(outcome.result(plan, timings, samples=samples))
