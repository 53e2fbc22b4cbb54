"""A step's batch: its rows, and the flattened inputs of the forward pass.

Rows that compute tokens are concatenated without padding, prefills and decodes together. A worked
example with block_size 4: a prefill of 3 tokens at position 0 with table [7], and a decode at
position 5 with table [2, 9]:

    positions      0   1   2   5
    slot_mapping  28  29  30  37      7*4+0, 7*4+1, 7*4+2, 9*4+1
    query_start    0           3   4
    context_lens   3   6

`DecodeInputs` builds the inputs of steps that compute one token of each sequence, on a CPU. Its
arrays are kept from step to step: allocating them costs more than filling them, and an operation of
torch releases the interpreter's lock, which other threads of a worker wait for.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from pagewire_kernels.batch import AttentionMetadata, LayerCaches, StepBatch
from worker_service.array_types import BoolArray, Int32Array, Int64Array
from worker_service.errors import InvalidPlan
from worker_service.pinned_memory import upload
from worker_service.plan import RowErrorReason, StepPlan
from worker_service.runner.state.sequence_table import NO_BLOCK, SequenceTable
from worker_service.sampling.sampler import SamplingBatch
from worker_service.structured.masks import MaskedRows

_NO_ROWS = np.empty(0, np.int64)


class Drafts(NamedTuple):
    """The drafts of a step's rows."""

    counts: Int32Array
    """[num_rows]: tokens of each row that are drafts, its last ones."""

    offsets: Int64Array
    """[num_sampling]: drafts before each place that is sampled at."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StepRows:
    """The rows of a plan, checked against what the worker knows; arrays are [num_rows]."""

    row_ids: Int64Array
    num_tokens: Int32Array
    sample: BoolArray

    computes: BoolArray
    """Rows in the forward pass: they have tokens to compute and have not failed before."""

    are_decodes: bool
    """Whether every row computes one token and samples."""

    forks: Int64Array
    """[num_forks]: the rows without tokens, which sample from their parents' last logits."""

    parents: Int64Array
    """[num_forks]: their parents' rows."""

    sampling: Int64Array
    """[num_sampling]: the rows that sample now, those with drafts once more for each of them; none
    of a sequence that failed before."""

    errors: dict[int, RowErrorReason]
    """The rows of sequences that failed before."""

    drafts: Drafts | None = None
    """None if no row has any."""

    def ends(self) -> Int64Array:
        """[num_rows]: one past each row's last hidden state in the forward pass."""
        return np.cumsum(np.where(self.computes, self.num_tokens, 0))

    def last_states(self, ends: Int64Array) -> Int64Array:
        """[num_sampling]: the hidden states to sample from; a fork's is its parent's."""
        if len(self.forks):
            ends = ends.copy()
            ends[self.forks] = ends[self.parents]
        if self.drafts is not None:
            ends = ends - self.drafts.counts
            return ends[self.sampling] - 1 + self.drafts.offsets
        return ends[self.sampling] - 1

    def advance(self, table: SequenceTable) -> None:
        """Mark the rows' tokens as computed, except for drafts, and those of a parent also in its
        new forks."""
        num_tokens = self.num_tokens
        if self.drafts is not None:
            num_tokens = num_tokens - self.drafts.counts
        table.advance(self.row_ids[self.computes], num_tokens[self.computes])
        if len(self.forks):
            table.copy_progress(self.row_ids[self.parents], self.row_ids[self.forks])


class PromptSpan(NamedTuple):
    """Consecutive prompt tokens of a row whose log probabilities are reported."""

    row: int
    """Of the plan."""

    row_id: int
    start: int
    """Position of the first."""

    end: int
    first_state: int
    """The hidden state in the forward pass that predicts the first; the others follow."""

    num_top: int


def prompt_spans(rows: StepRows, table: SequenceTable) -> Iterator[PromptSpan]:
    """The spans that a step's hidden states predict, of the sequences that ask for them."""
    if not table.prompt_logprobs:
        return
    ends = rows.ends()
    for row in np.flatnonzero(rows.computes).tolist():
        row_id, num_tokens = int(rows.row_ids[row]), int(rows.num_tokens[row])
        asked = table.prompt_logprobs.get(row_id)
        if asked is None:
            continue
        # The hidden state at position p predicts the token at p + 1.
        first = int(table.num_computed_tokens[row_id]) + 1
        start = max(first, asked.start)
        end = min(first + num_tokens, int(table.num_prompt_tokens[row_id]))
        if start < end:
            state = int(ends[row]) - num_tokens + start - first
            yield PromptSpan(row, row_id, start, end, state, asked.num_top)


def resolve_rows(plan: StepPlan, table: SequenceTable) -> StepRows:
    """The plan's rows and their table rows. Raises InvalidPlan if they contradict the table."""
    row_ids = table.row_ids(plan.seq_ids, "seq_ids")
    if len(set(row_ids.tolist())) != len(row_ids):
        raise InvalidPlan("seq_ids", "a sequence has two rows")
    computes = plan.num_tokens > 0
    forks = parents = _NO_ROWS
    errors: dict[int, RowErrorReason] = {}
    if failures := table.failures:
        ids = enumerate(row_ids.tolist())
        errors = {row: failures[row_id] for row, row_id in ids if row_id in failures}
    if errors or not computes.all():
        is_alive = np.ones(len(row_ids), np.bool_)
        is_alive[list(errors)] = False
        forks = np.flatnonzero(~computes & is_alive)
        parents = np.array([_parent_row(plan, row, table) for row in forks.tolist()], np.int64)
        computes &= is_alive
    samples = plan.sample & computes
    samples[forks] = True
    rows = StepRows(
        row_ids=row_ids,
        num_tokens=plan.num_tokens,
        sample=plan.sample,
        computes=computes,
        are_decodes=bool((computes & plan.sample & (plan.num_tokens == 1)).all()),
        forks=forks,
        parents=parents,
        sampling=np.flatnonzero(samples),
        errors=errors,
    )
    _check_lengths(rows, plan, table)
    return rows


def sampling_batch(
    row_ids: Int64Array,
    table: SequenceTable,
    masked: MaskedRows | None = None,
    num_drafts: Int64Array | None = None,
) -> SamplingBatch:
    """The rows of the table that sample in a step, as a sampler takes them. num_drafts: tokens
    after each one's last that count as output."""
    ends = table.num_tokens[row_ids]
    if num_drafts is not None:
        ends = ends + num_drafts
    return SamplingBatch(
        row_ids=row_ids,
        positions=ends - table.num_prompt_tokens[row_ids],
        edited=table.edited_rows(row_ids, ends),
        masked=masked,
    )


def _parent_row(plan: StepPlan, row: int, table: SequenceTable) -> int:
    """The row whose logits a row without tokens samples from."""
    seq_id = int(plan.seq_ids[row])
    parent = next((new.parent_seq_id for new in plan.new_sequences if new.seq_id == seq_id), None)
    if parent is None or not plan.sample[row]:
        problem = f"row {row} computes no tokens; only a new fork that samples may do so"
        raise InvalidPlan("num_tokens", problem)
    rows = np.flatnonzero(plan.seq_ids[:row] == parent)
    if len(rows) == 0 or plan.num_tokens[rows[0]] == 0:
        problem = f"row {row} is a fork of {parent}, which computes nothing in a row before it"
        raise InvalidPlan("num_tokens", problem)
    row_id, parent_row_id = table.row_id(seq_id), table.row_id(parent)
    end = table.num_computed_tokens[parent_row_id] + plan.num_tokens[rows[0]]
    if table.num_tokens[row_id] != end or table.num_tokens[parent_row_id] != end:
        problem = f"row {row} is a fork of {parent}, which does not compute up to its last token"
        raise InvalidPlan("num_tokens", problem)
    return int(rows[0])


def _check_lengths(rows: StepRows, plan: StepPlan, table: SequenceTable) -> None:
    """Rows compute tokens that exist, into blocks that exist, and sample from the last token. Rows
    with drafts compute and sample, and have blocks for all of them."""
    row_ids = rows.row_ids[rows.computes]
    end = last = table.num_computed_tokens[row_ids] + rows.num_tokens[rows.computes]
    known = table.num_tokens[row_ids]
    limit = np.minimum(table.max_model_len, table.num_blocks[row_ids] * table.block_size)
    is_early = rows.sample[rows.computes] & (end != known)
    if (lookahead := plan.lookahead).any():
        last = end + lookahead[rows.computes]
        is_idle = ~plan.sample | (plan.num_tokens == 0)
        if lookahead[is_idle].any():
            seq_id = plan.seq_ids[is_idle & (lookahead > 0)][0]
            problem = "has drafts, but does not compute and sample"
            raise InvalidPlan("lookahead", f"the row of sequence {seq_id} {problem}")
    if not (is_early | (end > known) | (last > limit)).any():
        return
    for field, is_wrong, problem in (
        ("num_tokens", end > known, "computes more tokens than the sequence has"),
        ("sample", is_early, "samples before its last token"),
        ("num_tokens", end > table.max_model_len, "goes beyond the model's length"),
        ("num_tokens", end > limit, "lacks blocks"),
        ("lookahead", last > limit, "lacks blocks for its drafts, or exceeds the model"),
    ):
        if is_wrong.any():
            seq_id = plan.seq_ids[rows.computes][is_wrong][0]
            raise InvalidPlan(field, f"the row of sequence {seq_id} {problem}")


@dataclass(frozen=True, kw_only=True, slots=True)
class HostInputs:
    """The flattened inputs of a forward pass, on the host; the module has a worked example."""

    row_ids: Int64Array
    """[num_seqs]."""

    token_row_ids: Int64Array
    """[num_tokens]: the row of each token's sequence."""

    token_ids: Int64Array
    """[num_tokens]; UNKNOWN_TOKEN where a token is not known on the host."""

    positions: Int64Array
    """[num_tokens]."""

    slot_mapping: Int64Array
    """[num_tokens]."""

    query_start: Int64Array
    """[num_seqs + 1]: first flattened row of each sequence."""

    context_lens: Int64Array
    """[num_seqs]."""

    max_query_len: int
    max_context_len: int
    max_blocks: int
    """Entries of the longest block table."""

    num_decodes: int
    """The first sequences, up to one that has more than one row."""


def lay_out(row_ids: Int64Array, num_tokens: Int32Array, table: SequenceTable) -> HostInputs:
    """Flattened inputs for sequences that compute `num_tokens` tokens each, all positive."""
    query_lens = num_tokens.astype(np.int64)
    query_start = np.zeros(len(row_ids) + 1, np.int64)
    np.cumsum(query_lens, out=query_start[1:])
    computed = table.num_computed_tokens[row_ids]
    context_lens = computed + query_lens
    max_query_len = int(query_lens.max())
    positions, token_row_ids = computed, row_ids
    if max_query_len > 1:
        # Row r of the batch belongs to sequence s and stands at computed[s] + r - query_start[s].
        positions = np.repeat(computed - query_start[:-1], query_lens) + np.arange(query_start[-1])
        token_row_ids = np.repeat(row_ids, query_lens)
    block_size = table.block_size
    blocks = table.block_tables[token_row_ids, positions // block_size].astype(np.int64)
    max_context_len = int(context_lens.max())
    return HostInputs(
        row_ids=row_ids,
        token_row_ids=token_row_ids,
        token_ids=table.token_ids[token_row_ids, positions].astype(np.int64),
        positions=positions,
        slot_mapping=blocks * block_size + positions % block_size,
        query_start=query_start,
        context_lens=context_lens,
        max_query_len=max_query_len,
        max_context_len=max_context_len,
        max_blocks=-(-max_context_len // block_size),
        num_decodes=int(np.argmax(query_lens > 1)) if max_query_len > 1 else len(row_ids),
    )


def build_batch(
    inputs: HostInputs,
    table: SequenceTable,
    caches: Sequence[LayerCaches],
    sampled: Int64Array | None = None,
) -> StepBatch:
    """Copy the inputs to the device of the caches, without waiting for it. sampled: the rows whose
    logits will be computed, None if they are not known."""
    device = caches[0][0].device
    block_tables = table.block_tables[inputs.row_ids, : inputs.max_blocks]
    metadata = AttentionMetadata(
        query_start=upload(inputs.query_start.astype(np.int32), device),
        context_lens=upload(inputs.context_lens.astype(np.int32), device),
        block_tables=upload(block_tables, device),
        slot_mapping=upload(inputs.slot_mapping, device),
        max_query_len=inputs.max_query_len,
        max_context_len=inputs.max_context_len,
        num_decodes=inputs.num_decodes,
    )
    return StepBatch(
        token_ids=upload(inputs.token_ids, device),
        positions=upload(inputs.positions, device),
        attention=(metadata,),
        caches=caches,
        sampled=None if sampled is None else upload(sampled, device),
    )


_MIN_CAPACITY = 16


class _Views(NamedTuple):
    """Tensors over the first rows of all arrays."""

    token_ids: Tensor
    positions: Tensor
    query_start: Tensor
    context_lens: Tensor
    block_tables: Tensor
    slot_mapping: Tensor
    sampled: Tensor
    """All rows."""


class DecodeInputs:
    """Builds decode inputs in fixed arrays, so each build overwrites the tensors of the last."""

    def __init__(self, caches: Sequence[LayerCaches]) -> None:
        self._caches = caches
        self._width = 0
        self._reserve(_MIN_CAPACITY, 1, 1)

    def build(self, row_ids: Int64Array, table: SequenceTable) -> StepBatch:
        """The batch of these rows of the table, each of which computes its next token, and from
        each of which is sampled."""
        num_rows, block_size = len(row_ids), table.block_size
        computed = table.num_computed_tokens[row_ids]
        longest = int(computed.max())
        max_blocks = longest // block_size + 1
        if num_rows > len(self._token_ids) or max_blocks > self._width:
            self._reserve(num_rows, max_blocks, table.block_tables.shape[1])
        blocks, offsets = np.divmod(computed, block_size)
        self._positions[:num_rows] = computed
        self._context_lens[:num_rows] = computed
        self._context_lens[:num_rows] += 1
        self._token_ids[:num_rows] = table.token_ids[row_ids, computed]
        self._slot_mapping[:num_rows] = table.block_tables[row_ids, blocks]
        self._slot_mapping[:num_rows] *= block_size
        self._slot_mapping[:num_rows] += offsets
        self._block_tables[:num_rows] = table.block_tables[row_ids, : self._width]
        views = self._of_size.get(num_rows)
        if views is None:
            views = self._of_size[num_rows] = self._views(num_rows)
        # A new object each time, since backends cache what they derive from it.
        metadata = AttentionMetadata(
            query_start=views.query_start,
            context_lens=views.context_lens,
            block_tables=views.block_tables,
            slot_mapping=views.slot_mapping,
            max_query_len=1,
            max_context_len=longest + 1,
        )
        return StepBatch(
            token_ids=views.token_ids,
            positions=views.positions,
            attention=(metadata,),
            caches=self._caches,
            sampled=views.sampled,
        )

    def _reserve(self, num_rows: int, max_blocks: int, table_width: int) -> None:
        """Allocate for a power of two of sequences and blocks, at most `table_width` blocks."""
        capacity = max(_MIN_CAPACITY, 1 << (num_rows - 1).bit_length())
        self._width = max(self._width, min(1 << (max_blocks - 1).bit_length(), table_width))
        self._query_start = np.arange(capacity + 1, dtype=np.int32)
        self._token_ids = np.zeros(capacity, np.int64)
        self._positions = np.zeros(capacity, np.int64)
        self._slot_mapping = np.zeros(capacity, np.int64)
        self._context_lens = np.zeros(capacity, np.int32)
        self._block_tables = np.full((capacity, self._width), NO_BLOCK, np.int32)
        self._of_size: dict[int, _Views] = {}

    def _views(self, num_rows: int) -> _Views:
        return _Views(
            token_ids=torch.from_numpy(self._token_ids[:num_rows]),
            positions=torch.from_numpy(self._positions[:num_rows]),
            query_start=torch.from_numpy(self._query_start[: num_rows + 1]),
            context_lens=torch.from_numpy(self._context_lens[:num_rows]),
            block_tables=torch.from_numpy(self._block_tables[:num_rows]),
            slot_mapping=torch.from_numpy(self._slot_mapping[:num_rows]),
            sampled=torch.arange(num_rows),
        )
