"""The work of one step, queued to the device piece by piece."""

from collections.abc import Callable

import numpy as np
import numpy.typing as npt
from torch import Tensor

from pagewire_kernels.metadata import AttentionMetadata
from worker_service.array_types import Int32Array, Int64Array
from worker_service.models.interface import Model
from worker_service.pinned_memory import Column
from worker_service.runner.batch import HostInputs
from worker_service.runner.device_sampler import SamplingRows
from worker_service.runner.device_state import Changes, DeviceState
from worker_service.runner.pending_tokens import Buffers, FetchedLogprobs
from worker_service.runner.sequence_table import UNKNOWN_TOKEN
from worker_service.sampler.upload import upload
from worker_service.sampling.sampler import SamplingBatch


class StepLaunch:
    """First `forward` or `replay`, then `sample`. Nothing here waits for the device."""

    def __init__(
        self, model: Model, kv_cache: Tensor, state: DeviceState, buffers: Buffers
    ) -> None:
        self._model = model
        self._kv_cache = kv_cache
        self._state = state
        self._slots = state.slots
        self._sampler = state.sampler
        self._graphs = state.graphs
        self._buffers = buffers
        self._replayed_size = 0
        self._rows: SamplingRows | None = None
        self._logits: Callable[[], Tensor] | None = None

    def recorded_size(self, num_rows: int, changes: Changes) -> int | None:
        """The padded size that a decode step of so many rows can be replayed at, if any."""
        if self._graphs is None or not self._graphs.have_room_for(changes.columns):
            return None
        return self._graphs.size_for(num_rows)

    def forward(
        self,
        inputs: HostInputs,
        last_states: Int64Array,
        batch: SamplingBatch,
        changes: Changes,
    ) -> None:
        """Compute any batch. last_states: which hidden states the batch's rows sample from."""
        unknown = np.flatnonzero(inputs.token_ids == UNKNOWN_TOKEN)
        sequences = np.searchsorted(inputs.query_start, unknown, side="right") - 1
        columns: list[Column] = [
            inputs.token_ids,
            inputs.positions,
            inputs.slot_mapping,
            inputs.query_start.astype(np.int32),
            inputs.context_lens.astype(np.int32),
            inputs.slots,
            unknown,
            inputs.slots[sequences],
            last_states,
            batch.slots,
            batch.positions.astype(np.int32),
        ]
        sent = self._buffers.staging.send([*columns, *changes.columns])
        self._state.apply(changes, sent[len(columns) :])
        token_ids, positions, slot_mapping, query_start, context_lens, slots = sent[:6]
        unknown_at, unknown_slots, last, row_slots, row_positions = sent[6 : len(columns)]
        self._slots.fill_in(token_ids, unknown_at, unknown_slots)
        metadata = AttentionMetadata(
            query_start=query_start,
            context_lens=context_lens,
            block_tables=self._slots.block_tables[:, : inputs.max_blocks].index_select(0, slots),
            slot_mapping=slot_mapping,
            max_query_len=inputs.max_query_len,
            max_context_len=inputs.max_context_len,
        )
        hidden = self._model.forward(token_ids, positions, self._kv_cache, metadata)
        self._rows = SamplingRows(slots=row_slots, positions=row_positions)
        # Without a way back to this launch: a circle would keep hidden states and caches, which are
        # memory of the device, until the garbage collector comes.
        model = self._model
        self._logits = lambda: model.compute_logits(hidden.index_select(0, last))

    def replay(self, inputs: HostInputs, batch: SamplingBatch, changes: Changes, size: int) -> None:
        """Compute a batch of decodes that all sample, by the recording of a padded size."""
        graphs, num_rows = self._graphs, len(batch.slots)
        assert graphs is not None, "recorded_size gave a size"
        columns = graphs.columns(inputs, batch.positions, size)
        sent = self._buffers.staging.send([columns, *changes.columns], graphs.landing)
        self._state.apply(changes, sent[1:])
        graphs.replay_forward(size)
        self._replayed_size = size
        self._logits = lambda: graphs.logits(num_rows)

    def sample(
        self, batch: SamplingBatch, wanted: Int64Array, num_top: Int32Array
    ) -> tuple[npt.NDArray[np.int64], FetchedLogprobs | None]:
        """Where the batch's tokens or failures will be on the host, and log probabilities.

        wanted: the rows that ask for log probabilities, with `num_top` of the most probable tokens.
        """
        num_rows = len(batch.slots)
        if num_rows == 0:
            return np.empty(0, np.int64), None
        if self._replayed_size:
            assert self._graphs is not None, "replayed before"
            if not batch.is_changed and not len(wanted):
                self._graphs.replay_sampling(self._replayed_size)
                return self._buffers.fetch(self._graphs.outcome[:num_rows]), None
            self._rows = self._graphs.rows(self._replayed_size, num_rows)
        return self._sample_eagerly(batch, wanted, num_top)

    def _sample_eagerly(
        self, batch: SamplingBatch, wanted: Int64Array, num_top: Int32Array
    ) -> tuple[npt.NDArray[np.int64], FetchedLogprobs | None]:
        assert self._rows is not None, "computed before"
        assert self._logits is not None, "computed before"
        logits = self._logits()
        index = upload(wanted, logits.device) if len(wanted) else None
        # Log probabilities are of the model's own logits, which are about to be changed.
        raw = None if index is None else logits.index_select(0, index)
        if batch.is_changed:
            outcome = self._sampler.sample_changed(logits, self._rows, batch)
        else:
            outcome = self._sampler.sample(logits, self._rows)
        numbers = self._buffers.fetch(outcome)
        if index is None or raw is None:
            return numbers, None
        chosen = outcome.index_select(0, index)
        tensors = self._sampler.logprobs(raw, chosen, int(num_top.max()))
        return numbers, FetchedLogprobs.fetch(wanted, num_top, tensors)
