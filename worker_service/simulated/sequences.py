"""A simulated worker's sequences and a step's rows, checked against `plan.proto`'s rules."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from worker_service.adapters.store import AdapterStore
from worker_service.array_types import Int32Array
from worker_service.cache_groups import CacheGroup, CacheLifetime
from worker_service.errors import InvalidPlan
from worker_service.plan import (
    BlockTable,
    Candidates,
    ContextKind,
    KeptSequence,
    NewSequence,
    PoolingHead,
    PoolingType,
    RowErrorReason,
    RowOutput,
    SamplerParams,
    StepPlan,
)
from worker_service.simulated.memory_model import MemoryModel
from worker_service.simulated.model import (
    NO_BLOCK,
    VECTOR_SIZE,
    NextToken,
    SimulatedSampler,
    SimulatedSequence,
    extend,
    is_misguessed,
)


class KnownSequence(SimulatedSequence):
    """A simulated sequence, and how its tokens are chosen or its vector is pooled."""

    __slots__ = (
        "_sampler",
        "all_context",
        "failure",
        "pooling",
        "prompt_logprobs_start",
        "sampling",
    )

    def __init__(self, new: NewSequence, num_prompt_tokens: int) -> None:
        super().__init__(
            seq_id=new.seq_id,
            num_prompt_tokens=num_prompt_tokens,
            salt=new.salt,
            context=tuple(part for part in new.context if part.kind is not ContextKind.SALT),
        )
        self.all_context = new.context
        """With its salts."""
        self.sampling: SamplerParams = new.sampling
        self.pooling = new.pooling
        self.prompt_logprobs_start = new.prompt_logprobs_start
        self.failure: RowErrorReason | None = None
        """Why no token could be sampled: the sequence stays failed until it is forgotten."""
        self._sampler = SimulatedSampler(new.sampling, new.choice_index)

    @property
    def adapter(self) -> bytes:
        """The digest of its adapter; empty if it has none."""
        adapters = (part.digest for part in self.context if part.kind is ContextKind.ADAPTER)
        return next(adapters, b"")

    def next_token(self, distribution: NextToken) -> int | None:
        """The token sampled after the last; None if every token is excluded."""
        return self._sampler.choose(distribution, self.tokens, self.num_prompt_tokens)

    @property
    def brings_all(self) -> bool:
        """Whether every row brings the vectors of its tokens."""
        return self.pooling is not None and self.pooling.type is PoolingType.ALL

    @property
    def outputs(self) -> tuple[RowOutput, ...]:
        """What its rows may bring."""
        if self.brings_all:
            return (RowOutput.VECTOR,)
        if self.pooling is not None:
            return RowOutput.NOTHING, RowOutput.VECTOR
        if self.sampling.num_candidates is not None:
            return RowOutput.NOTHING, RowOutput.CANDIDATES
        return RowOutput.NOTHING, RowOutput.TOKEN

    @property
    def may_draft(self) -> bool:
        """Whether its rows may bring several tokens."""
        params = self.sampling
        reported = (params.num_prompt_logprobs, params.num_candidates)
        return self.failure is None and reported == (None, None)

    def drafts(self, num_drafts: int, vocab_size: int) -> list[int]:
        """Guesses of its next tokens; they end where no token may follow."""
        tokens, history = self.tokens.copy(), self.histories[-1]
        for _ in range(num_drafts):
            distribution = NextToken(history, vocab_size)
            token = self._sampler.choose(distribution, tokens, self.num_prompt_tokens)
            if token is None:
                break
            token = (token + is_misguessed(history)) % vocab_size
            tokens.append(token)
            history = extend(history, token)
        return tokens[len(self.tokens) :]

    def offer(self, distribution: NextToken) -> Candidates:
        """The candidates for the next token, for the core to choose among."""
        return self._sampler.offer(distribution, self.tokens, self.num_prompt_tokens)


class SimulatedSequenceTable:
    """Known sequences by id; each holds its table's blocks in the memory model."""

    def __init__(
        self,
        memory: MemoryModel,
        *,
        vocab_size: int,
        max_model_len: int,
        num_labels: int,
        adapters: AdapterStore[Any] | None = None,
    ) -> None:
        """adapters: those that a sequence may have; None: any."""
        self._memory = memory
        self._adapters = adapters
        self._num_labels = num_labels
        self._vocab_size = vocab_size
        self._max_model_len = max_model_len
        self._known: dict[int, KnownSequence] = {}

    def get(self, seq_id: int, field: str) -> KnownSequence:
        """A known sequence. Raises InvalidPlan, naming the plan's field."""
        sequence = self._known.get(seq_id)
        if sequence is None:
            raise InvalidPlan(field, f"sequence {seq_id} is not known here")
        return sequence

    def forget(self, seq_ids: Int32Array) -> None:
        """Drop sequences; their blocks are free from now on."""
        for seq_id in seq_ids.tolist():
            sequence = self.get(seq_id, "forget_seq_ids")
            for table in sequence.tables:
                self._memory.holders.release(table, seq_id)
            if self._adapters is not None and sequence.adapter:
                self._adapters.release(sequence.adapter)
            del self._known[seq_id]

    def add(self, new: NewSequence, field: str) -> None:
        """Add a sequence; a fork starts with its parent's current tokens."""
        self._check_identity(new, field)
        self._check_ids(new, field)
        self._check_pooling(new, field)
        self._check_context(new, field)
        tables = self._checked_tables(new, field)
        if new.parent_seq_id is None:
            sequence = self._new_sequence(new, tables, field)
        else:
            sequence = self._fork(new, field)
        self._check_complete(sequence, tables, field)
        sequence.extend(new.token_ids.tolist())
        if len(sequence.tokens) > self._max_model_len:
            limit, got = self._max_model_len, len(sequence.tokens)
            raise InvalidPlan(f"{field}.token_ids", f"expected at most {limit} in all, got {got}")
        sequence.tables = tables
        if new.parent_seq_id is None:
            self._memory.check_new_states(sequence, f"{field}.num_computed_tokens")
        if self._adapters is not None and sequence.adapter:
            self._adapters.acquire(sequence.adapter)
        self._known[new.seq_id] = sequence
        for table in new.tables:
            for block in table.block_ids.tolist():
                self._memory.holders.hold(block, new.seq_id, table.group, f"{field}.tables")

    def kept(self) -> list[KeptSequence]:
        """What the caches hold of the sequences that generate tokens and have not failed."""
        return [
            self._kept(sequence)
            for sequence in self._known.values()
            if sequence.failure is None and sequence.pooling is None
        ]

    def _kept(self, sequence: KnownSequence) -> KeptSequence:
        tables = []
        for number, (group, blocks) in enumerate(
            zip(self._memory.groups, sequence.tables, strict=True)
        ):
            first = 0
            if group.has_tokens:
                first = group.first_visible(sequence.num_computed) // group.block_tokens
            held = np.array(blocks[first:], np.int32)
            tables.append(BlockTable(group=number, first_index=first, block_ids=held))
        return KeptSequence(
            seq_id=sequence.seq_id,
            token_ids=np.array(sequence.tokens[: sequence.num_computed], np.int32),
            context=sequence.all_context,
            tables=tuple(tables),
        )

    def append_chosen(self, chosen: Int32Array) -> None:
        """Append the tokens that the core chose. chosen: [n, 2] as in the plan."""
        field = "appended_tokens"
        self._check_tokens(chosen[:, 1], field)
        named: set[int] = set()
        for seq_id, token in chosen.tolist():
            sequence = self.get(seq_id, field)
            if seq_id in named:
                raise InvalidPlan(field, f"sequence {seq_id} is named twice")
            named.add(seq_id)
            if sequence.sampling.num_candidates is None:
                raise InvalidPlan(field, f"sequence {seq_id} gets its tokens from the worker")
            if len(sequence.tokens) >= self._max_model_len:
                raise InvalidPlan(field, f"expected at most {self._max_model_len} tokens in all")
            sequence.extend((token,))

    def update_blocks(self, updates: Int32Array) -> None:
        """Set or append block table entries. updates: [n, 4] as in the plan."""
        seen: set[tuple[int, int, int]] = set()
        for seq_id, group, index, block in updates.tolist():
            sequence = self.get(seq_id, "block_updates")
            self._memory.check_block(block, "block_updates")
            if not 0 <= group < len(self._memory.groups):
                limit = len(self._memory.groups) - 1
                raise InvalidPlan(
                    "block_updates", f"expected groups from 0 to {limit}, got {group}"
                )
            if (seq_id, group, index) in seen:
                self._refuse_update(seq_id, index, "is set twice")
            seen.add((seq_id, group, index))
            self._update_table(sequence, group, index, block)

    def _update_table(self, sequence: KnownSequence, group: int, index: int, block: int) -> None:
        table, seq_id = sequence.tables[group], sequence.seq_id
        if self._memory.groups[group].lifetime is CacheLifetime.FIXED:
            self._refuse_update(seq_id, index, f"is in group {group}, whose tables never change")
        if not 0 <= index <= len(table) or index >= self._max_entries(group):
            self._refuse_update(seq_id, index, f"does not follow a table of {len(table)}")
        if any(block in blocks for blocks in sequence.tables):
            self._refuse_update(seq_id, index, f"gives it block {block} twice")
        if index < len(table):
            self._memory.holders.release((table[index],), seq_id)
            num_kept = index * self._memory.groups[group].block_tokens
            sequence.num_checked = min(sequence.num_checked, num_kept)
        table[index : index + 1] = [block]
        self._memory.holders.hold(block, seq_id, group, "block_updates")

    def _max_entries(self, group: int) -> int:
        facts = self._memory.groups[group]
        if facts.has_tokens:
            return -(-self._max_model_len // facts.block_tokens)
        return facts.num_blocks or 2**31

    def _new_sequence(self, new: NewSequence, tables: list[list[int]], field: str) -> KnownSequence:
        if not 1 <= new.num_prompt_tokens <= len(new.token_ids):
            expected = f"expected 1 to {len(new.token_ids)}, the number of tokens"
            raise InvalidPlan(
                f"{field}.num_prompt_tokens", f"{expected}, got {new.num_prompt_tokens}"
            )
        capacity = min(len(new.token_ids), num_slots(tables, self._memory.groups))
        if new.num_computed_tokens > capacity:
            expected = f"expected at most {capacity}, as many as tokens and blocks hold"
            got = new.num_computed_tokens
            raise InvalidPlan(f"{field}.num_computed_tokens", f"{expected}, got {got}")
        sequence = KnownSequence(new, new.num_prompt_tokens)
        sequence.num_computed = new.num_computed_tokens
        return sequence

    def _fork(self, new: NewSequence, field: str) -> KnownSequence:
        assert new.parent_seq_id is not None
        parent = self.get(new.parent_seq_id, f"{field}.parent_seq_id")
        for name in ("num_prompt_tokens", "num_computed_tokens"):
            if getattr(new, name) != 0:
                problem = f"expected 0 in a fork, got {getattr(new, name)}"
                raise InvalidPlan(f"{field}.{name}", problem)
        sequence = KnownSequence(new, parent.num_prompt_tokens)
        sequence.tokens = parent.tokens.copy()
        sequence.histories = parent.histories.copy()
        sequence.num_computed = parent.num_computed
        sequence.salt, sequence.context = parent.salt, parent.context
        sequence.all_context = parent.all_context
        sequence.failure = parent.failure
        return sequence

    def _check_identity(self, new: NewSequence, field: str) -> None:
        if not 0 < new.seq_id < 2**31:
            raise InvalidPlan(f"{field}.seq_id", f"expected 1 to 2^31 - 1, got {new.seq_id}")
        if new.seq_id in self._known:
            raise InvalidPlan(f"{field}.seq_id", f"sequence {new.seq_id} is known already")

    def _check_context(self, new: NewSequence, field: str) -> None:
        """Adapters are loaded, and media have a length where it is that of a source."""
        if self._adapters is not None:
            self._adapters.adapter_of(new, field)
        if all(group.lifetime is not CacheLifetime.FIXED for group in self._memory.groups):
            return
        for index, part in enumerate(new.context):
            if part.kind is ContextKind.MEDIA and part.length == 0:
                problem = "expected the number of tokens of the source, got 0"
                raise InvalidPlan(f"{field}.context[{index}].length", problem)

    def _check_pooling(self, new: NewSequence, field: str) -> None:
        """Vectors have as many numbers as there are, and no hit that they depend on."""
        pooling = new.pooling
        if pooling is None:
            return
        max_dimensions = VECTOR_SIZE
        if pooling.head is PoolingHead.CLASSIFIER:
            max_dimensions = 0
            if not self._num_labels:
                problem = "expected none, as the model has no labels"
                raise InvalidPlan(f"{field}.pooling.head", problem)
        if pooling.dimensions > max_dimensions:
            problem = f"expected 0 to {max_dimensions}, got {pooling.dimensions}"
            raise InvalidPlan(f"{field}.pooling.dimensions", problem)
        if new.num_computed_tokens and pooling.type is not PoolingType.LAST:
            problem = f"expected 0 with this type of pooling, got {new.num_computed_tokens}"
            raise InvalidPlan(f"{field}.num_computed_tokens", problem)

    def _check_ids(self, new: NewSequence, field: str) -> None:
        self._check_tokens(new.token_ids, f"{field}.token_ids")
        for name in ("bias_token_ids", "suppressed_token_ids"):
            self._check_tokens(getattr(new.sampling, name), f"{field}.sampling.{name}")
        for word in new.sampling.bad_words:
            self._check_tokens(np.array(word), f"{field}.sampling.bad_words")

    def _check_tokens(self, token_ids: npt.NDArray[np.integer], field: str) -> None:
        if len(token_ids) and (token_ids.min() < 0 or token_ids.max() >= self._vocab_size):
            raise InvalidPlan(field, f"expected token ids from 0 to {self._vocab_size - 1}")

    def _checked_tables(self, new: NewSequence, field: str) -> list[list[int]]:
        """The new sequence's table of every group, the entries before its first block included."""
        groups = self._memory.groups
        tables: list[list[int]] = [[] for _ in groups]
        named: set[int] = set()
        for place, table in enumerate(new.tables):
            path = f"{field}.tables[{place}]"
            if table.group >= len(groups) or tables[table.group]:
                expected = f"expected groups from 0 to {len(groups) - 1}, each once"
                raise InvalidPlan(f"{path}.group", f"{expected}, got {table.group}")
            blocks: list[int] = table.block_ids.tolist()
            self._check_first(new, table, f"{path}.first_index")
            for block in blocks:
                self._memory.check_block(block, f"{path}.block_ids")
            if len(named.union(blocks)) != len(named) + len(blocks):
                raise InvalidPlan(f"{path}.block_ids", "a block is named twice")
            named.update(blocks)
            limit = self._max_entries(table.group) - table.first_index
            if len(blocks) > limit:
                raise InvalidPlan(f"{path}.block_ids", f"expected at most {limit} blocks")
            tables[table.group] = [NO_BLOCK] * table.first_index + blocks
        return tables

    def _check_first(self, new: NewSequence, table: BlockTable, field: str) -> None:
        """The entries that a table lacks are of tokens that nothing to come sees."""
        group, num_computed = self._memory.groups[table.group], new.num_computed_tokens
        if new.parent_seq_id is not None:
            num_computed = self.get(new.parent_seq_id, field).num_computed
        limit = 0
        if group.has_tokens:
            limit = group.first_visible(num_computed) // group.block_tokens
        if table.first_index > limit:
            raise InvalidPlan(field, f"expected at most {limit}, got {table.first_index}")

    def _check_complete(self, sequence: KnownSequence, tables: list[list[int]], field: str) -> None:
        """States and sources have all their blocks from the beginning."""
        for index, (group, table) in enumerate(zip(self._memory.groups, tables, strict=True)):
            if group.has_tokens:
                continue
            num_blocks = group.num_blocks
            if group.lifetime is CacheLifetime.FIXED:
                num_blocks = -(-sequence.num_source_tokens // group.block_tokens)
            if len(table) != num_blocks:
                expected = f"expected {num_blocks} blocks in group {index}"
                raise InvalidPlan(f"{field}.tables", f"{expected}, got {len(table)}")

    def _refuse_update(self, seq_id: int, index: int, problem: str) -> None:
        raise InvalidPlan("block_updates", f"entry {index} of sequence {seq_id} {problem}")


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """One row of the batch."""

    index: int
    sequence: KnownSequence
    num_tokens: int
    output: int
    """What it brings, a `RowOutput`."""
    lookahead: int
    """Maximum number of drafts."""

    @property
    def samples(self) -> bool:
        """Whether it brings a token or candidates."""
        return self.output in (RowOutput.TOKEN, RowOutput.CANDIDATES)

    @property
    def is_computed(self) -> bool:
        """Whether it has tokens to compute, and its sequence has not failed before."""
        return self.num_tokens > 0 and self.sequence.failure is None

    @property
    def end(self) -> int:
        """Computed tokens of the sequence after this row."""
        return self.sequence.num_computed + self.num_tokens


@dataclass(frozen=True, kw_only=True, slots=True)
class Batch:
    """The rows of a step."""

    rows: list[Row]

    parents: dict[int, Row]
    """The parent's row by the fork's sequence id, for rows without tokens, which sample from their
    parents' logits."""

    forks: dict[int, set[int]]
    """The inverse: sequence ids of such forks by the parent's sequence id."""

    saves: list[tuple[KnownSequence, int, int, int]]
    """States to save, but for those of failed sequences: cache group, position, block."""


def num_slots(tables: Sequence[Sequence[int]], groups: Sequence[CacheGroup]) -> int:
    """Number of a sequence's first tokens for which there are entries in all its tables."""
    return min(
        (len(t) * g.block_tokens for t, g in zip(tables, groups, strict=True) if g.has_tokens),
        default=2**31,
    )


def resolve_rows(
    plan: StepPlan,
    table: SimulatedSequenceTable,
    *,
    groups: Sequence[CacheGroup],
    max_model_len: int,
) -> Batch:
    """The plan's rows. Raises InvalidPlan if they contradict the sequences' state."""
    columns = (plan.seq_ids, plan.num_tokens, plan.output, plan.lookahead)
    numbers = (column.tolist() for column in columns)  # whose sums do not overflow
    rows = [
        Row(
            index=i,
            sequence=table.get(seq_id, "seq_ids"),
            num_tokens=num,
            output=output,
            lookahead=num_drafts,
        )
        for i, (seq_id, num, output, num_drafts) in enumerate(zip(*numbers, strict=True))
    ]
    places = {row.sequence.seq_id: row.index for row in rows}
    if len(places) != len(rows):
        raise InvalidPlan("seq_ids", "a sequence has two rows")
    _check_order(plan, places)
    saves = _resolve_saves(plan, rows, groups)
    batch = Batch(rows=rows, parents={}, forks={}, saves=saves)
    parent_ids = {new.seq_id: new.parent_seq_id for new in plan.new_sequences}
    for row in rows:
        if row.sequence.failure is not None:
            continue
        if row.num_tokens == 0:
            if row.lookahead:
                raise InvalidPlan("lookahead", f"row {row.index} has drafts, but no tokens")
            _resolve_fork(row, parent_ids.get(row.sequence.seq_id), places, batch, groups)
        else:
            _check_length(row, groups, max_model_len)
    return batch


def _resolve_saves(
    plan: StepPlan, rows: list[Row], groups: Sequence[CacheGroup]
) -> list[tuple[KnownSequence, int, int, int]]:
    field, row_of = "saved_states", {row.sequence.seq_id: row for row in rows}
    saves: list[tuple[KnownSequence, int, int, int]] = []
    counts: Counter[tuple[int, int, int]] = Counter()
    for seq_id, group, position, block in plan.saved_states.tolist():
        if not 0 <= group < len(groups) or groups[group].lifetime is not CacheLifetime.STATE:
            raise InvalidPlan(field, f"expected groups of states, got {group}")
        row = row_of.get(seq_id)
        if (
            row is None
            or row.lookahead
            or not 0 < position - row.end + row.num_tokens <= row.num_tokens
        ):
            raise InvalidPlan(field, f"no row of sequence {seq_id} reaches position {position}")
        counts[seq_id, group, position] += 1
        if row.is_computed:
            saves.append((row.sequence, group, position, block))
    for (seq_id, group, _), count in counts.items():
        if count != (expected := groups[group].num_blocks):
            problem = f"expected {expected} blocks of the state of sequence {seq_id}, got {count}"
            raise InvalidPlan(field, problem)
    if len({block for *_, block in saves}) != len(saves):
        raise InvalidPlan(field, "a block is named twice")
    return saves


def _check_order(plan: StepPlan, places: dict[int, int]) -> None:
    """New sequences come in batch order, forks' rows after their parents'."""
    new_places = [places[new.seq_id] for new in plan.new_sequences if new.seq_id in places]
    if new_places != sorted(new_places):
        raise InvalidPlan("new_sequences", "expected them in the order of their rows")
    for new in plan.new_sequences:
        parent = new.parent_seq_id
        if parent in places and places.get(new.seq_id, len(places)) < places[parent]:
            raise InvalidPlan("seq_ids", f"fork {new.seq_id} has its row before its parent's")


def _resolve_fork(
    row: Row,
    parent_id: int | None,
    places: dict[int, int],
    batch: Batch,
    groups: Sequence[CacheGroup],
) -> None:
    """Enter a row without tokens into the batch's forks."""
    seq_id = row.sequence.seq_id
    if parent_id is None or not row.samples:
        problem = f"row {row.index} computes no tokens; only a new fork that samples may do so"
        raise InvalidPlan("num_tokens", problem)
    parent = batch.rows[places[parent_id]] if parent_id in places else None
    if parent is None or parent.num_tokens == 0:
        problem = f"row {row.index} is a fork of {parent_id}, which computes nothing in this step"
        raise InvalidPlan("num_tokens", problem)
    if parent.lookahead:
        problem = f"row {parent.index} has drafts, and a fork that samples from its logits"
        raise InvalidPlan("lookahead", problem)
    if not parent.end == len(parent.sequence.tokens) == len(row.sequence.tokens):
        problem = f"is a fork of {parent_id}, which does not compute up to its last token"
        raise InvalidPlan("num_tokens", f"row {row.index} {problem}")
    if parent.end > num_slots(row.sequence.tables, groups):
        raise InvalidPlan("num_tokens", f"row {row.index}: sequence {seq_id} lacks blocks")
    batch.parents[seq_id] = parent
    batch.forks.setdefault(parent_id, set()).add(seq_id)


def _check_length(row: Row, groups: Sequence[CacheGroup], max_model_len: int) -> None:
    """Rows compute tokens that exist, within blocks and the model's length. Only rows that sample
    have drafts, of sequences that choose their tokens."""
    sequence, end = row.sequence, row.end
    known, room = len(sequence.tokens), num_slots(sequence.tables, groups)
    most, with_drafts = min(max_model_len, room), end + row.lookahead
    field = "num_tokens"
    if end > known:
        problem = f"computes {end} tokens of {known}"
    elif not groups and row.num_tokens != known:
        problem = f"computes {row.num_tokens} of {known} tokens, which are computed in one row"
    elif row.output and end != known and not sequence.brings_all:
        field, problem = "output", "brings something before its last token"
    elif row.output not in sequence.outputs:
        expected = " or ".join(str(int(output)) for output in sequence.outputs)
        field, problem = "output", f"has the output {row.output}, expected {expected}"
    elif end > max_model_len:
        problem = "goes beyond the model's length"
    elif end > room:
        problem = "lacks blocks"
    elif row.lookahead and row.output != RowOutput.TOKEN:
        field, problem = "lookahead", "has drafts, but does not bring a token"
    elif with_drafts > most:
        field = "lookahead"
        problem = f"may compute {with_drafts} tokens of {most} with its drafts"
    else:
        return
    raise InvalidPlan(field, f"row {row.index}: sequence {sequence.seq_id} {problem}")
