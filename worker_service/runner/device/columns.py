"""What a step sends to the device, on the host."""

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import numpy as np
from torch import Tensor

from pagewire_kernels.slot_deltas import NO_SLOT
from worker_service.array_types import Int64Array
from worker_service.pinned_memory import Column
from worker_service.runner.batch.inputs import HostInputs, lay_out
from worker_service.runner.batch.step_rows import StepRows
from worker_service.runner.device.drafts import DeviceHeadDrafter, StepDrafts
from worker_service.runner.device.reports import StepReports
from worker_service.runner.device.rows import DeviceRows
from worker_service.runner.device.sampler import DeviceSampler
from worker_service.runner.state.sequence_state import SequenceState
from worker_service.runner.state.sequence_table import SequenceTable


class PlacesAdapters(Protocol):
    """The adapters that the layers of a model hold; see `models/adapters.py`."""

    def place(self, digests: Sequence[bytes]) -> list[int]:
        """Put the adapters of a step into slots, and return these. Raises InvalidPlan."""
        ...


class SamplingColumns(NamedTuple):
    """The rows that sample; int64 [n] each."""

    row_ids: Int64Array
    outputs: Int64Array
    """Number of output tokens, drafts included, that the sequence of each row has so far."""

    mask_rows: Int64Array
    """As in `SamplingRows`."""

    @classmethod
    def of(cls, rows: StepRows, constrained: Int64Array, table: SequenceTable) -> "SamplingColumns":
        """Those of a step. constrained: indices of the rows with a constraint."""
        row_ids = rows.row_ids[rows.sampling]
        mask_rows = np.full(len(row_ids), -1)
        mask_rows[constrained] = np.arange(len(constrained))
        outputs = table.num_tokens[row_ids] - table.num_prompt_tokens[row_ids]
        if rows.drafts is not None:
            outputs += rows.drafts.offsets
        return cls(row_ids, outputs, mask_rows)


class StepColumns(NamedTuple):
    """Everything that a step sends, in one copy."""

    inputs: HostInputs
    sampling: SamplingColumns
    states: Int64Array
    """[num_sampling]: the hidden states to sample from."""

    reports: StepReports
    changes: list[Column]
    """Of `DeviceRows`."""

    drafting: StepDrafts | None = None
    """None: no head drafts on this device."""

    shared_drafts: Int64Array | None = None
    """[n]: rows of the table with drafts of a head, which several ranks share; None: no drafts are
    shared."""

    adapter_slots: Int64Array | None = None
    """[num_tokens]: the slot of the adapter of each token's sequence, NO_SLOT for none; None: no
    sequence has one."""

    @classmethod
    def of(
        cls,
        rows: StepRows,
        sequences: SequenceState,
        device_rows: DeviceRows,
        head: DeviceHeadDrafter | None,
        adapters: PlacesAdapters | None,
        *,
        shares_drafts: bool,
    ) -> "StepColumns":
        """Those of a step with these rows. head: that drafts on this device; adapters: None if
        sequences have none; shares_drafts: whether drafts may be those of a head that several
        ranks share."""
        table, computes = sequences.table, rows.computes
        changes = device_rows.changes(table)
        found = sequences.masks.constrained(rows.row_ids[rows.sampling]) if sequences.masks else []
        constrained = np.array([row for row, _ in found], np.int64)
        inputs = lay_out(
            rows.row_ids[computes],
            rows.firsts[computes],
            rows.num_tokens[computes],
            table,
            rows.saved_states,
        )
        shared_drafts = None
        if rows.drafts is not None and shares_drafts:
            shared_drafts = rows.row_ids[rows.drafts.counts > 0]
        return cls(
            inputs=inputs,
            sampling=SamplingColumns.of(rows, constrained, table),
            states=rows.last_states(),
            reports=StepReports.of(rows, table),
            changes=changes,
            drafting=None if head is None else head.plan(rows, table),
            shared_drafts=shared_drafts,
            adapter_slots=_adapter_slots(inputs, adapters) if inputs.adapters else None,
        )

    @property
    def of_drafts(self) -> list[Column]:
        """What `begin_drafts` needs on the device."""
        shared = [] if self.shared_drafts is None else [self.shared_drafts]
        return [*([] if self.drafting is None else self.drafting.columns), *shared]

    def begin_drafts(self, sent: list[Tensor], sampler: DeviceSampler) -> None:
        """Make the drafts of a head on the device, or receive them. sent: `of_drafts`."""
        if self.drafting is not None:
            self.drafting.begin(sent[: len(self.drafting.columns)])
        if self.shared_drafts is not None:
            sampler.share_drafts(sent[-1])


def _adapter_slots(inputs: HostInputs, adapters: PlacesAdapters | None) -> Int64Array:
    """Put the adapters of a step into slots; see `StepColumns.adapter_slots`."""
    assert adapters is not None, "sequences have none"
    slots = np.full(len(inputs.token_ids), NO_SLOT)
    placed = adapters.place([digest for digest, _ in inputs.adapters])
    for slot, (_, rows) in zip(placed, inputs.adapters, strict=True):
        slots[slice(None) if rows is None else rows] = slot
    return slots
