"""Passes of a draft head on the device, each of which drafts the tokens of one place, and CUDA
graphs of them, one per padded number of rows.

A pass of a small head takes the device less time than the host needs to launch its kernels. Its
graph reads the inputs of all places from fixed addresses, and counts the places itself, so that a
replay is a single launch. Rows that pad a pass are those of `cuda_graphs.py`: they have no blocks
and attend over nothing.
"""

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from pagewire_kernels.batch import LayerMemory, SamplingRows, StepInputs
from worker_service.models.decoder.draft_head import DraftHead
from worker_service.runner.device.rows import DeviceRows
from worker_service.runner.device.sampler import DeviceSampler

logger = logging.getLogger(__name__)

NUM_INPUTS = 5
"""Of a row and place: the token before the draft, its position, the context length of the head's
row, the number of output tokens before the draft, and the row of `DeviceRows`."""


@dataclass(frozen=True, slots=True)
class DraftPass:
    """The head's forward pass, and sampling from it."""

    head: DraftHead
    caches: Sequence[LayerMemory]
    """Keys and values of the layer of `head`."""

    sampler: DeviceSampler

    def run(
        self,
        inputs: Tensor,
        hidden: Tensor,
        query_start: Tensor,
        no_masks: Tensor,
        max_context_len: int,
        counted: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Draft a token of each row. Returns int64 [n] and the hidden states of the next place.

        inputs: int32 [NUM_INPUTS, n]; hidden: [n, hidden_size], may be overwritten; query_start:
        int32 [n + 1]; no_masks: int32 [n], -1; counted: see `DeviceSampler.sample_apart`.
        """
        tokens, positions, lengths, outputs, row_ids = inputs
        batch = self.sampler.prepare(
            StepInputs(tokens, positions, row_ids, row_ids, lengths),
            self.caches,
            query_start,
            max_context_len,
            num_groups=1,
            max_query_len=1,
            num_decodes=len(tokens),
        )
        output, hidden = self.head(batch, hidden)
        logits = self.head.compute_logits(output)
        drafts = torch.empty_like(tokens, dtype=torch.int64)
        rows = SamplingRows(row_ids, outputs, no_masks, self.sampler.no_masks)
        self.sampler.sample_apart(logits, rows, counted, drafts)
        return drafts.clamp_min_(0), hidden


class DraftGraphs:
    """Graphs of passes over one cache, for rows without penalties."""

    def __init__(
        self, draft_pass: DraftPass, device_rows: DeviceRows, sizes: Sequence[int]
    ) -> None:
        """sizes: padded numbers of rows. Records nothing yet."""
        self._pass = draft_pass
        self._drafts = device_rows.sampling.drafts
        self._padding_row = device_rows.padding_row
        self._sizes = sorted(sizes)
        device, largest = self._drafts.device, self._sizes[-1]
        shape = self._drafts.shape[1], NUM_INPUTS, largest
        self._inputs = torch.zeros(shape, dtype=torch.int32, device=device)
        self._place = torch.zeros(1, dtype=torch.int64, device=device)
        self._query_start = torch.arange(largest + 1, dtype=torch.int32, device=device)
        self._no_masks = torch.full((largest,), -1, dtype=torch.int32, device=device)
        like = draft_pass.head.hidden_like
        self._hidden = like.new_zeros(largest, like.shape[1])
        self._passes: dict[int, Callable[[], None]] = {}

    @staticmethod
    def num_bytes(max_size: int, max_drafts: int) -> int:
        """Memory of what graphs read, without the hidden states."""
        return 4 * max_size * (NUM_INPUTS * max_drafts + 2) + 4 + 8

    def record(self, record: Callable[[Callable[[], None]], Callable[[], None]]) -> None:
        """Record all sizes, the largest first. record: of a `GraphRecorder`."""
        started = time.monotonic()
        self._inputs[:, -1] = self._padding_row
        for size in self._sizes[::-1]:
            self._place.zero_()
            self._passes[size] = record(partial(self._draft, size))
        counts = len(self._sizes), time.monotonic() - started
        logger.info("passes of the draft head recorded num_sizes=%d seconds=%.1f", *counts)

    def size_for(self, num_rows: int) -> int | None:
        """The smallest recorded number of rows that holds these; None if none does."""
        return next((size for size in self._sizes if size >= num_rows), None)

    def run(self, inputs: Tensor, hidden: Tensor, counts: Sequence[int]) -> None:
        """Draft for the rows of each place, and store their drafts.

        inputs: int32 [k, NUM_INPUTS, size], padded; hidden: by row of `DeviceRows`; counts: [k],
        rows of each place, falling.
        """
        num_places, _, size = inputs.shape
        self._inputs[:num_places, :, :size].copy_(inputs)
        self._place.zero_()
        torch.index_select(hidden, 0, inputs[0, -1], out=self._hidden[:size])
        for count in counts:
            padded = self.size_for(count)
            assert padded is not None, "the first place has most rows"
            self._passes[padded]()

    def _draft(self, size: int) -> None:
        inputs = self._inputs.index_select(0, self._place)[0, :, :size]
        hidden, starts = self._hidden[:size], self._query_start[: size + 1]
        length = self._pass.head.max_model_len
        drafts, following = self._pass.run(inputs, hidden, starts, self._no_masks[:size], length)
        self._drafts.index_put_((inputs[-1].long(), self._place), drafts)
        hidden.copy_(following)
        self._place.add_(1)
