"""Cache groups: windows that give their blocks back, states, sources, and wrong tables."""

from collections.abc import Callable, Iterator

from conformance.assertions import Skipped
from conformance.cache_groups import NO_BLOCK, block_tokens, first_visible, has_tokens
from conformance.case import Alone, PlanFunction, refusal_case, stream_case
from conformance.sequence import MEDIA, Sequence, part
from conformance.step_stream import StepStream
from conformance.worker import Worker
from pagewire import columns
from pagewire.v1 import model_pb2, plan_pb2

MAX_SPAN = 1024
"""Longest windows and chunks that the cases outgrow."""

TABLES = "One block table for each of the model's cache groups in which the sequence has blocks"
RELEASED = "The entries before it are of tokens that no row of the"
COPY = "made before the forward pass, is the state that earlier plans have reached."
SAVE = "sequence's row has computed as many tokens, its state is copied to these blocks: one"
REACHED = (
    "for each, in the order of its table of the group, one after the other. The position follows a"
)
SOURCE = "Until its sequence ends, written once"
COMPLETE = "of a new sequence has blocks for all of them, and never changes."

STATE, FIXED = model_pb2.CACHE_LIFETIME_STATE, model_pb2.CACHE_LIFETIME_FIXED


def spans(worker: Worker) -> list[int]:
    """Tokens of the model's windows and chunks. Raises Skipped if there are none to outgrow."""
    found = [group.span for group in worker.groups if 0 < group.span <= MAX_SPAN]
    if not found or len(worker.groups) <= 1:
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
    targets = dict(zip(held, stream.blocks.take(len(held)), strict=True))
    stream.step(swap_in=zip(host, targets.values(), strict=True))
    moved = {g: [targets.get(block, NO_BLOCK) for block in t] for g, t in tables.items()}
    return resumed(stream, sequence, moved, position)


@stream_case("plan", RELEASED)
def a_sequence_returns_with_tables_that_begin_at_its_windows(
    worker: Worker, stream: StepStream
) -> Alone:
    first = stream.generate(stream.new(worker.prompt(1, outgrown(worker))), 2)
    again = stream.generate(parked(stream, first), 3)
    return {"a sequence that was swapped out": again}


def snapshot(
    stream: StepStream, sequence: Sequence
) -> tuple[dict[int, list[int]], list[tuple[int, int]]]:
    """Tables for a copy of a sequence at its position, and the copies that they need; sources are
    shared."""
    shared = {
        block
        for index, table in sequence.tables.items()
        if stream.groups[index].lifetime == FIXED
        for block in table
    }
    held = {block for table in sequence.tables.values() for block in table} - shared - {NO_BLOCK}
    copies = dict(zip(held, stream.blocks.take(len(held)), strict=True))
    tables = {g: [copies.get(b, b) for b in table] for g, table in sequence.tables.items()}
    return tables, list(copies.items())


def resumed(
    stream: StepStream, sequence: Sequence, tables: dict[int, list[int]], position: int
) -> Sequence:
    """A new sequence that continues from these tables after `position` tokens of another."""
    others = {index: table for index, table in tables.items() if index != stream.blocks.main_group}
    return stream.resumed(
        sequence,
        num_computed_tokens=position,
        blocks=tables[stream.blocks.main_group],
        other_tables=others,
    )


@stream_case("plan", COPY)
def a_state_continues_from_a_copy_at_its_position(worker: Worker, stream: StepStream) -> Alone:
    require(worker, STATE)
    first = stream.generate(stream.new(worker.prompt(1)), 2)
    tables, copies = snapshot(stream, first)
    position, tokens = first.num_computed_tokens, list(first.tokens)
    stream.step(first, copy=copies)  # the state that the steps before have reached
    again = resumed(stream, first, tables, position)
    again.tokens = tokens
    stream.generate(again, 3)
    return {"a sequence that continues from a snapshot": again, "its source": first}


@refusal_case("plan", "A state below is the one after exactly these tokens.", "num_computed_tokens")
def a_snapshot_that_the_same_plan_reaches_is_refused(worker: Worker, stream: StepStream) -> None:
    require(worker, STATE)
    first = stream.generate(stream.new(worker.prompt(1)), 2)
    tables, copies = snapshot(stream, first)
    resumed(stream, first, tables, first.num_computed_tokens + 1)
    stream.send(first, copy=copies)


Saves = list[tuple[int, int, int, int]]
"""Entries of `saved_states`."""


def saved(worker: Worker, stream: StepStream, sequence: Sequence, position: int) -> Saves:
    """The entries of a plan that save a sequence's states at a position, in new blocks. Raises
    Skipped if the model has no states."""
    require(worker, STATE)
    return [
        (sequence.seq_id, index, position, block)
        for index, group in enumerate(stream.groups)
        if group.lifetime == STATE
        for block in stream.blocks.take(group.num_blocks)
    ]


@stream_case("plan", SAVE)
def states_that_are_saved_within_a_row_are_continued(worker: Worker, stream: StepStream) -> Alone:
    first = stream.new(worker.prompt(1))
    tokens, end = list(first.tokens), len(first.tokens)
    positions = [1, end // 2, end - 1]
    entries = {position: saved(worker, stream, first, position) for position in positions}
    stream.step(first, saved_states=[entry for of in entries.values() for entry in of])
    found: dict[str, Sequence] = {}
    for position, of_position in entries.items():
        tables, copies = snapshot(stream, first)
        for index, group in enumerate(stream.groups):
            if group.lifetime == STATE:
                tables[index] = [block for _, number, _, block in of_position if number == index]
            elif has_tokens(group):
                tables[index] = tables[index][: -(-position // group.block_tokens)]
        kept = {block for table in tables.values() for block in table}
        again = resumed(stream, first, tables, position)
        again.tokens = list(tokens)
        stream.generate(again, 3, copy=[(s, t) for s, t in copies if t in kept])
        found[f"a sequence that continues from its state at {position}"] = again
    return found | {"its source": stream.generate(first, 2)}


def _beyond_its_row(worker: Worker, stream: StepStream, sequence: Sequence) -> Saves:
    return saved(worker, stream, sequence, len(sequence.tokens) + 1)


def _before_its_row(worker: Worker, stream: StepStream, sequence: Sequence) -> Saves:
    return saved(worker, stream, sequence, 0)


def _without_a_row(worker: Worker, stream: StepStream, sequence: Sequence) -> Saves:
    position = len(worker.prompt(1)) + 1
    return [
        (sequence.seq_id - 1, *entry[1:]) for entry in saved(worker, stream, sequence, position)
    ]


def _in_part(worker: Worker, stream: StepStream, sequence: Sequence) -> Saves:
    entries = saved(worker, stream, sequence, 1)
    (block,) = stream.blocks.take(1)
    return [*entries, (*entries[0][:3], block)]


def _of_tokens(worker: Worker, stream: StepStream, sequence: Sequence) -> Saves:
    require(worker, STATE)
    (block,) = stream.blocks.take(1)
    return [(sequence.seq_id, stream.blocks.main_group, 1, block)]


WRONG_SAVES = {
    "a state after the row": _beyond_its_row,
    "a state before the row": _before_its_row,
    "a state of a sequence without a row": _without_a_row,
    "a block too many for a state": _in_part,
    "a saved state of tokens": _of_tokens,
}
"""What is refused."""


def _send_save(make: Callable[[Worker, StepStream, Sequence], Saves]) -> PlanFunction:
    def send(worker: Worker, stream: StepStream) -> None:
        stream.prefilled(worker.prompt(1))  # a sequence without a row
        sequence = stream.new(worker.prompt(2))
        stream.send(sequence, saved_states=make(worker, stream, sequence))

    return send


for _name, _wrong in WRONG_SAVES.items():
    refusal_case("plan", REACHED, "saved_states", name=f"{_name} is refused")(_send_save(_wrong))


def with_source(worker: Worker, stream: StepStream) -> Sequence:
    """A new sequence with a source of several blocks. Raises Skipped if the model reads none."""
    require(worker, FIXED)
    size = max(group.block_tokens for group in worker.groups if group.lifetime == FIXED)
    return stream.new(worker.prompt(1), context=(part(MEDIA, "a source", 2 * size + 1),))


@stream_case("model", SOURCE)
def a_source_is_read_by_rows_that_follow_the_first(worker: Worker, stream: StepStream) -> Alone:
    sequence = with_source(worker, stream)
    stream.step(sequence.row(2, brings=False))
    return {"a sequence with a source, in chunks": stream.generate(sequence, 3)}


@stream_case("model", SOURCE)
def forks_share_their_parents_source(worker: Worker, stream: StepStream) -> Alone:
    parent = with_source(worker, stream)
    fork = stream.fork(parent)
    stream.step(parent, fork.row(0))
    copies, updates = stream.blocks.part(fork)
    stream.step(fork, forget=[parent], copy=copies, block_updates=updates)
    return {"a fork of a sequence with a source": fork}


@stream_case("model", SOURCE)
def a_source_serves_a_sequence_with_a_cached_prefix(worker: Worker, stream: StepStream) -> Alone:
    first = stream.generate(with_source(worker, stream), 2)
    tables, copies = snapshot(stream, first)
    again = resumed(stream, first, tables, first.num_computed_tokens)
    stream.generate(again, 3, forget=[first], copy=copies)
    return {"a sequence with another's source": again}


@stream_case("model", SOURCE)
def a_source_returns_from_the_host(worker: Worker, stream: StepStream) -> Alone:
    first = stream.generate(with_source(worker, stream), 2)
    return {"a sequence that was swapped out": stream.generate(parked(stream, first), 3)}


@refusal_case("model", SOURCE, "block_updates")
def an_update_of_a_sources_table_is_refused(worker: Worker, stream: StepStream) -> None:
    sequence = with_source(worker, stream)
    stream.step(sequence)
    index = [group.lifetime for group in worker.groups].index(FIXED)
    (block,) = stream.blocks.take(1)
    stream.send_changed(sequence, block_updates=[sequence.seq_id, index, 0, block])


def require(worker: Worker, lifetime: model_pb2.CacheLifetime.ValueType) -> None:
    """Raises Skipped if the model has no cache group of this lifetime."""
    if all(group.lifetime != lifetime for group in worker.groups):
        name = model_pb2.CacheLifetime.Name(lifetime).removeprefix("CACHE_LIFETIME_")
        raise Skipped(f"the model has no cache group of the lifetime {name}")


def tables_of(
    worker: Worker, new: plan_pb2.NewSequence, lifetime: model_pb2.CacheLifetime.ValueType
) -> Iterator[plan_pb2.BlockTable]:
    """A new sequence's tables in groups of a lifetime."""
    return (table for table in new.tables if worker.groups[table.group].lifetime == lifetime)


def _of_unknown_group(worker: Worker, new: plan_pb2.NewSequence) -> None:
    new.tables.add(group=len(worker.groups), block_ids=columns.pack([0]))


def _twice(worker: Worker, new: plan_pb2.NewSequence) -> None:
    block_tokens(worker.groups)
    new.tables.append(new.tables[0])


def _beginning_later(worker: Worker, new: plan_pb2.NewSequence) -> None:
    block_tokens(worker.groups)
    new.tables[0].first_index = 1


def _with_one_block(worker: Worker, new: plan_pb2.NewSequence) -> None:
    if len(worker.groups) <= 1:
        raise Skipped("the model has one cache group")
    new.tables[1].block_ids = new.tables[0].block_ids[:4] + new.tables[1].block_ids[4:]


def _without_state(worker: Worker, new: plan_pb2.NewSequence) -> None:
    require(worker, STATE)
    new.tables.remove(next(tables_of(worker, new, STATE)))


def _without_source(worker: Worker, new: plan_pb2.NewSequence) -> None:
    new.tables.remove(next(tables_of(worker, new, FIXED)))


def _with_part_of_a_source(worker: Worker, new: plan_pb2.NewSequence) -> None:
    table = next(tables_of(worker, new, FIXED))
    table.block_ids = table.block_ids[:-4]


def _with_open_media(worker: Worker, new: plan_pb2.NewSequence) -> None:
    new.context[0].length = 0


def _plain(worker: Worker, stream: StepStream) -> Sequence:
    return stream.new(worker.prompt(1))


Change = Callable[[Worker, plan_pb2.NewSequence], None]
WRONG: dict[str, tuple[str, str, str, Callable[[Worker, StepStream], Sequence], Change]] = {
    "a table of a group that does not exist": ("plan", TABLES, "tables", _plain, _of_unknown_group),
    "a second table of a group": ("plan", TABLES, "tables", _plain, _twice),
    "a table that lacks what a row sees": (
        *("plan", RELEASED, "first_index", _plain, _beginning_later),
    ),
    "a block in tables of two groups": ("plan", TABLES, "tables", _plain, _with_one_block),
    "a sequence without its state": ("plan", TABLES, "tables", _plain, _without_state),
    "a sequence without its source": ("model", COMPLETE, "tables", with_source, _without_source),
    "a sequence with a part of its source": (
        *("model", COMPLETE, "tables", with_source, _with_part_of_a_source),
    ),
    "a source of no length": ("model", SOURCE, "context", with_source, _with_open_media),
}
"""New sequences that are refused: the promise, the field named, the sequence, its change."""


def _send(make: Callable[[Worker, StepStream], Sequence], change: Change) -> PlanFunction:
    def send(worker: Worker, stream: StepStream) -> None:
        plan = stream.plan(make(worker, stream))
        change(worker, plan.new_sequences[0])
        stream.send_plan(plan)

    return send


for _name, (_file, _promise, _field, _make, _change) in WRONG.items():
    refusal_case(_file, _promise, _field, "new_sequences", name=f"{_name} is refused")(
        _send(_make, _change)
    )


@refusal_case("plan", TABLES, "block_updates")
def an_update_with_a_block_of_another_groups_table_is_refused(
    worker: Worker, stream: StepStream
) -> None:
    sequence = stream.prefilled(worker.prompt(1))
    others = [index for index, table in sequence.other_tables.items() if table]
    if not others:
        raise Skipped("the model has one cache group")
    index = others[0]
    update = [sequence.seq_id, index, len(sequence.tables[index]), sequence.blocks[-1]]
    stream.send_changed(sequence, block_updates=update)


@refusal_case("plan", "Quadruples (sequence id, cache group", "block_updates")
def an_update_of_a_group_that_does_not_exist_is_refused(worker: Worker, stream: StepStream) -> None:
    known = stream.prefilled(worker.prompt(1))
    (block,) = stream.blocks.take(1)
    stream.send_changed(block_updates=[known.seq_id, len(worker.groups), 0, block])
