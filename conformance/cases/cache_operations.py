"""Shared and copied blocks. Only correct contents lead to the right tokens."""

import grpc

from conformance.assertions import expect_true, fail
from conformance.case import Alone, case, refusal_case, stream_case
from conformance.generation import Generation, first_difference
from conformance.sequence import Sequence
from conformance.step_stream import StepStream
from conformance.worker import Worker

NUM_PROMPTS = 3
CACHED_PREFIX = "Number of tokens whose KV is already in the blocks below (a cached prefix"
COPY = "Pairs (source, target) of device blocks, int32 column: copy-on-write."


@case("plan", CACHED_PREFIX)
def another_sequences_blocks_serve_as_a_prefix(worker: Worker) -> None:
    for number in range(NUM_PROMPTS):
        prompt = worker.prompt(number)
        with worker.open() as stream:
            first = stream.generate(stream.new(prompt), 2)
            second = stream.generate(stream.borrowed(prompt, first.blocks), 3)
        worker.expect_as_alone("a sequence with a cached prefix", second)


@stream_case("plan", CACHED_PREFIX)
def a_prefix_serves_after_its_sequence_is_forgotten(worker: Worker, stream: StepStream) -> Alone:
    first = stream.generate(stream.new(worker.prompt(1)), 2)
    second = stream.generate(stream.borrowed(worker.prompt(1), first.blocks), 3, forget=[first])
    return {"a sequence with a cached prefix": second}


@case("plan", CACHED_PREFIX)
def the_blocks_contents_matter(worker: Worker) -> None:
    """The negative control: a worker that recomputes everything would pass all other cases."""
    differences = 0
    for number in range(NUM_PROMPTS):
        prompt = worker.prompt(number)
        with worker.open() as stream:
            wrong = stream.prefilled(worker.prompt(number + 50))
            try:
                found = stream.generate(stream.borrowed(prompt, wrong.blocks), 3)
            except grpc.RpcError as error:
                # A worker that checks plans, as the simulated one does, may detect this.
                expect_true(
                    error.code() is grpc.StatusCode.INVALID_ARGUMENT,
                    f"expected other tokens or INVALID_ARGUMENT, got {error.code().name}",
                )
                differences += 1
                continue
        expected = worker.alone(prompt, 3)
        changed = first_difference(Generation(found.sampled), expected, exact=False)
        differences += changed is not None
    if differences == 0:
        fail(
            f"none of {NUM_PROMPTS} sequences changed when given the blocks of another prompt:"
            " the cache is not read, so that the other cases prove nothing about it"
        )


def overwrite(stream: StepStream, worker: Worker, blocks: list[int], companion: Sequence) -> None:
    """Fill device blocks with another sequence's KV."""
    intruder = stream.new(worker.prompt(77, len(blocks) * worker.block_size), blocks=list(blocks))
    stream.step(companion, intruder)
    stream.step(companion, forget=[intruder])


@case("plan", COPY)
def a_copied_block_holds_what_its_source_held(worker: Worker) -> None:
    for number in range(NUM_PROMPTS):
        prompt = worker.prompt(number)
        with worker.open() as stream:
            first = stream.prefilled(prompt)
            targets = stream.blocks.take(stream.num_full_blocks(prompt))
            stream.step(first, copy=zip(first.blocks, targets, strict=False))
            companion = stream.new(worker.prompt(41))
            stream.step(companion, forget=[first])
            overwrite(stream, worker, first.blocks, companion)
            second = stream.generate(stream.borrowed(prompt, targets), 3)
        worker.expect_as_alone("a sequence in copies of its blocks", second)


@stream_case("plan", COPY)
def a_copy_leaves_its_source_as_it_is(worker: Worker, stream: StepStream) -> Alone:
    first = stream.prefilled(worker.prompt(1))
    (target,) = stream.blocks.take(1)
    stream.generate(first, 3, copy=[(first.blocks[0], target)])
    return {"a sequence whose block was copied": first}


@stream_case("plan", "Each of the three cache operations reads all its sources before it writes")
def a_copys_target_may_be_another_copys_source(worker: Worker, stream: StepStream) -> Alone:
    first, second = stream.new(worker.prompt(1)), stream.new(worker.prompt(2))
    companion = stream.new(worker.prompt(3))
    stream.step(first, second, companion)
    count = stream.num_full_blocks(worker.prompt(1))
    ours, theirs = first.blocks[:count], second.blocks[:count]
    stream.step(companion, forget=[first, second])
    stream.step(companion, copy=zip(ours + theirs, theirs + ours, strict=True))
    found = stream.generate(stream.borrowed(worker.prompt(1), theirs), 3)
    other = stream.generate(stream.borrowed(worker.prompt(2), ours), 3)
    return {
        "the first of two that changed places": found,
        "the second of two that changed places": other,
    }


def _beyond(field: str, pair: tuple[int, int]) -> None:
    """A case: a pair that names a block which a cache does not have."""
    side = "source" if pair[0] > pair[1] else "target"
    name = f"a {field.replace('_', ' ')} {side} beyond the cache is refused"
    promise = "A plan that is malformed, or contradicts what the worker knows"

    @refusal_case("worker_service", promise, field, name=name)
    def run(worker: Worker, stream: StepStream) -> None:
        known = stream.prefilled(worker.prompt(1))
        stream.send_changed(**{"seq_ids": [known.seq_id], field: list(pair)})


for _field in ("swap_out", "swap_in", "copy"):
    _beyond(_field, (2**31 - 1, 0))
    _beyond(_field, (0, 2**31 - 1))
