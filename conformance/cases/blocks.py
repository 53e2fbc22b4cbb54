"""Block tables: the location of a sequence's KV."""

import random

import grpc

from conformance import columns
from conformance.case import case
from conformance.cases.sequences import refuses, refuses_new
from conformance.sequence import Sequence
from conformance.worker import Worker
from pagewire.v1 import plan_pb2


@case("plan", "The block table. int32 column of device blocks.")
def blocks_may_be_anywhere_in_the_cache(worker: Worker) -> None:
    prompt = worker.prompt(1)
    with worker.open() as stream:
        blocks = stream.take_blocks(min(stream.num_gpu_blocks, 64))
        random.Random(3).shuffle(blocks)
        table = blocks[: -(-(len(prompt) + 4) // worker.block_size)]
        found = stream.generate(stream.new(prompt, blocks=table), 4)
    worker.expect_as_alone("a sequence in scattered blocks", found, prompt)


@case("plan", "an index one past the end appends")
def a_table_grows_by_block_updates(worker: Worker) -> None:
    prompt, num_tokens = worker.prompt(1), worker.block_size + 3
    with worker.open() as stream:
        found = stream.generate(stream.new(prompt), num_tokens)
    with worker.open() as stream:
        sequence = stream.new(prompt)
        more = -(-(len(prompt) + num_tokens) // worker.block_size)
        sequence.blocks = stream.take_blocks(more)
        at_once = stream.generate(sequence, num_tokens)
    worker.expect_as_alone("a sequence that grew block by block", found, prompt)
    worker.expect_as_alone("a sequence with all blocks at once", at_once, prompt)


@case("plan", "sets that entry")
def an_entry_may_be_replaced_once_its_block_was_copied(worker: Worker) -> None:
    prompt = worker.prompt(2)
    with worker.open() as stream:
        sequence = stream.new(prompt)
        stream.generate(sequence, 2)
        index = len(sequence.blocks) - 1
        source, target = sequence.blocks[index], stream.take_blocks(1)[0]
        sequence.blocks[index] = target
        found = stream.generate(
            sequence, 3, copy=[(source, target)], block_updates=[(sequence.seq_id, index, target)]
        )
    worker.expect_as_alone("a sequence moved to a copy", found, prompt, start=2)


@case("plan", "The block table. int32 column of device blocks.")
def a_block_beyond_the_cache_is_refused(worker: Worker) -> None:
    for block in (2**31 - 1, -1):

        def change(new: plan_pb2.NewSequence, block: int = block) -> None:
            new.block_ids = columns.pack([block]) + new.block_ids[4:]

        refuses_new(worker, change, "new_sequences")


@case("plan", "Triples (sequence id, index in its block table, device block)")
def an_update_to_a_block_beyond_the_cache_is_refused(worker: Worker) -> None:
    def change(plan: plan_pb2.StepPlan, sequence: Sequence) -> None:
        index = len(sequence.blocks)
        plan.block_updates = columns.pack([sequence.seq_id, index, 2**31 - 1])

    refuses(worker, change, "block_updates")


@case("plan", "an index one past the end appends")
def an_update_beyond_the_tables_end_is_refused(worker: Worker) -> None:
    def change(plan: plan_pb2.StepPlan, sequence: Sequence) -> None:
        index, block = len(sequence.blocks) + 1, sequence.blocks[-1] + 1
        plan.block_updates = columns.pack([sequence.seq_id, index, block])

    refuses(worker, change, "block_updates")


@case("plan", "Triples (sequence id, index in its block table, device block)")
def an_update_of_an_unknown_sequence_is_refused(worker: Worker) -> None:
    def change(plan: plan_pb2.StepPlan, sequence: Sequence) -> None:
        block = sequence.blocks[-1] + 1
        plan.block_updates = columns.pack([sequence.seq_id + 7, 0, block])

    refuses(worker, change, "block_updates")


@case("plan", "The block table. int32 column of device blocks.")
def a_row_that_lacks_blocks_is_refused(worker: Worker) -> None:
    with worker.open() as stream:
        plan = stream.plan(stream.new(worker.prompt(1)).row())
        plan.new_sequences[0].block_ids = plan.new_sequences[0].block_ids[:-4]
        stream.send_plan(plan)
        stream.refusal().expect(grpc.StatusCode.INVALID_ARGUMENT, "num_tokens", "seq_ids")
