"""Block tables: the location of a sequence's KV."""

import random

import grpc

from conformance.case import Alone, case, refusal_case, stream_case
from conformance.step_stream import StepStream
from conformance.worker import Worker
from pagewire import columns

UPDATES = "(sequence id, cache group, index in its block table of the group, device block)"
ENTRIES = "The entries from first_index on. int32 column of device blocks."


@stream_case("plan", ENTRIES)
def blocks_may_be_anywhere_in_the_cache(worker: Worker, stream: StepStream) -> Alone:
    prompt = worker.prompt(1)
    blocks = stream.blocks.take(min(stream.num_gpu_blocks, 64))
    random.Random(3).shuffle(blocks)
    sequence = stream.new(prompt, blocks=blocks[: -(-(len(prompt) + 4) // worker.block_size)])
    stream.generate(sequence, 4)
    return {"a sequence in scattered blocks": sequence}


@case("plan", "an index one past the end appends")
def a_table_grows_by_block_updates(worker: Worker) -> None:
    prompt, num_tokens = worker.prompt(1), worker.block_size + 3
    for num_blocks in (0, -(-(len(prompt) + num_tokens) // worker.block_size)):
        with worker.open() as stream:
            sequence = stream.new(prompt, blocks=stream.blocks.take(num_blocks))
            stream.generate(sequence, num_tokens)
        worker.expect_as_alone(f"a sequence with {num_blocks} blocks at first", sequence)


@stream_case("plan", "sets that entry")
def an_entry_may_be_replaced_once_its_block_was_copied(worker: Worker, stream: StepStream) -> Alone:
    sequence = stream.generate(stream.new(worker.prompt(2)), 2)
    (target,), index = stream.blocks.take(1), len(sequence.blocks) - 1
    source = sequence.blocks[index]
    sequence.blocks[index] = target
    updates = [(sequence.seq_id, 0, index, target)]
    stream.generate(sequence, 3, copy=[(source, target)], block_updates=updates)
    return {"a sequence moved to a copy": sequence}


@case("plan", ENTRIES)
def a_block_beyond_the_cache_is_refused(worker: Worker) -> None:
    for block in (2**31 - 1, -1):
        with worker.open() as stream:
            stream.send(stream.new(worker.prompt(1), blocks=[block]))
            stream.call.refusal().expect(grpc.StatusCode.INVALID_ARGUMENT, "new_sequences")


@refusal_case("plan", UPDATES, "block_updates")
def an_update_to_a_block_beyond_the_cache_is_refused(worker: Worker, stream: StepStream) -> None:
    known = stream.prefilled(worker.prompt(1))
    stream.send_changed(block_updates=[known.seq_id, 0, len(known.blocks), 2**31 - 1])


@refusal_case("plan", "an index one past the end appends", "block_updates")
def an_update_beyond_the_tables_end_is_refused(worker: Worker, stream: StepStream) -> None:
    known = stream.prefilled(worker.prompt(1))
    (block,) = stream.blocks.take(1)
    stream.send_changed(block_updates=[known.seq_id, 0, len(known.blocks) + 1, block])


@refusal_case("plan", UPDATES, "block_updates")
def an_update_of_an_unknown_sequence_is_refused(worker: Worker, stream: StepStream) -> None:
    known = stream.prefilled(worker.prompt(1))
    stream.send_changed(block_updates=[known.seq_id + 7, 0, 0, *stream.blocks.take(1)])


@refusal_case("plan", ENTRIES, "num_tokens", "seq_ids")
def a_row_that_lacks_blocks_is_refused(worker: Worker, stream: StepStream) -> None:
    sequence = stream.new(worker.prompt(1), blocks=stream.blocks.take(1))
    plan = stream.plan(sequence)
    plan.new_sequences[0].tables[0].block_ids = columns.pack(sequence.blocks[:-1])
    stream.send_plan(plan)
