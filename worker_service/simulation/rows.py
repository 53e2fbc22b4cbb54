"""A step's rows, checked against the rules of `plan.proto`."""

from dataclasses import dataclass

from worker_service.errors import InvalidPlan
from worker_service.plan import StepPlan
from worker_service.simulated.sequences import KnownSequence, SequenceTable


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """One row of the batch."""

    index: int
    sequence: KnownSequence
    num_tokens: int
    sample: bool

    @property
    def is_computed(self) -> bool:
        """Whether it has tokens to compute, and its sequence has not failed before."""
        return self.num_tokens > 0 and self.sequence.failure is None

    @property
    def end(self) -> int:
        """Tokens computed once this row is."""
        return self.sequence.num_computed + self.num_tokens


@dataclass(frozen=True, kw_only=True, slots=True)
class Batch:
    """The rows of a step."""

    rows: list[Row]

    parents: dict[int, Row]
    """Of the rows without tokens, which sample from their parents' logits: the parent's row, by
    the fork's sequence id."""

    forks: dict[int, set[int]]
    """The same the other way: sequence ids of such forks, by the parent's."""


def resolve_rows(
    plan: StepPlan, table: SequenceTable, *, block_size: int, max_model_len: int
) -> Batch:
    """The plan's rows. Raises InvalidPlan where they contradict the sequences' state."""
    columns = (plan.seq_ids.tolist(), plan.num_tokens.tolist(), plan.sample.tolist())
    rows = [
        Row(index=i, sequence=table.get(seq_id, "seq_ids"), num_tokens=num, sample=sample)
        for i, (seq_id, num, sample) in enumerate(zip(*columns, strict=True))
    ]
    places = {row.sequence.seq_id: row.index for row in rows}
    if len(places) != len(rows):
        raise InvalidPlan("seq_ids", "a sequence has two rows")
    _check_order(plan, places)
    batch = Batch(rows=rows, parents={}, forks={})
    parent_ids = {new.seq_id: new.parent_seq_id for new in plan.new_sequences}
    for row in rows:
        if row.sequence.failure is not None:
            continue
        if row.num_tokens == 0:
            _resolve_fork(row, parent_ids.get(row.sequence.seq_id), places, batch, block_size)
        else:
            _check_length(row, block_size, max_model_len)
    return batch


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
    row: Row, parent_id: int | None, places: dict[int, int], batch: Batch, block_size: int
) -> None:
    """Enter a row without tokens into the batch's forks."""
    seq_id = row.sequence.seq_id
    if parent_id is None or not row.sample:
        problem = f"row {row.index} computes no tokens; only a new fork that samples may do so"
        raise InvalidPlan("num_tokens", problem)
    parent = batch.rows[places[parent_id]] if parent_id in places else None
    if parent is None or parent.num_tokens == 0:
        problem = f"row {row.index} is a fork of {parent_id}, which computes nothing in this step"
        raise InvalidPlan("num_tokens", problem)
    if not parent.end == len(parent.sequence.tokens) == len(row.sequence.tokens):
        problem = f"is a fork of {parent_id}, which does not compute up to its last token"
        raise InvalidPlan("num_tokens", f"row {row.index} {problem}")
    if parent.end > len(row.sequence.block_table) * block_size:
        raise InvalidPlan("num_tokens", f"row {row.index}: sequence {seq_id} lacks blocks")
    batch.parents[seq_id] = parent
    batch.forks.setdefault(parent_id, set()).add(seq_id)


def _check_length(row: Row, block_size: int, max_model_len: int) -> None:
    sequence, end = row.sequence, row.end
    known = len(sequence.tokens)
    field = "num_tokens"
    if end > known:
        problem = f"computes {end} tokens of {known}"
    elif row.sample and end != known:
        field, problem = "sample", "samples before its last token"
    elif end > max_model_len:
        problem = "goes beyond the model's length"
    elif end > len(sequence.block_table) * block_size:
        problem = "lacks blocks"
    else:
        return
    raise InvalidPlan(field, f"row {row.index}: sequence {sequence.seq_id} {problem}")
