"""A step plan while its rows are being chosen."""

from collections.abc import Iterable

from scheduler_service.core.config import SchedulerConfig
from scheduler_service.core.kv_cache.block_table import BlockUpdate
from scheduler_service.core.scheduling.pipeline import InFlightStep
from scheduler_service.core.sequence import Sequence, SequenceGroup
from scheduler_service.core.step_plan import (
    SAMPLED,
    BlockTable,
    NewSequence,
    RowOutput,
    StepPlan,
)
from scheduler_service.core.throughput import PrefillCost, StepWork

MIN_CHUNK_TOKENS = 16
"""Prompt tokens that a step has capacity for whatever they cost, so that prompts make progress."""


class Batch:
    """Rows of one step. Decodes come first: one token each, and all of them sample."""

    def __init__(self, config: SchedulerConfig, step_id: int, now_us: int) -> None:
        self.step_id = step_id
        self.now_us = now_us
        self._chunks_prompts = config.enable_chunked_prefill
        self.budget = config.max_num_batched_tokens
        """Tokens that may still be added."""
        self._cost: PrefillCost | None = None
        self._budget_us = 0.0
        self.rows: list[Sequence] = []
        self.swap_out: list[int] = []
        """Pairs of blocks, as in the plan."""
        self.swap_in: list[int] = []
        self.copy: list[int] = []
        self.saved_states: list[int] = []
        """Quadruples, as in the plan."""
        self.lockstep_groups: set[SequenceGroup] = set()
        """Groups that have had their turn, of those whose sequences advance together."""
        self.has_preempted = False
        """Whether a sequence was preempted because memory ran out."""
        self.num_prefill_tokens = 0
        """Tokens of all prefill rows."""
        self.num_attended_pairs = 0
        """See `StepWork`."""
        self.num_prefill_pairs = 0
        """See `StepWork`."""
        self.exceeding: list[SequenceGroup] = []
        """Groups that have become longer than the whole cache; they end after the plan."""
        self.lookahead: list[int] = []
        """The most drafts of the first rows; later ones have none."""
        self._new_sequences: list[NewSequence] = []
        self._appended_tokens: list[int] = []
        self._other_outputs: dict[int, RowOutput] = {}
        """The rows that bring something other than a token."""
        self.vectors: dict[int, tuple[int, int]] = {}
        """By row that brings vectors: the first token's index, 0 without one for each, and their
        number."""
        self.vector_bytes = 0
        """Bytes of all vectors."""
        self._block_updates: list[int] = []
        self._prefill_tokens: list[int] = []
        self.prefilled: set[Sequence] = set()
        """Sequences with rows of prompt tokens."""
        self._prefills: list[tuple[Sequence, int, bool]] = []

    def update_tables(self, seq_id: int, updates: Iterable[BlockUpdate]) -> None:
        """Change a running sequence's block tables, copying the shared blocks that it replaces."""
        changes = self._block_updates
        for group, index, block, copied_from in updates:
            if copied_from is not None:
                self.copy += (copied_from, block)
            changes += (seq_id, group, index, block)

    def copy_shared(self, updates: Iterable[BlockUpdate]) -> None:
        """Copy the shared blocks that changes of block tables replace."""
        for _, _, block, copied_from in updates:
            if copied_from is not None:
                self.copy += (copied_from, block)

    def append_token(self, seq_id: int, token: int) -> None:
        """Send the worker a token that the core has chosen."""
        self._appended_tokens += (seq_id, token)

    def add_decode(self, seq: Sequence, num_drafts: int) -> None:
        """Add a row that samples one token, and may add drafts."""
        if num_beams := len(self.rows) - len(self.lookahead):
            self.lookahead += [0] * num_beams
        self.lookahead.append(num_drafts)
        self.num_attended_pairs += seq.growth.length
        self.rows.append(seq)

    def add_beam(self, seq: Sequence) -> None:
        """Add a decode row that reports candidates."""
        self._other_outputs[len(self.rows)] = RowOutput.CANDIDATES
        self.num_attended_pairs += seq.growth.length
        self.rows.append(seq)

    def add_new(self, new_sequence: NewSequence) -> None:
        """Introduce a sequence; its row must follow."""
        self._new_sequences.append(new_sequence)

    def add_prefill(self, seq: Sequence, num_tokens: int, is_last: bool) -> None:
        """Add a row of prompt tokens, or of none where a fork samples from its parent's logits.
        The sequence counts them as computed already."""
        strategy = seq.seq_group.strategy
        output = strategy.output if is_last or strategy.brings_all else RowOutput.NOTHING
        if output is not RowOutput.TOKEN:
            self._other_outputs[len(self.rows)] = output
        if output is RowOutput.VECTOR:
            is_each = strategy.brings_all
            vectors = (seq.prefill.num_computed - num_tokens, num_tokens) if is_each else (0, 1)
            self.vectors[len(self.rows)] = vectors
            self.vector_bytes += vectors[1] * strategy.vector_bytes
        self.rows.append(seq)
        self._prefill_tokens.append(num_tokens)
        self._prefills.append((seq, seq.prefill.num_computed, is_last))
        self.prefilled.add(seq)
        self.num_prefill_tokens += num_tokens
        self.num_attended_pairs += num_tokens * seq.prefill.num_computed
        num_pairs = num_tokens * seq.prefill.num_computed - num_tokens * (num_tokens - 1) // 2
        self.num_prefill_pairs += num_pairs
        self.budget -= num_tokens
        if self._cost is not None:
            self._budget_us -= self._cost.cost_us(num_tokens, num_pairs)

    def limit_prefills(self, cost: PrefillCost, budget_us: float) -> None:
        """Limit the time that prompts may take in this step, by their measured cost. They have at
        most twice as many tokens as in a recent step: few tokens cost hardly more than none while
        the step is bound by memory, so they do not predict what many cost."""
        self.budget = min(self.budget, max(MIN_CHUNK_TOKENS, int(2 * cost.max_tokens)))
        if cost.max_tokens:
            self._cost, self._budget_us = cost, budget_us

    def max_chunk(self, num_computed: int) -> int:
        """Number of tokens of a prompt that may be added after its first `num_computed`."""
        if self._cost is None:
            return self.budget
        num_tokens = self._cost.tokens_within(max(0.0, self._budget_us), num_computed)
        return int(min(self.budget, max(num_tokens, MIN_CHUNK_TOKENS - self.num_prefill_tokens)))

    def fits(self, seq: Sequence, num_computed: int) -> bool:
        """Whether there is capacity for the next chunk of a sequence after its first
        `num_computed` tokens."""
        num_needed = 1 if self._chunks_prompts else seq.growth.length - num_computed
        return self.max_chunk(num_computed) >= num_needed

    @property
    def is_empty(self) -> bool:
        """Whether the worker has nothing to do. A batch without rows may still move blocks, which
        have to be on the device before the first row."""
        return not (self.rows or self.swap_out or self.swap_in)

    def to_plan(self, forget_seq_ids: list[int]) -> tuple[StepPlan, InFlightStep]:
        """The plan, and the in-flight step that its result will be matched with."""
        plan = StepPlan(
            step_id=self.step_id,
            forget_seq_ids=forget_seq_ids,
            swap_out=self.swap_out,
            swap_in=self.swap_in,
            copy=self.copy,
            new_sequences=self._in_batch_order(),
            block_updates=self._block_updates,
            saved_states=self.saved_states,
            seq_ids=[seq.seq_id for seq in self.rows],
            appended_tokens=self._appended_tokens,
        )
        sampled = self.rows
        if self._prefill_tokens:
            num_decodes = len(self.rows) - len(self._prefill_tokens)
            plan.num_tokens = [1] * num_decodes + self._prefill_tokens
        if self._other_outputs:
            plan.output = [int(RowOutput.TOKEN)] * len(self.rows)
            for row, output in self._other_outputs.items():
                plan.output[row] = output
            pairs = zip(self.rows, plan.output, strict=True)
            sampled = [seq for seq, output in pairs if output in SAMPLED]
        if any(self.lookahead):
            missing = len(self.rows) - len(self.lookahead)
            plan.lookahead = self.lookahead + [0] * missing
        return plan, InFlightStep(
            self.step_id,
            self.rows,
            sampled,
            plan.lookahead,
            self._prefills,
            self._other_outputs,
            self.vectors,
            self._work(),
        )

    def _work(self) -> StepWork:
        num_decodes = len(self.rows) - len(self._prefill_tokens)
        return StepWork(
            num_tokens=num_decodes + self.num_prefill_tokens,
            num_prefill_tokens=self.num_prefill_tokens,
            num_moves=(len(self.swap_out) + len(self.swap_in)) // 2,
            swaps_in=bool(self.swap_in),
            num_attended_pairs=self.num_attended_pairs,
            num_prefill_pairs=self.num_prefill_pairs,
        )

    def _in_batch_order(self) -> list[NewSequence]:
        """The new sequences in the order of their rows. Beams, and sequences that were swapped in,
        may have been added in another order."""
        if self._appended_tokens or self._other_outputs:
            places = {seq.seq_id: row for row, seq in enumerate(self.rows)}
            self._new_sequences.sort(key=lambda new: places[new.seq_id])
        return self._new_sequences


def make_fork(
    seq: Sequence, parent: Sequence, token_ids: list[int], tables: list[BlockTable]
) -> NewSequence:
    """The introduction of a sequence that shares the parent's tokens and adds `token_ids`."""
    return NewSequence(
        seq_id=seq.seq_id,
        choice_index=seq.choice_index,
        token_ids=token_ids,
        num_prompt_tokens=0,
        num_computed_tokens=0,
        tables=tables,
        sampling=seq.seq_group.request.work.sampling,
        parent_seq_id=parent.seq_id,
    )


def make_new_sequence(seq: Sequence, tables: list[BlockTable]) -> NewSequence:
    """The introduction of a sequence, whose blocks hold its first `num_computed` tokens."""
    seq_group = seq.seq_group
    return NewSequence(
        seq_id=seq.seq_id,
        choice_index=seq.choice_index,
        token_ids=[*seq_group.request.prompt_token_ids, *seq.output_token_ids],
        num_prompt_tokens=seq_group.num_prompt_tokens,
        num_computed_tokens=seq.prefill.num_computed,
        tables=tables,
        sampling=seq_group.request.work.sampling,
        pooling=seq_group.request.work.pooling,
        prompt_logprobs_start=seq_group.prompt_logprobs_start,
        traceparent=seq_group.request.traceparent,
        context=seq_group.context,
    )
