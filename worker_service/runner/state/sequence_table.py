"""State of the sequences that the worker knows.

The core sends a sequence's tokens, blocks and parameters once; from then on a step names it by id.
Everything lives in columns by *row*. A sequence gets a row when it is added, and the row is reused
when it is forgotten. So a step's inputs are a few gathers, whatever the sequences' lengths. A *row
id* is a row of this table; a plain `row` elsewhere is a row of the step's batch.
"""

from collections.abc import Sequence, Set
from copy import copy
from heapq import heappop, heappush
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from worker_service.adapters.store import AdapterStore
from worker_service.array_types import Int32Array, Int64Array
from worker_service.cache_groups import CacheGroup
from worker_service.errors import InvalidPlan
from worker_service.plan import (
    BlockTable,
    ContextKind,
    ContextPart,
    KeptSequence,
    NewSequence,
    RowErrorReason,
    StepPlan,
)
from worker_service.pooling_facts import PoolingFacts
from worker_service.runner.state.block_tables import BlockTables, grown
from worker_service.runner.state.state_positions import StatePositions
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


_NO_GROUP = -1
_NO_ROWS = np.empty(0, np.int64)


class SequenceTable:
    """Tokens, block tables by cache group, progress and sampling state by row.

    Invariants, for a row in use: num_computed_tokens <= num_tokens; a block is in the tables of one
    group, except for entries that a group has released. A row is in use or free, never both.

    Sequences divide into `num_parts` parts by their rows. A new one gets a row of the smallest
    part, so that parts stay even while sequences come and go.
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
        self.num_gpu_blocks = num_gpu_blocks
        self.tables = [BlockTables(group, max_model_len, _INITIAL_ROWS) for group in groups]
        """By cache group."""
        self._of_states = [i for i, tables in enumerate(self.tables) if not tables.has_tokens]
        self.states: StatePositions | None = None
        """None without groups of states."""
        if self._of_states:
            self.states = StatePositions(num_gpu_blocks, num_cpu_blocks)
        self._group_of = np.full(num_gpu_blocks, _NO_GROUP, np.int8)
        """The group in whose tables each block was last put."""
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
        self._pooling = pooling
        self.sampling = SamplingTable(_INITIAL_ROWS)
        self._row_id_of: dict[int, int] = {}
        self._free_rows: list[list[int]] = [[] for _ in range(num_parts)]
        """Free rows of each part, as heaps: the lowest is taken first, so that few rows are beyond
        a GPU's tables once many sequences have come and gone."""
        self._part_sizes = [0] * num_parts
        self._add_rows(0, _INITIAL_ROWS)

    def __len__(self) -> int:
        """Number of sequences known."""
        return len(self._row_id_of)

    def __contains__(self, seq_id: int) -> bool:
        """Whether a sequence is known."""
        return seq_id in self._row_id_of

    def row_ids(self, seq_ids: Int32Array, field: str) -> Int64Array:
        """The rows of known sequences. Raises InvalidPlan, naming the plan's field."""
        row_id_of = self._row_id_of
        try:
            row_ids = [row_id_of[seq_id] for seq_id in seq_ids.tolist()]
        except KeyError as error:
            raise InvalidPlan(field, f"sequence {error.args[0]} is not known here") from None
        return np.array(row_ids, np.int64)

    @property
    def num_parts(self) -> int:
        """Parts that the sequences divide into."""
        return len(self._free_rows)

    def parts(self, row_ids: Int64Array) -> Int64Array:
        """The part that each of some sequences belongs to, for as long as it is known."""
        return row_ids % self.num_parts

    def row_id(self, seq_id: int) -> int:
        """The row of a known sequence."""
        return self._row_id_of[seq_id]

    def apply(self, plan: StepPlan) -> PlanRows:
        """Forget, add and extend the sequences that a plan names."""
        forgotten = updated = appended = _NO_ROWS
        if len(plan.forget_seq_ids):
            forgotten = self.forget(plan.forget_seq_ids)
        new = [
            (self.add(new, f"new_sequences[{index}]"), new)
            for index, new in enumerate(plan.new_sequences)
        ]
        batch = self.row_ids(plan.seq_ids, "seq_ids")
        if len(plan.block_updates):
            updated = self.update_blocks(plan.block_updates)
        for row_id, sequence in new:
            if sequence.pooling is None:
                self._put_sampling(row_id, sequence)
        if len(plan.appended_tokens):
            appended = self.append_chosen(plan.appended_tokens)
        if len(plan.saved_states):
            self._record_saves(plan, batch)
        added = np.array([row_id for row_id, _ in new], np.int64)
        return PlanRows(forgotten, added, updated, appended, batch)

    def forget(self, seq_ids: Int32Array) -> Int64Array:
        """Drop all state of these sequences. Returns the rows that they had."""
        row_ids = self.row_ids(seq_ids, "forget_seq_ids")
        if len(np.unique(row_ids)) != len(row_ids):
            raise InvalidPlan("forget_seq_ids", "a sequence is named twice")
        for seq_id, row_id in zip(seq_ids.tolist(), row_ids.tolist(), strict=True):
            del self._row_id_of[seq_id]
            for tables in self.tables:
                tables.remove(row_id)
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
            part = row_id % self.num_parts
            heappush(self._free_rows[part], row_id)
            self._part_sizes[part] -= 1
        return row_ids

    def add(self, new: NewSequence, field: str) -> int:
        """Add a sequence; a fork starts with its parent's tokens and progress. Returns its row."""
        if self._pooling is not None or new.pooling is not None:
            check_work(new, self._pooling, field)
        parent, num_computed = None, new.num_computed_tokens
        if new.parent_seq_id is not None:
            parent = self._row_id_of.get(new.parent_seq_id)
            if parent is None:
                problem = f"sequence {new.parent_seq_id} is not known here"
                raise InvalidPlan(f"{field}.parent_seq_id", problem)
            num_computed = int(self.num_computed_tokens[parent])
        self._check_new(new, num_computed, field)
        row_id = self._allocate_row()
        self._row_id_of[new.seq_id] = row_id
        self._put_tokens(row_id, new, parent, field)
        for index, table in enumerate(new.tables):
            self._claim(table.block_ids, table.group, f"{field}.tables[{index}].block_ids")
            self.tables[table.group].put(row_id, table)
        self._update_capacities(np.array([row_id]))
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

    def _put_sampling(self, row_id: int, new: NewSequence) -> None:
        prompt_start, prompt_end = self.num_virtual_tokens[row_id], self.num_prompt_tokens[row_id]
        tokens = self.token_ids[row_id, : self.num_tokens[row_id]]
        prompt, output = tokens[prompt_start:prompt_end], tokens[prompt_end:]
        self.sampling.put(row_id, new.sampling, new.choice_index, prompt, output)

    def update_blocks(self, updates: Int32Array) -> Int64Array:
        """Set or append block table entries. updates: [n, 4] as in the plan. Returns their rows."""
        field = "block_updates"
        row_ids = self.row_ids(updates[:, 0], field)
        groups, indices, blocks = updates[:, 1], updates[:, 2].astype(np.int64), updates[:, 3]
        self.check_blocks(blocks, field)
        if groups.min() < 0 or groups.max() >= len(self.tables):
            got = f"got {groups.min()} to {groups.max()}"
            raise InvalidPlan(field, f"{self._expected_groups}, {got}")
        for group, tables in enumerate(self.tables):
            chosen = slice(None) if len(self.tables) == 1 else groups == group
            if len(blocks[chosen]):
                self._claim(blocks[chosen], group, field)
                tables.update(row_ids[chosen], indices[chosen], blocks[chosen], field)
        self._update_capacities(row_ids)
        return row_ids

    def _update_capacities(self, row_ids: Int64Array) -> None:
        if not self.tables:
            self.capacity[row_ids] = self.max_model_len
            return
        ends = [tables.ends[row_ids] * tables.entry_tokens for tables in self.tables]
        limit = np.full(len(row_ids), self.max_model_len)
        self.capacity[row_ids] = np.min([limit, *ends], axis=0)

    def _claim(self, blocks: Int32Array, group: int, field: str) -> None:
        """Record that these blocks are in tables of a group. Raises InvalidPlan if one is in a
        table of another group, which has not released it."""
        if len(self.tables) == 1:
            return
        before = self._group_of[blocks]
        self._group_of[blocks] = group
        is_moved = (before != group) & (before != _NO_GROUP)
        for other in set(before[is_moved].tolist()):
            # A sequence that has failed reads nothing: the core may yet plan its next tokens.
            row_ids = np.array([r for r in self.used_rows() if r not in self.failures], np.int64)
            positions = self.num_computed_tokens[row_ids]
            held = self.tables[other].holding(blocks[before == other], row_ids, positions)
            if len(held):
                problem = f"block {held[0]} is in a table of group {other}"
                raise InvalidPlan(field, f"{problem}, got group {group}")

    @property
    def _expected_groups(self) -> str:
        return f"expected cache groups from 0 to {len(self.tables) - 1}"

    def append_chosen(self, chosen: Int32Array) -> Int64Array:
        """Append the tokens that the core chose. chosen: [n, 2] as in the plan. Returns their
        rows."""
        field = "appended_tokens"
        row_ids, tokens = self.row_ids(chosen[:, 0], field), chosen[:, 1]
        self._check_tokens(tokens, field)
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

    def fail(self, row_id: int, reason: RowErrorReason) -> None:
        """Record why a sequence cannot continue."""
        self.failures[row_id] = reason

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
        if self.states is not None:
            for group in self._of_states:
                blocks = self.tables[group].blocks[row_ids]
                self.states.set(blocks, self.num_computed_tokens[row_ids])

    def for_drafts(self, *, shift: int = 0) -> "SequenceTable":
        """The table as a draft model or head reads it: with the block tables of the first cache
        group only, and at each position the token `shift` positions later."""
        read = copy(self)
        read.tables, read.token_ids = self.tables[:1], self.token_ids[:, shift:]
        read.adapters = {}
        return read

    def kept(self, seq_id: int) -> KeptSequence:
        """What the caches hold of a sequence whose tokens are all known here."""
        row_id = self._row_id_of[seq_id]
        end = int(self.num_computed_tokens[row_id])
        tables = []
        for number, of_group in enumerate(self.tables):
            first = max(int(of_group.firsts[row_id]), of_group.first_needed(end))
            blocks = of_group.blocks[row_id, first : of_group.ends[row_id]].copy()
            is_state = self.states is not None and number in self._of_states
            if not is_state or self.states.are_at(blocks, end):  # type: ignore[union-attr]
                tables.append(BlockTable(group=number, first_index=first, block_ids=blocks))
        return KeptSequence(
            seq_id=seq_id,
            token_ids=self.token_ids[row_id, :end].copy(),
            context=self.contexts.get(row_id, ()),
            tables=tuple(tables),
        )

    def seq_ids(self, without: Set[int]) -> list[int]:
        """The sequences that generate tokens and have not failed, but for these rows."""
        return [
            seq_id
            for seq_id, row_id in self._row_id_of.items()
            if row_id not in self.failures and row_id not in self.texts and row_id not in without
        ]

    @property
    def num_rows(self) -> int:
        """Rows that there are, used and free."""
        return len(self.num_tokens)

    def used_rows(self) -> list[int]:
        """Rows in use."""
        return list(self._row_id_of.values())

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

    def check_blocks(self, blocks: Int32Array, field: str) -> None:
        """Raises InvalidPlan unless all are blocks of the device cache."""
        if len(blocks) and (blocks.min() < 0 or blocks.max() >= self.num_gpu_blocks):
            expected = f"expected blocks from 0 to {self.num_gpu_blocks - 1}"
            raise InvalidPlan(field, f"{expected}, got {blocks.min()} to {blocks.max()}")

    def _check_new(self, new: NewSequence, num_computed: int, field: str) -> None:
        if not 0 < new.seq_id < 2**31:
            raise InvalidPlan(f"{field}.seq_id", f"expected 1 to 2^31 - 1, got {new.seq_id}")
        if new.seq_id in self._row_id_of:
            raise InvalidPlan(f"{field}.seq_id", f"sequence {new.seq_id} is known already")
        self._check_tokens(new.token_ids, f"{field}.token_ids")
        self._check_tables(new.tables, num_computed, f"{field}.tables")
        if self.states is not None:
            self._check_states(self.states, new.tables, num_computed, field)
        computed = [ContextKind.SALT]
        if self._adapters is not None:
            self._adapters.adapter_of(new, field)
            computed.append(ContextKind.ADAPTER)
        for index, part in enumerate(new.context):
            if part.kind not in computed:
                only = "SALT, the only kind" if len(computed) == 1 else "SALT or ADAPTER, the kinds"
                problem = f"expected {only} computed here, got {part.kind.name}"
                raise InvalidPlan(f"{field}.context[{index}].kind", problem)
        for name in ("bias_token_ids", "suppressed_token_ids"):
            self._check_tokens(getattr(new.sampling, name), f"{field}.sampling.{name}")
        if (constraint := new.sampling.constraint) is not None:
            for name in ("end_token_ids", "last_token_ids"):
                path = f"{field}.sampling.constraint.{name}"
                self._check_tokens(getattr(constraint, name), path)
        for word in new.sampling.bad_words:
            self._check_tokens(np.array(word), f"{field}.sampling.bad_words")
        if new.parent_seq_id is not None:
            return
        num_tokens = len(new.token_ids)
        if not 1 <= new.num_prompt_tokens <= num_tokens:
            expected = f"expected 1 to {num_tokens}, the number of tokens"
            raise InvalidPlan(
                f"{field}.num_prompt_tokens", f"{expected}, got {new.num_prompt_tokens}"
            )
        ends = [0] * len(self.tables)
        for table in new.tables:
            ends[table.group] = table.first_index + len(table.block_ids)
        limits = zip(self.tables, ends, strict=True)
        held = (tables.entry_tokens * end for tables, end in limits)
        capacity = min([num_tokens, *held]) if self.tables else 0
        if new.num_computed_tokens > capacity:
            expected = f"expected at most {capacity}, as many as tokens and blocks hold"
            got = new.num_computed_tokens
            raise InvalidPlan(f"{field}.num_computed_tokens", f"{expected}, got {got}")

    def _check_tables(self, tables: Sequence[BlockTable], num_computed: int, field: str) -> None:
        seen = set[int]()
        for index, table in enumerate(tables):
            path = f"{field}[{index}]"
            if table.group >= len(self.tables):
                raise InvalidPlan(f"{path}.group", f"{self._expected_groups}, got {table.group}")
            if table.group in seen:
                raise InvalidPlan(f"{path}.group", f"group {table.group} has two tables")
            seen.add(table.group)
            first, first_needed = (
                table.first_index,
                self.tables[table.group].first_needed(num_computed),
            )
            if first > first_needed:
                raise InvalidPlan(
                    f"{path}.first_index", f"expected at most {first_needed}, got {first}"
                )
            self.check_blocks(table.block_ids, f"{path}.block_ids")
            limit, end = self.tables[table.group].blocks.shape[1], len(table.block_ids)
            if table.first_index + end > limit:
                got = f"got {end} from index {table.first_index}"
                raise InvalidPlan(f"{path}.block_ids", f"expected at most {limit} blocks, {got}")

    def _check_states(
        self,
        states: StatePositions,
        tables: Sequence[BlockTable],
        num_computed: int,
        field: str,
    ) -> None:
        """A state has all its blocks from the beginning, and is the one after the tokens that are
        computed."""
        given = {table.group: table.block_ids for table in tables}
        for index in self._of_states:
            num_blocks = self.tables[index].group.num_blocks
            blocks = given.get(index, np.empty(0, np.int32))
            if len(blocks) != num_blocks:
                expected = f"expected {num_blocks} blocks in group {index}"
                raise InvalidPlan(f"{field}.tables", f"{expected}, got {len(blocks)}")
            states.check(blocks, num_computed, f"{field}.num_computed_tokens")

    def _record_saves(self, plan: StepPlan, batch: Int64Array) -> None:
        """Check where the plan saves states, and record that they will be there. batch: the rows
        of the table that its rows have."""
        field, saved = "saved_states", plan.saved_states
        num_blocks = {index: self.tables[index].group.num_blocks for index in self._of_states}
        if wrong := set(saved[:, 1].tolist()) - num_blocks.keys():
            raise InvalidPlan(field, f"expected groups of states, got {min(wrong)}")
        self.check_blocks(saved[:, 3], field)
        if len(np.unique(saved[:, 3])) != len(saved):
            raise InvalidPlan(field, "a block is named twice")
        row_ids, places = self.row_ids(saved[:, 0], field), saved[:, 2]
        rows = {row_id: row for row, row_id in enumerate(batch.tolist())}
        for row_id, position in set(zip(row_ids.tolist(), places.tolist(), strict=True)):
            row, first = rows.get(row_id), int(self.num_computed_tokens[row_id])
            last = first if row is None or plan.lookahead[row] else first + plan.num_tokens[row]
            if not first < position <= last:
                expected = f"expected a position from {first + 1} to {last}, which the row reaches"
                raise InvalidPlan(field, f"{expected}, got {position}")
        assert self.states is not None, "there is a group of states"
        for group, count in num_blocks.items():
            of_group = saved[saved[:, 1] == group]
            states = of_group[: len(of_group) // count * count].reshape(-1, count, 4)
            is_mixed = (states[:, :, :3] != states[:, :1, :3]).any()
            num_states = len(np.unique(states[:, 0, :3], axis=0))
            if is_mixed or num_states * count != len(of_group):
                raise InvalidPlan(field, f"expected {count} blocks of each state in group {group}")
            self.states.set(states[:, :, 3], states[:, 0, 2].astype(np.int64))

    def _check_tokens(self, token_ids: npt.NDArray[np.integer], field: str) -> None:
        if len(token_ids) and (token_ids.min() < 0 or token_ids.max() >= self.vocab_size):
            raise InvalidPlan(field, f"expected token ids from 0 to {self.vocab_size - 1}")

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

    def _allocate_row(self) -> int:
        if not any(self._free_rows):
            self._grow()
        parts = [part for part, free in enumerate(self._free_rows) if free]
        part = min(parts, key=self._part_sizes.__getitem__)
        self._part_sizes[part] += 1
        return heappop(self._free_rows[part])

    def _add_rows(self, start: int, end: int) -> None:
        for row_id in range(start, end):
            heappush(self._free_rows[row_id % self.num_parts], row_id)

    def _grow(self) -> None:
        old = len(self.num_tokens)
        # Only tokens are copied: copying whole rows would make every page of both arrays resident.
        token_ids = np.zeros((2 * old, self.token_ids.shape[1]), np.int32)
        for row_id, end in enumerate(self.num_tokens.tolist()):
            token_ids[row_id, :end] = self.token_ids[row_id, :end]
        self.token_ids = token_ids
        for name in _COLUMNS:
            setattr(self, name, grown(getattr(self, name), 2 * old, 0))
        for tables in self.tables:
            tables.resize(2 * old)
        self.sampling.resize(2 * old)
        self._add_rows(old, 2 * old)
