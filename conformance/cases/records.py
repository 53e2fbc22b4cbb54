"""Records of what is in the caches, and sequences, that a worker keeps for the next core."""

from collections.abc import Iterable

import grpc

from conformance.assertions import Skipped, expect, expect_true
from conformance.cache_groups import first_visible, has_tokens
from conformance.case import case, refusal_case
from conformance.cases.errors import impossible
from conformance.cases.moves import keys_of
from conformance.sequence import SALT, Sequence, part
from conformance.step_stream import StepStream
from conformance.worker import Worker
from pagewire import columns
from pagewire.v1 import plan_pb2
from pagewire.v1 import worker_service_pb2 as pb

SEED = 2**63 + 5
WIDTH = 5
"""Numbers of a block in `CachedBlocks.blocks`."""

RETURNS = "Returns the records of the caches' contents (StepPlan.cached_blocks)"
SEQUENCES = "Sequences that the last stream's plans had not removed when it ended"
WITHDRAWN = "the worker reports no records to another core"

Rows = list[tuple[int, ...]]


def record(block: int, *, group: int = 0, others: Iterable[int] = ()) -> Rows:
    """The rows of an entry of one unit: a block that it fills, and further ones."""
    return [(block, group, 1, 1, 0), *((other, group, 0, 0, 0) for other in others)]


def tail_record(block: int, group: int = 0) -> Rows:
    """The row of an entry of two units, the last of which has three tokens, not one to its end."""
    return [(block, group, 2, 0, 3)]


def cached(*entries: Rows, first_key: int = 1) -> plan_pb2.CachedBlocks:
    """Records of these entries, whose keys are numbered."""
    rows = [row for entry in entries for row in entry]
    num_keys = sum(row[2] + (row[4] > 0) for row in rows)
    return plan_pb2.CachedBlocks(
        blocks=columns.pack_rows(rows), keys=keys_of(num_keys, first=first_key)
    )


def keeping(worker: Worker) -> None:
    """Raises Skipped for a worker that keeps nothing."""
    if not worker.keeps_blocks:
        raise Skipped("the worker keeps nothing for the next core")


def run(stream: StepStream, sequence: Sequence, **fields: object) -> None:
    """A step of a sequence, whose plan has these fields."""
    row = sequence.row()
    plan = stream.plan(row)
    plan.MergeFrom(plan_pb2.StepPlan(**fields))  # type: ignore[arg-type]
    stream.send_plan(plan, [row])
    stream.receive()


def kept(worker: Worker, epoch: int | None = None) -> list[pb.GetCachedBlocksResponse]:
    """What another core gets: by default one with new caches of the same size."""
    if epoch is None:
        worker.initialize(epoch := worker.next_epoch())
    request = pb.GetCachedBlocksRequest(epoch=epoch)
    return list(worker.stub.GetCachedBlocks(request, timeout=worker.timeout_s))


def expect_records(
    found: list[pb.GetCachedBlocksResponse], *wanted: plan_pb2.CachedBlocks, seed: int = SEED
) -> None:
    """Fail unless these records were returned, in this order."""
    blocks = b"".join(message.blocks.blocks for message in found)
    rows = columns.unpack(b"".join(records.blocks for records in wanted))
    expect("the recorded blocks", columns.unpack(blocks), rows)
    keys = b"".join(message.blocks.keys for message in found)
    expect("their keys", keys.hex(), b"".join(records.keys for records in wanted).hex())
    seeds = {message.key_seed for message in found}
    expect("the seeds of the messages", seeds, {seed} if found else set())


@case("worker_service", RETURNS)
def the_next_core_gets_the_records(worker: Worker) -> None:
    with worker.open() as stream:
        keeping(worker)
        sequence = stream.new(worker.prompt(1))
        first, second, third, last = stream.blocks.take(4)
        if stream.num_cpu_blocks:
            last = ~0
        of_state = record(first, others=[second])
        records = cached(of_state, tail_record(third), record(last))
        run(stream, sequence, key_seed=SEED, cached_blocks=records)
    expect_records(kept(worker), records)


@case(
    "plan", "First blocks of entries whose records the worker removes before it executes the plan"
)
def records_end_and_are_replaced(worker: Worker) -> None:
    with worker.open() as stream:
        keeping(worker)
        sequence = stream.new(worker.prompt(1))
        first, second, third = stream.blocks.take(3)
        records = cached(record(first), record(second), record(third))
        run(stream, sequence, key_seed=SEED, cached_blocks=records)
        again = cached(record(second), first_key=7)
        uncached = columns.pack([first, stream.num_gpu_blocks - 1])
        run(stream, sequence, uncached_blocks=uncached, cached_blocks=again)
    expect_records(kept(worker), cached(record(third), first_key=3), again)
    with worker.open() as stream:  # a core that continues them
        run(stream, stream.new(worker.prompt(1)), uncached_blocks=columns.pack([third]))
    expect_records(kept(worker), again)


@case("plan", "Removes all records first. Keys of later ones are made with this seed, a secret.")
def a_seed_removes_all_records(worker: Worker) -> None:
    with worker.open() as stream:
        keeping(worker)
        sequence = stream.new(worker.prompt(1))
        first, second = stream.blocks.take(2)
        run(stream, sequence, key_seed=SEED, cached_blocks=cached(record(first)))
        run(stream, sequence, key_seed=1, cached_blocks=cached(record(second)))
    expect_records(kept(worker), cached(record(second)), seed=1)


@case("worker_service", "too, where there are as many as before, in a worker that keeps_blocks.")
def recorded_blocks_keep_their_contents(worker: Worker) -> None:
    with worker.open() as stream:
        keeping(worker)
        sequence = stream.new(worker.prompt(1))
        run(stream, sequence, key_seed=SEED)
        blocks = sequence.blocks[: stream.num_full_blocks(sequence.tokens)]
        group = stream.blocks.main_group
        entries = [record(block, group=group) for block in blocks]
        run(stream, sequence, cached_blocks=cached(*entries))
    with worker.open() as stream:
        stream.blocks.take(max(sequence.blocks) + 1)
        second = stream.generate(stream.borrowed(worker.prompt(1), blocks), 3)
    worker.expect_as_alone("a sequence with a prefix of an earlier epoch", second)


@case(
    "worker_service", "unless the epoch is that of the last InitializeCache and has had no stream."
)
def records_are_refused_to_all_but_the_next_core(worker: Worker) -> None:
    with worker.open() as stream:
        keeping(worker)
        sequence = stream.new(worker.prompt(1))
        blocks = cached(record(*stream.blocks.take(1)))
        run(stream, sequence, key_seed=SEED, cached_blocks=blocks)
        epochs = [stream.epoch - 1, stream.epoch]  # the second one has had a stream
    worker.initialize(worker.next_epoch())
    for epoch in (*epochs, worker.epoch + 1):
        refusal = worker.refusal(
            lambda r, timeout: list(worker.stub.GetCachedBlocks(r, timeout=timeout)),
            pb.GetCachedBlocksRequest(epoch=epoch),
        )
        refusal.expect(grpc.StatusCode.FAILED_PRECONDITION)
    expect_records(kept(worker, worker.epoch), blocks)


@case("plan", WITHDRAWN)
def records_are_not_returned_before_a_failure_is_withdrawn(worker: Worker) -> None:
    for withdrawn in (True, False):
        with worker.open() as stream:
            keeping(worker)
            sequence = stream.new(worker.prompt(1), sampling=impossible(worker))
            blocks = cached(record(*stream.blocks.take(1)))
            run(stream, sequence, key_seed=SEED, cached_blocks=blocks)
            failed_step_id = stream.step_id
            other = stream.new(worker.prompt(2))
            stream.step(other, forget=[sequence])
            run(stream, other, withdrawn_step_id=failed_step_id if withdrawn else 0)
        expect_records(kept(worker), *([blocks] if withdrawn else []))


def sequences(found: list[pb.GetCachedBlocksResponse]) -> dict[int, pb.KeptSequence]:
    """The returned sequences by id."""
    return {sequence.seq_id: sequence for message in found for sequence in message.sequences}


def expect_kept(stream: StepStream, found: pb.KeptSequence, sequence: Sequence) -> None:
    """Fail unless the message has what the caches hold of a sequence."""
    computed = sequence.tokens[: sequence.num_computed_tokens]
    expect("its tokens", columns.unpack(found.token_ids), computed)
    expect("its context", list(found.context), list(sequence.context))
    tables = {table.group: table for table in found.tables if table.block_ids}
    wanted = {}
    for number, blocks in sequence.tables.items():
        group, first = stream.groups[number], 0
        if has_tokens(group):
            first = first_visible(group, len(computed)) // group.block_tokens
            blocks = blocks[: -(-len(computed) // group.block_tokens)]
        if blocks[first:]:
            wanted[number] = first, blocks
    expect("the groups of its tables", set(tables), set(wanted))
    for number, (visible, blocks) in wanted.items():
        first = tables[number].first_index
        expect_true(first <= visible, f"group {number}: expected its blocks from {visible} on")
        reported = columns.unpack(tables[number].block_ids)
        expect(f"its blocks in group {number} from {first} on", reported, blocks[first:])


@case("worker_service", SEQUENCES)
def sequences_are_kept_until_a_plan_arrives(worker: Worker) -> None:
    with worker.open() as stream:
        keeping(worker)
        forgotten = stream.new(worker.prompt(1))
        stays = stream.new(worker.prompt(2), context=(part(SALT, "a tenant"),))
        failed = stream.new(worker.prompt(3), sampling=impossible(worker))
        chunk = stream.new(worker.prompt(4))
        rows = [forgotten.row(), stays.row(), failed.row(), chunk.row(3, brings=False)]
        plan = stream.plan(*rows)
        plan.key_seed = SEED
        stream.send_plan(plan, rows)
        stream.receive()
        forget = columns.pack([forgotten.seq_id])
        run(stream, stays, forget_seq_ids=forget, withdrawn_step_id=stream.step_id)
    for _ in range(2):  # the second core has died before its first plan
        found = sequences(kept(worker))
        expect("the ids of the sequences", set(found), {stays.seq_id, chunk.seq_id})
        expect_kept(stream, found[stays.seq_id], stays)
        expect_kept(stream, found[chunk.seq_id], chunk)
    with worker.open() as later:
        sequence = later.prefilled(worker.prompt(1))
    found = sequences(kept(worker))
    expect("the ids after another core's plan", set(found), {sequence.seq_id})


@refusal_case("plan", "Quintuples (block, ~b for host block b", "cached_blocks")
def a_record_of_a_block_that_does_not_exist_is_refused(worker: Worker, stream: StepStream) -> None:
    _send_records(worker, stream, cached(record(stream.num_gpu_blocks)))


@refusal_case("plan", "16 bytes for each unit, in order", "cached_blocks")
def a_record_without_a_key_for_each_unit_is_refused(worker: Worker, stream: StepStream) -> None:
    records = cached(record(0), record(1))
    records.keys = records.keys[:16]
    _send_records(worker, stream, records)


def _send_records(worker: Worker, stream: StepStream, records: plan_pb2.CachedBlocks) -> None:
    keeping(worker)
    plan = stream.plan()
    plan.MergeFrom(plan_pb2.StepPlan(key_seed=SEED, cached_blocks=records))
    stream.send_plan(plan)
