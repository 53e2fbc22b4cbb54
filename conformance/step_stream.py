"""One epoch's step stream, from the core's side: plans go out, results come back."""

from collections import deque
from collections.abc import Collection, Iterable
from collections.abc import Sequence as Items
from typing import Any, Self

from conformance.assertions import Skipped, expect
from conformance.block_tables import BlockTables
from conformance.cache_groups import block_tokens
from conformance.sequence import Row, Sequence
from conformance.step_call import StepCall
from conformance.step_result import Result, advance, read_result
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


class StepStream:
    """Plans and results of one epoch."""

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
        self.blocks = BlockTables(groups, caches.num_gpu_blocks)
        """Allocates the blocks of all sequences."""
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
        self.call = StepCall(stub, timeout_s)
        self._next_seq_id = 1
        self._new: list[Sequence] = []
        self._appended: list[tuple[int, int]] = []
        self._in_flight: deque[tuple[int, list[Row]]] = deque()

    @property
    def block_size(self) -> int:
        """Tokens per block of the main group. Raises Skipped without groups."""
        return block_tokens(self.groups)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.call.send_no_more()
        self.call.cancel()

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
        self.blocks.share(block for table in others.values() for block in table)
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
        copies, _ = self.blocks.part(fork)
        return fork, copies

    def append(self, sequence: Sequence, token: int) -> None:
        """Choose a beam's next token; the next plan reports it to the worker."""
        sequence.tokens.append(token)
        self._appended.append((sequence.seq_id, token))

    def _introduce(self, **fields: Any) -> Sequence:
        defaults = {"seq_id": self._next_seq_id, "main_group": self.blocks.main_group}
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
        copies = [*self.blocks.pop_state_copies(), *copy]
        new_ids = {sequence.seq_id for sequence in self._new}
        grown = [update for update in self.blocks.grow(rows) if update[0] not in new_ids]
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
            block_updates=columns.pack_rows([*block_updates, *grown]),
            saved_states=columns.pack_rows(saved_states),
            seq_ids=columns.pack([row.sequence.seq_id for row in rows]),
            max_results=max_results,
        )
        for name, column in _ROW_COLUMNS.items():
            values = [getattr(row, name) for row in rows]
            if any(value != column.absent for value in values):
                setattr(plan, name, column.pack(values))
        advance(rows)
        return plan

    def send(self, *planned: Row | Sequence, **fields: Any) -> None:
        """Send the next plan without waiting for its result."""
        rows = _rows(planned)
        self.send_plan(self.plan(*rows, **fields), rows)

    def send_plan(self, plan: plan_pb2.StepPlan, rows: Items[Row] = ()) -> None:
        """Send a given plan. `rows`: those whose result is expected."""
        self._in_flight.append((plan.step_id, list(rows)))
        self.call.send([plan])

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
        self.call.send(plans)

    def receive(self) -> Result:
        """The next result, which must be that of the oldest plan in flight."""
        message = self.call.next_result()
        step_id, rows = self._in_flight.popleft()
        expect("the result's epoch", message.epoch, self.epoch)
        expect("the result's step_id", message.step_id, step_id)
        return read_result(message, rows)

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


def _rows(planned: Iterable[Row | Sequence]) -> list[Row]:
    return [item if isinstance(item, Row) else item.row() for item in planned]
