"""The model runner of a GPU: steps are launched without waiting for the device.

A launch sends what the plan changed, and the step's inputs, in one copy from pinned memory; what
the device knows already it gathers by slot (`slots.py`). Sampled tokens stay on the device, where
the next step finds them, and are copied to the host meanwhile (`flight.py`). A batch of decodes
replays a recording (`graphs.py`); prefills and mixed batches are computed eagerly.

What the host has to know before a launch is said here, in one place:

| a plan with | waits for |
| --- | --- |
| a fork | the tokens of its parent, which it takes over |
| bad words of several tokens | the tokens of the sequences that have them |
| more penalties than the device counts for (`penalties.py`) | the same |
| constraints | the tokens of the sequences that have them, but only once its forward pass is
  launched, which the device computes meanwhile |
| candidates, chosen tokens, prompt log probabilities | every step launched before; and is itself
  computed by `ModelRunner`, which waits for the device |
"""

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import torch

from worker_service.array_types import Int64Array
from worker_service.clock import monotonic_us
from worker_service.device.launch import StepLaunch
from worker_service.device.marks import Mark, marks
from worker_service.engine.executor import FinishedStep, Step
from worker_service.kv_cache.cache_engine import CacheEngine
from worker_service.models.interface import Model
from worker_service.plan import StepPlan, StepResult
from worker_service.runner.batch import StepRows, lay_out, resolve_rows
from worker_service.runner.device_state import DeviceState
from worker_service.runner.model_runner import Begun, ModelRunner
from worker_service.runner.pending_tokens import Flight, Flights, LastFinish
from worker_service.sampling.sampler import SamplingBatch
from worker_service.sampling.sampling_table import NO_LOGPROBS
from worker_service.structured.masks import MaskedRows

if TYPE_CHECKING:
    from worker_service.structured.grammars import Grammars


class DeviceRunner(ModelRunner):
    """A model runner that launches steps ahead of their results.

    `launch` and `reset` belong to the model thread; what `launch` returns may be collected by
    another.
    """

    def __init__(
        self,
        model: Model,
        cache: CacheEngine,
        block_size: int,
        state: DeviceState,
        mark: Callable[[], Mark] | None = None,
        grammars: "Grammars | None" = None,
    ) -> None:
        """mark: makes marks in the device's work; None makes those of the cache's device."""
        super().__init__(model, cache, block_size, grammars)
        self._state = state
        self._flights = Flights(self._device)
        self._last_finish = LastFinish()
        self._mark = mark or marks(self._device)
        state.forget()

    def reset(self) -> None:
        """Forget all sequences; steps under way may still be collected."""
        super().reset()
        self._flights.forget_all()
        self._state.forget()

    def execute(self, plan: StepPlan) -> StepResult:
        """Launch and collect in one."""
        return self.launch(plan).collect()

    @torch.inference_mode()
    def launch(self, plan: StepPlan) -> Step:
        """Begin what the plan says. Raises InvalidPlan, after which the runner is to be reset."""
        self._flights.learn_what_is_there(self._sequences)
        begun = self._begin(plan)
        rows = resolve_rows(plan, self._sequences)
        if self._needs_the_host(plan, rows):
            waiting_since_us = monotonic_us()
            self._flights.learn_all(self._sequences)
            begun = begun.later(monotonic_us() - waiting_since_us)
            result = self._finish(plan, begun)
            for slot in rows.slots.tolist():
                self._state.penalties.note(slot, self._sequences.sampling)
            return FinishedStep(result)
        flight = self._fly(plan, rows, begun)
        self._flights.add(flight)
        return flight

    def _forget(self, plan: StepPlan) -> None:
        slots = self._sequences.slots(plan.forget_seq_ids, "forget_seq_ids")
        self._flights.forget(slots)
        for slot in slots.tolist():
            self._state.penalties.release(slot)
        super()._forget(plan)

    def _take_in(self, plan: StepPlan) -> None:
        table = self._sequences
        seq_ids = [new.parent_seq_id for new in plan.new_sequences if new.parent_seq_id is not None]
        seq_ids += plan.appended_tokens[:, 0].tolist()
        needed = [table.slot(seq_id) for seq_id in seq_ids if seq_id in table]
        self._flights.learn(np.array(needed, np.int64), table)
        super()._take_in(plan)
        if table.num_slots > self._state.slots.padding_slot:
            self._flights.learn_all(table)
            self._state.grow(table)
            return
        slots = self._state.slots
        for new in plan.new_sequences:
            self._state.note_new(table.slot(new.seq_id), table)
        if len(plan.block_updates):
            changed = table.slots(plan.block_updates[:, 0], "block_updates")
            slots.note_blocks(changed, plan.block_updates[:, 1])

    def _needs_the_host(self, plan: StepPlan, rows: StepRows) -> bool:
        """Whether the step is one for `ModelRunner`; see the module's docstring."""
        table = self._sequences
        slots = rows.slots[rows.computes]
        if len(slots) == 0 or len(plan.appended_tokens):
            return True
        if (table.sampling.num_candidates[rows.slots] > 0).any():
            return True
        asking = table.prompt_logprobs
        in_prompt = table.num_computed_tokens[slots] < table.num_prompt_tokens[slots]
        return bool(asking) and any(slot in asking for slot in slots[in_prompt].tolist())

    def _fly(self, plan: StepPlan, rows: StepRows, begun: Begun) -> Flight:
        """Queue a step's work. Nothing here may wait for the device, but for what edits need."""
        table = self._sequences
        errors = self._start(rows).errors
        sampling = self._sampling_rows(rows)
        slots = rows.slots[sampling]
        self._flights.learn(self._slots_to_read(slots), table)
        batch = SamplingBatch(
            slots=slots,
            positions=table.num_tokens[slots] - table.num_prompt_tokens[slots],
            edited=table.edited_rows(slots),
        )
        buffers = self._flights.buffers()
        begin = self._mark()
        launch = StepLaunch(self._model, self._cache.device_cache, self._state, buffers)
        inputs = lay_out(rows.slots[rows.computes], rows.num_tokens[rows.computes], table)
        changes = self._state.changes(table)
        size = None
        if inputs.max_query_len == 1 and len(slots) == len(inputs.slots) and not len(rows.forks):
            size = launch.recorded_size(len(slots), changes)
        if size is None:
            launch.forward(inputs, self._last_states(sampling, rows), batch, changes)
        else:
            launch.replay(inputs, batch, changes, size)
        computed = self._mark()
        batch = replace(batch, masked=self._masks_of(slots))
        num_top = table.sampling.num_logprobs[slots]
        wanted = np.flatnonzero(num_top != NO_LOGPROBS)
        numbers, logprobs = launch.sample(batch, wanted, num_top[wanted])
        self._advance(rows)
        return Flight(
            plan=plan,
            rows=sampling,
            slots=slots,
            places=table.expect_tokens(slots),
            errors=errors,
            numbers=numbers,
            logprobs=logprobs,
            buffers=buffers,
            begin=begin,
            computed=computed,
            end=self._mark(),
            launched_us=begun.started_us,
            cache_us=begun.cache_done_us - begun.started_us,
            cache_device_us=self._cache.timer(),
            last_finish=self._last_finish,
        )

    def _masks_of(self, slots: Int64Array) -> MaskedRows | None:
        """What constraints allow after tokens that the steps before may just be sampling: waits for
        those, and then computes while the device is at the forward pass launched last."""
        if self._masks is None:
            return None
        constrained = [slot for _, slot in self._masks.constrained(slots)]
        self._flights.learn(np.array(constrained, np.int64), self._sequences)
        rows = self._constrained_rows(slots)
        return self._masks.compute(rows) if rows else None

    def _slots_to_read(self, slots: Int64Array) -> Int64Array:
        """Those of the sequences whose tokens the host has to know before it edits their logits."""
        edits, counted = self._sequences.sampling.edits, self._state.penalties
        reading = [
            slot
            for slot in (slots.tolist() if edits else ())
            if (found := edits.get(slot)) is not None
            and (found.reads_last_tokens or (found.occurrences is not None and slot not in counted))
        ]
        return np.array(reading, np.int64)

    def _last_states(self, sampling: Int64Array, rows: StepRows) -> Int64Array:
        """Where the sampling rows' last hidden states lie; a fork's is its parent's."""
        ends = np.cumsum(np.where(rows.computes, rows.num_tokens, 0))
        ends[rows.forks] = ends[rows.parents]
        return ends[sampling] - 1
