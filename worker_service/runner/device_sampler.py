"""What a device does of a step beside the model: its inputs, and the tokens, which stay there.

It makes the same choices as `worker_service.sampling`, with the kernels of `pagewire_kernels`.
Nothing here waits for the device, so a step can be launched while the one before it is computed.
The two may differ only in the rounding of sums of probabilities.
"""

from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from pagewire_kernels import reference
from pagewire_kernels.batch import (
    NON_FINITE,
    PreparedInputs,
    SamplingRows,
    SamplingTables,
    StepInputs,
    mask_width,
)
from worker_service.runner.device_rows import DeviceRows
from worker_service.sampling.draw import largest
from worker_service.sampling.logprobs import MIN_WINDOW, window


class StepKernels(Protocol):
    """Kernels that a step needs beside the model's; `pagewire_kernels.reference` defines each."""

    def prepare(
        self,
        inputs: StepInputs,
        latest: Tensor,
        block_tables: Tensor,
        block_size: int,
        max_blocks: int,
    ) -> PreparedInputs:
        """A model's inputs from what the host sent and what the device has."""
        ...

    def edit(self, logits: Tensor, rows: SamplingRows, tables: SamplingTables) -> Tensor:
        """Edit logits in place. Returns what `sample` needs to know of them as they were."""
        ...

    def sample(
        self,
        logits: Tensor,
        sound: Tensor,
        rows: SamplingRows,
        tables: SamplingTables,
        outcome: Tensor,
    ) -> None:
        """One token, or why there is none, per row into `outcome` and the tables."""
        ...

    def gather_logprobs(self, logits: Tensor, token_ids: Tensor) -> tuple[Tensor, Tensor]:
        """Log softmax of some tokens of each row, and the rank of the first."""
        ...


def step_kernels(device: torch.device) -> StepKernels:
    """The kernels of a device."""
    if device.type == "cuda":
        from pagewire_kernels import triton as triton_kernels  # imports triton

        return triton_kernels
    return reference


class LogprobTensors(NamedTuple):
    """Log probabilities of each row's own token and of its most probable ones, unordered."""

    token_ids: Tensor
    """int64 [n, 1 + window]; the row's own first."""

    logprobs: Tensor
    """float32, the same shape."""

    ranks: Tensor
    """int32 [n]: rank of the row's own token."""


class CandidateTensors(NamedTuple):
    """The most probable tokens of each row, most probable first, the lower id first among equals;
    those excluded have minus infinity."""

    token_ids: Tensor
    """int64 [n, count]."""

    logprobs: Tensor
    """float32 [n, count]."""


class DeviceSampler:
    """Prepares steps and samples on the device, for sequences in rows of the table."""

    def __init__(
        self, device_rows: DeviceRows, kernels: StepKernels, block_size: int, vocab_size: int
    ) -> None:
        self._block_tables = device_rows.block_tables
        self._tables = device_rows.sampling
        self._kernels = kernels
        self._block_size = block_size
        self.no_masks = self.bitmask(1, vocab_size)
        """The bitmask of a batch without constraints, which no row reads."""

    def bitmask(self, num_rows: int, vocab_size: int) -> Tensor:
        """A bitmask for `SamplingRows`, all zeros."""
        shape = (num_rows, mask_width(vocab_size))
        return torch.zeros(shape, dtype=torch.int32, device=self._tables.params.device)

    def prepare(self, inputs: StepInputs, max_blocks: int) -> PreparedInputs:
        """What the model takes. max_blocks: columns of its block tables."""
        return self._kernels.prepare(
            inputs, self._tables.latest, self._block_tables, self._block_size, max_blocks
        )

    def sample(self, logits: Tensor, rows: SamplingRows, outcome: Tensor) -> None:
        """One token or negative outcome per row into `outcome`, int64 [n], and the device's rows.

        logits: float32 [n, vocab_size], edited in place. Reads no host memory, so that it can be
        captured.
        """
        sound = self._kernels.edit(logits, rows, self._tables)
        self._kernels.sample(logits, sound, rows, self._tables, outcome)

    def logprobs(self, logits: Tensor, tokens: Tensor, num_top: int) -> LogprobTensors:
        """logits: float32 [n, vocab_size], unedited; tokens: int64 [n], failures among them."""
        ids = tokens.clamp_min(0).unsqueeze(1)
        if num_top > 0:
            _, top_ids = largest(logits, window(num_top, logits.shape[1]))
            ids = torch.cat([ids, top_ids], dim=1)
        logprobs, ranks = self._kernels.gather_logprobs(logits, ids)
        return LogprobTensors(token_ids=ids, logprobs=logprobs, ranks=ranks)

    def prompt_logprobs(
        self, logits: Tensor, tokens: Tensor, num_top: int, row_id: int
    ) -> LogprobTensors:
        """As `logprobs`, of tokens of a row's prompt; the row fails unless all are finite."""
        found = self.logprobs(logits, tokens, num_top)
        is_finite = found.logprobs.isfinite()
        num_reported = min(1 + num_top, is_finite.shape[1])
        is_sound = is_finite[:, 0] & (is_finite.sum(dim=1) >= num_reported)
        self._tables.latest.narrow(0, row_id, 1).masked_fill_(~is_sound.all(), NON_FINITE)
        return found

    def candidates(self, logits: Tensor, rows: SamplingRows, count: int) -> CandidateTensors:
        """The `count` most probable tokens of each row that its edits do not exclude.

        logits: float32 [n, vocab_size], unedited. Edits apply to log probabilities.
        """
        logprobs = torch.log_softmax(logits, dim=-1)
        self._kernels.edit(logprobs, rows, self._tables)
        token_ids = torch.topk(_order_of(logprobs), min(count, logprobs.shape[1]), dim=-1).indices
        return CandidateTensors(token_ids, logprobs.gather(1, token_ids))


def sample_padding(logits: Tensor, kernels: StepKernels) -> None:
    """Do all that a step may do with logits, for rows of no sequence: every row is sampled and has
    its log probabilities and those of other tokens reported, and one has candidates. Compiles the
    kernels for it, and takes the memory.

    logits: float32 [n, vocab_size], which are overwritten.
    """
    (num_rows, vocab_size), device = logits.shape, logits.device
    tables = DeviceRows(1, 1, vocab_size, device, num_counted=0)
    sampler = DeviceSampler(tables, kernels, 1, vocab_size)
    zeros = torch.zeros(num_rows, dtype=torch.int32, device=device)
    rows = SamplingRows(zeros + tables.padding_row, zeros, zeros - 1, sampler.no_masks)
    raw = logits.clone()
    sampler.candidates(logits[:1], rows.select(zeros[:1]), MIN_WINDOW)
    outcome = torch.zeros(num_rows, dtype=torch.int64, device=device)
    sampler.sample(logits, rows, outcome)
    for num_top in (0, MIN_WINDOW):
        sampler.logprobs(raw, outcome, num_top)


def _order_of(values: Tensor) -> Tensor:
    """int64 that order as float32 values do, and among equals the lower column above the higher."""
    bits = torch.where(values == 0.0, 0.0, values).view(torch.int32)
    ordered = (bits ^ ((bits >> 31) & 0x7FFFFFFF)).long()
    columns = torch.arange(values.shape[1] - 1, -1, -1, device=values.device)
    return (ordered << 32) + columns
