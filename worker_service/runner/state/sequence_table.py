"""State of the sequences that the worker knows.

The core sends a sequence's tokens, blocks and parameters once; from then on a step names it by id.
Everything lives in columns by *row*. A sequence gets a row when it is added, and the row is reused
when it is forgotten. So a step's inputs are a few gathers, whatever the sequences' lengths. A *row
id* is a row of this table; a plain `row` elsewhere is a row of the step's batch.
"""

from collections.abc import ItemsView, Sequence, Set
from copy import copy
from dataclasses import dataclass
from heapq import heappop, heappush
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from worker_service.adapters.store import AdapterStore
from worker_service.array_types import Int32Array, Int64Array
from worker_service.cache_groups import CacheGroup
from worker_service.errors import InvalidPlan
from worker_service.plan import (
    ContextKind,
    ContextPart,
    KeptSequence,
    NewSequence,
    RowErrorReason,
    SamplerParams,
    StepPlan,
)
from worker_service.pooling_facts import PoolingFacts
from worker_service.runner.state.block_tables import SequenceBlocks, grown
from worker_service.runner.state.texts import Text, check_work
from worker_service.sampling.logit_edits import EditedRow
from worker_service.sampling.sampling_table import SamplingTable

UNKNOWN_TOKEN = -1
"""Placeholder of a token that was sampled on the device or by another rank, unknown here."""

_INITIAL_ROWS = 64

_COLUMNS = (
    "num_tokens",
    "num_prompt_tokens",
    "num_computed_tokens",
    "num_virtual_tokens",
    "num_pending_drafts",
    "capacity",
    "salts",
    "drafter_state",
)


class PromptLogprobsRequest(NamedTuple):
    """Which prompt log probabilities a sequence asked for."""

    start: int
    """Position of the first token reported."""

    num_top: int
    """Number of most probable tokens reported with each token."""


class PlanRows(NamedTuple):
    """The sequences that a plan names, as rows of the table."""

    forgotten: Int64Array
    added: Int64Array
    updated: Int64Array
    """[n]: of each block update."""

    appended: Int64Array
    """[n]: of each appended token."""

    batch: Int64Array
    """[num_rows]."""


_NO_ROWS = np.empty(0, np.int64)


class RowIds:
    """Rows by sequence. A row is in use or free, never both.

    Sequences divide into `num_parts` parts by their rows. A new one gets a row of the smallest
    part, so that parts stay even while sequences come and go.
    """

    def __init__(self, num_rows: int, num_parts: int) -> None:
        self._row_id_of: dict[int, int] = {}
        self.num_parts = num_parts
        self._free: list[list[int]] = [[] for _ in range(num_parts)]
        """Free rows of each part, as heaps: the lowest is taken first, so that few rows are beyond
        a GPU's tables once many sequences have come and gone."""
        self._part_sizes = [0] * num_parts
        self.add_rows(0, num_rows)

    def add_rows(self, start: int, end: int) -> None:
        """Add free rows."""
        for row_id in range(start, end):
            heappush(self._free[row_id % self.num_parts], row_id)

    @property
    def are_used(self) -> bool:
        """Whether no row is free."""
        return not any(self._free)

    def allocate(self, seq_id: int) -> int:
        """Give a sequence a free row, of which there is one."""
        parts = [part for part, free in enumerate(self._free) if free]
        part = min(parts, key=self._part_sizes.__getitem__)
        self._part_sizes[part] += 1
        row_id = self._row_id_of[seq_id] = heappop(self._free[part])
        return row_id

    def release(self, seq_id: int) -> None:
        """Free a known sequence's row."""
        row_id = self._row_id_of.pop(seq_id)
        heappush(self._free[row_id % self.num_parts], row_id)
        self._part_sizes[row_id % self.num_parts] -= 1

    def __contains__(self, seq_id: int) -> bool:
        """Whether a sequence is known."""
        return seq_id in self._row_id_of

    def __getitem__(self, seq_id: int) -> int:
        """The row of a known sequence."""
        return self._row_id_of[seq_id]

    def items(self) -> ItemsView[int, int]:
        """(sequence, row) of all."""
        return self._row_id_of.items()

    def of(self, seq_ids: Int32Array, field: str) -> Int64Array:
        """The rows of some sequences. Raises InvalidPlan, naming the plan's field."""
        row_id_of = self._row_id_of
        try:
            row_ids = [row_id_of[seq_id] for seq_id in seq_ids.tolist()]
        except KeyError as error:
            raise InvalidPlan(field, f"sequence {error.args[0]} is not known here") from None
        return np.array(row_ids, np.int64)

    def parts(self, row_ids: Int64Array) -> Int64Array:
        """The part that each of some sequences belongs to, for as long as it is known."""
        return row_ids % self.num_parts


@dataclass(frozen=True, slots=True)
class SequenceChecks:
    """The rules for new sequences that depend on the model alone. Each check raises InvalidPlan,
    which names the field."""

    vocab_size: int
    adapters: AdapterStore[Any] | None
    """Those that sequences may have; None: none."""

    def check_new(self, new: NewSequence, field: str) -> None:
        """Check a sequence's tokens, context and parameters."""
        self.check_tokens(new.token_ids, f"{field}.token_ids")
        computed = [ContextKind.SALT]
        if self.adapters is not None:
            self.adapters.adapter_of(new, field)
            computed.append(ContextKind.ADAPTER)
        for index, part in enumerate(new.context):
            if part.kind not in computed:
                only = "SALT, the only kind" if len(computed) == 1 else "SALT or ADAPTER, the kinds"
                problem = f"expected {only} computed here, got {part.kind.name}"
                raise InvalidPlan(f"{field}.context[{index}].kind", problem)
        self._check_sampling(new.sampling, f"{field}.sampling")
        num_tokens = len(new.token_ids)
        if new.parent_seq_id is None and not 1 <= new.num_prompt_tokens <= num_tokens:
            expected = f"expected 1 to {num_tokens}, the number of tokens"
            got = f"got {new.num_prompt_tokens}"
            raise InvalidPlan(f"{field}.num_prompt_tokens", f"{expected}, {got}")

    def _check_sampling(self, params: SamplerParams, field: str) -> None:
        """Check that all tokens that it names are of the vocabulary."""
        for name in ("bias_token_ids", "suppressed_token_ids"):
            self.check_tokens(getattr(params, name), f"{field}.{name}")
        if (constraint := params.constraint) is not None:
            for name in ("end_token_ids", "last_token_ids"):
                path = f"{field}.constraint.{name}"
                self.check_tokens(getattr(constraint, name), path)
        for word in params.bad_words:
            self.check_tokens(np.array(word), f"{field}.bad_words")

    def check_tokens(self, token_ids: npt.NDArray[np.integer], field: str) -> None:
        """Check that tokens are of the vocabulary."""
        if len(token_ids) and (token_ids.min() < 0 or token_ids.max() >= self.vocab_size):
            raise InvalidPlan(field, f"expected token ids from 0 to {self.vocab_size - 1}")


class SequenceTable:
    """Tokens, block tables by cache group, progress and sampling state by row.

    Invariants, for a row in use: num_computed_tokens <= num_tokens.
    """

    def __init__(
        self,
        *,
        vocab_size: int,
        max_model_len: int,
        groups: Sequence[CacheGroup],
        num_gpu_blocks: int,
        num_cpu_blocks: int = 0,
        num_parts: int = 1,
        pooling: PoolingFacts | None = None,
        adapters: AdapterStore[Any] | None = None,
    ) -> None:
        """pooling: of a model that makes vectors; None: its sequences generate tokens. adapters:
        those that sequences may have; None: none."""
        self.vocab_size = vocab_size
        self.max_model_len = max_model_len
        self.rows = RowIds(_INITIAL_ROWS, num_parts)
        self.blocks = SequenceBlocks(
            groups, max_model_len, _INITIAL_ROWS, num_gpu_blocks, num_cpu_blocks
        )
        self.tables = self.blocks.tables
        """Block tables by cache group."""
        # One more than the model's length: the last position may still sample. Zeroed by the
        # operating system, so a page costs memory only once tokens are written to it.
        self.token_ids = np.zeros((_INITIAL_ROWS, max_model_len + 1), np.int32)
        self.num_tokens = np.zeros(_INITIAL_ROWS, np.int64)
        self.num_prompt_tokens = np.zeros(_INITIAL_ROWS, np.int64)
        self.num_computed_tokens = np.zeros(_INITIAL_ROWS, np.int64)
        self.num_virtual_tokens = np.zeros(_INITIAL_ROWS, np.int64)
        """The first tokens, whose embeddings are those of a sequence's adapter."""
        self.num_pending_drafts = np.zeros(_INITIAL_ROWS, np.int64)
        """Drafts in steps that are not resolved: if they are accepted, a sequence has as many more
        tokens, of which as many more are computed."""
        self.capacity = np.zeros(_INITIAL_ROWS, np.int64)
        """Tokens for which a sequence has blocks in all groups, within the model's length."""
        self.salts = np.zeros(_INITIAL_ROWS, np.uint64)
        self.drafter_state = np.zeros((_INITIAL_ROWS, 2), np.int64)
        """Columns that the drafter defines; zeros for a new sequence."""
        self.prompt_logprobs: dict[int, PromptLogprobsRequest] = {}
        """Requests by row, of sequences with prompt log probabilities."""
        self.next_drafts: dict[int, Int32Array] = {}
        """Drafts for a sequence's next row, by row, where several ranks share the model."""
        self.failures: dict[int, RowErrorReason] = {}
        """Why no token could be sampled, by row: such a sequence computes nothing more."""
        self.texts: dict[int, Text] = {}
        """By row, the sequences that are pooled."""
        self.adapters: dict[int, bytes] = {}
        """Digests by row, of sequences with an adapter."""
        self.contexts: dict[int, tuple[ContextPart, ...]] = {}
        """By row, of sequences with a context."""
        self._adapters = adapters
        self._checks = SequenceChecks(vocab_size, adapters)
        self._pooling = pooling
        self.sampling = SamplingTable(_INITIAL_ROWS)

    def apply(self, plan: StepPlan) -> PlanRows:
        """Forget, add and extend the sequences that a plan names."""
        forgotten = updated = appended = _NO_ROWS
        if len(plan.forget_seq_ids):
            forgotten = self.forget(plan.forget_seq_ids)
        added = np.array([self._add(*entry) for entry in enumerate(plan.new_sequences)], np.int64)
        batch = self.rows.of(plan.seq_ids, "seq_ids")
        if len(plan.block_updates):
            updated = self.rows.of(plan.block_updates[:, 0], "block_updates")
        self._put_blocks(plan, added, updated)
        for row_id, new in zip(added.tolist(), plan.new_sequences, strict=True):
            if new.pooling is None:
                start, end = self.num_virtual_tokens[row_id], self.num_prompt_tokens[row_id]
                tokens = self.token_ids[row_id, : self.num_tokens[row_id]]
                prompt, output = tokens[start:end], tokens[end:]
                self.sampling.put(row_id, new.sampling, new.choice_index, prompt, output)
        if len(plan.appended_tokens):
            appended = self.append_chosen(plan.appended_tokens)
        if len(plan.saved_states):
            self._record_saves(plan, batch)
        return PlanRows(forgotten, added, updated, appended, batch)

    def forget(self, seq_ids: Int32Array) -> Int64Array:
        """Drop all state of these sequences. Returns the rows that they had."""
        row_ids = self.rows.of(seq_ids, "forget_seq_ids")
        if len(set(row_ids.tolist())) != len(row_ids):
            raise InvalidPlan("forget_seq_ids", "a sequence is named twice")
        for seq_id, row_id in zip(seq_ids.tolist(), row_ids.tolist(), strict=True):
            self.rows.release(seq_id)
            self.blocks.remove(row_id)
            self.failures.pop(row_id, None)
            self.next_drafts.pop(row_id, None)
            self.drafter_state[row_id] = 0
            self.num_pending_drafts[row_id] = 0
            self.prompt_logprobs.pop(row_id, None)
            self.texts.pop(row_id, None)
            self.contexts.pop(row_id, None)
            if (digest := self.adapters.pop(row_id, None)) and self._adapters is not None:
                self._adapters.release(digest)
                self.num_virtual_tokens[row_id] = 0
            self.sampling.remove(row_id)
        return row_ids

    def _add(self, index: int, new: NewSequence) -> int:
        """Add a plan's new sequence of this index, without its blocks; a fork starts with its
        parent's tokens and progress. Returns its row."""
        field = f"new_sequences[{index}]"
        if self._pooling is not None or new.pooling is not None:
            check_work(new, self._pooling, field)
        parent = None
        if new.parent_seq_id is not None:
            if new.parent_seq_id not in self.rows:
                problem = f"sequence {new.parent_seq_id} is not known here"
                raise InvalidPlan(f"{field}.parent_seq_id", problem)
            parent = self.rows[new.parent_seq_id]
        if not 0 < new.seq_id < 2**31:
            raise InvalidPlan(f"{field}.seq_id", f"expected 1 to 2^31 - 1, got {new.seq_id}")
        if new.seq_id in self.rows:
            raise InvalidPlan(f"{field}.seq_id", f"sequence {new.seq_id} is known already")
        self._checks.check_new(new, field)
        if self.rows.are_used:
            self._grow()
        row_id = self.rows.allocate(new.seq_id)
        self._put_tokens(row_id, new, parent, field)
        if new.sampling.num_prompt_logprobs is not None:
            self.prompt_logprobs[row_id] = PromptLogprobsRequest(
                new.prompt_logprobs_start, new.sampling.num_prompt_logprobs
            )
        context = new.context if parent is None else self.contexts.get(parent, ())
        if context:
            self.contexts[row_id] = context
        if parent is not None and parent in self.failures:
            self.failures[row_id] = self.failures[parent]
        if new.pooling is not None:
            self.texts[row_id] = Text(new.pooling)
        if self._adapters is not None:
            inherited = self.adapters.get(parent, b"") if parent is not None else b""
            if digest := inherited or self._adapters.adapter_of(new, field):
                self.adapters[row_id] = digest
                self._adapters.acquire(digest)
                info = self._adapters.get(digest).info
                self.num_virtual_tokens[row_id] = info.num_virtual_tokens
        return row_id

    def _put_blocks(self, plan: StepPlan, added: Int64Array, updated: Int64Array) -> None:
        """Set the block tables of new sequences, then set or append entries. added, updated: the
        rows, as in `PlanRows`."""
        for index, new in enumerate(plan.new_sequences):
            row_id, field = int(added[index]), f"new_sequences[{index}]"
            num_computed = int(self.num_computed_tokens[row_id])
            end = self.blocks.add(row_id, new, num_computed, self._readers, field)
            self.capacity[row_id] = end
        if len(updated):
            ends = self.blocks.update(updated, plan.block_updates, self._readers, "block_updates")
            self.capacity[updated] = ends

    def _readers(self) -> tuple[Int64Array, Int64Array]:
        """The rows that may yet read their blocks, and the position that each computes next. A
        sequence that has failed reads nothing: the core may yet plan its next tokens."""
        used = (row_id for _, row_id in self.rows.items() if row_id not in self.failures)
        row_ids = np.array([*used], np.int64)
        return row_ids, self.num_computed_tokens[row_ids]

    def append_chosen(self, chosen: Int32Array) -> Int64Array:
        """Append the tokens that the core chose. chosen: [n, 2] as in the plan. Returns their
        rows."""
        field = "appended_tokens"
        row_ids, tokens = self.rows.of(chosen[:, 0], field), chosen[:, 1]
        self._checks.check_tokens(tokens, field)
        if len(np.unique(row_ids)) != len(row_ids):
            raise InvalidPlan(field, "a sequence is named twice")
        if (self.sampling.num_candidates[row_ids] == 0).any():
            raise InvalidPlan(field, "a sequence whose tokens the worker chooses is named")
        if self.num_tokens[row_ids].max() >= self.max_model_len:
            raise InvalidPlan(field, f"expected at most {self.max_model_len} tokens in all")
        self.append_tokens(row_ids, tokens.astype(np.int64))
        return row_ids

    def append_tokens(self, row_ids: Int64Array, tokens: Int64Array) -> None:
        """Append one token to each of these sequences."""
        self.token_ids[row_ids, self.num_tokens[row_ids]] = tokens
        self.num_tokens[row_ids] += 1
        if self.sampling.edits:
            self.sampling.append(row_ids, tokens)

    def insert_kept(self, row_id: int, place: int, tokens: Int64Array) -> None:
        """Insert the tokens sampled after drafts that were right, after the token that was sampled
        with them and before unknown ones. These drafts, one for each token, are computed; they are
        the token before and all of these but the last."""
        end = place + len(tokens)
        self.num_tokens[row_id] += len(tokens)
        self.token_ids[row_id, place:end] = tokens
        self.token_ids[row_id, end : self.num_tokens[row_id]] = UNKNOWN_TOKEN
        self.num_computed_tokens[row_id] += len(tokens)
        self._record_states(np.array([row_id]))
        self.sampling.append(np.full(len(tokens), row_id), tokens)

    def expect_tokens(self, row_ids: Int64Array) -> Int64Array:
        """Append an unknown token to each of these sequences. Returns the tokens' positions."""
        places = self.num_tokens[row_ids]
        self.token_ids[row_ids, places] = UNKNOWN_TOKEN
        self.num_tokens[row_ids] += 1
        return places

    def resolve_tokens(self, row_ids: Int64Array, places: Int64Array, tokens: Int64Array) -> None:
        """Replace unknown tokens, at the positions that `expect_tokens` returned."""
        self.token_ids[row_ids, places] = tokens
        if self.sampling.edits:
            self.sampling.append(row_ids, tokens)

    def remove_unknown(self, row_id: int) -> None:
        """Remove an unknown token, because none was sampled."""
        self.num_tokens[row_id] -= 1

    def advance(
        self, row_ids: Int64Array, num_tokens: Int32Array, parents: Int64Array, forks: Int64Array
    ) -> None:
        """Count the next `num_tokens` tokens of these sequences as computed, and in forks what is
        computed in their parents. All are rows of the table."""
        self.num_computed_tokens[row_ids] += num_tokens
        if len(forks):
            self.num_computed_tokens[forks] = self.num_computed_tokens[parents]
        self._record_states(row_ids)

    def _record_states(self, row_ids: Int64Array) -> None:
        """Record that the states of some sequences are those after their computed tokens."""
        if self.blocks.states is not None:
            self.blocks.record_states(row_ids, self.num_computed_tokens[row_ids])

    def for_drafts(self, *, shift: int = 0) -> "SequenceTable":
        """The table as a draft model or head reads it: with the block tables of the first cache
        group only, and at each position the token `shift` positions later."""
        read = copy(self)
        read.tables, read.token_ids = self.tables[:1], self.token_ids[:, shift:]
        read.adapters = {}
        return read

    def kept(self, seq_id: int) -> KeptSequence:
        """What the caches hold of a sequence whose tokens are all known here."""
        row_id = self.rows[seq_id]
        end = int(self.num_computed_tokens[row_id])
        return KeptSequence(
            seq_id=seq_id,
            token_ids=self.token_ids[row_id, :end].copy(),
            context=self.contexts.get(row_id, ()),
            tables=self.blocks.kept(row_id, end),
        )

    def seq_ids(self, without: Set[int]) -> list[int]:
        """The sequences that generate tokens and have not failed, but for these rows."""
        return [
            seq_id
            for seq_id, row_id in self.rows.items()
            if row_id not in self.failures and row_id not in self.texts and row_id not in without
        ]

    @property
    def num_rows(self) -> int:
        """Rows that there are, used and free."""
        return len(self.num_tokens)

    def output(self, row_id: int, num_drafts: int = 0) -> Int32Array:
        """A sequence's output tokens so far, including unknown ones, and drafts behind them."""
        end = self.num_tokens[row_id] + num_drafts
        return self.token_ids[row_id, self.num_prompt_tokens[row_id] : end]

    def may_draft(self, row_id: int) -> bool:
        """Whether a sequence can have drafts: those of beams have none, nor those that ask for log
        probabilities of their prompts."""
        return self.sampling.num_candidates[row_id] == 0 and row_id not in self.prompt_logprobs

    def edited_rows(self, row_ids: Int64Array, ends: Int64Array) -> list[EditedRow]:
        """The batch's rows whose logits need edits. ends: where each one's output ends,
        drafts included."""
        edits = self.sampling.edits
        if not edits:
            return []
        starts = self.num_prompt_tokens[row_ids].tolist()
        num_drafts = (ends - self.num_tokens[row_ids]).tolist()
        rows = zip(row_ids.tolist(), starts, ends.tolist(), num_drafts, strict=True)
        return [
            EditedRow(row, edits[row_id], self.token_ids[row_id, start:end], count)
            for row, (row_id, start, end, count) in enumerate(rows)
            if row_id in edits
        ]

    def _record_saves(self, plan: StepPlan, batch: Int64Array) -> None:
        """Check where the plan saves states, and record that they will be there. batch: the rows
        of the table that its rows have."""
        field, saved = "saved_states", plan.saved_states
        self.blocks.check_saves(saved, field)
        row_ids, places = self.rows.of(saved[:, 0], field), saved[:, 2]
        rows = {row_id: row for row, row_id in enumerate(batch.tolist())}
        for row_id, position in set(zip(row_ids.tolist(), places.tolist(), strict=True)):
            row, first = rows.get(row_id), int(self.num_computed_tokens[row_id])
            last = first if row is None or plan.lookahead[row] else first + plan.num_tokens[row]
            if not first < position <= last:
                expected = f"expected a position from {first + 1} to {last}, which the row reaches"
                raise InvalidPlan(field, f"{expected}, got {position}")
        self.blocks.record_saves(saved, field)

    def _put_tokens(self, row_id: int, new: NewSequence, parent: int | None, field: str) -> None:
        inherited = 0 if parent is None else int(self.num_tokens[parent])
        end = inherited + len(new.token_ids)
        if end > self.max_model_len:
            problem = f"expected at most {self.max_model_len} tokens in all, got {end}"
            raise InvalidPlan(f"{field}.token_ids", problem)
        if parent is None:
            self.num_prompt_tokens[row_id] = new.num_prompt_tokens
            self.num_computed_tokens[row_id] = new.num_computed_tokens
            self.salts[row_id] = new.salt
        else:
            self.token_ids[row_id, :inherited] = self.token_ids[parent, :inherited]
            self.num_prompt_tokens[row_id] = self.num_prompt_tokens[parent]
            self.num_computed_tokens[row_id] = self.num_computed_tokens[parent]
            self.salts[row_id] = self.salts[parent]
        self.token_ids[row_id, inherited:end] = new.token_ids
        self.num_tokens[row_id] = end

    def _grow(self) -> None:
        old = len(self.num_tokens)
        # Only tokens are copied: copying whole rows would make every page of both arrays resident.
        token_ids = np.zeros((2 * old, self.token_ids.shape[1]), np.int32)
        for row_id, end in enumerate(self.num_tokens.tolist()):
            token_ids[row_id, :end] = self.token_ids[row_id, :end]
        self.token_ids = token_ids
        for name in _COLUMNS:
            setattr(self, name, grown(getattr(self, name), 2 * old, 0))
        self.blocks.resize(2 * old)
        self.sampling.resize(2 * old)
        self.rows.add_rows(old, 2 * old)
