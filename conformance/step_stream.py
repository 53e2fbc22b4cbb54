"""One epoch's step stream, from the core's side: plans go out, results come back."""

import queue
from collections import deque
from collections.abc import Collection, Iterable, Iterator
from collections.abc import Sequence as Items
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Self

import grpc

from conformance.assertions import Failed, Skipped, expect, expect_true, fail
from conformance.cache_groups import (
    NO_BLOCK,
    block_tokens,
    first_visible,
    has_tokens,
    main_group,
    num_blocks,
)
from conformance.generation import Sampled, sampled
from conformance.sequence import TOKEN, VECTOR, Row, Sequence
from pagewire import columns
from pagewire.v1 import model_pb2, plan_pb2, pooling_pb2
from pagewire.v1 import worker_service_pb2 as pb
from pagewire.v1.worker_service_pb2_grpc import WorkerServiceStub

Pairs = Iterable[tuple[int, int]]

_ROW_COLUMNS = {
    name: column
    for name, column in columns.columns_of(plan_pb2.StepPlan.DESCRIPTOR).items()
    if column.has_rows
}

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


@dataclass(frozen=True, slots=True)
class Refusal:
    """The status that ended a stream or a call."""

    code: grpc.StatusCode
    message: str

    def expect(self, code: grpc.StatusCode, *names: str) -> None:
        """Fail unless it has this code, and names one of these fields, if any."""
        got = f"{self.code.name} ({self.message})"
        expect_true(self.code is code, f"expected the status {code.name}, got {got}")
        field_name = self.message.partition(":")[0]
        if names:
            found = any(name in field_name for name in names)
            wanted = " or ".join(names)
            expect_true(found, f"expected a message that begins with `{wanted}:`, got {got}")


class StepStream:
    """Plans and results of one epoch. Each block is allocated once, in ascending order."""

    def __init__(
        self,
        stub: WorkerServiceStub,
        caches: pb.InitializeCacheRequest,
        *,
        model: model_pb2.ModelInfo,
        timeout_s: float,
    ) -> None:
        self.epoch = caches.epoch
        self.groups = groups = list(model.cache_groups)
        self.main_group = main_group(groups)
        self._defaults: dict[str, Any] = {"whole_prompt": model.whole_prompt}
        kinds = model.work_kinds
        if kinds and model_pb2.WORK_KIND_GENERATION not in kinds:
            head = not model.pooling.vector_size
            type = model.pooling.classifier_type if head else model.pooling.default_type
            params = pooling_pb2.PoolingParams(type=type, head=int(head))  # type: ignore[arg-type]
            self._defaults["pooling"] = params
        self.num_gpu_blocks = caches.num_gpu_blocks
        self.num_cpu_blocks = caches.num_cpu_blocks
        self.step_id = 0
        """Step number of the last plan sent."""
        self._requests: queue.SimpleQueue[pb.ExecuteStepsRequest | None] = queue.SimpleQueue()
        self._call = stub.ExecuteSteps(iter(self._requests.get, None), timeout=timeout_s)
        self._next_seq_id = 1
        self._next_block = 0
        self._released: list[int] = []
        """Blocks that no token to come sees, for other sequences and groups."""
        self._shared: set[int] = set()
        """Blocks that are never released, since forks have them, too."""
        self._state_copies: list[tuple[int, int]] = []
        """Copies that the next plan has to make: of states which the last one has reached."""
        self._new: list[Sequence] = []
        self._appended: list[tuple[int, int]] = []
        self._in_flight: deque[tuple[int, list[Row]]] = deque()
        self._results: deque[plan_pb2.StepResult] = deque()
        """Results that arrived together with earlier ones."""

    @property
    def block_size(self) -> int:
        """Tokens per block of the main group. Raises Skipped without groups."""
        return block_tokens(self.groups)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._requests.put(None)
        self._call.cancel()

    def take_blocks(self, count: int) -> list[int]:
        """Allocate unused device blocks."""
        first = self._next_block
        self._next_block += count
        block_tokens(self.groups)
        if self._next_block > self.num_gpu_blocks:
            fail(f"the kit needs more than the {self.num_gpu_blocks} device blocks profiled")
        return list(range(first, self._next_block))

    def new(self, tokens: Collection[int], **fields: Any) -> Sequence:
        """A sequence that the next plan introduces; by default all tokens are the prompt, and one
        of a worker that only pools is pooled. Raises Skipped if it has computed tokens, but no
        blocks in the model's other groups, or if it samples, and the worker does not."""
        if "sampling" in fields and "pooling" in self._defaults:
            raise Skipped("the worker generates nothing")
        has_others = len(self.groups) == 1 or "other_tables" in fields
        if fields.get("num_computed_tokens") and not has_others:
            raise Skipped("the model has several cache groups")
        defaults = {"num_prompt_tokens": len(tokens), **self._defaults}
        return self._introduce(tokens=list(tokens), **(defaults | fields))

    def fork(self, parent: Sequence, tokens: Collection[int] = (), **fields: Any) -> Sequence:
        """A fork that the next plan introduces; without `blocks` it shares its parent's."""
        if parent.pooling is not None:
            raise Skipped("the worker generates nothing")
        others = {g: list(table) for g, table in parent.other_tables.items()}
        self._shared.update(block for table in others.values() for block in table)
        defaults = {
            "blocks": list(parent.blocks),
            "other_tables": others,
            "num_own_tokens": len(tokens),
        }
        return self._introduce(
            tokens=[*parent.tokens, *tokens],
            num_prompt_tokens=parent.num_prompt_tokens,
            num_computed_tokens=parent.num_computed_tokens,
            parent=parent,
            context=parent.context,
            **(defaults | fields),
        )

    def prefilled(self, tokens: Collection[int], **fields: Any) -> Sequence:
        """A new sequence, after a step that computed its tokens and sampled one."""
        sequence = self.new(tokens, **fields)
        self.step(sequence)
        return sequence

    def borrowed(self, tokens: list[int], blocks: Collection[int]) -> Sequence:
        """A new sequence whose full blocks, but for the last token's, are computed: these."""
        shared = list(blocks)[: self.num_full_blocks(tokens)]
        return self.new(tokens, blocks=shared, num_computed_tokens=len(shared) * self.block_size)

    def num_full_blocks(self, tokens: Collection[int]) -> int:
        """Number of full blocks before the last token: those that others may reuse."""
        return (len(tokens) - 1) // self.block_size

    def resumed(self, sequence: Sequence, **fields: Any) -> Sequence:
        """A new sequence with the tokens of another, which the worker may have forgotten."""
        kept = {
            name: getattr(sequence, name) for name in ("num_prompt_tokens", "sampling", "context")
        }
        return self.new(sequence.tokens, **(kept | fields))

    def fork_with_last_block(
        self, parent: Sequence, tokens: Collection[int] = (), **fields: Any
    ) -> tuple[Sequence, Pairs]:
        """A fork with last blocks of its own, and the copies that its first plan requires."""
        fork = self.fork(parent, tokens, **fields)
        copies, _ = self.part(fork)
        return fork, copies

    def part(self, fork: Sequence) -> tuple[list[tuple[int, int]], list[tuple[int, int, int, int]]]:
        """Give a fork a last block of its own in each group, and states; returns the copies and
        changes of its tables that this takes."""
        copies, updates = [], []
        for group, table in fork.tables.items():
            first = len(table) - 1
            if self.groups[group].lifetime == model_pb2.CACHE_LIFETIME_FIXED:
                continue
            if not has_tokens(self.groups[group]):
                is_parents = fork.parent and table == fork.parent.other_tables[group]
                first = 0 if is_parents else len(table)
            for index in range(first, len(table)):
                (target,) = self.take_blocks(1)
                copies.append((table[index], target))
                updates.append((fork.seq_id, group, index, target))
                table[index] = target
        return copies, updates

    def append(self, sequence: Sequence, token: int) -> None:
        """Choose a beam's next token; the next plan reports it to the worker."""
        sequence.tokens.append(token)
        self._appended.append((sequence.seq_id, token))

    def _introduce(self, **fields: Any) -> Sequence:
        defaults = {"seq_id": self._next_seq_id, "main_group": self.main_group}
        sequence = Sequence(**(defaults | fields))
        self._next_seq_id = max(self._next_seq_id, sequence.seq_id) + 1
        self._new.append(sequence)
        return sequence

    def plan(
        self,
        *planned: Row | Sequence,
        forget: Collection[Sequence] = (),
        swap_out: Pairs = (),
        swap_in: Pairs = (),
        copy: Pairs = (),
        block_updates: Items[tuple[int, int, int, int]] = (),
        saved_states: Items[tuple[int, int, int, int]] = (),
        max_results: int = 0,
    ) -> plan_pb2.StepPlan:
        """The next plan, with the new sequences and the blocks that its rows need.

        A sequence stands for the row that computes and samples all it can.
        """
        rows = _rows(planned)
        copies, self._state_copies = [*self._state_copies, *copy], []
        updates = [*block_updates, *self._grow(rows)]
        places = {row.sequence.seq_id: place for place, row in enumerate(rows)}
        new = sorted(self._new, key=lambda sequence: places.get(sequence.seq_id, len(rows)))
        self._new = []
        appended, self._appended = self._appended, []
        self.step_id += 1
        plan = plan_pb2.StepPlan(
            epoch=self.epoch,
            step_id=self.step_id,
            forget_seq_ids=columns.pack([sequence.seq_id for sequence in forget]),
            swap_out=columns.pack_rows(swap_out),
            swap_in=columns.pack_rows(swap_in),
            copy=columns.pack_rows(copies),
            new_sequences=[sequence.message() for sequence in new],
            appended_tokens=columns.pack_rows(appended),
            block_updates=columns.pack_rows(updates),
            saved_states=columns.pack_rows(saved_states),
            seq_ids=columns.pack([row.sequence.seq_id for row in rows]),
            max_results=max_results,
        )
        for name, column in _ROW_COLUMNS.items():
            values = [getattr(row, name) for row in rows]
            if any(value != column.absent for value in values):
                setattr(plan, name, column.pack(values))
        self._advance(rows)
        return plan

    def send(self, *planned: Row | Sequence, **fields: Any) -> None:
        """Send the next plan without waiting for its result."""
        rows = _rows(planned)
        self.send_plan(self.plan(*rows, **fields), rows)

    def send_plan(self, plan: plan_pb2.StepPlan, rows: Items[Row] = ()) -> None:
        """Send a given plan. `rows`: those whose result is expected."""
        self._in_flight.append((plan.step_id, list(rows)))
        self._requests.put(pb.ExecuteStepsRequest(plans=[plan]))

    def send_changed(self, *planned: Row | Sequence, **fields: int | bytes | list[int]) -> None:
        """Send the next plan with wrong fields; lists become columns."""
        plan = self.plan(*planned)
        for name, value in fields.items():
            setattr(plan, name, columns.pack(value) if isinstance(value, list) else value)
        self.send_plan(plan)

    def send_together(self, planned: Items[Row | Sequence], **fields: Any) -> None:
        """Send plans of one row each, in one message."""
        plans = []
        for row in planned:
            rows = _rows([row])
            plans.append(self.plan(*rows, **fields))
            self._in_flight.append((self.step_id, rows))
        self._requests.put(pb.ExecuteStepsRequest(plans=plans))

    def receive(self) -> Result:
        """The next result, which must be that of the oldest plan in flight."""
        message = self._results.popleft() if self._results else self._next_message()
        step_id, rows = self._in_flight.popleft()
        expect("the result's epoch", message.epoch, self.epoch)
        expect("the result's step_id", message.step_id, step_id)
        return self._read(message, rows)

    def _next_message(self) -> plan_pb2.StepResult:
        """The first result of the next message; further ones are kept."""
        try:
            message = next(self._call)
        except StopIteration:
            fail("the stream ended instead of returning a result")
        if not message.results:
            fail("a message holds no result")
        self._results.extend(message.results)
        return self._results.popleft()

    def receive_all(self) -> list[Result]:
        """The results of all plans in flight."""
        return [self.receive() for _ in range(len(self._in_flight))]

    def step(self, *planned: Row | Sequence, **fields: Any) -> Result:
        """Send the next plan and wait for its result."""
        self.send(*planned, **fields)
        return self.receive()

    def generate(self, sequence: Sequence, num_tokens: int, **fields: Any) -> Sequence:
        """Compute the rest of a sequence, then decode, unless it is pooled; `fields` are set in the
        first plan.

        Returns the sequence, which holds what it sampled, or its vector.
        """
        self.step(sequence, **fields)
        for _ in range(num_tokens - 1 if sequence.pooling is None else 0):
            self.step(sequence)
        return sequence

    def refusal(self) -> Refusal:
        """The error that ends the stream; no result may precede it."""
        try:
            came = f"the result of step {next(self._call).results[0].step_id}"
        except StopIteration:
            came = "its end with OK"
        except grpc.RpcError as error:
            return Refusal(error.code(), error.details() or "")
        raise Failed(f"expected the stream to end with an error, got {came}")

    def send_no_more(self) -> None:
        """Close the sending side of the stream."""
        self._requests.put(None)

    def finish(self) -> None:
        """Send no more; fail unless the stream then ends with OK."""
        self.send_no_more()
        for response in self._call:
            fail(f"the result of step {response.results[0].step_id} came without a plan")

    def cancel(self) -> None:
        """Cancel the stream."""
        self._call.cancel()

    def _grow(self, rows: Items[Row]) -> list[tuple[int, int, int, int]]:
        """Allocate blocks for each row; returns the updates of sequences that the worker has."""
        updates = []
        for row in rows:
            sequence = row.sequence
            if row.num_tokens == 0 and sequence.parent is not None:
                self._share(sequence, sequence.parent)
                continue
            num_drafts = sequence.num_pending_drafts + row.lookahead
            end = sequence.num_computed_tokens + row.num_tokens + num_drafts
            for index, group in enumerate(self.groups):
                table = sequence.blocks
                if index != self.main_group:
                    table = sequence.other_tables.setdefault(index, [])
                    self._release(group, table, sequence.num_computed_tokens)
                size = num_blocks(group, end, sequence.context)
                for block in self._take(size - len(table), index):
                    updates.append((sequence.seq_id, index, len(table), block))
                    table.append(block)
        new_ids = {sequence.seq_id for sequence in self._new}
        return [update for update in updates if update[0] not in new_ids]

    def _take(self, count: int, group: int) -> list[int]:
        """Blocks for a table; those of other groups than the main one reuse what was released."""
        blocks: list[int] = []
        while group != self.main_group and self._released and len(blocks) < count:
            blocks.append(self._released.pop())
        return blocks + self.take_blocks(max(count - len(blocks), 0))

    def _release(self, group: model_pb2.CacheGroup, table: list[int], position: int) -> None:
        """Release the blocks that the token at `position` and those after it do not see."""
        if not has_tokens(group):
            return
        for index in range(min(first_visible(group, position) // group.block_tokens, len(table))):
            if table[index] != NO_BLOCK and table[index] not in self._shared:
                self._released.append(table[index])
            table[index] = NO_BLOCK

    def _share(self, fork: Sequence, parent: Sequence) -> None:
        """Give a fork its parent's blocks, and states of its own: the next plan copies those."""
        fork.blocks = list(parent.blocks)
        for index, table in parent.other_tables.items():
            if self.groups[index].lifetime != model_pb2.CACHE_LIFETIME_STATE:
                fork.other_tables[index] = list(table)
                self._shared.update(table)
            else:
                own = fork.other_tables[index] = self.take_blocks(len(table))
                self._state_copies += zip(table, own, strict=True)

    def _advance(self, rows: Items[Row]) -> None:
        for row in rows:
            sequence = row.sequence
            if row.num_tokens == 0 and sequence.parent is not None:
                sequence.num_computed_tokens = sequence.parent.num_computed_tokens
            sequence.num_computed_tokens += row.num_tokens
            if not sequence.sampling.HasField("num_candidates"):
                sequence.num_pending += row.output == TOKEN
                sequence.num_pending_drafts += row.lookahead

    def _read(self, message: plan_pb2.StepResult, rows: list[Row]) -> Result:
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


def _rows(planned: Iterable[Row | Sequence]) -> list[Row]:
    return [item if isinstance(item, Row) else item.row() for item in planned]
