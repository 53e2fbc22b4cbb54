"""Cache groups: windows that give their blocks back, states, and tables that no model has."""

from collections.abc import Callable

from conformance.assertions import Skipped
from conformance.cache_groups import NO_BLOCK, first_visible, has_tokens
from conformance.case import Alone, refusal_case, stream_case
from conformance.sequence import Sequence
from conformance.step_stream import StepStream
from conformance.worker import Worker
from pagewire import columns
from pagewire.v1 import model_pb2, plan_pb2

MAX_SPAN = 1024
"""Longest windows and chunks that the cases outgrow."""

TABLES = "One block table for each of the model's cache groups in which the sequence has blocks"
RELEASED = "The entries before it are of tokens that no row of the"
STATE = "A state of a fixed number of blocks, written in place by each token"


def spans(worker: Worker) -> list[int]:
    """Tokens of the model's windows and chunks. Raises Skipped if there are none to outgrow."""
    found = [group.span for group in worker.groups if 0 < group.span <= MAX_SPAN]
    if not found or len(worker.groups) == 1:
        raise Skipped(f"the model has no window of up to {MAX_SPAN} tokens beside another group")
    return found


def outgrown(worker: Worker) -> int:
    """Tokens after which each window has released several blocks."""
    return max(spans(worker)) + 3 * max(group.block_tokens for group in worker.groups)


@stream_case("plan", RELEASED)
def released_blocks_may_be_given_to_others(worker: Worker, stream: StepStream) -> Alone:
    num_tokens = outgrown(worker)
    first, second = (stream.new(worker.prompt(number, num_tokens)) for number in (1, 2))
    # In small chunks, so that the prompts release blocks, which the other one then overwrites.
    size = max(worker.block_size // 2, 1)
    for start in range(0, num_tokens, size):
        count = min(size, num_tokens - start)
        is_last = start + count == num_tokens
        stream.step(*(sequence.row(count, brings=is_last) for sequence in (first, second)))
    stream.generate(first, 2)
    stream.generate(second, 2)
    return {"the first of two": first, "the second of two": second}


def parked(stream: StepStream, sequence: Sequence) -> Sequence:
    """A sequence again after it was swapped out and its device blocks were overwritten: a new one,
    whose tables begin where its windows do."""
    position = sequence.num_computed_tokens
    tables: dict[int, list[int]] = {}
    for index, table in sequence.tables.items():
        group, kept = stream.groups[index], list(table)
        if has_tokens(group):
            num_unseen = first_visible(group, position) // group.block_tokens
            kept[:num_unseen] = [NO_BLOCK] * len(kept[:num_unseen])
        tables[index] = kept
    held = [block for table in tables.values() for block in table if block != NO_BLOCK]
    if stream.num_cpu_blocks < len(held):
        raise Skipped(f"the worker has {stream.num_cpu_blocks} host blocks, {len(held)} are needed")
    host = range(len(held))
    stream.step(forget=[sequence], swap_out=zip(held, host, strict=True))
    targets = dict(zip(held, stream.take_blocks(len(held)), strict=True))
    stream.step(swap_in=zip(host, targets.values(), strict=True))
    moved = {g: [targets.get(block, NO_BLOCK) for block in t] for g, t in tables.items()}
    main = moved.pop(stream.main_group)
    return stream.resumed(sequence, num_computed_tokens=position, blocks=main, other_tables=moved)


@stream_case("plan", RELEASED)
def a_sequence_returns_with_tables_that_begin_at_its_windows(
    worker: Worker, stream: StepStream
) -> Alone:
    first = stream.generate(stream.new(worker.prompt(1, outgrown(worker))), 2)
    again = stream.generate(parked(stream, first), 3)
    return {"a sequence that was swapped out": again}


@stream_case("model", STATE)
def a_state_continues_from_a_copy_at_its_position(worker: Worker, stream: StepStream) -> Alone:
    require_states(worker)
    first = stream.generate(stream.new(worker.prompt(1)), 2)
    held = [b for table in first.tables.values() for b in table if b != NO_BLOCK]
    copies = dict(zip(held, stream.take_blocks(len(held)), strict=True))
    targets = {g: [copies.get(b, NO_BLOCK) for b in t] for g, t in first.tables.items()}
    position = first.num_computed_tokens
    stream.step(first, copy=copies.items())  # the state that the steps before have reached
    main = targets.pop(stream.main_group)
    snapshot = stream.new(
        first.tokens[: position + 1],
        num_prompt_tokens=first.num_prompt_tokens,
        num_computed_tokens=position,
        blocks=main,
        other_tables=targets,
    )
    stream.generate(snapshot, 3)
    return {"a sequence that continues from a snapshot": snapshot, "its source": first}


def require_states(worker: Worker) -> None:
    """Raises Skipped if the model has no states."""
    if not any(g.lifetime == model_pb2.CACHE_LIFETIME_STATE for g in worker.groups):
        raise Skipped("the model has no states")


def refused(
    name: str, promise: str, field: str, change: Callable[[Worker, plan_pb2.NewSequence], None]
) -> None:
    """Register a case of a new sequence with wrong tables."""

    def send(worker: Worker, stream: StepStream) -> None:
        plan = stream.plan(stream.new(worker.prompt(1)))
        change(worker, plan.new_sequences[0])
        stream.send_plan(plan)

    refusal_case("plan", promise, field, "new_sequences", name=name)(send)


def _of_unknown_group(worker: Worker, new: plan_pb2.NewSequence) -> None:
    new.tables.add(group=len(worker.groups), block_ids=columns.pack([0]))


def _twice(_: Worker, new: plan_pb2.NewSequence) -> None:
    new.tables.append(new.tables[0])


def _beginning_later(_: Worker, new: plan_pb2.NewSequence) -> None:
    new.tables[0].first_index = 1


def _with_one_block(worker: Worker, new: plan_pb2.NewSequence) -> None:
    if len(worker.groups) == 1:
        raise Skipped("the model has one cache group")
    new.tables[1].block_ids = new.tables[0].block_ids[:4] + new.tables[1].block_ids[4:]


def _without_state(worker: Worker, new: plan_pb2.NewSequence) -> None:
    require_states(worker)
    states = [
        table
        for table in new.tables
        if worker.groups[table.group].lifetime == model_pb2.CACHE_LIFETIME_STATE
    ]
    new.tables.remove(states[0])


refused("a table of a group that does not exist is refused", TABLES, "tables", _of_unknown_group)
refused("two tables of one group are refused", TABLES, "tables", _twice)
refused("a table that lacks what a row sees is refused", RELEASED, "first_index", _beginning_later)
refused("a block in tables of two groups is refused", TABLES, "tables", _with_one_block)
refused("a sequence without its state is refused", TABLES, "tables", _without_state)


@refusal_case("plan", "Quadruples (sequence id, cache group", "block_updates")
def an_update_of_a_group_that_does_not_exist_is_refused(worker: Worker, stream: StepStream) -> None:
    known = stream.prefilled(worker.prompt(1))
    (block,) = stream.take_blocks(1)
    stream.send_changed(block_updates=[known.seq_id, len(worker.groups), 0, block])
