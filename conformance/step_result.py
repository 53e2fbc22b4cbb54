"""What a step does to the sequences of its rows, and its result, decoded."""

from collections.abc import Iterator
from collections.abc import Sequence as Items
from dataclasses import dataclass, field
from typing import NamedTuple

from conformance.assertions import expect, expect_true
from conformance.generation import Sampled, sampled
from conformance.sequence import TOKEN, VECTOR, Row, Sequence
from pagewire import columns
from pagewire.v1 import plan_pb2

_RESULT_COLUMNS = columns.columns_of(plan_pb2.StepResult.DESCRIPTOR)


class Candidates(NamedTuple):
    """The tokens that may follow a sequence, most probable first."""

    token_ids: list[int]
    logprobs: list[float]


@dataclass(kw_only=True, slots=True)
class Result:
    """One step's result, decoded."""

    message: plan_pb2.StepResult
    sampled: dict[int, Sampled] = field(default_factory=dict)
    """The first token of each row that sampled, by sequence id; -1 if the row failed or has
    candidates."""

    candidates: dict[int, Candidates] = field(default_factory=dict)
    """By sequence id."""

    vectors: dict[int, list[float]] = field(default_factory=dict)
    """By sequence id."""

    errors: dict[int, plan_pb2.RowErrorReason.ValueType] = field(default_factory=dict)
    """By sequence id."""

    def token(self, sequence: Sequence) -> int:
        """The token that a sequence sampled."""
        return self.sampled[sequence.seq_id].token


def advance(rows: Items[Row]) -> None:
    """Count what the rows of a plan compute and sample, before their result arrives."""
    for row in rows:
        sequence = row.sequence
        if row.num_tokens == 0 and sequence.parent is not None:
            sequence.num_computed_tokens = sequence.parent.num_computed_tokens
        sequence.num_computed_tokens += row.num_tokens
        if not sequence.sampling.HasField("num_candidates"):
            sequence.num_pending += row.output == TOKEN
            sequence.num_pending_drafts += row.lookahead


def read_result(message: plan_pb2.StepResult, rows: list[Row]) -> Result:
    """A step's result, decoded; its tokens and vectors are added to the sequences of the rows."""
    result = Result(message=message, vectors=_vectors(message, rows))
    for row in rows:
        row.sequence.vector = result.vectors.get(row.sequence.seq_id, row.sequence.vector)
    for error in message.errors:
        expect_true(error.row < len(rows), f"the result has an error for row {error.row}")
        result.errors[rows[error.row].sequence.seq_id] = error.reason
    for entry in message.candidates:
        ids, logprobs = columns.unpack(entry.token_ids), columns.unpack_floats(entry.logprobs)
        result.candidates[rows[entry.row].sequence.seq_id] = Candidates(ids, logprobs)
    for row, found in _tokens(message, rows):
        sequence = row.sequence
        result.sampled[sequence.seq_id] = found[0]
        if not sequence.sampling.HasField("num_candidates"):
            sequence.num_pending -= 1
            sequence.num_pending_drafts -= row.lookahead
            sequence.num_computed_tokens += len(found) - 1
            sequence.sampled += found
            sequence.tokens += [sample.token for sample in found if sample.token >= 0]
    return result


def _tokens(message: plan_pb2.StepResult, rows: list[Row]) -> Iterator[tuple[Row, list[Sampled]]]:
    """The tokens of each row that samples, whose numbers are those of the rows and of the plan."""
    decoded = _RESULT_COLUMNS.unpack(message)
    sampling = [(index, row) for index, row in enumerate(rows) if row.samples]
    tokens, counts = decoded["token_ids"] or [], decoded["num_sampled"] or [1] * len(sampling)
    drafts = decoded["num_drafts"] or [count - 1 for count in counts]
    expect("numbers of tokens, one per sampling row", len(counts), len(sampling))
    expect("numbers of drafts, one per sampling row", len(drafts), len(counts))
    for count, number, (index, row) in zip(counts, drafts, sampling, strict=True):
        is_right = 1 <= count <= 1 + row.lookahead
        expect_true(is_right, f"row {index} has {count} tokens, {row.lookahead} drafts allowed")
        is_right = count - 1 <= number <= row.lookahead
        expect_true(is_right, f"row {index} has {number} drafts and {count} tokens")
    expect("tokens in the result, of all sampling rows", len(tokens), sum(counts))
    entries: dict[int, list[plan_pb2.RowLogprobs]] = {}
    for reported in message.logprobs:
        entries.setdefault(reported.row, []).append(reported)
    remaining = iter(tokens)
    for count, (index, row) in zip(counts, sampling, strict=True):
        own: Items[plan_pb2.RowLogprobs | None] = entries.get(index) or [None] * count
        expect(f"entries in `logprobs` of row {index}, one for each token", len(own), count)
        yield row, [sampled(next(remaining), entry) for entry in own]


def _vectors(message: plan_pb2.StepResult, rows: list[Row]) -> dict[int, list[float]]:
    """The vectors by sequence id: one of each row that brings one, in row order."""
    wanted = [index for index, row in enumerate(rows) if row.output == VECTOR]
    failed = {error.row for error in message.errors}
    expected = [index for index in wanted if index not in failed]
    expect("rows in `vectors`", [entry.row for entry in message.vectors], expected)
    return {
        rows[entry.row].sequence.seq_id: columns.unpack_floats(entry.values)
        for entry in message.vectors
    }
