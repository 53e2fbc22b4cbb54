"""The parts of a step besides the model that run on the device: preparing inputs, and sampling.

Samples the same tokens as `worker_service.sampling`, up to the rounding of sums of probabilities,
with the kernels of `pagewire_kernels`. Tokens stay on the device. Nothing here waits for the
device, so that a step can be launched while the previous one is computed.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from pagewire_kernels import reference
from pagewire_kernels.batch import (
    COUNT_OCCURS,
    COUNT_ONE_OUTPUT,
    NON_FINITE,
    NOT_SAMPLED,
    AttentionMetadata,
    LayerMemory,
    PreparedInputs,
    SamplingRows,
    SamplingTables,
    StepBatch,
    StepInputs,
    mask_width,
)
from worker_service.distributed.communicator import Communicator
from worker_service.runner.device.rows import DeviceRows
from worker_service.sampling.draw import largest
from worker_service.sampling.logprobs import MIN_WINDOW, window


class StepKernels(Protocol):
    """The kernels of a step besides those of the model, as defined by the functions of the same
    names in `pagewire_kernels.reference`."""

    def prepare(
        self,
        inputs: StepInputs,
        latest: Tensor,
        num_ahead: Tensor,
        drafts: Tensor,
        block_tables: Tensor,
        block_size: int,
        max_blocks: int,
    ) -> PreparedInputs:
        """Combine the inputs sent by the host with tokens, progress, drafts and block tables on the
        device."""
        ...

    def edit(self, logits: Tensor, rows: SamplingRows, tables: SamplingTables) -> Tensor:
        """Edit logits in place. Returns what `sample` must know of them."""
        ...

    def sample(
        self,
        logits: Tensor,
        edited: Tensor,
        rows: SamplingRows,
        tables: SamplingTables,
        outcome: Tensor,
    ) -> None:
        """Write one token or negative outcome per row to `outcome` and the tables."""
        ...

    def accept(
        self,
        outcome: Tensor,
        drafts: Tensor,
        row_ids: Tensor,
        starts: Tensor,
        num_drafts: Tensor,
        tables: SamplingTables,
    ) -> Tensor:
        """Store the last token of each row whose drafts were verified. Returns the number of
        accepted drafts of each."""
        ...

    def gather_logprobs(self, logits: Tensor, token_ids: Tensor) -> tuple[Tensor, Tensor]:
        """Return the log softmax of some tokens of each row, and the rank of the first one."""
        ...


def step_kernels(device: torch.device) -> StepKernels:
    """Select the kernels of a device: Triton kernels on GPUs, otherwise the reference."""
    if device.type == "cuda":
        from pagewire_kernels import triton as triton_kernels  # imports triton

        return triton_kernels
    return reference


class LogprobTensors(NamedTuple):
    """Log probabilities of each row's sampled token and of its most probable ones, unordered."""

    token_ids: Tensor
    """int64 [n, 1 + window], the sampled token first."""

    logprobs: Tensor
    """float32 [n, 1 + window]."""

    ranks: Tensor
    """int32 [n]: rank of the sampled token."""


class CandidateTensors(NamedTuple):
    """The most probable tokens of each row, most probable first, and the lower id first among
    equals; excluded tokens have a log probability of minus infinity."""

    token_ids: Tensor
    """int64 [n, count]."""

    logprobs: Tensor
    """float32 [n, count]."""


class DeviceSampler:
    """Prepares inputs and samples on the device, for sequences in rows of `DeviceRows`.

    Of several ranks, one samples, and the others receive what it sampled, on their devices."""

    def __init__(
        self,
        device_rows: DeviceRows,
        kernels: StepKernels,
        vocab_size: int,
        communicator: Communicator | None = None,
    ) -> None:
        """communicator: of the ranks that share the model; None for one rank."""
        self._communicator = communicator
        self._block_tables = device_rows.block_tables
        self._tables = device_rows.sampling
        self._kernels = kernels
        self._groups = device_rows.groups
        self.no_masks = self.bitmask(1, vocab_size)
        """The bitmask of batches without constraints, which no row reads."""

    @property
    def is_shared(self) -> bool:
        """Whether several ranks share the model."""
        return self._communicator is not None

    @property
    def samples(self) -> bool:
        """Whether this rank samples."""
        return self._communicator is None or self._communicator.layout.samples

    def bitmask(self, num_rows: int, vocab_size: int) -> Tensor:
        """Allocate a bitmask of zeros for `SamplingRows`."""
        shape = (num_rows, mask_width(vocab_size))
        return torch.zeros(shape, dtype=torch.int32, device=self._tables.params.device)

    def prepare(
        self,
        inputs: StepInputs,
        caches: Sequence[LayerMemory],
        query_start: Tensor,
        max_context_len: int,
        num_groups: int | None = None,
        **metadata: Any,
    ) -> StepBatch:
        """Prepare the inputs of the model, or of a head that reads the first `num_groups` groups
        only. metadata: other fields of `AttentionMetadata` that the host decides."""
        attention = []
        pairs = [*zip(self._block_tables, self._groups, strict=True)]
        for tables, group in pairs[:num_groups]:
            prepared = self._kernels.prepare(
                inputs,
                self._tables.latest,
                self._tables.num_ahead,
                self._tables.drafts,
                tables,
                group.block_tokens,
                group.table_width(max_context_len),
            )
            of_all = AttentionMetadata(
                query_start=query_start,
                context_lens=prepared.context_lens,
                block_tables=prepared.block_tables,
                slot_mapping=prepared.slot_mapping[: None if group.has_tokens else 0],
                max_context_len=max_context_len,
                **metadata,
            )
            attention.append(of_all.in_chunks(group.chunk, group.block_tokens))
        return StepBatch(
            token_ids=prepared.token_ids,
            positions=prepared.positions,
            attention=tuple(attention),
            caches=caches,
        )

    def sample(self, logits: Tensor, rows: SamplingRows, outcome: Tensor) -> None:
        """Write one token or negative outcome per row to `outcome`, int64 [n], and to `DeviceRows`.

        logits: float32 [n, vocab_size], edited in place. Reads no host memory, so that it can be
        captured.
        """
        edited = self._kernels.edit(logits, rows, self._tables)
        self._kernels.sample(logits, edited, rows, self._tables, outcome)

    def sample_apart(
        self, logits: Tensor, rows: SamplingRows, counted: Tensor | None, outcome: Tensor
    ) -> None:
        """As `sample`, but several rows may be of one sequence, after some of its drafts, and
        nothing is stored in `DeviceRows` before `accept`: each row has a copy of its sequence's
        state.

        counted: int64 [2, m], rows of the batch and drafts before them, or their codes, that
        penalties count; None: no row has penalties.
        """
        row_ids, tables = rows.row_ids.long(), self._tables
        counts = tables.counts
        if counted is not None:
            # Rows without penalties get the occurrences of others, which are not read.
            counts = counts.index_select(0, row_ids.clamp_max(len(counts) - 1))
            places, drafts = counted[0], counted[1]
            if tables.drafts.shape[1]:
                of_drafts = row_ids.index_select(0, places)
                drafts = reference.decode_drafts(drafts, of_drafts, tables.drafts)
            at = (places, drafts)
            counts.index_put_(at, counts.new_full((), COUNT_ONE_OUTPUT), accumulate=True)
            counts.index_put_(at, counts[at] | COUNT_OCCURS)
        own = SamplingTables(
            params=tables.params.index_select(0, row_ids),
            latest=tables.latest.index_select(0, row_ids),
            num_ahead=tables.num_ahead.index_select(0, row_ids),
            drafts=tables.drafts,
            counts=counts,
            edit_tokens=tables.edit_tokens.index_select(0, row_ids),
            edit_values=tables.edit_values.index_select(0, row_ids),
            edit_ends=tables.edit_ends.index_select(0, row_ids),
        )
        places = torch.arange(len(row_ids), dtype=torch.int32, device=row_ids.device)
        apart = rows._replace(row_ids=places)
        self._kernels.sample(logits, self._kernels.edit(logits, apart, own), apart, own, outcome)

    def accept(self, outcome: Tensor, rows: SamplingRows, verified: Sequence[Tensor]) -> Tensor:
        """Accept the drafts that were right, and store the last token of each sequence and its
        progress in `DeviceRows`; all ranks do so, with the same numbers. Returns the number of
        accepted drafts of each, int32 [n].

        outcome: of `sample_apart`; verified: `VerifiedDrafts` on the device.
        """
        starts, num_drafts, drafts = verified
        row_ids = rows.row_ids.index_select(0, starts).long()
        return self._kernels.accept(outcome, drafts, row_ids, starts, num_drafts, self._tables)

    def share(self, rows: SamplingRows, outcome: Tensor) -> None:
        """Give the other ranks the outcome of a step, or receive it.

        outcome: int64, of `rows` and then of rows that only report on their prompts. After
        `sample_apart`, `accept` stores the last token of each sequence.
        """
        if self._communicator is None:
            return
        self._communicator.share_in_stage(outcome)
        if not self.samples:
            row_ids, sampled = rows.row_ids.long(), outcome[: len(rows.row_ids)]
            before = self._tables.latest.index_select(0, row_ids)
            latest = torch.where(sampled == NOT_SAMPLED, before, sampled)
            self._tables.latest.index_copy_(0, row_ids, latest)

    def share_drafts(self, row_ids: Tensor) -> None:
        """Give the other ranks the drafts that a head has made for these rows, or receive them.
        row_ids: int64 [n], distinct."""
        assert self._communicator is not None, "one rank shares nothing"
        drafts = self._tables.drafts.index_select(0, row_ids)
        self._communicator.share_in_stage(drafts)
        if not self.samples:
            self._tables.drafts.index_copy_(0, row_ids, drafts)

    def failures(self, row_ids: Tensor) -> Tensor:
        """int64 [n]: NON_FINITE for rows that have failed, otherwise NOT_SAMPLED."""
        latest = self._tables.latest.index_select(0, row_ids)
        return torch.where(latest < 0, latest, NOT_SAMPLED)

    def logprobs(self, logits: Tensor, tokens: Tensor, num_top: int) -> LogprobTensors:
        """Compute the log probabilities of tokens and of at least `num_top` most probable ones.

        logits: float32 [n, vocab_size], unedited; tokens: int64 [n], which may contain negative
        outcomes.
        """
        ids = tokens.clamp_min(0).unsqueeze(1)
        if num_top > 0:
            _, top_ids = largest(logits, window(num_top, logits.shape[1]))
            ids = torch.cat([ids, top_ids], dim=1)
        logprobs, ranks = self._kernels.gather_logprobs(logits, ids)
        return LogprobTensors(token_ids=ids, logprobs=logprobs, ranks=ranks)

    def prompt_logprobs(
        self, logits: Tensor, tokens: Tensor, num_top: int, row_id: int
    ) -> LogprobTensors:
        """As `logprobs`, for tokens of a row's prompt; the row fails unless all are finite."""
        found = self.logprobs(logits, tokens, num_top)
        is_finite = found.logprobs.isfinite()
        num_reported = min(1 + num_top, is_finite.shape[1])
        is_sound = is_finite[:, 0] & (is_finite.sum(dim=1) >= num_reported)
        self._tables.latest.narrow(0, row_id, 1).masked_fill_(~is_sound.all(), NON_FINITE)
        return found

    def candidates(self, logits: Tensor, rows: SamplingRows, count: int) -> CandidateTensors:
        """Find the `count` most probable tokens of each row that its edits do not exclude.

        logits: float32 [n, vocab_size], unedited. Edits apply to log probabilities.
        """
        logprobs = torch.log_softmax(logits, dim=-1)
        self._kernels.edit(logprobs, rows, self._tables)
        token_ids = torch.topk(_order_of(logprobs), min(count, logprobs.shape[1]), dim=-1).indices
        return CandidateTensors(token_ids, logprobs.gather(1, token_ids))


def sample_padding(logits: Tensor, kernels: StepKernels) -> None:
    """Run all operations that a step may apply to logits, for padding rows, to compile kernels and
    to allocate memory: every row samples and reports log probabilities, and one has candidates.

    logits: float32 [n, vocab_size], which are overwritten.
    """
    (num_rows, vocab_size), device = logits.shape, logits.device
    tables = DeviceRows(1, [], 1, vocab_size, device, num_counted=0)
    sampler = DeviceSampler(tables, kernels, vocab_size)
    zeros = torch.zeros(num_rows, dtype=torch.int32, device=device)
    rows = SamplingRows(zeros + tables.padding_row, zeros, zeros - 1, sampler.no_masks)
    raw = logits.clone()
    sampler.candidates(logits[:1], rows.select(zeros[:1]), MIN_WINDOW)
    outcome = torch.zeros(num_rows, dtype=torch.int64, device=device)
    sampler.sample(logits, rows, outcome)
    for num_top in (0, MIN_WINDOW):
        sampler.logprobs(raw, outcome, num_top)


def _order_of(values: Tensor) -> Tensor:
    """int64 with the order of float32 values, and the lower column above the higher one among
    equals."""
    bits = torch.where(values == 0.0, 0.0, values).view(torch.int32)
    ordered = (bits ^ ((bits >> 31) & 0x7FFFFFFF)).long()
    columns = torch.arange(values.shape[1] - 1, -1, -1, device=values.device)
    return (ordered << 32) + columns
