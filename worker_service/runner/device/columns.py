"""What a step sends to the device, on the host."""

from typing import NamedTuple

import numpy as np
from torch import Tensor

from worker_service.array_types import Int64Array
from worker_service.pinned_memory import Column
from worker_service.runner.batch.inputs import HostInputs
from worker_service.runner.batch.step_rows import StepRows
from worker_service.runner.device.drafts import StepDrafts
from worker_service.runner.device.reports import StepReports
from worker_service.runner.device.sampler import DeviceSampler
from worker_service.runner.state.sequence_table import SequenceTable


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
